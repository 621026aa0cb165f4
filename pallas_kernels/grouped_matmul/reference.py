"""Grouped matmul in jnp: a loop over blocks of rows, each inside one group, a few blocks a turn and as many turns as
the blocks need."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.grouped_matmul.blocks import row_blocks

BLOCKS_A_TURN = 4  # a turn of one small product costs the CPU more in overhead than in arithmetic


def block_rows(rows: int, groups: int) -> int:
    """Rows of a block: the even share of a group, as a power of two between 4 and 64."""
    return min(64, max(4, 1 << (max(rows // groups, 1) - 1).bit_length()))


def grouped_matmul(
    x: Float[Array, "A inputs"],
    matrices: Callable[[Int32[Array, " n"]], Float[Array, "n inputs outputs"]],
    counts: Int32[Array, " E"],
    outputs: int,
) -> Float[Array, "A outputs"]:
    """Row i times the matrix of its group; rows are sorted by group and `counts` says how many each has.

    `matrices(groups)` gives the matrices of a few groups, which repeat where one has many rows; nothing is asked for
    when no group has rows. Rows beyond the last group give zeros. Accumulates in float32. Any distribution is exact,
    empty groups and one group with all rows included.
    """
    rows = x.shape[0]
    size = block_rows(rows, counts.shape[0])
    blocks = row_blocks(counts, rows, size)
    turn = min(BLOCKS_A_TURN, blocks.group.shape[0])
    pad = -blocks.group.shape[0] % turn
    groups, first = jnp.pad(blocks.group, (0, pad)), jnp.pad(blocks.first, (0, pad))
    # A block may reach past its group's end: what it makes of those rows is not read.
    parts = x.at[first[:, None] + jnp.arange(size)].get(mode="clip")

    def body(index, out):
        some = lambda a: jax.lax.dynamic_slice_in_dim(a, index * turn, turn)  # noqa: E731
        product = jnp.matmul(some(parts), matrices(some(groups)), preferred_element_type=jnp.float32)
        return jax.lax.dynamic_update_slice_in_dim(out, product.astype(x.dtype), index * turn, axis=0)

    needed = jnp.sum(blocks.last > blocks.first)
    out = jax.lax.fori_loop(0, -(-needed // turn), body, jnp.zeros((*parts.shape[:2], outputs), x.dtype))
    row = jnp.arange(rows)
    block = (blocks.last <= row[:, None]).sum(axis=1)
    mine = out.at[block, row - first.at[block].get(mode="clip")].get(mode="clip")
    return jnp.where((row < counts.sum())[:, None], mine, 0)
