"""How work is cut: blocks of grouped rows and pieces of attention cover everything once, whatever the distribution."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.grouped_matmul.blocks import most_blocks, row_blocks
from pallas_kernels.paged_attention.blocks import split

ROWS, GROUPS = 200, 5
cut_rows = jax.jit(row_blocks, static_argnums=(1, 2))
cut_tiles = jax.jit(split, static_argnums=1)


@given(st.lists(st.integers(0, ROWS // GROUPS), min_size=GROUPS, max_size=GROUPS), st.sampled_from([4, 16]))
def test_row_blocks_cover_every_row_once(counts, size):
    blocks = jax.tree.map(np.asarray, cut_rows(jnp.asarray(counts, jnp.int32), ROWS, size))
    groups, used = np.repeat(np.arange(GROUPS), counts), sum(counts)
    seen = np.zeros(ROWS, int)
    for group, first, last in zip(blocks.group, blocks.first, blocks.last, strict=True):
        assert last - first <= size
        seen[first:last] += 1
        assert (groups[first:last] == group).all()
    assert (seen[:used] == 1).all() and (seen[used:] == 0).all()
    assert len(blocks.group) == most_blocks(ROWS, GROUPS, size)


@given(st.lists(st.integers(0, 300), min_size=GROUPS, max_size=GROUPS), st.sampled_from([1, 4, 264]))
def test_pieces_cover_every_tile_once_and_evenly(tiles, wanted):
    pieces = jax.tree.map(np.asarray, cut_tiles(jnp.asarray(tiles, jnp.int32), wanted))
    size = max(-(-sum(tiles) // wanted), 1)
    found = [[] for _ in tiles]
    for piece, (block, first, last) in enumerate(zip(pieces.block, pieces.first, pieces.last, strict=True)):
        if block == GROUPS:
            assert first == last
            continue
        found[block] += list(range(first, last))
        assert last - first <= size
        assert pieces.start[block] <= piece < pieces.start[block] + pieces.count[block]
    assert found == [list(range(count)) for count in tiles]
