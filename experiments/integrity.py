"""Table `integrity`: what the checks of pages before every decode read cost, measured here, modelled for 8 x H200."""

from typing import Any

import numpy as np

from experiments.ablation import FULL, PROMPT_TOKENS, Ablation, rates
from jaxinfer.config import LEVELS, Precision
from jaxinfer.engine import Engine
from jaxinfer.evaluation import statistics
from jaxinfer.evaluation.table import Table
from jaxinfer.evaluation.throughput import DecodeRun, bare_run
from jaxinfer.planning.gpus import GPU
from jaxinfer.planning.integrity import check_bytes
from jaxinfer.planning.model import PlannedModel

CONCURRENCIES = (1, 16)
FULL_CONCURRENCIES = (1, 8, 32)
FULL_ENGINE = {"max_slots": 32, "num_pages": 2176, "decode_buckets": FULL_CONCURRENCIES}
PRECISION = Precision.parse("bf16", "fp8_e4m3")
PERCENTILES = (50, 95, 99)
PAPER = {"throughput_change": "under 1%", "p95_latency_change": "under 1%"}
PLANNED_MODEL, PLANNED_GPU, DEVICES, CONTEXT, PAGE_SIZE = "kimi-k2.6", "h200", 8, 21_440, 64
PLANNED_PRECISION = Precision.parse("int4:g32", "fp8_e4m3")


def integrity(ablation: Ablation) -> Table:
    """Throughput and latency at each level, the check's own time, and its bytes in a large model's step."""
    full = ablation.effort == FULL
    options: dict[str, Any] = FULL_ENGINE if full else {}
    engines = {level: ablation.engine(PRECISION, integrity=level, **options) for level in LEVELS}
    rows = []
    for concurrency in FULL_CONCURRENCIES if full else CONCURRENCIES:
        runs = ablation.decode_runs(engines, concurrency)
        rows += [measured_row(ablation, level, engines[level], concurrency, runs) for level in LEVELS]
    rows += [planned_row(level, concurrency) for concurrency in FULL_CONCURRENCIES for level in LEVELS[1:]]
    return Table(
        "integrity",
        rows,
        ablation.meta([PRECISION]),
        "KV integrity: the checks before every decode read",
        [
            "Ratios are to the level off, the median over rounds taken in turn in one process with a 95% interval.",
            "check_share: the check as a program by itself over the decode step with the check in it, each waited for; "
            "on the CPU most of the former is the launch of a program, which the step does not pay.",
            "digest checks one page of each request a step. At the end of a request all its pages are read once more: "
            "audit_ms, not part of the other columns.",
            f"Modelled: {PLANNED_MODEL} on {DEVICES} x {PLANNED_GPU.upper()}, {PLANNED_PRECISION}, requests of "
            f"{CONTEXT:,} tokens in pages of {PAGE_SIZE}; bytes that one GPU reads for the check and for the step.",
        ],
    )


def measured_row(
    ablation: Ablation, level: str, engine: Engine, concurrency: int, runs: dict[str, list[DecodeRun]]
) -> dict[str, Any]:
    """One level at one concurrency, held against the level off."""
    here, off = runs[level], runs["off"]
    checked = level != "off"
    ratios = {"throughput_ratio": (rates(here), rates(off))} | {
        f"p{p}_itl_ratio": (percentile(here, p), percentile(off, p)) for p in PERCENTILES
    }
    ratio = lambda pair: statistics.ratio_interval(*pair).fields("ratio") if checked else None  # noqa: E731
    return {
        "level": level,
        "concurrency": concurrency,
        "decode_tokens_per_s": float(np.median(rates(here))),
        **{name: ratio(pair) for name, pair in ratios.items()},
        "itl_ms": statistics.distribution(np.concatenate([run.itl_ms for run in here])),
        **(bare_fields(ablation, engine, concurrency) if checked else {}),
        "paper": PAPER if checked else None,
        "source": "measured",
    }


def percentile(runs: list[DecodeRun], p: int) -> np.ndarray:
    """A percentile of the inter-token latency of each run, in milliseconds."""
    return np.array([np.percentile(run.itl_ms, p) for run in runs])


def bare_fields(ablation: Ablation, engine: Engine, concurrency: int) -> dict[str, float | None]:
    """Median times of the check, over that of the step, and of the last look at a request's pages, each by itself."""
    run = bare_run(engine, concurrency, PROMPT_TOKENS, 2 * ablation.effort.steps, ablation.seed)
    audited = engine.config.integrity == "digest"
    return {
        "check_share": float(np.median(run.verify_seconds) / np.median(run.decode_seconds)),
        "audit_ms": 1e3 * float(np.median(run.audit_seconds)) if audited else None,
    }


def planned_row(level: str, concurrency: int) -> dict[str, Any]:
    """Bytes of the check against those of a decode step, on one of the planned GPUs."""
    model, gpu = PlannedModel.find(PLANNED_MODEL), GPU.find(PLANNED_GPU)
    found = check_bytes(model, PLANNED_PRECISION, gpu, DEVICES, concurrency, CONTEXT, PAGE_SIZE, level)
    return {
        "level": level,
        "concurrency": concurrency,
        "model": model.name,
        "check_bytes": found.check,
        "step_bytes": found.step,
        "bytes_share": found.share,
        "paper": PAPER,
        "source": "modelled",
    }
