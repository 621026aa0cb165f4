"""The decoder and its parameters as a plain nested dict of arrays.

`parameter_specs` is the one tree of (shape, dtype, axes) that drives init, restore and shardings; it allocates nothing,
so that a model of a trillion parameters can be described anywhere. `bind` puts a dict of weights, in any number format,
behind the module.
"""

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from jaxinfer.cache.kv import KVCache
from jaxinfer.config import ModelConfig
from jaxinfer.models.attention import MLA, PagedContext, causal_mask, make_attention
from jaxinfer.models.indexer import Indexer, choices
from jaxinfer.models.moe import MLP, MoE
from jaxinfer.models.norm import RMSNorm
from jaxinfer.models.parameter import ParameterSpec, parameter

Params = dict  # nested dict of str to array or QuantizedTensor


class Block(nnx.Module):
    """`layers` decoder layers of one kind from the model's layer `first` on, weights stacked: attention and MLP or
    experts, both pre-norm residual."""

    def __init__(self, first: int, layers: int, config: ModelConfig, sparse: bool, rngs: nnx.Rngs, dtype):
        self.attention_norm = RMSNorm(layers, config.hidden, config.rms_eps, rngs, dtype)
        self.attention = make_attention(layers, config, rngs, dtype)
        self.indexer = Indexer.make(first, layers, config, rngs, dtype)
        self.mlp_norm = RMSNorm(layers, config.hidden, config.rms_eps, rngs, dtype)
        self.mlp: MoE | MLP = (
            MoE(layers, config, rngs, dtype)
            if sparse
            else MLP(layers, config.hidden, config.dense_intermediate, rngs, dtype)
        )

    def plain(self, x, choice, layer, positions, mask, valid, capacity_factor):
        """One layer over whole texts. `choice`: with an indexer, the part of `mask` that attention sees. Returns x and
        choice, and tokens routed to each expert, or None. No capacity factor: none dropped."""
        with jax.named_scope("attention"):
            h = self.attention_norm(x, layer)
            if self.indexer is not None:
                assert isinstance(self.attention, MLA)
                latent = self.attention.query_latent(h, layer)
                choice = self.indexer.plain(h, latent, layer, positions, mask, choice)
            x = x + self.attention.plain(h, layer, positions, mask if choice is None else choice)
        x, load = self._mlp_plain(x, layer, valid, capacity_factor)
        return (x, choice), load

    def _mlp_plain(self, x, layer, valid, capacity_factor):
        with jax.named_scope("mlp"):
            h = self.mlp_norm(x, layer)
            if not isinstance(self.mlp, MoE):
                return x + self.mlp(h, layer), None
            flat = h.reshape(-1, h.shape[-1])
            if capacity_factor is None:
                return x + self.mlp(flat, layer, valid.reshape(-1)).reshape(x.shape), None
            y, load = self.mlp.with_capacity(flat, layer, valid.reshape(-1), capacity_factor)
            return x + y.reshape(x.shape), load

    def paged(self, x, layer, pool_layer, context: PagedContext, cache: KVCache):
        """One layer over pages: x, the cache, and the choice that the next layer may share."""
        with jax.named_scope("attention"):
            h = self.attention_norm(x, layer)
            if self.indexer is not None:
                assert isinstance(self.attention, MLA) and context.chosen is not None
                latent = self.attention.query_latent(h, layer)
                chosen, cache = self.indexer.paged(h, latent, layer, context, cache, context.chosen)
                context = dataclasses.replace(context, chosen=chosen)
            y, cache = self.attention.paged(h, layer, pool_layer, context, cache)
            x = x + y
        with jax.named_scope("mlp"):
            h = self.mlp_norm(x, layer)
            if not isinstance(self.mlp, MoE):
                return x + self.mlp(h, layer), cache, context.chosen
            y = self.mlp(h.reshape(-1, h.shape[-1]), layer, context.positions.reshape(-1) >= 0)
            return x + y.reshape(x.shape), cache, context.chosen


class Decoder(nnx.Module):
    """Embedding, dense blocks, sparse blocks, final norm, head."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, dtype):
        self.config = config
        self.embedding = parameter(
            rngs, dtype, ("vocab", "embed"), (config.vocab, config.hidden), init="embed"
        )
        self.dense = Block(0, config.dense_layers, config, False, rngs, dtype) if config.dense_layers else None
        first, layers = config.dense_layers, config.moe_layers
        self.sparse = Block(first, layers, config, True, rngs, dtype) if layers else None
        self.norm = RMSNorm(1, config.hidden, config.rms_eps, rngs, dtype)
        self.head = None if config.tied else parameter(rngs, dtype, ("embed", "vocab"), (config.hidden, config.vocab))

    def _blocks(self):
        """The stacks in order, each with its number of layers and the first one's index in the cache."""
        if self.dense is not None:
            yield self.dense, self.config.dense_layers, 0
        if self.sparse is not None:
            yield self.sparse, self.config.moe_layers, self.config.dense_layers

    def embed(self, tokens: Int32[Array, "B T"], dtype) -> Float[Array, "B T D"]:
        # Two rows at least: XLA turns the gather of one into a slice, for which every device fetches the whole table.
        places = jnp.maximum(tokens, 0).reshape(-1)
        rows = self.embedding.get_value()[jnp.resize(places, (max(2, places.size),))][: places.size]
        return rows.astype(dtype).reshape(*tokens.shape, -1)

    def logits(self, x: Float[Array, "... D"]) -> Float[Array, "... V"]:
        """Float32 logits of hidden states."""
        x = self.norm(x, jnp.int32(0))
        if self.head is None:
            embedding = self.embedding.get_value().astype(x.dtype)
            return jnp.einsum("...d,vd->...v", x, embedding, preferred_element_type=jnp.float32)
        return jnp.matmul(x, self.head.get_value().astype(x.dtype), preferred_element_type=jnp.float32)

    def plain(self, tokens, positions, segments, dtype, capacity_factor=None):
        """Logits `[B, T, V]` of whole texts, each token seeing its own segment, and expert loads `[moe_layers, E]`."""
        x, mask, valid = self.embed(tokens, dtype), causal_mask(segments), segments > 0
        loads = None
        carry = (x, mask if self.config.indexer else None)
        for block, layers, _ in self._blocks():
            step = functools.partial(
                _plain_layer, block, positions=positions, mask=mask, valid=valid, capacity_factor=capacity_factor
            )
            carry, loads = jax.lax.scan(step, carry, jnp.arange(layers, dtype=jnp.int32))
        return self.logits(carry[0]), loads

    def paged(self, tokens, context: PagedContext, cache: KVCache, dtype):
        """Hidden states `[B, T, D]` of new tokens and the cache with their entries. The pool is the scan's carry and is
        changed in place; layers are read from the stacks by index. The choice of sparse attention goes along, for the
        layers that share it."""
        page_size = next(iter(cache.entries.values())).shape[2]
        carry = (self.embed(tokens, dtype), cache, choices(self.config, context, page_size))
        for block, layers, first in self._blocks():

            def step(carry, layer, block=block, first=first):
                x, cache, chosen = carry
                own = dataclasses.replace(context, chosen=chosen)
                return block.paged(x, layer, layer + first, own, cache), None

            carry, _ = jax.lax.scan(step, carry, jnp.arange(layers, dtype=jnp.int32))
        return carry[:2]


def _plain_layer(block, carry, layer, **context):
    return block.plain(*carry, layer, **context)


@functools.cache
def _abstract(config: ModelConfig, dtype_name: str):
    module = nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0), jnp.dtype(dtype_name)))
    graph, state = nnx.split(module)
    return graph, tuple(nnx.to_flat_state(state))


def parameter_specs(config: ModelConfig, dtype=jnp.bfloat16) -> Params:
    """Nested dict of ParameterSpec. Allocates nothing."""
    _, flat = _abstract(config, jnp.dtype(dtype).name)
    leaves = {}
    for path, variable in flat:
        value, meta = variable.get_value(), variable.get_metadata()
        # The last name is the module's attribute `weight` for layers of their own: left out of the path.
        leaves[path] = ParameterSpec(value.shape, value.dtype, meta["axes"], meta["kind"])
    return _nest(leaves)


def init_params(config: ModelConfig, key: jax.Array, dtype=jnp.float32) -> Params:
    """Fresh random parameters."""
    module = Decoder(config, nnx.Rngs(key), jnp.dtype(dtype))
    return _nest({path: variable.get_value() for path, variable in nnx.to_flat_state(nnx.state(module))})


def bind(config: ModelConfig, params: Params) -> Decoder:
    """The module that reads `params`. Cheap; called while tracing."""
    graph, flat = _abstract(config, "bfloat16")
    return nnx.merge(graph, nnx.from_flat_state([(path, v.replace(_lookup(params, path))) for path, v in flat]))


def forward(
    config: ModelConfig,
    params: Params,
    tokens: Int32[Array, "B T"],
    positions: Int32[Array, "B T"],
    segments: Int32[Array, "B T"],
    capacity_factor: float | None = None,
    dtype=jnp.float32,
) -> tuple[Float[Array, "B T V"], Float[Array, "moe_layers E"] | None]:
    """The teacher-forced forward pass: no cache, no pages. The reference for everything served, and what trains."""
    return bind(config, params).plain(tokens, positions, segments, dtype, capacity_factor)


def _nest(leaves: Mapping[tuple, object]) -> Params:
    tree: Params = {}
    for path, value in leaves.items():
        *parents, name = map(str, path)
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = value
    return tree


def _lookup(params: Params, path: tuple):
    node = params
    for name in path:
        node = node[str(name)]
    return node
