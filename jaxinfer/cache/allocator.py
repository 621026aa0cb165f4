"""The page allocator: pure functions of one pytree of arrays.

A *page* is room for `page_size` tokens in every layer of the pool (`jaxinfer.cache.pages`). A *slot* is the
place of one running request; its row of the page table lists the pages that hold its tokens, in order. Each
function takes an `AllocatorState` and returns the next one. All shapes are static, nothing loops over slots,
so everything can be jitted, donated and replicated.

The life of a request: `allocate` (a fresh slot tag, pages for the prompt), `append` once a step (a page when
the length crosses a page boundary, a copy when the last page is shared), `release` once, whatever the reason.
`fork` lets a second slot share the pages; `jaxinfer.cache.sharing` lets pages outlive their slot.

What holds between any two calls (`integrity.check_invariants` tests it):

1. A page is free (listed once among the first `free_count` entries of `free_list`, reference count 0) or
   owned (reference count above 0, not listed), never both and never neither.
2. The reference count of a page is the number of page-table entries that name it, and one more where it is `kept`.
3. A slot of length n holds exactly ceil(n / page_size) pages, in the first columns of its row; the rest of
   the row is INVALID.
4. Each time a page is handed out it takes a new tag, written both to `page_tags` and to the slot. A tag does
   not come back within 2**32 such events, so an entry of a slot is good when its page has references and the
   two tags are equal.
5. What is refused changes nothing.

Entries that fail the test of 4 (damaged, or left behind by a page freed too early) are never written through,
shared, or released: no slot can free a page of another.

Letters: B rows of a call, S slots, M pages a slot may hold, N new pages of a row, P pages, T positions.
"""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32, UInt32

INVALID = -1
"""No page, or no slot. JAX takes an index of -1 for the last one, so it is never used as an index."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class AllocatorState:
    """Everything the allocator knows, on the device. `page_size` (tokens) is static.

    `free_list` is a stack whose first `free_count` entries are the free pages. `next_tag` and `next_slot_tag`
    count what has been handed out; the tags themselves are the counts scrambled (`scramble`). `kept`: pages that the
    prefix cache holds.
    """

    free_list: Int32[Array, "pages"]
    free_count: Int32[Array, ""]
    page_tags: UInt32[Array, "pages"]
    reference_counts: Int32[Array, "pages"]
    kept: Bool[Array, "pages"]
    next_tag: UInt32[Array, ""]
    page_table: Int32[Array, "slots columns"]
    expected_tags: UInt32[Array, "slots columns"]
    lengths: Int32[Array, "slots"]
    slot_tags: UInt32[Array, "slots"]
    next_slot_tag: UInt32[Array, ""]
    page_size: int = field(metadata={"static": True})

    @classmethod
    def create(cls, num_pages: int, num_slots: int, max_pages_per_slot: int, page_size: int) -> "AllocatorState":
        """All pages free, all slots empty.

        Raises ValueError when a size is below 1 or a slot could hold more tokens than an int32 counts.
        """
        if min(num_pages, num_slots, max_pages_per_slot, page_size) < 1:
            raise ValueError(
                f"sizes must be at least 1, got {num_pages=} {num_slots=} {max_pages_per_slot=} {page_size=}"
            )
        if max_pages_per_slot * page_size >= 2**31 or num_pages >= 2**31:
            raise ValueError(f"too large for int32: {num_pages=} {max_pages_per_slot=} {page_size=}")
        return cls(
            free_list=jnp.arange(num_pages - 1, -1, -1, dtype=jnp.int32),
            free_count=jnp.array(num_pages, jnp.int32),
            page_tags=scramble(jnp.arange(1, num_pages + 1, dtype=jnp.uint32)),
            reference_counts=jnp.zeros(num_pages, jnp.int32),
            kept=jnp.zeros(num_pages, bool),
            next_tag=jnp.array(num_pages + 1, jnp.uint32),
            page_table=jnp.full((num_slots, max_pages_per_slot), INVALID, jnp.int32),
            expected_tags=jnp.zeros((num_slots, max_pages_per_slot), jnp.uint32),
            lengths=jnp.zeros(num_slots, jnp.int32),
            slot_tags=scramble(jnp.arange(1, num_slots + 1, dtype=jnp.uint32)),
            next_slot_tag=jnp.array(num_slots + 1, jnp.uint32),
            page_size=page_size,
        )

    @property
    def num_pages(self) -> int:
        return self.free_list.shape[0]

    @property
    def num_slots(self) -> int:
        return self.page_table.shape[0]

    @property
    def max_pages_per_slot(self) -> int:
        return self.page_table.shape[1]

    @property
    def capacity(self) -> int:
        """Tokens that one slot can hold."""
        return self.max_pages_per_slot * self.page_size


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Grant:
    """The answer to `append` and `allocate`.

    The first `copies` entries of `copy_source` and `copy_target` are whole pages that must be copied
    (`pages.copy`) before the granted tokens are written; the other entries are INVALID.
    """

    granted: Bool[Array, "batch"]
    copy_source: Int32[Array, "batch"]
    copy_target: Int32[Array, "batch"]
    copies: Int32[Array, ""]


class _Plan(NamedTuple):
    """What an append would do, worked out before anything changes. Only granted rows count."""

    granted: Bool[Array, "batch"]
    row: Int32[Array, "batch"]  # the slot, or 0
    length: Int32[Array, "batch"]  # tokens after
    start: Int32[Array, "batch"]  # first column to receive a new page
    need: Int32[Array, "batch"]  # new pages, the copy first
    order: Int32[Array, "batch"]  # new pages of the rows before
    total: Int32[Array, ""]  # new pages of all granted rows
    copied: Bool[Array, "batch"]  # the tail page is shared and must be copied
    tail: Int32[Array, "batch"]  # that page


def scramble(counter: UInt32[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """A bijection of uint32 after which neighbours differ in about half their bits.

    Xor-shifts and odd multipliers, each of which can be undone: "lowbias32" of C. Wellons' hash-prospector.
    """
    x = counter ^ (counter >> 16)
    x = x * jnp.uint32(0x7FEB352D)
    x = x ^ (x >> 15)
    x = x * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def pages_needed(lengths: Int32[Array, "*shape"], page_size: int) -> Int32[Array, "*shape"]:
    """Pages that hold so many tokens."""
    return lengths // page_size + (lengths % page_size > 0)


def matches(
    state: AllocatorState, pages: Int32[Array, "*shape"], tags: UInt32[Array, "*shape"]
) -> Bool[Array, "*shape"]:
    """Whether each page exists, has an owner, and still carries the tag that was given with it."""
    exists, page = in_range(pages, state.num_pages)
    return exists & (state.reference_counts[page] > 0) & (state.page_tags[page] == tags)


def is_empty(state: AllocatorState, slots: Int32[Array, "batch"]) -> Bool[Array, "batch"]:
    """Whether each slot exists and holds no page and no token."""
    exists, row = in_range(slots, state.num_slots)
    return exists & (state.lengths[row] == 0) & jnp.all(state.page_table[row] == INVALID, axis=1)


def open_slots(state: AllocatorState, slots: Int32[Array, "batch"]) -> tuple[AllocatorState, Bool[Array, "batch"]]:
    """Give empty slots a fresh slot tag. Returns the state and which rows were opened.

    Refused: an INVALID slot, one that still holds pages (release it first), one named earlier in the same
    call.
    """
    opened = is_empty(state, slots) & ~repeated(slots)
    return _renew(state, slots, opened), opened


def append(
    state: AllocatorState,
    slots: Int32[Array, "batch"],
    counts: Int32[Array, "batch"],
    *,
    max_new_pages: int | None = None,
) -> tuple[AllocatorState, Grant]:
    """Make room for `counts` more tokens in each slot and advance its length.

    A row is granted all it asks for or nothing. Rows are served in order: the first that finds too few free
    pages is refused, and with it each later row that needs a page. Also refused: an INVALID slot, a negative
    count, a slot named earlier in the same call, a length beyond the slot's M pages, a partly filled last
    page that is no longer the slot's own (its tag differs). A partly filled last page that another slot
    shares is replaced by a fresh one, and the copy is reported in the `Grant`.

    `max_new_pages` (static) bounds the new pages of a row, a copy counted; a row that needs more is refused.
    A decode step passes 1, which makes the call cheap.
    """
    limit = state.max_pages_per_slot if max_new_pages is None else min(max_new_pages, state.max_pages_per_slot)
    with jax.named_scope("allocator_append"):
        plan = _plan(state, slots, counts, limit)
        return _commit(state, plan, limit)


def allocate(
    state: AllocatorState,
    slots: Int32[Array, "batch"],
    counts: Int32[Array, "batch"],
    *,
    max_new_pages: int | None = None,
) -> tuple[AllocatorState, Grant]:
    """`open_slots` and `append` as one: a row refused by either leaves its slot as it was, unopened."""
    vacant = jnp.where(is_empty(state, slots), slots, INVALID)
    state, grant = append(state, vacant, counts, max_new_pages=max_new_pages)
    return _renew(state, slots, grant.granted), grant


def fork(
    state: AllocatorState, source: Int32[Array, "batch"], target: Int32[Array, "batch"]
) -> tuple[AllocatorState, Bool[Array, "batch"]]:
    """Let each target slot share all pages of its source, at the same length and under a fresh slot tag.

    Refused: an INVALID slot, a target that is not empty or is named earlier in the same call, a source that
    is the target of any row of the call, a source with a page that is no longer its own. One source may serve
    several targets.
    """
    exists, row = in_range(source, state.num_slots)
    pages, tags, length = state.page_table[row], state.expected_tags[row], state.lengths[row]
    covered = jnp.arange(state.max_pages_per_slot) < pages_needed(length, state.page_size)[:, None]
    sound = jnp.all(jnp.where(covered, matches(state, pages, tags), pages == INVALID), axis=1)
    sound &= (length >= 0) & (length <= state.capacity)
    is_target = jnp.any(source[:, None] == target[None, :], axis=1)
    granted = exists & sound & ~is_target & is_empty(state, target) & ~repeated(target)

    slot = jnp.where(granted, target, state.num_slots)
    page = jnp.where(granted[:, None] & covered, pages, state.num_pages)
    state = replace(
        state,
        reference_counts=state.reference_counts.at[page].add(1, mode="drop"),
        page_table=state.page_table.at[slot].set(pages, mode="drop"),
        expected_tags=state.expected_tags.at[slot].set(tags, mode="drop"),
        lengths=state.lengths.at[slot].set(length, mode="drop"),
    )
    return _renew(state, target, granted), granted


def release(
    state: AllocatorState,
    slots: Int32[Array, "batch"],
    slot_tags: UInt32[Array, "batch"] | None = None,
) -> AllocatorState:
    """Empty each slot, drop its references, free the pages without any. The one way back to the free list.

    Only entries whose page has references and carries the expected tag count, so a stale or damaged entry
    frees nothing. The slot tag changes. A slot named twice counts once; releasing an empty slot changes its
    slot tag and nothing else. With `slot_tags`, a slot that has another tag by now (the request is long gone)
    is left alone. INVALID slots are ignored.
    """
    exists, row = in_range(slots, state.num_slots)
    if slot_tags is not None:
        exists &= state.slot_tags[row] == slot_tags
    released = exists & ~repeated(jnp.where(exists, slots, INVALID))
    pages = state.page_table[row]
    held = released[:, None] & matches(state, pages, state.expected_tags[row])
    state = drop_references(state, once_a_row(jnp.where(held, pages, state.num_pages), state.num_pages))

    slot = jnp.where(released, slots, state.num_slots)
    state = replace(
        state,
        page_table=state.page_table.at[slot].set(INVALID, mode="drop"),
        expected_tags=state.expected_tags.at[slot].set(jnp.uint32(0), mode="drop"),
        lengths=state.lengths.at[slot].set(0, mode="drop"),
    )
    return _renew(state, slots, released)


def positions_to_pages(
    state: AllocatorState, slots: Int32[Array, "batch"], positions: Int32[Array, "batch time"]
) -> tuple[Int32[Array, "batch time"], Int32[Array, "batch time"]]:
    """The page of each position of a slot (tokens from 0), and the offset within the page.

    Both are INVALID for a position that the slot's length does not cover, an INVALID slot, or an entry that
    names no page, so that `pages.write` drops it. Tags are not looked at: `integrity.verify` does that for
    the whole slot.
    """
    exists, row = in_range(slots, state.num_slots)
    length = jnp.minimum(state.lengths[row], state.capacity)
    covered = exists[:, None] & (positions >= 0) & (positions < length[:, None])
    position = jnp.where(covered, positions, 0)
    page = state.page_table[row[:, None], position // state.page_size]
    covered &= (page >= 0) & (page < state.num_pages)
    return jnp.where(covered, page, INVALID), jnp.where(covered, position % state.page_size, INVALID)


def in_range(index: Int32[Array, "*shape"], size: int) -> tuple[Bool[Array, "*shape"], Int32[Array, "*shape"]]:
    """Whether each index is within 0..size-1, and the index, 0 where it is not."""
    valid = (index >= 0) & (index < size)
    return valid, jnp.where(valid, index, 0)


def repeated(index: Int32[Array, "batch"]) -> Bool[Array, "batch"]:
    """Whether each entry has occurred earlier in the array: compared in pairs where there are few, as in a decode step,
    or else sorted."""
    if index.shape[0] > 1024:
        order = jnp.argsort(index, stable=True)
        again = index[order[1:]] == index[order[:-1]]
        return jnp.zeros(index.shape, bool).at[order[1:]].set(again)
    return jnp.any(jnp.tril(index[:, None] == index[None, :], k=-1), axis=1)


def _renew(state: AllocatorState, slots: Int32[Array, "batch"], chosen: Bool[Array, "batch"]) -> AllocatorState:
    """Give the chosen rows, distinct slots, the next slot tags in order."""
    count = jnp.cumsum(chosen, dtype=jnp.uint32)
    tags = scramble(state.next_slot_tag + count - 1)
    slot = jnp.where(chosen, slots, state.num_slots)
    return replace(
        state,
        slot_tags=state.slot_tags.at[slot].set(tags, mode="drop"),
        next_slot_tag=state.next_slot_tag + count[-1],
    )


def _plan(state: AllocatorState, slots: Int32[Array, "batch"], counts: Int32[Array, "batch"], limit: int) -> _Plan:
    """Decide which rows of an append are granted, as if they were served one after the other.

    Rows that share a tail page in one call: the first ones copy and each copy drops a reference; the last
    holder keeps the page. That is known without a loop because if a row that needs a page is granted, so are
    all such rows before it.
    """
    valid, row = in_range(slots, state.num_slots)
    length = state.lengths[row]
    valid &= ~repeated(slots) & (length >= 0) & (counts >= 0) & (counts <= state.capacity - length)
    length = jnp.where(valid, length, 0)
    counts = jnp.where(valid, counts, 0)
    held = pages_needed(length, state.page_size)
    fresh = pages_needed(length + counts, state.page_size) - held

    partial = (length % state.page_size > 0) & (counts > 0)
    column = jnp.maximum(held - 1, 0)
    tail = state.page_table[row, column]
    valid &= ~partial | matches(state, tail, state.expected_tags[row, column])
    references = state.reference_counts[jnp.where(valid & partial, tail, 0)]
    shared = partial & (references > 1)
    valid &= fresh + shared <= limit
    shared &= valid
    before = jnp.tril(shared[:, None] & shared[None, :] & (tail[:, None] == tail[None, :]), k=-1)
    copied = shared & (references - jnp.sum(before, axis=1, dtype=jnp.int32) > 1)

    need = jnp.where(valid, fresh + copied, 0)
    total = jnp.cumsum(need, dtype=jnp.int32)
    fits = total <= _available(state, slots.shape[0] * limit)
    still_shared = jnp.any(before & ~fits[None, :], axis=1)
    granted = valid & jnp.where(need > 0, fits, ~still_shared)
    start = held - copied
    taken = jnp.sum(jnp.where(granted, need, 0), dtype=jnp.int32)
    return _Plan(granted, row, length + counts, start, need, total - need, taken, copied & granted, tail)


def _available(state: AllocatorState, most: int) -> Int32[Array, ""]:
    """How many of the next `most` pages of the stack can be handed out: up to the first that does not exist, has an
    owner or was named before, none of which a sound free list has (faults 21 and 22: such a page is never handed out).
    """
    place = jnp.arange(min(most, state.num_pages), dtype=jnp.int32)
    listed, index = in_range(state.free_count - 1 - place, state.num_pages)
    exists, page = in_range(state.free_list[index], state.num_pages)
    good = listed & exists & (state.reference_counts[page] == 0) & ~repeated(page)
    return jnp.sum(jnp.cumprod(good, dtype=jnp.int32), dtype=jnp.int32)


def _commit(state: AllocatorState, plan: _Plan, limit: int) -> tuple[AllocatorState, Grant]:
    """Carry out the granted rows of a plan: pop pages, tag them, enter them in the table, list the copies."""
    batch = plan.granted.shape[0]
    new = jnp.arange(limit, dtype=jnp.int32)
    taken = plan.granted[:, None] & (new < plan.need[:, None])
    order = plan.order[:, None] + new
    page = state.free_list[jnp.where(taken, state.free_count - 1 - order, 0)]
    tag = scramble(state.next_tag + order.astype(jnp.uint32))

    at_page = jnp.where(taken, page, state.num_pages)
    at_slot = jnp.where(taken, plan.row[:, None], state.num_slots)
    column = plan.start[:, None] + new
    references = state.reference_counts.at[at_page].set(1, mode="drop")
    references = references.at[jnp.where(plan.copied, plan.tail, state.num_pages)].add(-1, mode="drop")
    granted_slot = jnp.where(plan.granted, plan.row, state.num_slots)
    new_state = replace(
        state,
        free_count=state.free_count - plan.total,
        page_tags=state.page_tags.at[at_page].set(tag, mode="drop"),
        reference_counts=references,
        next_tag=state.next_tag + plan.total.astype(jnp.uint32),
        page_table=state.page_table.at[at_slot, column].set(page, mode="drop"),
        expected_tags=state.expected_tags.at[at_slot, column].set(tag, mode="drop"),
        lengths=state.lengths.at[granted_slot].set(plan.length, mode="drop"),
    )
    rank = jnp.cumsum(plan.copied, dtype=jnp.int32)
    place = jnp.where(plan.copied, rank - 1, batch)
    none = jnp.full(batch, INVALID, jnp.int32)
    source = none.at[place].set(plan.tail, mode="drop")
    target = none.at[place].set(page[:, 0], mode="drop")
    return new_state, Grant(plan.granted, source, target, rank[-1])


def once_a_row(pages: Int32[Array, "batch columns"], nothing: int) -> Int32[Array, "batch columns"]:
    """The same pages, sorted in each row, with every repeat within a row replaced by `nothing`."""
    ordered = jnp.sort(pages, axis=1)
    repeat = jnp.pad(ordered[:, 1:] == ordered[:, :-1], ((0, 0), (1, 0)))
    return jnp.where(repeat, nothing, ordered)


def drop_references(state: AllocatorState, pages: Int32[Array, "batch columns"]) -> AllocatorState:
    """Drop one reference for every entry and push the pages that have none left. Entries of P are ignored.

    A page that several entries drop is pushed once, by the first of them.
    """
    pages = pages.reshape(-1)
    entry = jnp.arange(pages.shape[0], dtype=jnp.int32)
    dropped = pages < state.num_pages
    page = jnp.where(dropped, pages, 0)
    references = state.reference_counts.at[pages].add(-1, mode="drop").at[pages].max(0, mode="drop")
    first = jnp.full(state.num_pages, pages.shape[0], jnp.int32).at[pages].min(entry, mode="drop")
    freed = dropped & (references[page] == 0) & (first[page] == entry)
    count = jnp.cumsum(freed, dtype=jnp.int32)
    place = jnp.where(freed, state.free_count + count - 1, state.num_pages)
    return replace(
        state,
        reference_counts=references,
        free_list=state.free_list.at[place].set(pages, mode="drop"),
        free_count=state.free_count + count[-1],
    )
