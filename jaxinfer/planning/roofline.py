"""Floors: the least time a step can take, from the bytes it must move and the operations it must do on each GPU.

A floor is the longest of three times, as if they overlapped perfectly and nothing else took any: HBM traffic against
bandwidth, matrix products against tensor-core FLOP/s, all-reduces against NVLink. What it leaves out (latency of
launches and collectives, softmax, routing, sampling, intermediate results) makes real steps slower, never faster.
"""

from dataclasses import dataclass

from jaxinfer.config import MLAConfig, ModelConfig, Precision
from jaxinfer.planning.capacity import Weight, weights
from jaxinfer.planning.gpus import GPU
from jaxinfer.planning.model import PlannedModel

BF16 = 2  # bytes of a value of the activations


@dataclass(frozen=True)
class Floor:
    """What one step takes of each GPU: bytes by kind, FLOPs by kind of product, bytes over the link; and its tokens."""

    gpu: GPU
    tokens: int
    weight_bytes: float
    kv_bytes: float
    link_bytes: float
    fp8_flops: float
    bf16_flops: float

    @property
    def times(self) -> dict[str, float]:
        """Seconds by what limits them: `memory`, `compute`, `link`."""
        return {
            "memory": (self.weight_bytes + self.kv_bytes) / self.gpu.bandwidth,
            "compute": self.fp8_flops / self.gpu.fp8_flops + self.bf16_flops / self.gpu.bf16_flops,
            "link": self.link_bytes / self.gpu.link,
        }

    @property
    def seconds(self) -> float:
        return max(self.times.values())

    @property
    def bound(self) -> str:
        """What takes longest."""
        return max(self.times, key=lambda kind: self.times[kind])

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def decode_floor(model: PlannedModel, precision: Precision, gpu: GPU, devices: int, batch: int, context: int) -> Floor:
    """One decode step of `batch` requests that have `context` tokens each. Experts are chosen evenly."""
    found = weights(model, precision.weights, devices)
    entries = model.entries(devices)
    read = sum(e.layers * e.gpu_width * e.tokens_read(context) for e in entries)
    written = sum(e.layers * e.gpu_width for e in entries)
    products = _products(model.config, found, batch, head_rows=batch)
    pairs = batch * entries[0].tokens_read(context)
    attention = pairs * model.config.layers * flops_per_pair(model.config, absorbed=True) / devices
    return Floor(
        gpu,
        batch,
        weight_bytes=sum(w.gpu_bytes * share_read(model.config, w, batch) for w in found),
        kv_bytes=batch * (read + written) * precision.kv.itemsize,
        link_bytes=_all_reduces(model.config, devices, batch),
        fp8_flops=products[True],
        bf16_flops=products[False] + attention + batch * _index_flops(model, context),
    )


def prefill_floor(model: PlannedModel, precision: Precision, gpu: GPU, devices: int, prompt: int) -> Floor:
    """A whole prompt of `prompt` tokens in one pass, with logits of its last token.

    Attention is counted in the form with keys and values of every head, which takes the fewest operations here.
    """
    found = weights(model, precision.weights, devices)
    entries = model.entries(devices)
    products = _products(model.config, found, prompt, head_rows=1)
    pairs = causal_pairs(prompt, entries[0].reads)
    attention = pairs * model.config.layers * flops_per_pair(model.config, absorbed=False) / devices
    written = sum(e.layers * e.gpu_width for e in entries)
    index = _index_flops(model, 1) * causal_pairs(prompt)
    return Floor(
        gpu,
        prompt,
        weight_bytes=sum(w.gpu_bytes * share_read(model.config, w, prompt) for w in found),
        kv_bytes=prompt * written * precision.kv.itemsize,
        link_bytes=_all_reduces(model.config, devices, prompt),
        fp8_flops=products[True],
        bf16_flops=products[False] + attention + index,
    )


def experts_hit(experts: int, top_k: int, tokens: int) -> float:
    """Expected number of experts that `tokens` tokens reach when each chooses `top_k` evenly and independently."""
    return experts * (1 - (1 - top_k / experts) ** tokens)


def share_read(config: ModelConfig, weight: Weight, tokens: int) -> float:
    """The share of a tensor that a step of `tokens` tokens reads: rows of the embedding, experts that are reached."""
    if weight.part == "embedding":
        return min(1.0, tokens / config.vocab)
    if weight.part == "routed experts":
        assert config.moe is not None
        return experts_hit(config.moe.experts, config.moe.top_k, tokens) / config.moe.experts
    return 1.0


def flops_per_pair(config: ModelConfig, absorbed: bool) -> int:
    """FLOPs of one layer's attention for one query token and one cached token, over all heads.

    MLA on the latent itself (`absorbed`, arXiv:2405.04434 section 2.1.2) multiplies wider vectors, and expands nothing.
    """
    attention = config.attention
    if not isinstance(attention, MLAConfig):
        return 4 * attention.heads * attention.head_dim
    if absorbed:
        return 2 * attention.heads * (2 * attention.kv_lora + attention.rope_dim)
    return 2 * attention.heads * (attention.qk_dim + attention.v_dim)


def causal_pairs(tokens: int, most: int | None = None) -> int:
    """Pairs of a token and one it attends to, itself included, when each attends to at most `most`."""
    full = min(tokens, most or tokens)
    return full * (full + 1) // 2 + (tokens - full) * full


def _products(config: ModelConfig, found: list[Weight], tokens: int, head_rows: int) -> dict[bool, float]:
    """FLOPs a GPU of the products with weights, by whether they are FP8: two for each value and row."""
    flops = {True: 0.0, False: 0.0}
    for weight in found:
        rows: float = {"embedding": 0, "norms": 0, "head": head_rows}.get(weight.part, tokens)
        if weight.part == "routed experts":
            assert config.moe is not None
            rows = tokens * config.moe.top_k / config.moe.experts
        flops[weight.format == "fp8_e4m3"] += 2 * weight.gpu_parameters * rows
    return flops


def _index_flops(model: PlannedModel, context: int) -> int:
    """FLOPs of the indexers for one query: it scores every token with all index heads, on every GPU."""
    indexer = model.indexer
    return 2 * indexer.layers * indexer.heads * indexer.key_dim * context if indexer else 0


def _all_reduces(config: ModelConfig, devices: int, tokens: int) -> float:
    """Bytes that a GPU sends: an all-reduce after attention and one after the MLP of each layer, each value sent once.

    That is what a switch that reduces in passing allows (NVLink SHARP, Hopper and later); a ring sends 2(n-1)/n times
    as much.
    """
    return 2 * config.layers * tokens * config.hidden * BF16 if devices > 1 else 0
