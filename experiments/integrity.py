"""Table `integrity`: what the check of page tags before every decode read costs."""

import numpy as np

from experiments.ablation import PROMPT_TOKENS, Ablation, rates
from jaxinfer.config import Precision
from jaxinfer.engine import Engine
from jaxinfer.evaluation import statistics
from jaxinfer.evaluation.table import Table
from jaxinfer.evaluation.throughput import bare_run

LEVELS = ("off", "tags")
CONCURRENCIES = (1, 16)
PRECISION = Precision.parse("bf16", "fp8_e4m3")
PAPER = {"throughput_change": "under 1%", "p95_latency_change": "under 1%"}


def integrity(ablation: Ablation) -> Table:
    """Throughput and latency with the check and without, and the check's own time."""
    engines = {level: ablation.engine(PRECISION, level) for level in LEVELS}
    rows = []
    for concurrency in CONCURRENCIES:
        runs = ablation.decode_runs(engines, concurrency)
        for level in LEVELS:
            itl = np.concatenate([run.itl_ms for run in runs[level]])
            tagged = level != "off"
            throughput = statistics.ratio_interval(rates(runs[level]), rates(runs["off"])).fields("ratio")
            p95 = [np.array([np.percentile(run.itl_ms, 95) for run in runs[name]]) for name in (level, "off")]
            rows.append(
                {
                    "level": level,
                    "concurrency": concurrency,
                    "decode_tokens_per_s": float(np.median(rates(runs[level]))),
                    "throughput_ratio": throughput if tagged else None,
                    "itl_ms": statistics.distribution(itl),
                    "p95_itl_ratio": statistics.ratio_interval(*p95).fields("ratio") if tagged else None,
                    "verify_share": verify_share(engines[level], concurrency, ablation) if tagged else None,
                    "paper": PAPER if tagged else None,
                    "source": "measured",
                }
            )
    return Table(
        "integrity",
        rows,
        ablation.meta([PRECISION]),
        "KV integrity: the check of page tags before every decode read",
        [
            "Ratios are tags to off, the median over rounds taken in turn in one process with a 95% interval.",
            "verify_share: time of the check alone over that of the decode step alone, each as a bare program; "
            "on the CPU most of the check's time is the launch of a program.",
        ],
    )


def verify_share(engine: Engine, concurrency: int, ablation: Ablation) -> float:
    """Median time of the check over that of the decode step, as compiled programs run one by one on live requests."""
    run = bare_run(engine, concurrency, PROMPT_TOKENS, 2 * ablation.effort.steps, ablation.seed)
    return float(np.median(run.verify_seconds) / np.median(run.decode_seconds))
