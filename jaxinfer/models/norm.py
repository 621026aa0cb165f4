"""RMSNorm and LayerNorm, computed in float32."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from jaxinfer.models.parameter import parameter


class RMSNorm(nnx.Module):
    """x / rms(x) * weight, with one weight vector a layer: `[layers, width]`."""

    def __init__(self, layers: int, width: int, eps: float, rngs: nnx.Rngs, dtype):
        self.eps = eps
        self.weight = parameter(rngs, dtype, ("layers", "norm"), (layers, width), init="ones")

    def __call__(self, x: Float[Array, "... width"], layer: Int32[Array, ""]) -> Float[Array, "... width"]:
        wide = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (wide * scale * self.weight.get_value()[layer].astype(jnp.float32)).astype(x.dtype)


class LayerNorm(nnx.Module):
    """(x - mean) / deviation * weight + bias, with one weight and one bias vector a layer: `[layers, width]`."""

    def __init__(self, layers: int, width: int, eps: float, rngs: nnx.Rngs, dtype):
        self.eps = eps
        self.weight = parameter(rngs, dtype, ("layers", "norm"), (layers, width), init="ones")
        self.bias = parameter(rngs, dtype, ("layers", "norm"), (layers, width), init="zeros")

    def __call__(self, x: Float[Array, "... width"], layer: Int32[Array, ""]) -> Float[Array, "... width"]:
        wide = x.astype(jnp.float32)
        wide -= jnp.mean(wide, axis=-1, keepdims=True)
        wide *= jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        weight, bias = (a.get_value()[layer].astype(jnp.float32) for a in (self.weight, self.bias))
        return (wide * weight + bias).astype(x.dtype)
