"""Feed-forward layers: the dense SwiGLU MLP and the mixture of experts."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int32

from jaxinfer.config import ModelConfig
from jaxinfer.models.linear import Linear
from jaxinfer.models.parameter import parameter
from jaxinfer.models.router import Router
from jaxinfer.quantization.tensor import Weight, dequantize, grouped_matmul, take


class MLP(nnx.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, layers: int, hidden: int, intermediate: int, rngs: nnx.Rngs, dtype):
        self.gate = Linear(layers, hidden, intermediate, ("embed", "mlp"), rngs, dtype)
        self.up = Linear(layers, hidden, intermediate, ("embed", "mlp"), rngs, dtype)
        self.down = Linear(layers, intermediate, hidden, ("mlp", "embed"), rngs, dtype)

    def __call__(self, x: Float[Array, "... D"], layer: Int32[Array, ""]) -> Float[Array, "... D"]:
        return self.down(jax.nn.silu(self.gate(x, layer)) * self.up(x, layer), layer)


class MoE(nnx.Module):
    """Routed experts plus shared experts, `[layers, experts, inputs, outputs]`."""

    def __init__(self, layers: int, config: ModelConfig, rngs: nnx.Rngs, dtype):
        moe = config.moe
        assert moe is not None
        self.router = Router(layers, config.hidden, moe, rngs, dtype)
        width = moe.intermediate
        wide = ("layers", "experts", "embed", "expert_mlp")
        narrow = ("layers", "experts", "expert_mlp", "embed")
        up_shape, down_shape = (layers, moe.experts, config.hidden, width), (layers, moe.experts, width, config.hidden)
        self.gate = parameter(rngs, dtype, wide, up_shape, kind="expert")
        self.up = parameter(rngs, dtype, wide, up_shape, kind="expert")
        self.down = parameter(rngs, dtype, narrow, down_shape, kind="expert")
        self.shared = (
            MLP(layers, config.hidden, width * moe.shared_experts, rngs, dtype) if moe.shared_experts else None
        )
        self.experts = moe.experts

    def __call__(
        self, x: Float[Array, "N D"], layer: Int32[Array, ""], valid: Bool[Array, " N"]
    ) -> Float[Array, "N D"]:
        """Serving: every token reaches its experts, none is dropped; rows that are not `valid` are skipped."""
        chosen, weights = self.router(x, layer)
        with jax.named_scope("experts"):
            routed = self._sorted_experts(x, layer, jnp.where(valid[:, None], chosen, self.experts), weights)
        return routed + self._shared(x, layer)

    def with_capacity(
        self, x: Float[Array, "N D"], layer: Int32[Array, ""], valid: Bool[Array, " N"], capacity_factor: float
    ) -> tuple[Float[Array, "N D"], Float[Array, " E"]]:
        """Differentiable: each expert takes at most `capacity_factor` times its even share, the rest is dropped.
        Also the number of tokens routed to each expert, for the balancing rule."""
        chosen, weights = self.router(x, layer)
        chosen = jnp.where(valid[:, None], chosen, self.experts)
        load = jnp.zeros(self.experts).at[chosen.reshape(-1)].add(1.0, mode="drop")
        capacity = math.ceil(capacity_factor * chosen.size / self.experts)
        routed = self._capacity_experts(x, layer, chosen, weights, capacity)
        return routed + self._shared(x, layer), load

    def _shared(self, x, layer):
        return self.shared(x, layer) if self.shared is not None else jnp.zeros_like(x)

    def _sorted_experts(self, x, layer, chosen, weights):
        order, counts = sort_by_expert(chosen, self.experts)
        rows = x[order // chosen.shape[1]]
        wide, narrow = ("embed", "expert_mlp"), ("expert_mlp", "embed")
        gate = grouped_matmul(rows, self.gate.get_value(), layer, counts, wide)
        up = grouped_matmul(rows, self.up.get_value(), layer, counts, wide)
        down = grouped_matmul(jax.nn.silu(gate) * up, self.down.get_value(), layer, counts, narrow)
        # Back in token order the K results of a token stand together: a sum, no scatter.
        by_token = down[jnp.argsort(order)].reshape(*chosen.shape, -1)
        return jnp.einsum("nkd,nk->nd", by_token.astype(jnp.float32), weights).astype(x.dtype)

    def _capacity_experts(self, x, layer, chosen, weights, capacity: int):
        order, counts = sort_by_expert(chosen, self.experts)
        start = jnp.cumsum(counts) - counts
        slots = start[:, None] + jnp.arange(capacity)
        taken = jnp.arange(capacity) < counts[:, None]
        assignment = order[jnp.minimum(slots, order.size - 1)]
        rows = jnp.where(taken[..., None], x[assignment // chosen.shape[1]], 0)
        gate, up = (_per_expert(rows, w.get_value(), layer) for w in (self.gate, self.up))
        down = _per_expert(jax.nn.silu(gate) * up, self.down.get_value(), layer)
        scaled = down * jnp.where(taken, weights.reshape(-1)[assignment], 0)[..., None].astype(down.dtype)
        return jnp.zeros_like(x).at[assignment // chosen.shape[1]].add(scaled)


def sort_by_expert(chosen: Int32[Array, "N K"], experts: int) -> tuple[Int32[Array, " A"], Int32[Array, " E"]]:
    """Assignments (token * K + k) in order of their expert, and how many each expert has. Assignments to `experts`
    (no expert) come last and are not counted."""
    flat = chosen.reshape(-1)
    counts = jnp.zeros(experts, jnp.int32).at[flat].add(1, mode="drop")
    return jnp.argsort(flat, stable=True).astype(jnp.int32), counts


def _per_expert(rows: Float[Array, "E C inputs"], weight: Weight, layer) -> Float[Array, "E C outputs"]:
    return jnp.einsum("eci,eio->eco", rows, dequantize(take(weight, layer), rows.dtype))
