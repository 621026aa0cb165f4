"""Pages that outlive their slot, so that others with the same beginning can have them: pure functions of the allocator.

The prefix cache has a hold of a page (`kept`), which counts as one more reference. It takes it with `keep` while a slot
still has the page, gives the page to other slots with `adopt`, and lets go with `drop`. Only whole pages: nobody writes
to them again. Their tag stays the same as long as anybody holds them, so a check of a slot means the same whether its
pages are shared or not; when the last one lets go, the next owner gets a new tag, and what remembers the old one, a row
or the host's tree, matches nothing.

Letters: B rows of a call, M pages a slot may hold, N pages of a call, P pages.
"""

from dataclasses import replace
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32, UInt32

from jaxinfer.cache.allocator import (
    INVALID,
    AllocatorState,
    drop_references,
    in_range,
    is_empty,
    matches,
    once_a_row,
    repeated,
)


class Hold(NamedTuple):
    """The answer to `keep`, for each column of each slot: the page (INVALID where it can't be kept), its tag, and
    whether the hold is new; otherwise the cache had the page already."""

    pages: Int32[Array, "B M"]
    tags: UInt32[Array, "B M"]
    taken: Bool[Array, "B M"]


def keep(
    state: AllocatorState, slots: Int32[Array, "B"], counts: Int32[Array, "B"]
) -> tuple[AllocatorState, Hold]:
    """Take a hold of the first `counts` pages of each slot, of those that are whole and still the slot's own."""
    exists, row = in_range(slots, state.num_slots)
    pages, tags = state.page_table[row], state.expected_tags[row]
    whole = jnp.minimum(counts, state.lengths[row] // state.page_size)
    good = exists[:, None] & (jnp.arange(pages.shape[1]) < whole[:, None]) & matches(state, pages, tags)
    taken = _once(good & ~state.kept[jnp.where(good, pages, 0)], pages, state.num_pages)
    page = jnp.where(taken, pages, state.num_pages)
    state = replace(
        state,
        kept=state.kept.at[page].set(True, mode="drop"),
        reference_counts=state.reference_counts.at[page].add(1, mode="drop"),
    )
    return state, Hold(jnp.where(good, pages, INVALID), jnp.where(good, tags, jnp.uint32(0)), taken)


def drop(state: AllocatorState, pages: Int32[Array, "N"], tags: UInt32[Array, "N"]) -> AllocatorState:
    """Let go of kept pages; those that nobody else holds are free. A page that is not kept, or has another tag by now,
    is left alone, as is INVALID."""
    exists, page = in_range(pages, state.num_pages)
    good = exists & state.kept[page] & matches(state, pages, tags)
    dropped = jnp.where(_once(good, pages, state.num_pages), pages, state.num_pages)
    return drop_references(replace(state, kept=state.kept.at[dropped].set(False, mode="drop")), dropped[:, None])


def adopt(
    state: AllocatorState,
    slots: Int32[Array, "B"],
    pages: Int32[Array, "B M"],
    tags: UInt32[Array, "B M"],
) -> tuple[AllocatorState, Bool[Array, "B"]]:
    """Put whole `pages`, the rest of a row INVALID, at the front of each slot, in the place of its own. Returns which
    rows were granted.

    An empty slot has their tokens afterwards; it keeps its slot tag. A slot that has as many whole pages already lets
    go of its own, which hold the same tokens (duplicates), and keeps its length. Refused: an INVALID slot, one named
    earlier in the same call, one of any other length or whose own pages are not its own any more; pages without an
    owner, under another tag, or twice in a row.
    """
    exists, row = in_range(slots, state.num_slots)
    own, own_tags, length = state.page_table[row], state.expected_tags[row], state.lengths[row]
    given = pages != INVALID
    count = jnp.sum(given, axis=1, dtype=jnp.int32)
    front = jnp.arange(pages.shape[1]) < count[:, None]
    replaced = front & (length > 0)[:, None]
    after, after_tags = jnp.where(front, pages, own), jnp.where(front, tags, own_tags)

    sound = jnp.all(given == front, axis=1) & jnp.all(~front | matches(state, pages, tags), axis=1)
    fits = (count <= length // state.page_size) & jnp.all(~replaced | matches(state, own, own_tags), axis=1)
    listed = jnp.where((after >= 0) & (after < state.num_pages), after, state.num_pages)
    distinct = jnp.sum(once_a_row(listed, state.num_pages) < state.num_pages, axis=1) == jnp.sum(
        listed < state.num_pages, axis=1
    )
    granted = exists & ~repeated(slots) & sound & distinct & (is_empty(state, slots) | fits)

    slot = jnp.where(granted, slots, state.num_slots)
    gained = jnp.where(granted[:, None] & front, pages, state.num_pages)
    lost = jnp.where(granted[:, None] & replaced, own, state.num_pages)
    state = replace(
        state,
        reference_counts=state.reference_counts.at[gained].add(1, mode="drop"),
        page_table=state.page_table.at[slot].set(after, mode="drop"),
        expected_tags=state.expected_tags.at[slot].set(after_tags, mode="drop"),
        lengths=state.lengths.at[slot].set(jnp.maximum(length, count * state.page_size), mode="drop"),
    )
    return drop_references(state, lost), granted


def _once(chosen: Bool[Array, "*shape"], pages: Int32[Array, "*shape"], num_pages: int) -> Bool[Array, "*shape"]:
    """The chosen entries without those whose page was chosen before."""
    entry = jnp.arange(pages.size, dtype=jnp.int32).reshape(pages.shape)
    page = jnp.where(chosen, pages, num_pages)
    first = jnp.full(num_pages + 1, pages.size, jnp.int32).at[page].min(entry)
    return chosen & (first[page] == entry)
