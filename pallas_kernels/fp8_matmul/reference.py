"""Block-scaled FP8 products in jnp: the same rounding of the activations as the kernel's, then float32."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.grouped_matmul.reference import grouped_matmul

BLOCK = 128
E4M3_MAX = 448.0


def quantize_rows(x: Float[Array, "M K"]) -> tuple[Float[Array, "M K"], Float[Array, "M K/128"]]:
    """`x` in e4m3 with a float32 scale over each 128 inputs of a row; the largest of them becomes 448."""
    rows, inputs = x.shape
    parts = x.astype(jnp.float32).reshape(rows, inputs // BLOCK, BLOCK)
    scale = jnp.abs(parts).max(axis=-1) / E4M3_MAX
    steps = parts / jnp.where(scale == 0, 1, scale)[..., None]
    # A cast doesn't saturate: what rounds above 448 would become NaN.
    return jnp.clip(steps, -E4M3_MAX, E4M3_MAX).astype(jnp.float8_e4m3fn).reshape(rows, inputs), scale


def dequantize(weight: Float[Array, "... N K"], scale: Float[Array, "... N/128 K/128"]) -> Float[Array, "... N K"]:
    rows, columns = weight.shape[-2:]
    spread = jnp.repeat(jnp.repeat(scale, BLOCK, axis=-2)[..., :rows, :], BLOCK, axis=-1)[..., :columns]
    return weight.astype(jnp.float32) * spread


def rounded(x: Float[Array, "M K"]) -> Float[Array, "M K"]:
    """`x` after `quantize_rows`, in float32."""
    values, scale = quantize_rows(x)
    return values.astype(jnp.float32) * jnp.repeat(scale, BLOCK, axis=1)


def fp8_matmul(
    x: Float[Array, "M K"],
    weight: Float[Array, "L N K"],
    scale: Float[Array, "L N/128 K/128"],
    layer: Int32[Array, ""],
) -> Float[Array, "M N"]:
    return jnp.matmul(rounded(x), dequantize(weight[layer], scale[layer]).T).astype(x.dtype)


def fp8_grouped_matmul(
    x: Float[Array, "A K"],
    weight: Float[Array, "L E N K"],
    scale: Float[Array, "L E N/128 K/128"],
    layer: Int32[Array, ""],
    counts: Int32[Array, " E"],
) -> Float[Array, "A N"]:
    matrices = lambda experts: dequantize(weight[layer, experts], scale[layer, experts]).mT  # noqa: E731
    return grouped_matmul(rounded(x), matrices, counts, weight.shape[-2]).astype(x.dtype)
