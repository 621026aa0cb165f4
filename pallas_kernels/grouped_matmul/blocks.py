"""The blocks of rows that a grouped product is cut into, each inside one group."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowBlocks:
    """Block b is rows `first[b]` up to `last[b]` of group `group[b]`; one that is not needed has no rows."""

    group: Int32[Array, " blocks"]
    first: Int32[Array, " blocks"]
    last: Int32[Array, " blocks"]


def even_blocks(rows: int, size: int, groups: int = 1) -> RowBlocks:
    """Blocks of up to `size` of the same `rows` for each group."""
    first = jnp.tile(jnp.arange(-(-rows // size), dtype=jnp.int32) * size, groups)
    group = jnp.repeat(jnp.arange(groups, dtype=jnp.int32), first.shape[0] // groups)
    return RowBlocks(group, first, jnp.minimum(first + size, rows))


def most_blocks(rows: int, groups: int, size: int) -> int:
    """Blocks that the worst distribution needs: every group that can have rows ends with one that isn't full."""
    used = min(rows, groups)
    return used + (rows - used) // size


def row_blocks(counts: Int32[Array, " E"], rows: int, size: int) -> RowBlocks:
    """Blocks of up to `size` rows for a list of `rows` sorted by group. Every distribution fits, none drops a row."""
    groups = counts.shape[0]
    needed = -(-counts // size)
    end = jnp.cumsum(needed)
    block = jnp.arange(most_blocks(rows, groups, size), dtype=jnp.int32)
    group = jnp.minimum((block[:, None] >= end[None, :]).sum(axis=1), groups - 1).astype(jnp.int32)
    row_end = jnp.cumsum(counts)
    first = (row_end - counts)[group] + (block - (end - needed)[group]) * size
    last = jnp.where(block < end[-1], jnp.minimum(first + size, row_end[group]), first)
    return RowBlocks(group, first.astype(jnp.int32), last.astype(jnp.int32))
