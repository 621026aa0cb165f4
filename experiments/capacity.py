"""Tables `capacity-kimi` and `capacity-glm`: what first principles give beside the published capacity figures.

    python -m jaxinfer.run ablation --tables capacity-kimi,capacity-glm --out experiments/results

Nothing here is fitted. The one number taken from a published figure, the share of an H200's memory that Kimi K2.6's
686,000 tokens imply, has a row of its own, and each row that uses it says so.
"""

from collections.abc import Iterable
from typing import Any

from matplotlib.figure import Figure

from experiments.ablation import Ablation
from jaxinfer.config import Precision
from jaxinfer.evaluation.table import Table, draw_bars, run_meta
from jaxinfer.planning.capacity import USABLE, Capacity, Weight, kv_bytes_per_token, total
from jaxinfer.planning.capacity import weights as placed
from jaxinfer.planning.gpus import GPU
from jaxinfer.planning.model import PlannedModel
from jaxinfer.planning.roofline import decode_floor, prefill_floor, share_read
from jaxinfer.quantization.formats import KVFormat, WeightFormat

DEVICES, H200, GIB = 8, GPU.find("h200"), 2**30
KIMI, GLM = PlannedModel.find("kimi-k2.6"), PlannedModel.find("glm-5.2")
FP8, INT4, INT4_ALL = (WeightFormat.parse(text) for text in ("fp8_e4m3", "int4:g32", "int4:g32+dense"))
PUBLISHED_TOKENS = {"bf16": 686_000, "fp8_e4m3": 1_370_000}
"""Kimi K2.6 tokens that fit one GPU of 8 x H200."""
SCALED_LATENT, INDEX_KEY = 656, 132
"""Bytes of one layer's entry as SGLang keeps it for sparse attention: 512 e4m3 values, 4 float32 scales and 64 bf16
rope values; and of an index key: 128 e4m3 values and a float32 scale."""
NOTES = [
    "difference_percent is ours against the published figure.",
    f"A budget at {USABLE:.0%} is that share of an H200's {H200.memory / GIB:.1f} GiB less the weights of one GPU.",
]
SHORT_CONTEXT = 8192  # tokens of the one request in the rows about concurrency 1


def row(
    name: str,
    ours: float,
    unit: str,
    paper: float | None = None,
    reason: str = "",
    weights: object = None,
    kv: str | None = None,
) -> dict[str, Any]:
    """One figure beside the published one, their difference, and why they differ."""
    return {
        "name": name,
        "weight_format": None if weights is None else str(weights),
        "kv_format": kv,
        "ours": ours,
        "unit": unit,
        "paper": paper,
        "difference_percent": None if paper is None else 100 * (ours / paper - 1),
        "reason": reason,
        "source": "modelled",
    }


def implied_budget() -> int:
    """Bytes of one GPU that Kimi K2.6's 686,000 BF16 tokens take."""
    return PUBLISHED_TOKENS["bf16"] * kv_bytes_per_token(KIMI, KVFormat("bf16"))


def implied_share() -> float:
    """The share of an H200 that those tokens and the INT4 weights of one GPU take together."""
    return (implied_budget() + total(placed(KIMI, INT4, DEVICES))) / H200.memory


def kimi_rows() -> Iterable[dict[str, Any]]:
    """Kimi K2.6 with INT4 weights: bytes, tokens at our budget, tokens at the implied one, requests, speed."""
    found = placed(KIMI, INT4, DEVICES)
    reason = "ours is the text decoder; the public checkpoint has a vision tower too"
    yield row("checkpoint", total(found, "bytes") / GIB, "GiB", 554.3, reason, INT4)
    reason = "matrices that every GPU keeps whole make it more than an eighth"
    yield row("one GPU, as sharded", total(found) / GIB, "GiB", None, reason, INT4)
    reason = f"the published budget is smaller: it implies {implied_share():.1%} of the memory, ours is {USABLE:.0%}"
    for kv, paper in PUBLISHED_TOKENS.items():
        capacity = Capacity.of(KIMI, Precision(INT4, KVFormat(kv)), H200, DEVICES)
        yield row("bytes a token", capacity.per_token, "B", kv=kv)
        yield row(f"tokens that fit at {USABLE:.0%}", capacity.tokens, "tokens", paper, reason, INT4, kv)
    yield row("budget that 686,000 tokens imply", implied_budget() / 1e9, "GB", kv="bf16")
    yield row("share of memory that they imply", 100 * implied_share(), "%", reason="with the INT4 weights", kv="bf16")
    fp8, paper = implied_budget() // kv_bytes_per_token(KIMI, KVFormat("fp8_e4m3")), PUBLISHED_TOKENS["fp8_e4m3"]
    reason = "rounding; exactly twice takes the rope part in FP8 too, and no scale stored with each entry"
    yield row("tokens in that budget", fp8, "tokens", paper, reason, kv="fp8_e4m3")
    scaled = implied_budget() // (KIMI.config.layers * SCALED_LATENT)
    reason = "656 B a layer, with scales and bf16 rope, is not the layout behind the published figure"
    yield row("tokens in that budget", scaled, "tokens", paper, reason, kv="fp8 + scales")
    yield from kimi_load_rows(fp8)


def kimi_load_rows(fp8_tokens: int) -> Iterable[dict[str, Any]]:
    """The run at high load: 32 requests in BF16, 64 at 2,192 tokens/s in FP8."""
    context = PUBLISHED_TOKENS["bf16"] // 32
    reason = f"limited by capacity alone: {context:,} tokens a request fill the budget in both formats"
    yield row("requests, if BF16 stops at 32", fp8_tokens // context, "requests", 64, reason, kv="fp8_e4m3")
    floor = decode_floor(KIMI, Precision(INT4, KVFormat("fp8_e4m3")), H200, DEVICES, 64, context)
    reason = "ours is a ceiling, from bytes alone and with every request at its longest"
    yield row("decode at concurrency 64", floor.tokens_per_s, "tokens/s", 2192, reason, INT4, "fp8_e4m3")


def glm_rows() -> Iterable[dict[str, Any]]:
    """GLM 5.2: checkpoint sizes, bytes of one GPU, tokens, and speed."""
    for format, paper, per_gpu in ((FP8, 705, 88), (INT4, 421, 52)):
        found = placed(GLM, format, DEVICES, draft=True)
        size = total(found, "bytes")
        reason = "the draft layer is counted; which small tensors stay BF16 is not published in full"
        yield row("checkpoint", size / GIB, "GiB", paper, reason, format)
        yield row("checkpoint, in GB", size / 1e9, "GB", paper, "published as GB, but the figures are GiB", format)
        yield row("one GPU, an eighth", size / DEVICES / GIB, "GiB", per_gpu, "rounding", format)
        reason = "every GPU keeps the latents' down-projections, router, indexer and the draft's join matrix whole"
        yield row("one GPU, as sharded", total(found) / GIB, "GiB", per_gpu, reason, format)
    yield from glm_token_rows()
    yield from glm_speed_rows()


def glm_token_rows() -> Iterable[dict[str, Any]]:
    """1.18 million more tokens, read as the memory that INT4 frees, and as all that fits beside INT4."""
    assert GLM.indexer is not None
    scaled = GLM.config.layers * SCALED_LATENT + GLM.indexer.layers * INDEX_KEY
    raw = kv_bytes_per_token(GLM, KVFormat("fp8_e4m3"))
    yield row("bytes a token", scaled, "B", kv="fp8 + scales")
    yield row("bytes a token", raw, "B", kv="fp8_e4m3")
    loaded = {format: total(placed(GLM, format, DEVICES)) for format in (FP8, INT4)}
    freed, paper = loaded[FP8] - loaded[INT4], 1_180_000
    reason = "the memory that INT4 frees holds fewer: as a difference the figure cannot be reproduced"
    published = 36_000_000_000 // scaled  # 88 GB less 52 GB
    yield row("more tokens: freed as published", published, "tokens", paper, reason, INT4, "fp8 + scales")
    yield row("more tokens: freed as sharded", freed // scaled, "tokens", paper, reason, INT4, "fp8 + scales")
    reason = "nor with the smallest entries, raw e4m3 without scales"
    yield row("more tokens: freed as sharded", freed // raw, "tokens", paper, reason, INT4, "fp8_e4m3")
    reason = "near: the figure looks like the whole pool beside INT4, at the share that Kimi's figure implies"
    for share, why in ((implied_share(), reason), (USABLE, "the whole pool beside INT4, at our share")):
        tokens = (int(H200.memory * share) - loaded[INT4]) // scaled
        yield row(f"tokens beside INT4 at {share:.1%}", tokens, "tokens", paper, why, INT4, "fp8 + scales")


def glm_speed_rows() -> Iterable[dict[str, Any]]:
    """+55% at concurrency 1, against the bytes that each format reads; and prefill against its operations."""
    fp8, int4, whole = (placed(GLM, format, DEVICES) for format in (FP8, INT4, INT4_ALL))
    mixed = [w for w in fp8 if w.part != "routed experts"] + [w for w in int4 if w.part == "routed experts"]
    for elsewhere, format, found, reason in (
        (
            "BF16",
            INT4,
            int4,
            "bytes say slower, since what was FP8 outside the experts doubles; yet the sizes say it is so",
        ),
        ("FP8", INT4, mixed, "bytes allow no more, even had the rest stayed FP8: other effects must give what is left"),
        ("INT4", INT4_ALL, whole, "bytes would allow it, but this checkpoint is smaller than the published one"),
    ):
        for name, field in (("an eighth", "bytes"), ("as sharded", "gpu_bytes")):
            name = f"speed-up at concurrency 1, {elsewhere} outside the experts, {name}"
            yield row(name, bytes_read(fp8, field) / bytes_read(found, field), "x", 1.55, reason, format, "fp8_e4m3")
    kv = KVFormat("fp8_e4m3")
    old, new = (decode_floor(GLM, Precision(f, kv), H200, DEVICES, 64, SHORT_CONTEXT) for f in (FP8, INT4))
    reason = "no figure is published; there the experts outweigh the rest, and bytes allow what is claimed for 1"
    name = "speed-up at concurrency 64, BF16 outside the experts, as sharded"
    yield row(name, old.seconds / new.seconds, "x", None, reason, INT4, "fp8_e4m3")
    old, new = (prefill_floor(GLM, Precision(f, KVFormat("bf16")), H200, DEVICES, SHORT_CONTEXT) for f in (FP8, INT4))
    ratio = new.tokens_per_s / old.tokens_per_s
    reason = (
        f"INT4 loses the FP8 rate at the ceilings; the published runs are far below them ({old.tokens_per_s:,.0f}/s)"
    )
    yield row("prefill, INT4 against FP8", ratio, "x", 8660 / 10_160, reason, INT4, "bf16")


def bytes_read(found: Iterable[Weight], field: str) -> float:
    """Bytes that one GPU reads of weights and cache for a token of one request.

    `field`: `gpu_bytes` as they are placed, or `bytes`, of which every GPU reads an eighth.
    """
    entries = GLM.entries(DEVICES)
    cache = sum(entry.layers * entry.gpu_width * entry.tokens_read(SHORT_CONTEXT) for entry in entries)
    read = sum(getattr(weight, field) * share_read(GLM.config, weight, 1) for weight in found)
    return read / (DEVICES if field == "bytes" else 1) + cache


def draw_differences(figure: Figure, table: Table) -> None:
    """Bars of the difference from the published figure, one for each row that has one."""
    rows = [r for r in table.rows if r["paper"] is not None]
    axis = figure.subplots()
    names = [", ".join(r[field] for field in ("name", "weight_format", "kv_format") if r[field]) for r in rows]
    axis.set_yticks(range(len(rows)), names, fontsize=7)
    axis.set_ylim(len(rows) - 0.5, -0.5)
    draw_bars(axis, [r["difference_percent"] for r in rows], "difference from the published figure, %")


def capacity_kimi(ablation: Ablation) -> Table:
    """Kimi K2.6: KV tokens and concurrency."""
    return _table("capacity-kimi", KIMI, kimi_rows(), ablation.command)


def capacity_glm(ablation: Ablation) -> Table:
    """GLM-5.2: checkpoint and GPU memory, the tokens that INT4 makes room for, decode at concurrency 1."""
    return _table("capacity-glm", GLM, glm_rows(), ablation.command)


def _table(name: str, model: PlannedModel, rows: Iterable[dict[str, Any]], command: str) -> Table:
    meta = run_meta(command, seed=0, samples=0, model=model.name, gpu=H200.name, devices=DEVICES)
    return Table(name, list(rows), meta, f"Capacity of {model.name} on 8 x H200", NOTES, draw_differences)
