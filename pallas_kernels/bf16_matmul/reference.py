"""Products with 16-bit weights in jnp, accumulated in float32."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.fp8_matmul.reference import dequantize
from pallas_kernels.grouped_matmul.reference import grouped_matmul


def bf16_matmul(
    x: Float[Array, "M K"], weight: Float[Array, "L K N"], layer: Int32[Array, ""]
) -> Float[Array, "M N"]:
    """In float32."""
    return jnp.matmul(x.astype(jnp.float32), weight[layer].astype(jnp.float32), precision="highest")


def bf16_grouped_matmul(
    x: Float[Array, "A K"], weight: Float[Array, "L E K N"], layer: Int32[Array, ""], counts: Int32[Array, " E"]
) -> Float[Array, "A N"]:
    return grouped_matmul(x, lambda expert: weight[layer, expert], counts, weight.shape[-1])


def bf16_heads_matmul(
    x: Float[Array, "M H K"], weight: Float[Array, "L C H*D"], layer: Int32[Array, ""], transposed: bool
) -> Float[Array, "M H N"]:
    """Every head's inputs times its columns of the matrix, or their transpose."""
    heads = weight[layer].reshape(weight.shape[1], x.shape[1], -1)
    product = "mhd,chd->mhc" if transposed else "mhc,chd->mhd"
    return jnp.einsum(product, x, heads, preferred_element_type=jnp.float32).astype(x.dtype)


def fp8_heads_matmul(
    x: Float[Array, "M H K"],
    weight: Float[Array, "L H*D C"],
    scale: Float[Array, "L H*D/128 C/128"],
    layer: Int32[Array, ""],
    transposed: bool,
) -> Float[Array, "M H N"]:
    heads = dequantize(weight[layer], scale[layer]).reshape(x.shape[1], -1, weight.shape[2])
    product = "mhd,hdc->mhc" if transposed else "mhc,hdc->mhd"
    return jnp.einsum(product, x.astype(jnp.float32), heads, precision="highest").astype(x.dtype)
