"""Table `weights-concurrency`: FP8 and INT4 weights from 1 request at once to 64, prefill and decode apart.

What is published: INT4 decodes faster, most at concurrency 1 (+55%), and prefills slower (8,660 tokens/s to 10,160), so
each phase has its own weights. Measured on the model that ships, and the planner's floors for the models themselves.
"""

import functools
from collections.abc import Iterable
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.ablation import PROMPT_TOKENS, Ablation
from experiments.capacity import DEVICES, FP8, GLM, H200, INT4, KIMI, SHORT_CONTEXT
from experiments.lines import draw_by_concurrency
from jaxinfer.config import EngineConfig, Precision
from jaxinfer.engine import Engine
from jaxinfer.evaluation import statistics
from jaxinfer.evaluation.table import Table
from jaxinfer.evaluation.throughput import decode_run, prefill_run
from jaxinfer.planning.model import PlannedModel
from jaxinfer.planning.roofline import decode_floor, prefill_floor
from jaxinfer.quantization.formats import KVFormat

FORMATS = (str(FP8), str(INT4))
CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64)
SHOWN = (
    *("model", "weight_format", "concurrency", "prefill_tokens_per_s", "prefill_ratio", "decode_tokens_per_s"),
    "decode_ratio",
)
KV = "fp8_e4m3"
PHASES = ("prefill", "decode")
PAPER = {
    (str(FP8), 1): {"prefill_tokens_per_s": 10_160},
    (str(INT4), 1): {"prefill_tokens_per_s": 8_660, "prefill_ratio": 8_660 / 10_160, "decode_ratio": 1.55},
}
"""Published for GLM 5.2 on 8 x H200. Prefill is not published by concurrency: it stands beside the first row."""


def weights_concurrency(ablation: Ablation) -> Table:
    """Measured rows of the ablation's model, then modelled ones."""
    precisions = {weights: Precision.parse(weights, KV) for weights in FORMATS}
    engines = {weights: ablation.engine(p, **engine_options(ablation)) for weights, p in precisions.items()}
    rows = [row for at_once in CONCURRENCIES for row in measured(ablation, engines, at_once)]
    rows.sort(key=lambda row: FORMATS.index(row["weight_format"]))
    rows += [row for model in (KIMI, GLM) for row in modelled(model)]
    kept = (
        "It expands quantised weights once at load and computes in float32: there the ratios are blind to the format, "
        "and must be 1 within noise."
        if ablation.model.expand_weights
        else "Quantised weights stay packed in memory."
    )
    return Table(
        "weights-concurrency",
        rows,
        ablation.meta(precisions.values(), gpu=f"{DEVICES} x {H200.name}"),
        "Weights by concurrency: FP8 blocks against INT4 groups, prefill and decode apart",
        [
            f"Measured rows: {ablation.model.config.name}, a small model, on the device below. {kept}",
            f"prefill_tokens_per_s: so many prompts of {PROMPT_TOKENS} tokens at once, until each has its first token; "
            "decode_tokens_per_s: so many requests, all past their prefill. Medians of rounds taken in turn.",
            "prefill_ratio, decode_ratio: INT4 against FP8.",
            f"Modelled rows: ceilings on {DEVICES} x {H200.name} from bytes and operations alone, {SHORT_CONTEXT:,} "
            "tokens a request. Prefill takes prompts one at a time there, and is the same at any concurrency. INT4 "
            "covers the routed experts and leaves the rest BF16, as the published checkpoints do.",
            "The published +55% at concurrency 1 is above what bytes allow: see capacity-glm. Published figures are in "
            "the files that --out writes.",
        ],
        draw_panels,
        SHOWN,
    )


def draw_panels(figure: Figure, table: Table) -> None:
    """Both phases as measured, and decode as modelled."""
    panels = {
        "measured": ("prefill_tokens_per_s", "decode_tokens_per_s"),
        "modelled": ("decode_tokens_per_s",),
    }
    draw_by_concurrency(figure, table, panels, "weight_format")


def engine_options(ablation: Ablation) -> dict[str, Any]:
    """Slots and pages for the most requests at once, as long as `decode_run` makes them."""
    most, page = max(CONCURRENCIES), EngineConfig.page_size
    context = min(ablation.model.config.max_position, PROMPT_TOKENS + ablation.effort.steps + most + 2 * page)
    return {
        "num_pages": most * -(-context // page),
        "max_slots": most,
        "max_context": context,
        "decode_buckets": CONCURRENCIES,
        "prefill_buckets": ((4, PROMPT_TOKENS), (1, PROMPT_TOKENS)),
    }


def measured(ablation: Ablation, engines: dict[str, Engine], at_once: int) -> Iterable[dict[str, Any]]:
    """A row for each format; prefill in turn, then decode in turn."""
    seed, steps = ablation.seed, ablation.effort.steps

    def one(weights: str, phase: str) -> float:
        if phase == "prefill":
            return prefill_run(engines[weights], at_once, PROMPT_TOKENS, seed=seed).tokens_per_s
        return decode_run(engines[weights], at_once, PROMPT_TOKENS, steps, seed).tokens_per_s

    def rates(phase: str) -> dict[str, np.ndarray]:
        each = {weights: functools.partial(one, weights, phase) for weights in engines}
        return ablation.in_turn(f"{phase} of {at_once} at once", each, ablation.effort.fewer_rounds)

    found = {phase: rates(phase) for phase in PHASES}
    for weights in engines:
        row: dict[str, Any] = {
            "model": ablation.model.config.name,
            "weight_format": weights,
            "kv_format": KV,
            "concurrency": at_once,
        }
        for phase, of in found.items():
            row[f"{phase}_tokens_per_s"] = float(np.median(of[weights]))
        for phase, of in found.items():
            ratio = statistics.ratio_interval(of[weights], of[FORMATS[0]]) if weights != FORMATS[0] else None
            row[f"{phase}_ratio"] = ratio.fields("ratio") if ratio else None
        yield row | {"paper": None, "source": "measured"}


def modelled(model: PlannedModel) -> Iterable[dict[str, Any]]:
    """Ceilings of both formats at each concurrency."""
    precisions = {str(format): Precision(format, KVFormat(KV)) for format in (FP8, INT4)}

    def rates(weights: str, at_once: int) -> dict[str, float]:
        prefill = prefill_floor(model, precisions[weights], H200, DEVICES, SHORT_CONTEXT)
        decode = decode_floor(model, precisions[weights], H200, DEVICES, at_once, SHORT_CONTEXT)
        return {"prefill": prefill.tokens_per_s, "decode": decode.tokens_per_s}

    for weights in FORMATS:
        for at_once in CONCURRENCIES:
            found, base = rates(weights, at_once), rates(FORMATS[0], at_once)
            other = weights != FORMATS[0]
            yield {
                "model": model.name,
                "weight_format": weights,
                "kv_format": KV,
                "concurrency": at_once,
                **{f"{phase}_tokens_per_s": found[phase] for phase in PHASES},
                **{f"{phase}_ratio": found[phase] / base[phase] if other else None for phase in PHASES},
                "paper": PAPER.get((weights, at_once)) if model is GLM else None,
                "source": "modelled",
            }
