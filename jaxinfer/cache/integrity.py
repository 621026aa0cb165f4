"""Whether slots still own the pages they read: the check on the device before every decode step, and reports
for the host.

`verify` is batched, reads only small arrays and changes nothing; its result is an input of the decode step,
so that a slot that fails never reads. `report` and `check_invariants` run in numpy, for logs and tests.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32, UInt32

from jaxinfer.cache.allocator import INVALID, AllocatorState, matches, pages_needed


class Mismatch(NamedTuple):
    """One page of a slot that is not the slot's any more.

    `column` is its place in the page table, `expected` the tag that the slot was given. `found` (the tag now)
    and `reference_count` are None when there is no such page.
    """

    column: int
    page: int
    expected: int
    found: int | None
    reference_count: int | None


def verify(
    state: AllocatorState,
    slots: Int32[Array, "batch"],
    slot_tags: UInt32[Array, "batch"] | None = None,
) -> Bool[Array, "batch"]:
    """Whether every page that the length of each slot covers exists, has an owner and carries the tag the
    slot was given.

    True for a slot of length 0. False for an INVALID slot, for a length that no slot can have, and, with
    `slot_tags`, for a slot that has been given to another request since.
    """
    with jax.named_scope("verify_tags"):
        exists = (slots >= 0) & (slots < state.num_slots)
        row = jnp.where(exists, slots, 0)
        length = state.lengths[row]
        covered = jnp.arange(state.max_pages_per_slot) < pages_needed(length, state.page_size)[:, None]
        good = matches(state, state.page_table[row], state.expected_tags[row])
        sound = jnp.all(good | ~covered, axis=1) & (length >= 0) & (length <= state.capacity)
        if slot_tags is not None:
            sound &= state.slot_tags[row] == slot_tags
        return exists & sound


def report(state: AllocatorState, slot: int) -> list[Mismatch]:
    """What `verify` objects to in one slot, for the log of the host. Empty for a slot that is sound, except
    for an impossible length.

    Raises IndexError for a slot that does not exist.
    """
    if not 0 <= slot < state.num_slots:
        raise IndexError(f"slot {slot} is not one of {state.num_slots}")
    page_tags, counts = np.asarray(state.page_tags), np.asarray(state.reference_counts)
    length = min(max(int(np.asarray(state.lengths)[slot]), 0), state.capacity)
    covered = -(-length // state.page_size)
    found = []
    for column in range(covered):
        page = int(np.asarray(state.page_table)[slot, column])
        expected = int(np.asarray(state.expected_tags)[slot, column])
        if not 0 <= page < state.num_pages:
            found.append(Mismatch(column, page, expected, None, None))
        elif counts[page] <= 0 or page_tags[page] != expected:
            found.append(Mismatch(column, page, expected, int(page_tags[page]), int(counts[page])))
    return found


def check_invariants(state: AllocatorState) -> list[str]:
    """The invariants of `jaxinfer.cache.allocator` that do not hold, one sentence each. Empty for a sound
    state.
    """
    return _check_pages(state) + _check_slots(state)


def _check_pages(state: AllocatorState) -> list[str]:
    """Invariants 1 and 2: free or owned, never both; reference counts equal to the holders."""
    problems = []
    free_count, counts = int(state.free_count), np.asarray(state.reference_counts)
    if not 0 <= free_count <= state.num_pages:
        return [f"free count {free_count} is not within 0..{state.num_pages}"]
    free = np.asarray(state.free_list)[:free_count]
    if np.any((free < 0) | (free >= state.num_pages)):
        return [f"the free list names pages that do not exist: {free.tolist()}"]
    listed = np.bincount(free, minlength=state.num_pages)
    table = np.asarray(state.page_table)
    holders = np.bincount(table[(table >= 0) & (table < state.num_pages)], minlength=state.num_pages)
    holders += np.asarray(state.kept)
    for page in range(state.num_pages):
        if listed[page] > 1:
            problems.append(f"page {page} is {listed[page]} times on the free list")
        if listed[page] and (counts[page] != 0 or holders[page]):
            problems.append(f"page {page} is free and owned")
        if not listed[page] and counts[page] == 0:
            problems.append(f"page {page} is neither free nor owned")
        if counts[page] != holders[page]:
            problems.append(f"page {page} has reference count {counts[page]} and {holders[page]} holders")
    return problems


def _check_slots(state: AllocatorState) -> list[str]:
    """Invariants 3 and 4: the pages of a slot fit its length and carry its tags."""
    problems = []
    table, tags = np.asarray(state.page_table), np.asarray(state.page_tags)
    expected, lengths = np.asarray(state.expected_tags), np.asarray(state.lengths)
    for slot in range(state.num_slots):
        length = int(lengths[slot])
        if not 0 <= length <= state.capacity:
            problems.append(f"slot {slot} has length {length}, not within 0..{state.capacity}")
            continue
        covered = -(-length // state.page_size)
        head, tail = table[slot, :covered], table[slot, covered:]
        if np.any(tail != INVALID):
            problems.append(f"slot {slot} of length {length} names pages beyond its {covered}: {tail.tolist()}")
        if np.any((head < 0) | (head >= state.num_pages)):
            problems.append(f"slot {slot} of length {length} lacks pages: {head.tolist()}")
        elif np.any(tags[head] != expected[slot, :covered]):
            problems.append(f"slot {slot} holds pages whose tags differ")
        elif len(set(head.tolist())) < covered:
            problems.append(f"slot {slot} names a page twice: {head.tolist()}")
    return problems
