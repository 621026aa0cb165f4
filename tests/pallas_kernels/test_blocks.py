"""How work is cut: blocks of grouped rows and pieces of attention cover everything once, whatever the distribution."""

import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.grouped_matmul.blocks import most_blocks, row_blocks
from pallas_kernels.paged_attention.blocks import split


@given(st.lists(st.integers(0, 40), min_size=1, max_size=8), st.integers(0, 9), st.sampled_from([4, 16]))
def test_row_blocks_cover_every_row_once(counts, beyond, size):
    rows = sum(counts) + beyond
    if not rows:
        return
    blocks = row_blocks(jnp.asarray(counts, jnp.int32), rows, size)
    groups = np.repeat(np.arange(len(counts)), counts)
    seen = np.zeros(rows, int)
    for group, first, last in zip(blocks.group, blocks.first, blocks.last, strict=True):
        assert last - first <= size
        seen[int(first) : int(last)] += 1
        assert (groups[int(first) : int(last)] == int(group)).all()
    assert (seen[: sum(counts)] == 1).all() and (seen[sum(counts) :] == 0).all()
    assert len(blocks.group) == most_blocks(rows, len(counts), size)


@given(st.lists(st.integers(0, 300), min_size=1, max_size=8), st.sampled_from([1, 4, 264]))
def test_pieces_cover_every_tile_once_and_evenly(tiles, wanted):
    pieces = split(jnp.asarray(tiles, jnp.int32), wanted)
    size = max(-(-sum(tiles) // wanted), 1)
    found = [[] for _ in tiles]
    for piece, (block, first, last) in enumerate(zip(pieces.block, pieces.first, pieces.last, strict=True)):
        if int(block) == len(tiles):
            assert first == last
            continue
        found[int(block)] += list(range(int(first), int(last)))
        assert last - first <= size
        assert pieces.start[block] <= piece < pieces.start[block] + pieces.count[block]
    assert found == [list(range(count)) for count in tiles]
