"""Products with 4-bit weights in jnp, in float32: the matrix is expanded, then multiplied."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, UInt16

from pallas_kernels.grouped_matmul.reference import grouped_matmul
from pallas_kernels.w4a16_matmul.layout import dequantize


def w4a16_matmul(
    x: Float[Array, "M K"],
    words: UInt16[Array, "L K/32 N*8"],
    scale: Float[Array, "L K/group N"],
    layer: Int32[Array, ""],
    group: int,
) -> Float[Array, "M N"]:
    matrix = dequantize(words[layer], scale[layer], group)
    return jnp.matmul(x.astype(jnp.float32), matrix).astype(x.dtype)


def w4a16_grouped_matmul(
    x: Float[Array, "A K"],
    words: UInt16[Array, "L E K/32 N*8"],
    scale: Float[Array, "L E K/group N"],
    layer: Int32[Array, ""],
    counts: Int32[Array, " E"],
    group: int,
) -> Float[Array, "A N"]:
    matrices = lambda experts: dequantize(words[layer, experts], scale[layer, experts], group)  # noqa: E731
    return grouped_matmul(x.astype(jnp.float32), matrices, counts, scale.shape[-1]).astype(x.dtype)
