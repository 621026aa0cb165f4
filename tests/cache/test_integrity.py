"""What `verify`, `report` and `check_invariants` see: damage of each kind, in the slot that has it alone."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.cache import allocator, integrity
from jaxinfer.cache.allocator import INVALID, AllocatorState
from jaxinfer.cache.integrity import Mismatch

P, S, M, PAGE = 16, 4, 4, 4
VICTIM = 1
verify = jax.jit(integrity.verify)


@pytest.fixture(scope="module")
def sound() -> AllocatorState:
    """Slots of 6, 9, 16 and 0 tokens: 2, 3, 4 and 0 pages."""
    state, grant = jax.jit(allocator.allocate)(
        AllocatorState.create(P, S, M, PAGE), jnp.arange(S), jnp.array([6, 9, 16, 0])
    )
    assert np.asarray(grant.granted).all()
    return state


def damage(state: AllocatorState, field: str, index: object, value: int) -> AllocatorState:
    return replace(state, **{field: getattr(state, field).at[index].set(value)})


def all_slots(state: AllocatorState) -> list[bool]:
    return np.asarray(verify(state, jnp.arange(S))).tolist()


def test_a_sound_state(sound):
    assert all_slots(sound) == [True] * S
    assert integrity.check_invariants(sound) == []
    assert [integrity.report(sound, slot) for slot in range(S)] == [[]] * S


@pytest.mark.parametrize("bit", [0, 7, 31])
@pytest.mark.parametrize("column", [0, 1, 2])
def test_one_wrong_bit_in_any_tag_is_seen(sound, column, bit):
    """On either side: the tag of the page, or the tag that the slot was given."""
    page = int(sound.page_table[VICTIM, column])
    wrong = int(sound.page_tags[page]) ^ (1 << bit)
    on_page = damage(sound, "page_tags", page, jnp.uint32(wrong))
    in_slot = damage(sound, "expected_tags", (VICTIM, column), jnp.uint32(wrong))
    right = wrong ^ (1 << bit)
    for state, expected, found in [(on_page, right, wrong), (in_slot, wrong, right)]:
        assert all_slots(state) == [True, False, True, True]
        assert integrity.report(state, VICTIM) == [Mismatch(column, page, expected, found, 1)]
        assert any("tags differ" in problem for problem in integrity.check_invariants(state))


@pytest.mark.parametrize("page", [INVALID, -2, P, 2**31 - 1, -(2**31)])
def test_a_page_that_does_not_exist_is_seen(sound, page):
    expected = int(sound.expected_tags[VICTIM, 2])
    state = damage(sound, "page_table", (VICTIM, 2), page)
    assert all_slots(state) == [True, False, True, True]
    assert integrity.report(state, VICTIM) == [Mismatch(2, page, expected, None, None)]
    assert any("lacks pages" in problem for problem in integrity.check_invariants(state))


@pytest.mark.parametrize("count", [0, -1])
def test_a_page_without_references_is_seen(sound, count):
    page = int(sound.page_table[VICTIM, 0])
    tag = int(sound.page_tags[page])
    state = damage(sound, "reference_counts", page, count)
    assert all_slots(state) == [True, False, True, True]
    assert integrity.report(state, VICTIM) == [Mismatch(0, page, tag, tag, count)]
    assert integrity.check_invariants(state) != []


def test_a_swapped_entry_is_seen(sound):
    """The page of another slot, itself in perfect order."""
    state = damage(sound, "page_table", (VICTIM, 1), sound.page_table[0, 0])
    assert all_slots(state) == [True, False, True, True]


def test_a_page_past_the_length_does_not_count(sound):
    """Nothing reads it, so the slot may go on; the invariants still object."""
    state = damage(sound, "page_table", (VICTIM, 3), sound.page_table[0, 0])
    assert all_slots(state) == [True] * S and integrity.report(state, VICTIM) == []
    assert any("beyond its 3" in problem for problem in integrity.check_invariants(state))


@pytest.mark.parametrize("length", [M * PAGE, M * PAGE + 1, -1, 2**31 - 1, -(2**31)])
def test_a_length_beyond_the_pages_is_seen(sound, length):
    state = damage(sound, "lengths", VICTIM, length)
    assert all_slots(state) == [True, False, True, True]
    assert integrity.check_invariants(state) != []


def test_a_full_slot_cannot_be_longer(sound):
    """All its pages are in order, but there is no room for another token."""
    state = damage(sound, "lengths", 2, M * PAGE + 1)
    assert all_slots(state) == [True, True, False, True]


def test_slots_that_do_not_exist_fail(sound):
    slots = jnp.array([INVALID, 0, S, -S, 2**31 - 1, 2])
    assert np.asarray(verify(sound, slots)).tolist() == [False, True, False, False, False, True]
    for slot in (INVALID, S):
        with pytest.raises(IndexError, match="not one of 4"):
            integrity.report(sound, slot)


def test_slot_tags_are_compared(sound):
    """Fault 23: the slot belongs to another request by now."""
    tags = sound.slot_tags.at[2].set(sound.slot_tags[0])
    assert np.asarray(verify(sound, jnp.arange(S), tags)).tolist() == [True, True, False, True]
    assert not verify(sound, jnp.array([INVALID]), sound.slot_tags[-1:])[0]


@pytest.mark.parametrize(
    ("field", "index", "value", "problem"),
    [
        ("free_list", 0, 0, "page 0 is 2 times on the free list"),
        ("free_list", 0, P, "pages that do not exist"),
        ("free_list", 0, INVALID, "pages that do not exist"),
        ("free_count", (), P + 1, "free count 17 is not within 0..16"),
        ("free_count", (), -1, "free count -1 is not within 0..16"),
        ("free_count", (), 6, "is neither free nor owned"),
        ("free_count", (), 8, "is free and owned"),
        ("reference_counts", 15, 1, "is free and owned"),
        ("reference_counts", 0, 2, "page 0 has reference count 2 and 1 holders"),
        ("reference_counts", 0, 0, "page 0 is neither free nor owned"),
        ("page_table", (0, 1), 0, "names a page twice"),
    ],
)
def test_check_invariants_names_the_problem(sound, field, index, value, problem):
    state = damage(sound, field, index, value)
    if field == "free_list":
        state = damage(state, "free_list", 1, 0)
    if field == "page_table":
        tag = state.expected_tags[0, 0]
        state = damage(state, "expected_tags", (0, 1), tag)
        assert int(state.page_table[0, 0]) == value
    assert any(problem in found for found in integrity.check_invariants(state))
