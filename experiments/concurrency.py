"""Table `concurrency`: BF16 and FP8 pages from 1 request at once to 64, under one memory budget.

The budget holds half of the most requests in BF16, as the published run's does. Where BF16 runs out this engine queues:
callers wait, and throughput stops rising. Beside what was measured on the model that ships stands what the planner's
floors say of Kimi K2.6 and GLM-5.2 on 8 x H200.
"""

import functools
from collections.abc import Iterable
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.ablation import PROMPT_TOKENS, WARMUP, Ablation
from experiments.capacity import DEVICES, GLM, H200, INT4, KIMI, PUBLISHED_TOKENS, implied_share
from experiments.lines import draw_by_concurrency
from jaxinfer.config import EngineConfig, Precision
from jaxinfer.engine import Engine
from jaxinfer.evaluation import statistics
from jaxinfer.evaluation.load.arrivals import ClosedLoop
from jaxinfer.evaluation.load.bench import page_bytes, pages_in, warm_up
from jaxinfer.evaluation.load.driver import drive
from jaxinfer.evaluation.load.lengths import Mix
from jaxinfer.evaluation.load.measures import LoadResult, latencies
from jaxinfer.evaluation.table import Table
from jaxinfer.planning.capacity import Capacity
from jaxinfer.planning.model import PlannedModel
from jaxinfer.planning.roofline import decode_floor
from jaxinfer.quantization.formats import KVFormat

FORMATS = ("bf16", "fp8_e4m3")
CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64)
SHOWN = (
    *("model", "kv_format", "concurrency", "decoding: mean", "preemptions", "output_tokens_per_s", "output_ratio"),
    "decode_tokens_per_s",
)
CONTEXT = PUBLISHED_TOKENS["bf16"] // 32
"""Tokens of a request in the modelled rows: what 686,000 tokens give each of 32."""
PAPER: dict[tuple[str, int], dict[str, Any]] = {
    ("bf16", 32): {"fits": True},
    ("bf16", 64): {"fits": False},
    ("fp8_e4m3", 64): {"fits": True, "decode_tokens_per_s": 2192},
}
"""Published for Kimi K2.6 on 8 x H200: FP8 carries 64 requests, BF16 stops at 32, out of memory."""


def concurrency(ablation: Ablation) -> Table:
    """Measured rows of the ablation's model, then modelled ones."""
    precisions = {kv: Precision.parse("bf16", kv) for kv in FORMATS}
    budget = budget_bytes(ablation)
    engines = {kv: ablation.engine(p, **engine_options(ablation, p, budget)) for kv, p in precisions.items()}
    for engine in engines.values():
        warm_up(engine, mix(ablation).jobs(2, engine.model.config.vocab, engine.config.max_context, ablation.seed))
    rows = [row for callers in CONCURRENCIES for row in measured(ablation, engines, callers)]
    rows.sort(key=lambda row: FORMATS.index(row["kv_format"]))
    rows += [row for model in (KIMI, GLM) for kv in FORMATS for row in modelled(model, kv)]
    return Table(
        "concurrency",
        rows,
        ablation.meta(
            precisions.values(),
            budget_bytes=budget,
            num_pages={kv: engine.config.num_pages for kv, engine in engines.items()},
            lengths={"input": PROMPT_TOKENS, "output": ablation.effort.steps},
            gpu=f"{DEVICES} x {H200.name}",
        ),
        "Concurrency: BF16 against FP8 (e4m3) pages under one memory budget",
        notes(ablation, budget),
        draw_panels,
        SHOWN,
    )


def draw_panels(figure: Figure, table: Table) -> None:
    """What was measured: throughput and how many decode; what is modelled: the ceilings, with the published point."""
    panels = {
        "measured": ("output_tokens_per_s", "decoding"),
        "modelled": ("decode_tokens_per_s",),
    }
    draw_by_concurrency(figure, table, panels, "kv_format")
    *_, modelled = figure.axes
    modelled.plot([64], [PAPER["fp8_e4m3", 64]["decode_tokens_per_s"]], "k*", label="kimi-k2.6 fp8_e4m3, published")
    modelled.legend(fontsize=7)


def notes(ablation: Ablation, budget: int) -> list[str]:
    """What a reader must know of the rows."""
    model, most = ablation.model.config.name, max(CONCURRENCIES)
    return [
        f"Measured rows: {model}, a small model, on the device below; {budget:,} bytes of pages hold {most // 2} whole "
        f"requests of {PROMPT_TOKENS} + {ablation.effort.steps} tokens in BF16. A request that does not fit waits or "
        "is preempted, and none fails: past the limit latencies rise and throughput does not.",
        "decoding: requests that got a token in one step, mean over time and peak. Rates are medians of the rounds, "
        "latencies of all their requests.",
        "output_ratio: FP8 against BF16, rounds taken in turn. A CPU computes in float32 whatever the format: below "
        "the limit the ratio shows what decoding e4m3 costs there, and nothing of a GPU's memory bandwidth.",
        f"Modelled rows: floors on {DEVICES} x {H200.name}, {CONTEXT:,} tokens a request, INT4 weights, "
        f"{implied_share():.1%} of the memory, which is what the published 686,000 tokens imply. decode_tokens_per_s "
        "is a ceiling, from bytes and operations alone, of as many requests as fit; in it BF16 is never faster.",
        "Waiting, KV use, latencies and the published figures are in the files that --out writes.",
    ]


# ---- measured


def mix(ablation: Ablation) -> Mix:
    return Mix("fixed", PROMPT_TOKENS, ablation.effort.steps)


def budget_bytes(ablation: Ablation) -> int:
    """Memory for half of the most requests, each at its full length in BF16."""
    page = EngineConfig.page_size
    pages = -(-(PROMPT_TOKENS + ablation.effort.steps) // page) * max(CONCURRENCIES) // 2
    return pages * page_bytes(ablation.model.config, Precision.parse("bf16", "bf16"), page)


def engine_options(ablation: Ablation, precision: Precision, budget: int) -> dict[str, Any]:
    """A slot for every caller, a decode bucket for every concurrency, and the pages that the budget holds."""
    page = EngineConfig.page_size
    return {
        "num_pages": pages_in(budget / 2**20, ablation.model.config, precision, page),
        "max_slots": max(CONCURRENCIES),
        "max_context": -(-(PROMPT_TOKENS + ablation.effort.steps) // page) * page,
        "decode_buckets": CONCURRENCIES,
        "prefill_buckets": ((4, PROMPT_TOKENS), (1, PROMPT_TOKENS)),
    }


def measured(ablation: Ablation, engines: dict[str, Engine], callers: int) -> Iterable[dict[str, Any]]:
    """A row for each format, runs taken in turn: twice as many requests as there are callers, four at least."""
    runs: dict[str, list[LoadResult]] = {kv: [] for kv in engines}

    def one(kv: str) -> float:
        engine = engines[kv]
        vocab, room = engine.model.config.vocab, engine.config.max_context
        jobs = mix(ablation).jobs(max(4, 2 * callers), vocab, room, ablation.seed)
        runs[kv].append(drive(engine, jobs, ClosedLoop(callers)))
        return runs[kv][-1].output_tokens_per_s

    each = {kv: functools.partial(one, kv) for kv in engines}
    rates = ablation.in_turn(f"serving {callers} callers", each, ablation.effort.fewer_rounds)
    for kv, results in runs.items():
        ratio = statistics.ratio_interval(rates[kv], rates[FORMATS[0]]) if kv != FORMATS[0] else None
        yield {
            "model": ablation.model.config.name,
            "weight_format": "bf16",
            "kv_format": kv,
            "concurrency": callers,
            **summary(results[WARMUP:]),
            "output_ratio": ratio.fields("ratio") if ratio else None,
            "paper": None,
            "source": "measured",
        }


def summary(results: list[LoadResult]) -> dict[str, Any]:
    """One row of several runs: medians of rates, means of counts, highest peaks, latencies of all requests."""
    rows = [result.fields() for result in results]
    average = lambda name: float(np.mean([r[name]["mean"] for r in rows]))  # noqa: E731
    peak = lambda name: max(r[name]["peak"] for r in rows)  # noqa: E731
    return {
        "decoding": {"mean": average("decoding"), "peak": peak("decoding")},
        "waiting": {"mean": average("waiting"), "peak": peak("waiting")},
        "kv_used": {"mean": average("kv_used"), "peak": peak("kv_used")},
        "preemptions": float(np.mean([r["preemptions"] for r in rows])),
        "refused": sum(r["refused"] for r in rows),
        **{
            name: float(np.median([r[name] for r in rows]))
            for name in ("requests_per_s", "input_tokens_per_s", "output_tokens_per_s", "total_tokens_per_s")
        },
        **latencies([trace for result in results for trace in result.completed]),
    }


# ---- modelled


def modelled(model: PlannedModel, kv: str) -> Iterable[dict[str, Any]]:
    """Requests that fit, and the floor of their decode step, at each concurrency."""
    precision = Precision(INT4, KVFormat(kv))
    most = Capacity.of(model, precision, H200, DEVICES, implied_share()).concurrency(CONTEXT)
    for asked in CONCURRENCIES:
        carried = min(asked, most)
        floor = decode_floor(model, precision, H200, DEVICES, carried, CONTEXT)
        yield {
            "model": model.name,
            "weight_format": str(INT4),
            "kv_format": kv,
            "concurrency": asked,
            "decoding": {"mean": carried, "peak": carried},
            "fits": asked <= most,
            "decode_tokens_per_s": floor.tokens_per_s,
            "step_floor_ms": 1e3 * floor.seconds,
            "paper": PAPER.get((kv, asked)) if model is KIMI else None,
            "source": "modelled",
        }
