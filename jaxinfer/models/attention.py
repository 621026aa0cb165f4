"""Attention: latent (MLA) and grouped-query (GQA), each over a whole text at once (`plain`) or over pages (`paged`).

`plain` is the simple form, with keys and values of every head, for training and as the reference. `paged` writes the
new entries to their pages and attends over the pages; MLA does so in absorbed form, on the latent itself.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int32

from jaxinfer.cache.kv import KVCache
from jaxinfer.config import GQAConfig, MLAConfig, ModelConfig
from jaxinfer.models.linear import Linear
from jaxinfer.models.norm import RMSNorm
from jaxinfer.models.rope import rotate
from jaxinfer.parallel.kernels import current
from pallas_kernels.paged_attention import chosen_mla_attention, gqa_attention, mla_attention

LATENT_EPS = 1e-6
"""Of the norms of MLA's latents: fixed in the published code, whatever a model's `rms_norm_eps` says."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedContext:
    """Where the tokens of a step stand: `positions` in their texts (-1: padding), the `pages` and `offsets` their
    entries go to (INVALID: nowhere), and each row's page table and length, the new tokens included. `chosen`: with
    sparse attention, the positions that each token attends to (INVALID: none); K is 0 where it attends to all."""

    positions: Int32[Array, "B T"]
    pages: Int32[Array, "B T"]
    offsets: Int32[Array, "B T"]
    page_table: Int32[Array, "B M"]
    lengths: Int32[Array, " B"]
    chosen: Int32[Array, "B T K"] | None = None

    @classmethod
    def one_text(cls, width: int, count: Int32[Array, ""]) -> "PagedContext":
        """A whole text of `count` tokens, padded to `width`, in one page of that size: what calibration and evaluation
        read through, in place of an allocator."""
        positions = jnp.where(jnp.arange(width) < count, jnp.arange(width), -1)[None]
        pages, table = jnp.where(positions >= 0, 0, -1), jnp.zeros((1, 1), jnp.int32)
        return cls(positions, pages, positions, table, count[None])


def causal_mask(segments: Int32[Array, "B T"]) -> Bool[Array, "B T T"]:
    """True where a token (second axis) may see another (third): same segment, not later; segment 0 is padding."""
    tokens = segments.shape[1]
    same = (segments[:, :, None] == segments[:, None, :]) & (segments > 0)[:, :, None]
    return same & jnp.tril(jnp.ones((tokens, tokens), bool))


def _softmax_attention(query, key, value, mask, scale) -> Float[Array, "B T H v"]:
    scores = jnp.einsum("bthd,bshd->bhts", query, key, preferred_element_type=jnp.float32) * scale
    weights = jax.nn.softmax(jnp.where(mask[:, None], scores, -1e30), axis=-1)
    return jnp.einsum("bhts,bshd->bthd", weights.astype(value.dtype), value)


class MLA(nnx.Module):
    """Multi-head latent attention (arXiv:2405.04434, eq. 9-19)."""

    def __init__(self, layers: int, config: ModelConfig, rngs: nnx.Rngs, dtype):
        self.config = config
        mla = config.attention
        assert isinstance(mla, MLAConfig)
        self.dims = mla
        width = mla.heads * mla.qk_dim
        if mla.q_lora:
            self.query_down = Linear(layers, config.hidden, mla.q_lora, ("embed", "lora"), rngs, dtype)
            self.query_norm = RMSNorm(layers, mla.q_lora, LATENT_EPS, rngs, dtype)
        self.query_up = Linear(
            layers, mla.q_lora or config.hidden, width, ("lora" if mla.q_lora else "embed", "heads"), rngs, dtype
        )
        self.latent_down = Linear(layers, config.hidden, mla.kv_lora + mla.rope_dim, ("embed", "lora"), rngs, dtype)
        self.latent_norm = RMSNorm(layers, mla.kv_lora, LATENT_EPS, rngs, dtype)
        self.key_up = Linear(layers, mla.kv_lora, mla.heads * mla.nope_dim, ("lora", "heads"), rngs, dtype)
        self.value_up = Linear(layers, mla.kv_lora, mla.heads * mla.v_dim, ("lora", "heads"), rngs, dtype)
        self.output = Linear(layers, mla.heads * mla.v_dim, config.hidden, ("heads", "embed"), rngs, dtype)

    def query_latent(self, x: Float[Array, "B T D"], layer) -> Float[Array, "B T q"]:
        """What queries are made of."""
        return self.query_norm(self.query_down(x, layer), layer) if self.dims.q_lora else x

    def _queries(self, x, layer, positions):
        dims = self.dims
        low = self.query_latent(x, layer)
        query = self.query_up(low, layer).reshape(*x.shape[:2], dims.heads, dims.qk_dim)
        nope, rope = query[..., : dims.nope_dim], query[..., dims.nope_dim :]
        return nope, rotate(rope, positions, self.config.rope)

    def _latents(self, x, layer, positions):
        """What is cached of each token: the normalised latent and the shared rotated key."""
        down = self.latent_down(x, layer)
        latent = self.latent_norm(down[..., : self.dims.kv_lora], layer)
        rope = rotate(down[..., None, self.dims.kv_lora :], positions, self.config.rope)[..., 0, :]
        return latent, rope

    def plain(self, x: Float[Array, "B T D"], layer, positions: Int32[Array, "B T"], mask: Bool[Array, "B T T"]):
        dims, shape = self.dims, x.shape[:2]
        nope, rope = self._queries(x, layer, positions)
        latent, shared = self._latents(x, layer, positions)
        key = self.key_up(latent, layer).reshape(*shape, dims.heads, dims.nope_dim)
        shared = jnp.broadcast_to(shared[:, :, None], (*shape, dims.heads, dims.rope_dim))
        value = self.value_up(latent, layer).reshape(*shape, dims.heads, dims.v_dim)
        query, key = jnp.concatenate([nope, rope], -1), jnp.concatenate([key, shared], -1)
        out = _softmax_attention(query, key, value, mask, self.config.softmax_scale)
        return self.output(out.reshape(*shape, -1), layer)

    def paged(self, x: Float[Array, "B T D"], layer, pool_layer, context: PagedContext, cache: KVCache):
        shape = x.shape[:2]
        nope, rope = self._queries(x, layer, context.positions)
        latent, shared = self._latents(x, layer, context.positions)
        cache = cache.write("latent", pool_layer, context, jnp.concatenate([latent, shared], -1))
        absorbed = self.key_up.by_head(nope, layer, transposed=True)
        out = self._attend(jnp.concatenate([absorbed, rope], -1), pool_layer, context, cache)
        values = self.value_up.by_head(out.astype(x.dtype), layer)
        return self.output(values.reshape(*shape, -1), layer), cache

    def _attend(self, query, pool_layer, context: PagedContext, cache: KVCache):
        """Each device has some of the heads and all of the latents. Sparse attention is dense while no row of the step
        is longer than what may be chosen: the paged kernel reads each entry once, for all queries."""

        def call(query, pool, layer, table, lengths, positions, scale, *chosen, implementation):
            options = {"latent": self.dims.kv_lora, "kv_scale": scale, "implementation": implementation}
            options["softmax_scale"] = self.config.softmax_scale
            operands = (query, pool, layer, table, lengths, positions)
            dense = lambda: mla_attention(*operands, **options)  # noqa: E731
            if not chosen:
                return dense()
            sparse = lambda: chosen_mla_attention(*operands, *chosen, **options)  # noqa: E731
            return jax.lax.cond(jnp.max(lengths) <= chosen[0].shape[-1], dense, sparse)

        heads = P(None, None, current().axis("heads", self.dims.heads))
        chosen = () if context.chosen is None or context.chosen.shape[-1] == 0 else (context.chosen,)
        spread = current().split(call, (heads, P(), P(), P(), P(), P(), P(), *(P() for _ in chosen)), heads)
        places = (pool_layer, context.page_table, context.lengths, context.positions)
        return spread(query, cache.entries["latent"], *places, cache.scales["latent"][pool_layer], *chosen)


class GQA(nnx.Module):
    """Grouped-query attention with rotary embedding over all or part of a head, optional q/k RMSNorm."""

    def __init__(self, layers: int, config: ModelConfig, rngs: nnx.Rngs, dtype):
        self.config = config
        gqa = config.attention
        assert isinstance(gqa, GQAConfig)
        self.dims = gqa
        width, kv_width = gqa.heads * gqa.head_dim, gqa.kv_heads * gqa.head_dim
        self.query = Linear(layers, config.hidden, width, ("embed", "heads"), rngs, dtype, gqa.bias)
        self.key = Linear(layers, config.hidden, kv_width, ("embed", "kv_heads"), rngs, dtype, gqa.bias)
        self.value = Linear(layers, config.hidden, kv_width, ("embed", "kv_heads"), rngs, dtype, gqa.bias)
        self.output = Linear(layers, width, config.hidden, ("heads", "embed"), rngs, dtype)
        if gqa.qk_norm:
            self.query_norm = RMSNorm(layers, gqa.head_dim, config.rms_eps, rngs, dtype)
            self.key_norm = RMSNorm(layers, gqa.head_dim, config.rms_eps, rngs, dtype)

    def _project(self, x, layer, positions):
        split = lambda a: a.reshape(*x.shape[:2], -1, self.dims.head_dim)  # noqa: E731
        query, key, value = split(self.query(x, layer)), split(self.key(x, layer)), split(self.value(x, layer))
        if self.dims.qk_norm:
            query, key = self.query_norm(query, layer), self.key_norm(key, layer)
        return rotate(query, positions, self.config.rope), rotate(key, positions, self.config.rope), value

    def plain(self, x: Float[Array, "B T D"], layer, positions: Int32[Array, "B T"], mask: Bool[Array, "B T T"]):
        query, key, value = self._project(x, layer, positions)
        key, value = (jnp.repeat(a, self.dims.heads // self.dims.kv_heads, axis=2) for a in (key, value))
        out = _softmax_attention(query, key, value, mask, self.config.softmax_scale)
        return self.output(out.reshape(*x.shape[:2], -1), layer)

    def paged(self, x: Float[Array, "B T D"], layer, pool_layer, context: PagedContext, cache: KVCache):
        query, key, value = self._project(x, layer, context.positions)
        flat = lambda a: a.reshape(*x.shape[:2], -1)  # noqa: E731
        cache = cache.write("key", pool_layer, context, flat(key))
        cache = cache.write("value", pool_layer, context, flat(value))
        out = self._attend(query, pool_layer, context, cache)
        return self.output(flat(out.astype(x.dtype)), layer), cache

    def _attend(self, query, pool_layer, context: PagedContext, cache: KVCache):
        """Each device has some of the heads, and the pages of their keys and values."""

        def call(query, keys, values, layer, table, lengths, positions, key_scale, value_scale, implementation):
            options = {"key_scale": key_scale, "value_scale": value_scale, "implementation": implementation}
            places = (layer, table, lengths, positions)
            return gqa_attention(query, keys, values, *places, softmax_scale=self.config.softmax_scale, **options)

        axis = current().axis("heads", self.dims.heads, self.dims.kv_heads)
        heads, pool = P(None, None, axis), P(None, None, None, axis)
        spread = current().split(call, (heads, pool, pool, P(), P(), P(), P(), P(), P()), heads)
        places = (pool_layer, context.page_table, context.lengths, context.positions)
        scales = (cache.scales[kind][pool_layer] for kind in ("key", "value"))
        return spread(query, cache.entries["key"], cache.entries["value"], *places, *scales)


def make_attention(layers: int, config: ModelConfig, rngs: nnx.Rngs, dtype) -> MLA | GQA:
    kind = MLA if isinstance(config.attention, MLAConfig) else GQA
    return kind(layers, config, rngs, dtype)
