"""Kept pages under damage: an old tag matches nothing, a refused row changes nothing, no page is lost."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.cache import INVALID, AllocatorState, allocator, integrity, quarantine, sharing
from jaxinfer.cache.kv import KVCache
from jaxinfer.quantization.formats import KVFormat

P, S, M, PAGE = 12, 4, 4, 4
adopt, keep, drop = jax.jit(sharing.adopt), jax.jit(sharing.keep), jax.jit(sharing.drop)
allocate, release, verify = jax.jit(allocator.allocate), jax.jit(allocator.release), jax.jit(integrity.verify)


@pytest.fixture(scope="module")
def kept():
    """Slot 0 had 10 tokens and is gone; its two whole pages are kept. Slot 1 has 9 tokens. (state, pages, tags)."""
    state, _ = allocate(AllocatorState.create(P, S, M, PAGE), jnp.array([0, 1]), jnp.array([10, 9]))
    state, hold = keep(state, jnp.array([0]), jnp.array([9]))
    state = release(state, jnp.array([0]))
    assert np.asarray(hold.taken).tolist() == [[True, True, False, False]]
    return state, hold.pages, hold.tags


def test_an_evicted_page_has_another_tag_when_it_comes_back(kept):
    state, pages, tags = kept
    state = drop(state, pages[0], tags[0])
    assert int(state.free_count) == P - 3 and integrity.check_invariants(state) == []
    again, grant = allocate(state, jnp.array([2, 3]), jnp.array([16, 16]))
    assert np.asarray(grant.granted).all()
    assert set(np.asarray(pages)[0, :2]) <= set(np.asarray(again.page_table)[2:].flat)
    for each in (state, again):
        after, granted = adopt(each, jnp.array([0]), pages, tags)
        assert not granted[0]
        jax.tree.map(np.testing.assert_array_equal, after, each)
    after = drop(again, pages[0], tags[0])
    jax.tree.map(np.testing.assert_array_equal, after, again)


def test_a_slot_with_adopted_pages_verifies_and_fails_like_any_other(kept):
    state, pages, tags = kept
    state, granted = adopt(state, jnp.array([2, 3]), jnp.repeat(pages, 2, 0), jnp.repeat(tags, 2, 0))
    assert np.asarray(granted).all() and np.asarray(verify(state, jnp.arange(1, 4))).all()
    assert np.asarray(state.lengths).tolist() == [0, 9, 8, 8] and np.asarray(state.reference_counts)[pages[0, 0]] == 3
    bad = replace(state, page_tags=state.page_tags.at[pages[0, 1]].add(1))
    assert np.asarray(verify(bad, jnp.arange(1, 4))).tolist() == [True, False, False]


def test_a_duplicate_is_free_once_it_is_exchanged(kept):
    """Fault 6: nothing points at it, and its old holder reads the page that is kept."""
    state, pages, tags = kept
    own = np.asarray(state.page_table)[1, :2].tolist()
    state, granted = adopt(state, jnp.array([1]), pages, tags)
    assert granted[0] and int(state.lengths[1]) == 9 and bool(verify(state, jnp.array([1]))[0])
    assert np.asarray(state.page_table)[1, :2].tolist() == np.asarray(pages)[0, :2].tolist()
    assert np.asarray(state.reference_counts)[own].tolist() == [0, 0] and integrity.check_invariants(state) == []


def test_the_books_are_written_anew_with_what_the_tree_holds(kept):
    """Whatever became of `kept`: pages of the tree stay as they are, all others without a slot are set aside."""
    state, pages, tags = kept
    first, second = np.asarray(pages)[0, :2].tolist()
    cache = KVCache.create({"latent": 8}, 1, P, PAGE, KVFormat.parse("fp8_e4m3"))
    cache = replace(cache, entries={"latent": cache.entries["latent"] + 1})
    damaged = replace(state, kept=~state.kept)
    assert integrity.check_invariants(damaged) != []
    of_tree = jnp.zeros(P, bool).at[first].set(True)
    after, wiped, count = jax.jit(quarantine.restore)(damaged, cache, jnp.array([INVALID]), of_tree)
    assert integrity.check_invariants(after) == [] and int(count) == 1 and int(after.free_count) == P - 4
    bytes_of = np.asarray(wiped.entries["latent"])
    assert bytes_of[:, first].all() and not bytes_of[:, second].any()
    assert adopt(after, jnp.array([2]), pages.at[0, 1].set(INVALID), tags)[1][0]
    assert not adopt(after, jnp.array([2]), pages, tags)[1][0]
