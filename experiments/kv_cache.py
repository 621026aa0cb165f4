"""Table `kv-cache`: BF16 against FP8 (e4m3) pages, the weights in BF16 throughout."""

from experiments.ablation import REFERENCE, Ablation, speed_fields
from jaxinfer.config import Precision
from jaxinfer.evaluation.table import Table

FORMATS = ("bf16", "fp8_e4m3")
CONCURRENCY = 16
PAPER = {
    "bf16": {"tokens": 686_000, "gsm8k": 94.24, "mmlu": 89.11, "tool_call_validity": 92.2},
    "fp8_e4m3": {"tokens": 1_370_000, "gsm8k": 94.09, "mmlu": 89.04, "tool_call_validity": 92.6},
}
"""Published for Kimi K2.6 on H200: tokens that fit one GPU's KV memory, scores in percent."""


def kv_cache(ablation: Ablation) -> Table:
    """Quality, capacity and decode speed of each KV format."""
    precisions = {kv: Precision.parse("bf16", kv) for kv in FORMATS}
    engines = {kv: ablation.engine(precision) for kv, precision in precisions.items()}
    runs = ablation.decode_runs(engines, CONCURRENCY)
    rows = []
    for kv, precision in precisions.items():
        cache = engines[kv].state.cache
        page_bytes = cache.bytes_per_token * engines[kv].config.page_size
        rows.append(
            {
                "kv_format": kv,
                "weight_format": "bf16",
                "concurrency": CONCURRENCY,
                "bytes_per_token": cache.bytes_per_token,
                "tokens_in_budget": ablation.budget_bytes // page_bytes * engines[kv].config.page_size,
                **speed_fields(runs[kv], None if precision == REFERENCE else runs[FORMATS[0]]),
                "quality": ablation.quality(precision),
                "tool_call_validity": ablation.tool_call_validity(precision),
                "recall_by_distance": ablation.recall_by_distance(precision),
                **ablation.divergence(precision),
                "paper": PAPER[kv],
                "source": "measured",
            }
        )
    return Table(
        "kv-cache",
        rows,
        ablation.meta(precisions.values(), budget_bytes=ablation.budget_bytes),
        "KV cache: BF16 against FP8 (e4m3) pages",
        [
            f"tokens_in_budget: whole pages in {ablation.budget_bytes >> 20} MiB; the published figure is for another "
            "model and budget, its ratio FP8 to BF16 of 2.0 is what can be compared.",
            "decode_ratio: rounds taken in turn in one process. The CPU computes in float32 whatever the format: the "
            "ratio shows what decoding e4m3 costs here and nothing of a GPU's memory bandwidth.",
            "kl and top1_agreement: next-token distributions on the true answers, against the bf16 row.",
        ],
    )
