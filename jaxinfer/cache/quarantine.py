"""After a check failed: no page of the failing slot, and no page that nobody owns, is lost or trusted.

A damaged table can't say which pages a slot had. So nothing of it is used: the books are written anew from the entries
that verify. A page without a good entry that was not properly free is *quarantined*: out of the free list, under a new
tag that no old entry matches, its bytes overwritten with zeros in every layer and kind, and only then free again, at
the bottom of the free list, where it is handed out last. All of this is one program: no step runs in between.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jaxinfer.cache.allocator import INVALID, AllocatorState, once_a_row, scramble
from jaxinfer.cache.kv import KVCache
from jaxinfer.cache.pages import Pool


def restore(
    state: AllocatorState,
    cache: KVCache,
    slots: Int32[Array, "batch"],
    kept: Bool[Array, "pages"] | None = None,
) -> tuple[AllocatorState, KVCache, Int32[Array, ""]]:
    """Empty the failed `slots` (INVALID: none) and recount every page. Returns how many pages went through quarantine.

    Afterwards the invariants 1 and 2 of `allocator` hold whatever the damage was: each page is free or has as many
    references as good entries, and one more where it is kept. Slots that are not named keep their rows; one that is
    damaged as well and has not been found yet fails at its next check. A slot named twice counts once. `kept` is what
    the prefix cache holds, whatever became of the state's own record.
    """
    state = _empty(state, slots)
    state = state if kept is None else replace(state, kept=kept)
    holders = _holders(state)
    unowned = holders == 0
    orphan = unowned & ~(_listed(state) & (state.reference_counts == 0))
    count = jnp.sum(orphan, dtype=jnp.int32)
    tags = scramble(state.next_tag + jnp.cumsum(orphan, dtype=jnp.uint32) - 1)
    # Quarantined pages first, then the free ones: the top of the stack, its end, is used first.
    order = jnp.argsort(jnp.where(orphan, 0, jnp.where(unowned, 1, 2)), stable=True).astype(jnp.int32)
    state = replace(
        state,
        free_list=order,
        free_count=jnp.sum(unowned, dtype=jnp.int32),
        page_tags=jnp.where(orphan, tags, state.page_tags),
        reference_counts=holders,
        next_tag=state.next_tag + count.astype(jnp.uint32),
    )
    return state, replace(cache, entries=_wiped(cache.entries, order, count)), count


def _empty(state: AllocatorState, slots: Int32[Array, "batch"]) -> AllocatorState:
    """The slots without pages or tokens; the pages are left to the recount."""
    slot = jnp.where(slots >= 0, slots, state.num_slots)
    return replace(
        state,
        page_table=state.page_table.at[slot].set(INVALID, mode="drop"),
        expected_tags=state.expected_tags.at[slot].set(jnp.uint32(0), mode="drop"),
        lengths=state.lengths.at[slot].set(0, mode="drop"),
    )


def _holders(state: AllocatorState) -> Int32[Array, "pages"]:
    """Slots that hold each page under the tag it carries, and the prefix cache, whatever its reference count says."""
    exists = (state.page_table >= 0) & (state.page_table < state.num_pages)
    good = exists & (state.page_tags[jnp.where(exists, state.page_table, 0)] == state.expected_tags)
    pages = once_a_row(jnp.where(good, state.page_table, state.num_pages), state.num_pages)
    return state.kept.astype(jnp.int32).at[pages.reshape(-1)].add(1, mode="drop")


def _listed(state: AllocatorState) -> Bool[Array, "pages"]:
    """Pages that the free list names."""
    valid = (jnp.arange(state.num_pages) < state.free_count) & (state.free_list >= 0)
    page = jnp.where(valid, state.free_list, state.num_pages)
    return jnp.zeros(state.num_pages, bool).at[page].set(True, mode="drop")


def _wiped(entries: Pool, pages: Int32[Array, "pages"], count: Int32[Array, ""]) -> Pool:
    """Zeros in the first `count` of `pages`, in place when the pool is donated."""

    def wipe(i: Int32[Array, ""], entries: Pool) -> Pool:
        blank = lambda pool: jnp.zeros((pool.shape[0], 1, *pool.shape[2:]), pool.dtype)  # noqa: E731
        return {
            kind: jax.lax.dynamic_update_slice_in_dim(pool, blank(pool), pages[i], axis=1)
            for kind, pool in entries.items()
        }

    with jax.named_scope("quarantine"):
        return jax.lax.fori_loop(0, count, wipe, entries)
