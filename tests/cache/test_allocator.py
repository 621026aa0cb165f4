"""The allocator, one behaviour or fault at a time. Random sequences of operations are in
`test_allocator_properties.py`.
"""

from dataclasses import fields, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer.cache import allocator, integrity
from jaxinfer.cache.allocator import INVALID, AllocatorState

P, S, M, PAGE = 8, 4, 4, 4
TOP = 2**31 - 1

ROWS = 5


def compiled(function, **options):
    """The operation, jitted for batches of ROWS: shorter ones are filled up with INVALID, and their answers
    cut again.
    """
    jitted = jax.jit(function, **options)

    def call(state, *rows, **options):
        given = len(rows[0])
        fill = [np.pad(np.asarray(row), (0, ROWS - given), constant_values=row.dtype.type(TOP)) for row in rows]
        fill[0][given:] = INVALID
        result = jitted(state, *fill, **options)
        if isinstance(result, AllocatorState):
            return result
        if isinstance(result, tuple):
            return result[0], jax.tree.map(lambda leaf: np.asarray(leaf)[:given] if leaf.ndim else leaf, result[1])
        return np.asarray(result)[:given]

    return call


allocate = compiled(allocator.allocate, static_argnames="max_new_pages")
append = compiled(allocator.append, static_argnames="max_new_pages")
open_slots = compiled(allocator.open_slots)
fork = compiled(allocator.fork)
release = compiled(allocator.release)
verify = compiled(integrity.verify)
matches = jax.jit(allocator.matches)


def create(**changes) -> AllocatorState:
    return replace(AllocatorState.create(P, S, M, PAGE), **changes)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def pages_of(state: AllocatorState, slot: int) -> list[int]:
    return [page for page in np.asarray(state.page_table)[slot].tolist() if page != INVALID]


def changed(before: AllocatorState, after: AllocatorState) -> set[str]:
    """The fields that are not bit-identical."""
    return {
        f.name
        for f in fields(before)
        if not np.array_equal(np.asarray(getattr(before, f.name)), np.asarray(getattr(after, f.name)))
    }


def granted(grant) -> list[bool]:
    return np.asarray(grant.granted).tolist()


def copies(grant) -> list[tuple[int, int]]:
    """The reported copies; also checks that the rest of the lists is INVALID."""
    count = int(grant.copies)
    source, target = np.asarray(grant.copy_source), np.asarray(grant.copy_target)
    assert np.all(source[count:] == INVALID) and np.all(target[count:] == INVALID)
    return list(zip(source[:count].tolist(), target[:count].tolist(), strict=True))


def started(*lengths: int) -> AllocatorState:
    """Slots 0, 1, ... with these lengths."""
    state, grant = allocate(create(), ints(*range(len(lengths))), ints(*lengths))
    assert all(granted(grant))
    return state


def free_behind_its_back(state: AllocatorState, page: int) -> AllocatorState:
    """The fault: a page returns to the free list while its owner still holds it."""
    return replace(
        state,
        reference_counts=state.reference_counts.at[page].set(0),
        free_list=state.free_list.at[state.free_count].set(page),
        free_count=state.free_count + 1,
    )


# ---- creation and tags


@pytest.mark.parametrize("sizes", [(0, 1, 1, 1), (1, 0, 1, 1), (1, 1, 0, 1), (1, 1, 1, 0), (1, 1, 2**16, 2**15)])
def test_create_refuses_impossible_sizes(sizes):
    with pytest.raises(ValueError, match="num_pages"):
        AllocatorState.create(*sizes)


def test_create_is_sound_and_empty():
    state = create()
    assert integrity.check_invariants(state) == []
    assert int(state.free_count) == P and state.capacity == M * PAGE
    assert (state.num_pages, state.num_slots, state.max_pages_per_slot) == (P, S, M)


def unscramble(x: np.ndarray) -> np.ndarray:
    """The steps of `scramble` undone one by one: that it exists shows that no two counters give one tag."""
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(pow(0x846CA68B, -1, 2**32))
    x = x ^ (x >> np.uint32(15)) ^ (x >> np.uint32(30))
    x = x * np.uint32(pow(0x7FEB352D, -1, 2**32))
    return x ^ (x >> np.uint32(16))


def test_scramble_is_a_bijection():
    rng = np.random.default_rng(0)
    around_the_wrap = np.arange(-(2**16), 2**16, dtype=np.int32).view(np.uint32)
    counters = np.concatenate([around_the_wrap, rng.integers(0, 2**32, 2**18, dtype=np.uint32)])
    tags = np.asarray(allocator.scramble(jnp.array(counters)))
    assert tags.dtype == np.uint32
    np.testing.assert_array_equal(unscramble(tags), counters)


def test_neighbouring_tags_differ_in_many_bits():
    tags = np.asarray(allocator.scramble(jnp.arange(2**16, dtype=jnp.uint32)))
    distance = np.bitwise_count(tags[1:] ^ tags[:-1])
    assert 15 < distance.mean() < 17 and distance.min() >= 3


def test_tags_survive_the_wrap_of_the_counter():
    state = create(
        page_tags=allocator.scramble(jnp.uint32(2**32 - 5 - P) + jnp.arange(P, dtype=jnp.uint32)),
        next_tag=jnp.uint32(2**32 - 5),
        slot_tags=allocator.scramble(jnp.uint32(2**32 - 2 - S) + jnp.arange(S, dtype=jnp.uint32)),
        next_slot_tag=jnp.uint32(2**32 - 2),
    )
    seen = set(np.asarray(state.page_tags).tolist())
    requests = set(np.asarray(state.slot_tags).tolist())
    for _ in range(3):
        state, grant = allocate(state, ints(0, 1), ints(2 * PAGE, PAGE))
        assert granted(grant) == [True, True]
        assert integrity.check_invariants(state) == []
        assert np.asarray(verify(state, ints(0, 1))).all()
        tags = np.asarray(state.expected_tags)[[0, 0, 1], [0, 1, 0]].tolist()
        assert not seen & set(tags) and len(set(tags)) == 3
        seen |= set(tags)
        tags = np.asarray(state.slot_tags)[:2].tolist()
        assert not requests & set(tags) and len(set(tags)) == 2
        requests |= set(tags)
        state = release(state, ints(0, 1))
    assert int(state.next_tag) == 4 and int(state.next_slot_tag) == 10


# ---- allocate and append


def test_append_takes_a_page_only_at_a_boundary():
    state = started(PAGE - 1)
    held = []
    for _ in range(PAGE + 2):
        state, grant = append(state, ints(0), ints(1), max_new_pages=1)
        assert granted(grant) == [True] and copies(grant) == []
        held.append(len(pages_of(state, 0)))
    assert held == [1, 2, 2, 2, 2, 3]
    assert int(state.lengths[0]) == 2 * PAGE + 1
    assert integrity.check_invariants(state) == []


def test_tokens_that_are_there_keep_their_pages():
    before = started(PAGE + 1, 2)
    after, _ = append(before, ints(1, 0), ints(3 * PAGE, PAGE))
    for slot in (0, 1):
        held = pages_of(before, slot)
        assert pages_of(after, slot)[: len(held)] == held
        assert len(pages_of(after, slot)) == allocator.pages_needed(after.lengths[slot], PAGE)


def test_page_aligned_sequences_get_different_pages():
    """Fault 22: lengths that are multiples of the page size, then one decode step."""
    state = started(PAGE, PAGE, 2 * PAGE)
    state, grant = append(state, ints(0, 1, 2), ints(1, 1, 1), max_new_pages=1)
    assert granted(grant) == [True] * 3
    new = [pages_of(state, slot)[-1] for slot in range(3)]
    assert len(set(new)) == 3
    assert integrity.check_invariants(state) == []


@pytest.mark.parametrize("in_use", range(P + 1))
def test_more_than_is_free_is_refused_before_anything_changes(in_use):
    """Fault 21: ask for everything from nothing to too much, at every number of pages in use."""
    state = create()
    for slot, pages in enumerate([min(in_use, M), max(in_use - M, 0)]):
        state, grant = allocate(state, ints(slot), ints(pages * PAGE))
        assert granted(grant) == [True]
    assert int(state.free_count) == P - in_use
    for tokens in range(M * PAGE + 1):
        for operation in (allocate, append):
            after, grant = operation(state, ints(2), ints(tokens))
            pages = -(-tokens // PAGE)
            assert granted(grant) == [pages <= P - in_use]
            assert int(after.free_count) == P - in_use - (pages if granted(grant)[0] else 0) >= 0
            assert integrity.check_invariants(after) == []
            if not granted(grant)[0]:
                assert changed(state, after) == set() and copies(grant) == []


def test_rows_are_served_in_order():
    state = started(M * PAGE, PAGE)  # 3 pages are free, slot 1 has none to spare
    after, grant = append(state, ints(1, 2, 3), ints(PAGE, 3 * PAGE, PAGE))
    assert granted(grant) == [True, False, False]  # the second is refused, and the third may not overtake it
    assert changed(state, after) == {
        "free_count", "page_tags", "reference_counts", "next_tag", "page_table", "expected_tags", "lengths",
    }  # fmt: skip
    assert pages_of(after, 2) == pages_of(after, 3) == []


def test_a_row_that_needs_no_page_is_granted_when_none_is_free():
    state = started(M * PAGE, 2 * PAGE, PAGE + 1)
    assert int(state.free_count) == 0
    after, grant = append(state, ints(1, 3, 2, 0), ints(1, 1, 1, 0))
    assert granted(grant) == [False, False, True, True]
    assert changed(state, after) == {"lengths"}
    assert np.asarray(after.lengths).tolist() == [M * PAGE, 2 * PAGE, PAGE + 2, 0]


@pytest.mark.parametrize("slot", [INVALID, -S, S, TOP, -TOP - 1])
@pytest.mark.parametrize("operation", [allocate, append])
def test_a_slot_that_does_not_exist_is_refused(operation, slot):
    state = started(3, 3, 3, 3)
    after, grant = operation(state, ints(slot), ints(1))
    assert granted(grant) == [False] and changed(state, after) == set()


@pytest.mark.parametrize("count", [-1, M * PAGE - 4, TOP, -TOP - 1])
def test_an_impossible_count_is_refused(count):
    state = started(5)
    after, grant = append(state, ints(0), ints(count))
    assert granted(grant) == [False] and changed(state, after) == set()


@pytest.mark.parametrize("length", [-1, M * PAGE + 1, TOP, -TOP - 1])
def test_a_damaged_length_is_refused(length):
    state = started(5)
    state = replace(state, lengths=state.lengths.at[0].set(length))
    after, grant = append(state, ints(0), ints(1))
    assert granted(grant) == [False] and changed(state, after) == set()
    assert not verify(state, ints(0))[0]
    assert np.asarray(fork(state, ints(0), ints(1))[1]).tolist() == [False]


@pytest.mark.parametrize("operation", [allocate, append])
def test_a_slot_named_twice_is_served_once(operation):
    once, _ = operation(create(), ints(1), ints(3))
    twice, grant = operation(create(), ints(1, 1), ints(3, 2))
    assert granted(grant) == [True, False] and changed(once, twice) == set()


def test_max_new_pages_bounds_a_row():
    state = started(PAGE - 1, PAGE)
    after, grant = append(state, ints(0, 1), ints(PAGE + 2, PAGE), max_new_pages=1)
    assert granted(grant) == [False, True]
    assert int(after.lengths[0]) == PAGE - 1
    state, _ = fork(state, ints(0), ints(2))
    after, grant = append(state, ints(2), ints(2), max_new_pages=1)  # a copy and a fresh page
    assert granted(grant) == [False] and changed(state, after) == set()
    assert granted(append(state, ints(2), ints(2), max_new_pages=2)[1]) == [True]


def test_allocate_opens_and_fills_or_does_neither():
    state = started(3)
    tags = np.asarray(state.slot_tags)
    after, grant = allocate(state, ints(0, 1, 2, 3), ints(1, 0, M * PAGE + 1, 5))
    assert granted(grant) == [False, True, False, True]
    renewed = np.asarray(after.slot_tags) != tags
    assert renewed.tolist() == [False, True, False, True]
    assert pages_of(after, 0) == pages_of(state, 0)
    assert np.asarray(after.lengths).tolist() == [3, 0, 0, 5]
    assert integrity.check_invariants(after) == []


def test_open_slots_refuses_a_slot_that_holds_pages():
    state = started(3)
    after, opened = open_slots(state, ints(0, 1, 1, INVALID, S))
    assert np.asarray(opened).tolist() == [False, True, False, False, False]
    assert changed(state, after) == {"slot_tags", "next_slot_tag"}
    assert (np.asarray(after.slot_tags) != np.asarray(state.slot_tags)).tolist() == [
        False,
        True,
        False,
        False,
    ]
    assert int(after.next_slot_tag) == int(state.next_slot_tag) + 1


# ---- fork and copy on write


def test_fork_shares_every_page():
    state = started(PAGE + 2)
    after, done = fork(state, ints(0, 0), ints(1, 3))
    assert np.asarray(done).tolist() == [True, True]
    assert pages_of(after, 0) == pages_of(after, 1) == pages_of(after, 3)
    assert np.asarray(after.reference_counts)[pages_of(after, 0)].tolist() == [3, 3]
    assert int(after.free_count) == P - 2
    assert np.asarray(verify(after, ints(0, 1, 3))).all()
    assert (np.asarray(after.slot_tags) != np.asarray(state.slot_tags)).tolist() == [False, True, False, True]
    assert integrity.check_invariants(after) == []


@pytest.mark.parametrize(
    ("source", "target"),
    [(0, 0), (0, 1), (INVALID, 2), (0, INVALID), (S, 2), (0, S), (2, 2), (0, TOP), (-S, 2)],
)
def test_fork_refuses(source, target):
    state = started(PAGE + 2, 3)
    after, done = fork(state, ints(source), ints(target))
    assert np.asarray(done).tolist() == [False] and changed(state, after) == set()


def test_fork_refuses_a_target_named_twice_and_a_source_that_is_a_target():
    state = started(PAGE + 2, 3)
    after, done = fork(state, ints(0, 1, 2, 1), ints(2, 2, 3, 3))
    assert np.asarray(done).tolist() == [True, False, False, False]
    assert pages_of(after, 2) == pages_of(state, 0) and pages_of(after, 3) == []
    assert integrity.check_invariants(after) == []


def test_fork_of_a_stale_source_is_refused():
    state = started(PAGE + 2)
    state = free_behind_its_back(state, pages_of(state, 0)[0])
    after, done = fork(state, ints(0), ints(1))
    assert np.asarray(done).tolist() == [False] and changed(state, after) == set()


def test_a_shared_tail_is_copied_and_the_last_holder_writes_in_place():
    state = started(PAGE + 2)
    head, tail = pages_of(state, 0)
    state, _ = fork(state, ints(0), ints(1))
    state, grant = append(state, ints(1), ints(1), max_new_pages=1)
    (copy,) = copies(grant)
    assert pages_of(state, 1) == [head, copy[1]] and copy[0] == tail != copy[1]
    assert pages_of(state, 0) == [head, tail]
    assert np.asarray(state.reference_counts)[[head, tail, copy[1]]].tolist() == [2, 1, 1]
    assert integrity.check_invariants(state) == []
    before = state
    state, grant = append(state, ints(0), ints(1), max_new_pages=1)
    assert granted(grant) == [True] and copies(grant) == []
    assert changed(before, state) == {"lengths"}


def test_nothing_is_copied_for_a_row_of_no_tokens():
    state, _ = fork(started(PAGE + 2), ints(0), ints(1))
    after, grant = append(state, ints(1, 0), ints(0, 0), max_new_pages=1)
    assert granted(grant) == [True, True] and copies(grant) == []
    assert changed(state, after) == set()


def test_a_shared_full_page_is_not_copied():
    state, _ = fork(started(PAGE), ints(0), ints(1))
    state, grant = append(state, ints(0, 1), ints(1, 1))
    assert granted(grant) == [True, True] and copies(grant) == []
    assert pages_of(state, 0)[0] == pages_of(state, 1)[0] and pages_of(state, 0)[1] != pages_of(state, 1)[1]


@pytest.mark.parametrize("batch", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_sharers_that_append_together_leave_the_page_to_the_last(batch):
    state = started(PAGE + 2)
    tail = pages_of(state, 0)[1]
    state, _ = fork(state, ints(0, 0), ints(1, 2))
    state, grant = append(state, ints(*batch), ints(1, 1, 1))
    assert granted(grant) == [True] * 3
    assert [source for source, _ in copies(grant)] == [tail, tail]
    assert [pages_of(state, slot)[1] == tail for slot in batch] == [False, False, True]
    assert len({pages_of(state, slot)[1] for slot in batch}) == 3
    assert integrity.check_invariants(state) == []


def test_no_sharer_writes_in_place_when_the_copy_of_another_was_refused():
    state, _ = allocate(create(), ints(0, 1, 2), ints(2, 4 * PAGE, 3 * PAGE))
    state, _ = fork(state, ints(0), ints(3))
    assert int(state.free_count) == 0
    after, grant = append(state, ints(0, 3), ints(1, 1))
    assert granted(grant) == [False, False] and changed(state, after) == set()


def test_copies_are_listed_from_the_front():
    state, _ = fork(started(3, PAGE), ints(0), ints(2))
    state, grant = append(state, ints(3, 1, INVALID, 2), ints(1, 1, 1, 1))
    assert granted(grant) == [True, True, False, True]
    assert copies(grant) == [(pages_of(state, 0)[0], pages_of(state, 2)[0])]


# ---- release


STAGES = ["empty", "opened", "prompt", "step", "boundary", "refused", "shared", "copied", "sibling copied"]


def at_stage(stage: str) -> AllocatorState:
    """Slot 0 at a stage of a request's life, alone or beside a slot 1 that shares its pages."""
    if stage == "empty":
        return create()
    if stage == "opened":
        return open_slots(create(), ints(0))[0]
    if stage == "refused":
        state, grant = append(started(2 * PAGE, 4 * PAGE, 2 * PAGE), ints(0), ints(1))
        assert granted(grant) == [False]
        return state
    prompt = started(PAGE + 2)
    shared, _ = fork(prompt, ints(0), ints(1))
    before, slot, count = {
        "prompt": (prompt, 0, 0),
        "step": (prompt, 0, 1),
        "boundary": (prompt, 0, 3),
        "shared": (shared, 0, 0),
        "copied": (shared, 0, 1),
        "sibling copied": (shared, 1, 1),
    }[stage]
    return append(before, ints(slot), ints(count))[0]


@pytest.mark.parametrize("stage", STAGES)
def test_release_at_every_stage(stage):
    """Fault 9: whatever the stage, the pages come back once, under new tags, and the old holder verifies no
    more.
    """
    before = at_stage(stage)
    alone = [p for p in pages_of(before, 0) if before.reference_counts[p] == 1]
    after = release(before, ints(0), before.slot_tags[:1])
    assert integrity.check_invariants(after) == []
    assert int(after.free_count) == int(before.free_count) + len(alone)
    assert pages_of(after, 0) == [] and int(after.lengths[0]) == 0
    assert after.slot_tags[0] != before.slot_tags[0]
    others = ints(*range(1, S))
    assert np.asarray(verify(after, others)).all()
    assert np.array_equal(after.page_table[1:], before.page_table[1:])

    pages = min(int(after.free_count), M)  # a new request takes what came back
    reused, grant = allocate(after, ints(0), ints(pages * PAGE))
    assert granted(grant) == [True] and integrity.check_invariants(reused) == []
    for entry in range(len(pages_of(before, 0))):
        old = before.page_table[0, entry], before.expected_tags[0, entry]
        assert not matches(after, *old) or old[0] not in alone
        assert not matches(reused, *old) or old[0] not in alone
    stale = replace(reused, page_table=before.page_table, expected_tags=before.expected_tags, lengths=before.lengths)
    assert bool(verify(stale, ints(0))[0]) == (not alone)


def test_double_release_frees_once():
    """Fault 24: the second release finds nothing."""
    first = release(started(PAGE + 2, 3), ints(0))
    second = release(first, ints(0))
    assert changed(first, second) == {"slot_tags", "next_slot_tag"}
    assert integrity.check_invariants(second) == []


def test_a_slot_named_twice_in_one_release_counts_once():
    state = started(PAGE + 2, 3)
    once, twice = release(state, ints(0)), release(state, ints(0, 0))
    assert changed(once, twice) == set()
    tags = np.asarray(state.slot_tags)[[1, 0, 0]]  # the first row is late, the others are not
    with_tags = release(state, ints(0, 0, 0), tags)
    assert changed(once, with_tags) == set()


def test_a_late_release_with_an_old_slot_tag_is_ignored():
    """Faults 23 and 24: the slot has gone to another request since."""
    state = started(PAGE + 2)
    old = state.slot_tags[:1]
    state, _ = allocate(release(state, ints(0), old), ints(0), ints(3))
    assert changed(state, release(state, ints(0), old)) == set()
    assert not verify(state, ints(0), old)[0] and verify(state, ints(0), state.slot_tags[:1])[0]


def test_slots_that_share_pages_released_together():
    state, _ = fork(started(PAGE + 2, 3), ints(0, 0), ints(2, 3))
    after = release(state, ints(0, 2))
    assert np.asarray(after.reference_counts)[pages_of(state, 3)].tolist() == [1, 1]
    assert np.asarray(verify(after, ints(3, 1))).all() and integrity.check_invariants(after) == []
    after = release(state, ints(3, INVALID, 0, 2))
    assert int(after.free_count) == P - 1 and integrity.check_invariants(after) == []


@pytest.mark.parametrize("slot", [INVALID, -S, S, TOP])
def test_release_of_a_slot_that_does_not_exist_changes_nothing(slot):
    state = started(3, 3, 3, 3)
    assert changed(state, release(state, ints(slot))) == set()


# ---- stale and damaged slots


def test_a_page_freed_behind_its_holders_back():
    """Fault 1: A's page goes to B. A fails the check, B does not notice, not even when A is released."""
    state = started(PAGE + 2, 3)
    stolen = pages_of(state, 0)[1]
    state = free_behind_its_back(state, stolen)
    assert np.asarray(verify(state, ints(0, 1))).tolist() == [False, True]
    state, grant = allocate(state, ints(2), ints(3))
    assert granted(grant) == [True] and pages_of(state, 2) == [stolen]
    assert np.asarray(verify(state, ints(0, 1, 2))).tolist() == [False, True, True]

    blocked, grant = append(state, ints(0), ints(1))  # A's tail is B's page now: A may not write
    assert granted(grant) == [False] and changed(state, blocked) == set()

    state = release(state, ints(0))
    assert np.asarray(verify(state, ints(1, 2))).all() and pages_of(state, 2) == [stolen]
    assert int(state.reference_counts[stolen]) == 1
    assert integrity.check_invariants(state) == []


def test_a_page_freed_twice_is_listed_once():
    state = started(PAGE + 2)
    state = release(free_behind_its_back(state, pages_of(state, 0)[0]), ints(0))
    assert integrity.check_invariants(state) == [] and int(state.free_count) == P


@pytest.mark.parametrize("page", [P, P + 3, -2, TOP, -TOP - 1])
def test_a_page_that_does_not_exist_is_ignored(page):
    """An index out of range must not turn into the last page, nor count from the end."""
    state = started(4 * PAGE, 4 * PAGE)
    holder = 0 if P - 1 in pages_of(state, 0) else 1
    victim = 1 - holder
    for tag in (state.page_tags[P - 1], state.page_tags[page % P]):
        damaged = replace(
            state,
            page_table=state.page_table.at[victim, 3].set(page),
            expected_tags=state.expected_tags.at[victim, 3].set(tag),
        )
        assert np.asarray(verify(damaged, ints(victim, holder))).tolist() == [False, True]
        after = release(damaged, ints(victim))
        assert int(after.free_count) == M - 1
        assert np.asarray(after.reference_counts)[pages_of(state, holder)].tolist() == [1] * M
        assert verify(after, ints(holder))[0]


def test_a_damaged_entry_cannot_free_the_page_it_names():
    state = started(PAGE + 2, 3)
    other = pages_of(state, 1)[0]
    state = replace(state, page_table=state.page_table.at[0, 0].set(other))
    after = release(state, ints(0))
    assert verify(after, ints(1))[0] and int(after.reference_counts[other]) == 1


def test_an_entry_repeated_within_a_slot_drops_one_reference():
    state, _ = fork(started(PAGE + 2), ints(0), ints(1))
    state = replace(
        state,
        page_table=state.page_table.at[0, 1:].set(state.page_table[0, 0]),
        expected_tags=state.expected_tags.at[0, 1:].set(state.expected_tags[0, 0]),
    )
    after = release(state, ints(0))
    assert verify(after, ints(1))[0]


def test_a_page_with_more_holders_than_references_is_freed_once():
    """The count is damaged: it must not go below zero, and the page must not be lost."""
    state, _ = fork(started(PAGE + 2), ints(0), ints(1))
    state = replace(state, reference_counts=state.reference_counts.at[pages_of(state, 0)[0]].set(1))
    state = release(state, ints(0, 1))
    assert integrity.check_invariants(state) == [] and int(state.free_count) == P


# ---- positions


def test_positions_to_pages():
    state = started(PAGE + 2, 3)
    table = np.asarray(state.page_table)
    positions = jnp.tile(jnp.array([-1, 0, 2, 3, PAGE, PAGE + 1, PAGE + 2, M * PAGE, TOP]), (4, 1))
    page, offset = jax.jit(allocator.positions_to_pages)(state, ints(0, 1, INVALID, S), positions)
    none = INVALID
    assert np.asarray(page).tolist() == [
        [none, *table[0, [0, 0, 0, 1, 1]], none, none, none],
        [none, *table[1, [0, 0]], none, none, none, none, none, none],
        [none] * 9,
        [none] * 9,
    ]
    assert np.asarray(offset).tolist() == [
        [none, 0, 2, 3, 0, 1, none, none, none],
        [none, 0, 2, none, none, none, none, none, none],
        [none] * 9,
        [none] * 9,
    ]


@pytest.mark.parametrize("page", [INVALID, -2, P, TOP])
def test_positions_of_a_damaged_entry_are_invalid(page):
    state = started(M * PAGE)
    state = replace(state, page_table=state.page_table.at[0, 0].set(page), lengths=state.lengths.at[0].set(TOP))
    pages, offsets = jax.jit(allocator.positions_to_pages)(state, ints(0), ints(0, PAGE, M * PAGE, -1)[None])
    assert np.asarray(pages).tolist() == [[INVALID, int(state.page_table[0, 1]), INVALID, INVALID]]
    assert np.asarray(offsets).tolist() == [[INVALID, 0, INVALID, INVALID]]


@pytest.mark.parametrize("length", [0, 1, PAGE - 1, PAGE, PAGE + 1, TOP])
def test_pages_needed(length):
    assert int(allocator.pages_needed(jnp.int32(length), PAGE)) == -(-length // PAGE)


# ---- compiled


def compiled_append(num_pages: int):
    state = jax.eval_shape(partial(AllocatorState.create, num_pages, 16, 64, 64))
    rows = jax.ShapeDtypeStruct((16,), jnp.int32)
    step = jax.jit(partial(allocator.append, max_new_pages=1), donate_argnums=0)
    return step.lower(state, rows, rows).compile(), state


def test_append_in_decode_is_in_place_and_does_not_depend_on_the_pool():
    (small, _), (large, state) = compiled_append(64), compiled_append(65536)
    memory = large.memory_analysis()
    assert memory.temp_size_in_bytes == small.memory_analysis().temp_size_in_bytes
    assert memory.alias_size_in_bytes == sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    assert " sort(" not in large.as_text()


def test_operations_replicated_over_a_mesh():
    """The same state on 8 devices, donated through a scripted life, bit-identical to one device."""
    if len(jax.devices()) < 8:
        pytest.skip("needs 8 devices: set XLA_FLAGS=--xla_force_host_platform_device_count=8")
    replicated = NamedSharding(Mesh(np.array(jax.devices()[:8]), ("model",)), PartitionSpec())
    functions = allocator.allocate, allocator.append, allocator.fork, allocator.release
    on_mesh = [jax.jit(f, donate_argnums=0, in_shardings=replicated, out_shardings=replicated) for f in functions]

    def life(state, allocate, append, fork, release):
        state, grant = allocate(state, ints(0, 1), ints(PAGE + 2, PAGE))
        state, done = fork(state, ints(0), ints(2))
        state, step = append(state, ints(0, 2, 1), ints(1, 1, 1))
        return release(state, ints(0, 0, INVALID)), grant, done, step

    alone = life(create(), *(jax.jit(f) for f in functions))
    spread = life(jax.device_put(create(), replicated), *on_mesh)
    for expected, got in zip(jax.tree.leaves(alone), jax.tree.leaves(spread), strict=True):
        assert got.sharding.is_fully_replicated and len(got.sharding.device_set) == 8
        np.testing.assert_array_equal(np.asarray(got), np.asarray(expected))
    assert integrity.check_invariants(spread[0]) == []
    assert np.asarray(jax.jit(integrity.verify)(spread[0], jnp.arange(S))).all()
