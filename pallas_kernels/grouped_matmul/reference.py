"""Grouped matmul in jnp: a loop over blocks of rows, each inside one group, with as many turns as there are blocks."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32


def block_rows(rows: int, groups: int) -> int:
    """Rows of a block: the even share of a group, as a power of two between 4 and 64."""
    return min(64, max(4, 1 << (max(rows // groups, 1) - 1).bit_length()))


def grouped_matmul(
    x: Float[Array, "A inputs"],
    matrix: Callable[[Int32[Array, ""]], Float[Array, "inputs outputs"]],
    counts: Int32[Array, " E"],
    outputs: int,
) -> Float[Array, "A outputs"]:
    """Row i times the matrix of its group; rows are sorted by group and `counts` says how many each has.

    `matrix(e)` gives group e's matrix, and is asked only for groups that have rows. Rows beyond the last group give
    zeros. Accumulates in float32. Any distribution is exact, empty groups and one group with all rows included.
    """
    rows = x.shape[0]
    size = block_rows(rows, counts.shape[0])
    blocks = -(-counts // size)
    last_block = jnp.cumsum(blocks)
    start = jnp.cumsum(counts) - counts
    padded = jnp.pad(x, ((0, size), (0, 0)))

    def body(index, out):
        group = jnp.searchsorted(last_block, index, side="right").astype(jnp.int32)
        first = start[group] + (index - (last_block[group] - blocks[group])) * size
        part = jax.lax.dynamic_slice_in_dim(padded, first, size)
        product = jnp.matmul(part, matrix(group), preferred_element_type=jnp.float32)
        # A block may reach past its group's end; the next group's block, which comes later, writes those rows again.
        return jax.lax.dynamic_update_slice_in_dim(out, product.astype(x.dtype), first, axis=0)

    out = jax.lax.fori_loop(0, last_block[-1], body, jnp.zeros((rows + size, outputs), x.dtype))
    return jnp.where((jnp.arange(rows) < counts.sum())[:, None], out[:rows], 0)
