"""The indexer of sparse attention (DSA, DeepSeek-V3.2 and GLM-5): which cached tokens each new one attends to.

A token's score is the weighted sum over small heads of relu(query . key): one key a token, kept in pages as the kind
`index`. Published kernels turn queries and keys by a Hadamard matrix before they round them to e4m3 with a scale a
token. The turn leaves every product as it is, so it is left out; and keys are kept as all else in the pool is, in its
format with a static scale a layer: they come out of a LayerNorm, so that no token's are far from another's, and kinds
of entry stay alike for digests, prefixes and hand-over.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int32

from jaxinfer.cache import INVALID, pages
from jaxinfer.cache.kv import KVCache
from jaxinfer.config import MLAConfig, ModelConfig
from jaxinfer.models.linear import Linear
from jaxinfer.models.norm import LayerNorm
from jaxinfer.models.parameter import parameter
from jaxinfer.models.rope import rotate

BLOCK_TOKENS = 512  # that are scored at a time, by every head, in float32
NORM_EPS = 1e-6  # published, whatever the model's other norms have


class Indexer(nnx.Module):
    """The indexers of the layers from `first` up to `first + layers` that choose for themselves, weights stacked; the
    others pass on the choice that comes in. A choice is a mask over whole texts, positions over pages."""

    def __init__(self, first: int, layers: int, config: ModelConfig, rngs: nnx.Rngs, dtype):
        assert isinstance(config.attention, MLAConfig) and config.attention.indexer and config.attention.q_lora
        self.mla, self.dims = config.attention, config.attention.indexer
        owners = self.dims.owners(config.layers)
        here = [i for i in owners if first <= i < first + layers]
        self.all_choose = len(here) == layers
        # Of each layer: its place in the weights, or the last one's, and in the pool, INVALID for a layer that shares.
        self.place = tuple(max(sum(i <= first + n for i in here) - 1, 0) for n in range(layers))
        self.pool_layer = tuple(owners.index(i) if i in owners else INVALID for i in range(first, first + layers))
        self.rope = dataclasses.replace(config.rope, interleaved=self.dims.interleaved)
        heads, dim, count = self.dims.heads, self.dims.head_dim, len(here)
        self.query_up = Linear(count, config.attention.q_lora, heads * dim, ("lora", "index"), rngs, dtype)
        self.key_down = Linear(count, config.hidden, dim, ("embed", "index"), rngs, dtype)
        self.key_norm = LayerNorm(count, dim, NORM_EPS, rngs, dtype)
        self.head_weights = parameter(rngs, dtype, ("layers", "embed", "index"), (count, config.hidden, heads))

    @staticmethod
    def make(first: int, layers: int, config: ModelConfig, rngs: nnx.Rngs, dtype) -> "Indexer | None":
        """None where no layer of these chooses for itself."""
        chosen = config.indexer.owners(config.layers) if config.indexer else ()
        here = any(first <= i < first + layers for i in chosen)
        return Indexer(first, layers, config, rngs, dtype) if here else None

    def _turn(self, x: Float[Array, "B T H d"], positions: Int32[Array, "B T"]) -> Float[Array, "B T H d"]:
        rope = self.mla.rope_dim
        return jnp.concatenate([rotate(x[..., :rope], positions, self.rope), x[..., rope:]], -1)

    def _queries(self, x, latent, place, positions):
        """Queries [B T H d] and head weights [B T H] in float32, with both scales in the weights."""
        dims = self.dims
        query = self.query_up(latent, place).reshape(*x.shape[:2], dims.heads, dims.head_dim)
        weights = jnp.matmul(
            x, self.head_weights.get_value()[place].astype(x.dtype), preferred_element_type=jnp.float32
        )
        return self._turn(query, positions).astype(jnp.float32), weights / math.sqrt(dims.heads * dims.head_dim)

    def _keys(self, x, place, positions) -> Float[Array, "B T d"]:
        return self._turn(self.key_norm(self.key_down(x, place), place)[..., None, :], positions)[..., 0, :]

    def plain(
        self,
        x: Float[Array, "B T D"],
        latent: Float[Array, "B T q"],
        layer: Int32[Array, ""],
        positions: Int32[Array, "B T"],
        mask: Bool[Array, "B T T"],
        choice: Bool[Array, "B T T"],
    ) -> Bool[Array, "B T T"]:
        """Of the tokens that `mask` lets each token see, the `top_k` best."""
        count = self.dims.top_k
        if mask.shape[-1] <= count:
            return mask
        place = jnp.asarray(self.place)[layer]

        def choose():
            query, weights = self._queries(x, latent, place, positions)
            scores = jnp.where(mask, _scores(query, weights, self._keys(x, place, positions)), -jnp.inf)
            _, best = jax.lax.top_k(jax.lax.stop_gradient(scores), count)
            rows, tokens = (jnp.arange(n) for n in mask.shape[:2])
            chosen = jnp.zeros_like(mask).at[rows[:, None, None], tokens[None, :, None], best].set(True)
            return chosen & mask

        return self._where_own(layer, choose, choice)

    def paged(
        self,
        x: Float[Array, "B T D"],
        latent: Float[Array, "B T q"],
        layer: Int32[Array, ""],
        context: Any,  # PagedContext, which lives with attention
        cache: KVCache,
        choice: Int32[Array, "B T K"],
    ) -> tuple[Int32[Array, "B T K"], KVCache]:
        """Positions of the K best tokens that each token sees, best first, INVALID behind the last one; and the cache
        with the new keys. Where contexts cannot exceed `top_k`, K is 0 and nothing is scored."""
        place, pool_layer = (jnp.asarray(numbers)[layer] for numbers in (self.place, self.pool_layer))
        # A layer that shares has no place in the pool: what it writes is dropped.
        cache = cache.write("index", pool_layer, context, self._keys(x, place, context.positions))
        if choice.shape[-1] == 0:
            return choice, cache

        def choose():
            query, weights = self._queries(x, latent, place, context.positions)
            scores = self._paged_scores(query, weights, pool_layer, context, cache)
            best, found = jax.lax.top_k(scores, choice.shape[-1])
            return jnp.where(best > -jnp.inf, found.astype(jnp.int32), INVALID)

        return self._where_own(layer, choose, choice), cache

    def _where_own(self, layer, choose, choice):
        if self.all_choose:
            return choose()
        return jax.lax.cond(jnp.asarray(np.array(self.pool_layer) >= 0)[layer], choose, lambda: choice)

    def _paged_scores(self, query, weights, pool_layer, context, cache: KVCache) -> Float[Array, "B T S"]:
        """Scores of every position of the page tables, -inf where a token sees nothing. Blocks of pages, as many as the
        longest row needs; what lies beyond a row's length or in no page is zeros before any product."""
        pool, table, lengths = cache.entries["index"], context.page_table, context.lengths
        size = pool.shape[2]
        step = min(max(1, BLOCK_TOKENS // size), table.shape[1])
        table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % step)), constant_values=INVALID)
        block = step * size

        def body(index, scores):
            columns = jax.lax.dynamic_slice_in_dim(table, index * step, step, axis=1)
            stored = pages.gather(pool, pool_layer, columns, lengths - index * block)
            keys = cache.format.decode(stored, cache.scales["index"][pool_layer])
            position = index * block + jnp.arange(block)
            there = jnp.repeat((columns >= 0) & (columns < pool.shape[1]), size, axis=1) & (position < lengths[:, None])
            seen = there[:, None] & (position <= context.positions[..., None])
            found = jnp.where(seen, _scores(query, weights, keys), -jnp.inf)
            return jax.lax.dynamic_update_slice_in_dim(scores, found, index * block, axis=2)

        start = jnp.full((*query.shape[:2], table.shape[1] * size), -jnp.inf)
        return jax.lax.fori_loop(0, -(-jnp.max(lengths) // block), body, start)


def choices(config: ModelConfig, context: Any, page_size: int) -> Int32[Array, "B T K"] | None:
    """Where the choices of a step's layers go; K = 0 where attention stays dense, None without an indexer."""
    if config.indexer is None:
        return None
    capacity, top_k = context.page_table.shape[1] * page_size, config.indexer.top_k
    return jnp.full((*context.positions.shape, top_k if capacity > top_k else 0), INVALID, jnp.int32)


def _scores(query: Float[Array, "B T H d"], weights: Float[Array, "B T H"], keys: Float[Array, "B S d"]):
    """Scores [B T S]. Zeros of both signs are one: the order of equals is that of their positions."""
    products = jax.nn.relu(jnp.einsum("bthd,bsd->bths", query, keys.astype(jnp.float32)))
    scores = jnp.einsum("bth,bths->bts", weights, products)
    return jnp.where(scores == 0, 0.0, scores)
