"""What becomes of pages after a check failed: none lost, none trusted, others untouched."""

import dataclasses
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.cache import INVALID, AllocatorState, allocator, integrity, quarantine
from jaxinfer.cache.kv import KVCache
from jaxinfer.quantization.formats import KVFormat

P, S, M, PAGE = 16, 4, 4, 4
VICTIM = 1
restore = jax.jit(quarantine.restore)
verify = jax.jit(integrity.verify)


@pytest.fixture(scope="module")
def cache() -> KVCache:
    """Every byte of a page is its number plus one."""
    empty = KVCache.create({"latent": 8}, 2, P, PAGE, KVFormat.parse("fp8_e4m3"))
    marks = jnp.broadcast_to(jnp.arange(1, P + 1, dtype=jnp.uint8)[None, :, None, None], (2, P, PAGE, 8))
    return dataclasses.replace(empty, entries={"latent": marks})


@pytest.fixture(scope="module")
def sound() -> AllocatorState:
    """Slots of 6, 9, 13 and 0 tokens; a page is free that was used before."""
    allocate, release = jax.jit(allocator.allocate), jax.jit(allocator.release)
    state, _ = allocate(AllocatorState.create(P, S, M, PAGE), jnp.arange(S), jnp.array([6, 9, 13, 3]))
    return release(state, jnp.array([3]))


DAMAGE = {
    "page tag": lambda s, p: replace(s, page_tags=s.page_tags.at[p].add(1)),
    "expected tag": lambda s, p: replace(s, expected_tags=s.expected_tags.at[VICTIM, 0].add(1)),
    "another's page": lambda s, p: replace(s, page_table=s.page_table.at[VICTIM, 0].set(s.page_table[0, 0])),
    "no page": lambda s, p: replace(s, page_table=s.page_table.at[VICTIM, 0].set(-7)),
    "no references": lambda s, p: replace(s, reference_counts=s.reference_counts.at[p].set(0)),
    "length": lambda s, p: replace(s, lengths=s.lengths.at[VICTIM].set(-3)),
    "freed": lambda s, p: replace(
        s,
        reference_counts=s.reference_counts.at[p].set(0),
        free_list=s.free_list.at[s.free_count].set(p),
        free_count=s.free_count + 1,
    ),
    "nothing": lambda s, p: s,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_no_page_is_lost_and_others_keep_theirs(sound, cache, damage):
    page = int(sound.page_table[VICTIM, 0])
    damaged = DAMAGE[damage](sound, page)
    assert bool(verify(damaged, jnp.array([VICTIM]))[0]) == (damage == "nothing")
    state, after, count = restore(damaged, cache, jnp.array([VICTIM]))
    assert integrity.check_invariants(state) == []
    assert int(state.free_count) == P - 2 - 4 and int(state.lengths[VICTIM]) == 0
    assert int(count) == (2 if damage == "freed" else 3)
    assert np.asarray(verify(state, jnp.array([0, 2]))).all()
    for slot in (0, 2):
        held = np.asarray(sound.page_table)[slot]
        np.testing.assert_array_equal(np.asarray(state.page_table)[slot], held)
        held = held[held >= 0]
        np.testing.assert_array_equal(after.entries["latent"][:, held], cache.entries["latent"][:, held])


def test_quarantined_pages_are_wiped_retagged_and_used_last(sound, cache):
    pages = [int(p) for p in sound.page_table[VICTIM] if p >= 0]
    state, after, count = restore(sound, cache, jnp.array([VICTIM, VICTIM, INVALID]))
    assert int(count) == 3 and sorted(np.asarray(state.free_list)[:3].tolist()) == sorted(pages)
    assert not np.asarray(after.entries["latent"])[:, pages].any()
    untouched = [p for p in range(P) if p not in pages]
    np.testing.assert_array_equal(after.entries["latent"][:, untouched], cache.entries["latent"][:, untouched])
    assert not set(np.asarray(state.page_tags)[pages].tolist()) & set(np.asarray(sound.page_tags).tolist())
    assert int(state.next_tag) == int(sound.next_tag) + 3


def test_an_old_entry_never_verifies_again(sound, cache):
    """The victim's former row, put back by whatever is still confused."""
    state, _, _ = restore(sound, cache, jnp.array([VICTIM]))
    stale = replace(state, page_table=sound.page_table, expected_tags=sound.expected_tags, lengths=sound.lengths)
    assert np.asarray(verify(stale, jnp.arange(3))).tolist() == [True, False, True]
    allocate = jax.jit(allocator.allocate)
    state, grant = allocate(state, jnp.array([1, 3]), jnp.array([16, 16]))
    assert np.asarray(grant.granted).all()
    stale = replace(state, page_table=sound.page_table, expected_tags=sound.expected_tags, lengths=sound.lengths)
    assert not verify(stale, jnp.array([VICTIM]))[0]


def test_a_shared_page_stays_with_the_other_holder(sound, cache):
    state, granted = jax.jit(allocator.fork)(sound, jnp.array([VICTIM]), jnp.array([3]))
    assert np.asarray(granted).all()
    state, after, count = restore(state, cache, jnp.array([VICTIM]))
    assert int(count) == 0 and integrity.check_invariants(state) == []
    assert verify(state, jnp.array([3]))[0]
    np.testing.assert_array_equal(after.entries["latent"], cache.entries["latent"])


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("free_count", lambda a: a + 5),
        ("free_count", lambda a: a - 3),
        ("free_count", lambda a: a | jnp.int32(-(2**31))),
        ("free_list", lambda a: a.at[0].set(-1)),
        ("free_list", lambda a: a.at[1].set(a[0])),
        ("free_list", lambda a: a.at[2].set(2**30)),
        ("reference_counts", lambda a: a + 1),
        ("reference_counts", lambda a: a.at[jnp.argmax(a)].set(-5)),
    ],
)
def test_a_damaged_free_list_is_written_anew(sound, cache, field, change):
    damaged = replace(sound, **{field: change(getattr(sound, field))})
    assert integrity.check_invariants(damaged) != []
    state, after, _ = restore(damaged, cache, jnp.array([INVALID]))
    assert integrity.check_invariants(state) == []
    assert np.asarray(verify(state, jnp.arange(3))).all()
    for slot in range(3):
        held = np.asarray(state.page_table)[slot]
        held = held[held >= 0]
        np.testing.assert_array_equal(after.entries["latent"][:, held], cache.entries["latent"][:, held])


@pytest.mark.parametrize("stale", [INVALID, P, -5, 0])
def test_a_page_that_is_not_free_is_never_handed_out(sound, stale):
    """Faults 21 and 22: the top of the free list names no page, or one that has an owner, or one twice."""
    owned = int(sound.page_table[0, 0])
    top = int(sound.free_count) - 1
    wrong = owned if stale == 0 else stale
    damaged = replace(sound, free_list=sound.free_list.at[top].set(wrong))
    twice = replace(sound, free_list=sound.free_list.at[top - 1].set(sound.free_list[top]))
    allocate = jax.jit(allocator.allocate)
    for state, grants in ((damaged, [False, False]), (twice, [True, False])):
        after, grant = allocate(state, jnp.array([3, INVALID]), jnp.array([4, 4]))
        assert np.asarray(grant.granted).tolist() == [grants[0], False]
        if not grants[0]:
            jax.tree.map(np.testing.assert_array_equal, after, state)
    after, grant = allocate(twice, jnp.array([3]), jnp.array([8]))
    assert not np.asarray(grant.granted).any()


def test_more_is_said_to_be_free_than_is(sound):
    """Fault 21: the count is too high, so that the top of the list is what an earlier owner left there."""
    damaged = replace(sound, free_count=sound.free_count + 3)
    after, grant = jax.jit(allocator.allocate)(damaged, jnp.array([3]), jnp.array([4]))
    assert not np.asarray(grant.granted).any()
    assert np.asarray(verify(after, jnp.arange(3))).all()
