"""Table `disaggregation`: one engine against a prefill and a decode worker, under the same load.

Some requests decode all the time while long prompts come in. One engine computes a chunk of a prompt and a step of
decode in turn, so the gaps between tokens grow by a chunk; two workers do both at once, as far as the machine has room
for both. Beside what was measured stands what the planner's floors say of Kimi K2.6 and GLM-5.2 on 8 x H200.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments.ablation import WARMUP, Ablation
from experiments.capacity import DEVICES, FP8, GLM, H200, INT4, KIMI, SHORT_CONTEXT
from jaxinfer.config import EngineConfig, PhasePrecision, Precision
from jaxinfer.engine import Engine, Separated
from jaxinfer.evaluation import statistics
from jaxinfer.evaluation.load.driver import drive
from jaxinfer.evaluation.load.lengths import Job
from jaxinfer.evaluation.load.measures import LoadResult, Trace
from jaxinfer.evaluation.table import Table
from jaxinfer.planning.capacity import kv_gpu_bytes_per_token
from jaxinfer.planning.model import PlannedModel
from jaxinfer.planning.roofline import decode_floor, prefill_floor
from jaxinfer.quantization.formats import KVFormat

CHATS, CHAT_PROMPT, CHAT_OUTPUT = 8, 32, 192
PROMPTS, PROMPT, PROMPT_OUTPUT = 8, 768, 2
PHASES = PhasePrecision(Precision.parse("bf16", "bf16"), Precision.parse("bf16", "fp8_e4m3"))
"""The same weights in both phases and both rows: only the separation differs."""
AGGREGATED, SEPARATED = "aggregated", "separated"
CONCURRENCY, CHUNK = 32, 2048
"""Of the modelled rows: requests that decode, and tokens of a prompt that are computed between two of their steps."""


@dataclass(frozen=True)
class Beside:
    """Arrivals: the chats at once, then a prompt every so many seconds."""

    every: float

    def due(self, sent: int, live: int, now: float) -> float | None:
        at = self._at(sent)
        return at if at <= now else None

    def wait(self, sent: int, now: float) -> float:
        return max(0.0, self._at(sent) - now)

    def _at(self, sent: int) -> float:
        return 0.0 if sent < CHATS else self.every * (sent - CHATS + 1)


def disaggregation(ablation: Ablation) -> Table:
    """Measured rows of the ablation's model, then modelled ones."""
    config = EngineConfig(
        precision=PHASES.decode,
        devices=ablation.devices,
        num_pages=(CHATS + 4) * (ablation.model.config.max_position // EngineConfig.page_size),
    )
    engines: dict[str, Any] = {
        AGGREGATED: Engine(ablation.model, config),
        SEPARATED: Separated.of(ablation.model, config, PHASES),
    }
    rows = list(measured(ablation, engines))
    rows += [row for model in (KIMI, GLM) for row in modelled(model)]
    own = engines[SEPARATED].prefill.config.first_device > 0
    return Table(
        "disaggregation",
        rows,
        ablation.meta([PHASES.prefill, PHASES.decode], gpu=f"{DEVICES} x {H200.name}", devices_apart=own),
        "Prefill and decode: one engine against two workers",
        [
            f"Measured rows: {ablation.model.config.name}, a small model, on the device below. {CHATS} requests decode "
            f"{CHAT_OUTPUT} tokens each while {PROMPTS} prompts of {PROMPT} tokens come in, evenly over the time that "
            "the chats take alone. itl_ms: gaps between the tokens of the chats; itl_alone_ms: the same without the "
            "prompts; slowdown: the mean of one over the other, rounds taken in turn.",
            "prompt_ttft_ms: until the first token of a long prompt.",
            "Two workers of one CPU share its cores and its memory: there a separation can hide a prefill only as far "
            "as decode leaves a core idle.",
            f"Modelled rows: floors on {DEVICES} x {H200.name} for each phase, {CONCURRENCY} requests of "
            f"{SHORT_CONTEXT:,} tokens that decode, and a chunk of {CHUNK:,} tokens between two of their steps: one "
            "engine, INT4 weights for both; two workers, FP8 weights in prefill. transfer_ms: the KV of one such "
            "request over NVLink, which does not hold up decode.",
        ],
    )


# ---- measured


def chats_and_prompts(ablation: Ablation) -> list[Job]:
    rng, vocab = np.random.default_rng([ablation.seed, 29]), ablation.model.config.vocab
    shapes = [(CHAT_PROMPT, CHAT_OUTPUT)] * CHATS + [(PROMPT, PROMPT_OUTPUT)] * PROMPTS
    return [Job(rng.integers(0, vocab, length).tolist(), output) for length, output in shapes]


def measured(ablation: Ablation, engines: dict[str, Any]) -> Iterable[dict[str, Any]]:
    """A row for each way: runs with and without prompts, in turn."""
    jobs = chats_and_prompts(ablation)
    runs: dict[tuple[str, bool], list[LoadResult]] = {(way, beside): [] for way in engines for beside in (False, True)}
    alone: dict[str, float] = {}

    def one(way: str, beside: bool) -> float:
        every = alone.get(way, 1.0) / (PROMPTS + 1)
        result = drive(engines[way], jobs if beside else jobs[:CHATS], Beside(every))
        runs[way, beside].append(result)
        if not beside:
            alone[way] = result.seconds
        return float(np.mean(gaps(result)))

    each = {f"{way} {beside}": (lambda w=way, b=beside: one(w, b)) for way, beside in runs}
    means = ablation.in_turn("chats, with and without prompts", each, ablation.effort.rounds)
    for way in engines:
        kept = {beside: runs[way, beside][WARMUP:] for beside in (False, True)}
        slowdown = statistics.ratio_interval(means[f"{way} True"], means[f"{way} False"])
        yield {
            "model": ablation.model.config.name,
            "mode": way,
            "itl_ms": milliseconds(np.concatenate([gaps(r) for r in kept[True]])),
            "itl_alone_ms": milliseconds(np.concatenate([gaps(r) for r in kept[False]])),
            "slowdown": slowdown.fields("ratio"),
            "prompt_ttft_ms": milliseconds([t.ttft for r in kept[True] for t in r.traces if not is_chat(t)]),
            "output_tokens_per_s": float(np.median([r.output_tokens_per_s for r in kept[True]])),
            "paper": None,
            "source": "measured",
        }


def is_chat(trace: Trace) -> bool:
    return trace.input == CHAT_PROMPT


def gaps(result: LoadResult) -> np.ndarray:
    """Seconds between the tokens of the chats."""
    return np.concatenate([np.diff(t.tokens) for t in result.traces if is_chat(t)])


def milliseconds(seconds: Any) -> dict[str, float]:
    return statistics.distribution(1e3 * np.asarray(seconds))


# ---- modelled


def modelled(model: PlannedModel) -> Iterable[dict[str, Any]]:
    """The floor of a step between two tokens, with a chunk of a prompt in it and without."""
    kv = KVFormat("fp8_e4m3")
    alone = decode_floor(model, Precision(INT4, kv), H200, DEVICES, CONCURRENCY, SHORT_CONTEXT).seconds
    chunk = prefill_floor(model, Precision(INT4, kv), H200, DEVICES, CHUNK).seconds
    prefill = Precision(FP8, KVFormat("bf16"))
    moved = SHORT_CONTEXT * kv_gpu_bytes_per_token(model, kv, DEVICES) / H200.link
    for way, itl in ((AGGREGATED, alone + chunk), (SEPARATED, alone)):
        whole = INT4 if way == AGGREGATED else FP8
        ttft = prefill_floor(model, prefill if whole is FP8 else Precision(INT4, kv), H200, DEVICES, SHORT_CONTEXT)
        yield {
            "model": model.name,
            "mode": way,
            "itl_ms": {"mean": 1e3 * itl},
            "itl_alone_ms": {"mean": 1e3 * alone},
            "slowdown": {"ratio": itl / alone},
            "prompt_ttft_ms": {"mean": 1e3 * ttft.seconds},
            "transfer_ms": 1e3 * moved if way == SEPARATED else None,
            "paper": None,
            "source": "modelled",
        }
