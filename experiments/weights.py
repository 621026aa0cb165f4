"""Table `weights`: BF16, FP8 (128x128 blocks) and INT4 (groups of 32, 64, 128) weights, the KV cache in BF16."""

from experiments.ablation import REFERENCE, Ablation, speed_fields
from jaxinfer.checkpoints.model import quantize_params, weight_bytes
from jaxinfer.config import Precision
from jaxinfer.evaluation.table import Table

FORMATS = ("bf16", "fp8_e4m3", "int4:g32", "int4:g64", "int4:g128", "int4:g32+dense")
CONCURRENCY = 16
PAPER = {
    "fp8_e4m3": {"checkpoint_gb": 705, "gsm8k": 94.39, "mmlu": 86.60, "arc_challenge": 64.93},
    "int4:g32": {"checkpoint_gb": 421, "gsm8k": 93.56, "mmlu": 86.54, "arc_challenge": 64.85},
}
"""Published for GLM 5.2 on 8 x H200: checkpoint size, scores in percent."""


def weights(ablation: Ablation) -> Table:
    """Quality, bytes and decode speed of each weight format."""
    precisions = {weights: Precision.parse(weights, "bf16") for weights in FORMATS}
    engines = {weights: ablation.engine(precision) for weights, precision in precisions.items()}
    runs = ablation.decode_runs(engines, CONCURRENCY)
    sizes = {
        weights: weight_bytes(quantize_params(ablation.model.config, ablation.model.params, precision.weights))
        for weights, precision in precisions.items()
    }
    rows = [
        {
            "weight_format": weights,
            "kv_format": "bf16",
            "concurrency": CONCURRENCY,
            "weight_bytes": sizes[weights],
            "bytes_ratio": sizes[weights] / sizes["bf16"],
            **speed_fields(runs[weights], None if precision == REFERENCE else runs[FORMATS[0]]),
            "quality": ablation.quality(precision),
            **ablation.divergence(precision),
            "paper": PAPER.get(weights),
            "source": "measured",
        }
        for weights, precision in precisions.items()
    ]
    kept = (
        "The CPU expands quantised weights once at load and computes in float32: decode_ratio is blind to the format."
        if ablation.model.expand_weights
        else "Quantised weights stay packed in memory."
    )
    return Table(
        "weights",
        rows,
        ablation.meta(precisions.values()),
        "Weights: BF16, FP8 blocks and INT4 groups",
        [
            "int4:gN quantises the routed experts only, as the published checkpoints do; +dense every linear layer.",
            kept,
            "kl and top1_agreement: next-token distributions on the true answers, against the bf16 row.",
            "Embedding and head are bf16 in every row, and weigh much in a small model: bytes_ratio is far from 1/4.",
        ],
    )
