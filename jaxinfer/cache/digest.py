"""Digests of pages: whether the bytes that a page holds are those that were written to it.

Tags say whose page it is; a digest says what is in it. It is taken over the stored bytes of a page in every layer and
kind, kept for each physical page, and brought up to date by every step that writes, so that a page is covered from its
first token on. Each row (one token, one layer, one kind) is read as 32-bit words:

    row    = sum over words w of scramble(word ^ scramble(w))
    digest = sum over rows of scramble(row ^ scramble(place)), place = (kind, layer, offset in the page)

both modulo 2^32, where `scramble` is the bijection of the tags. A sum can grow by a row at a time, and the places in it
make it depend on the order. Because each summand is a bijection of its word, a change within one word (any number of
its bits) always changes the digest; of other changes, such as two words or two rows exchanged or a page replaced, one
in 2^32 is missed. It is no defence against somebody who chooses the bytes.

What it can't catch: what was computed wrongly before it was stored, and a right page read wrongly.

Letters: L layers, P pages, N entries of a call, S slots, W words of a row.
"""

import dataclasses
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32, Shaped, UInt32

from jaxinfer.cache.allocator import INVALID, AllocatorState, Grant, pages_needed, scramble
from jaxinfer.cache.kv import KVCache
from jaxinfer.cache.pages import Pool

BLOCK = 8  # pages that `audit` reads at a time


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Digests:
    """What is known of the contents of the pool. `values` and `rows`: each page's digest and the tokens in it;
    `cursors`: the column of each slot that is checked next; `scales`: one digest of the scales of all kinds, which
    belong to the contents as much as the bytes do. `sample` (static): pages of a slot that a step checks."""

    values: UInt32[Array, "pages"]
    rows: Int32[Array, "pages"]
    cursors: Int32[Array, "slots"]
    scales: UInt32[Array, ""]
    sample: int = field(metadata={"static": True})

    @classmethod
    def create(cls, cache: KVCache, num_slots: int, sample: int) -> "Digests":
        """Of an empty pool."""
        num_pages = next(iter(cache.entries.values())).shape[1]
        return cls(
            jnp.zeros(num_pages, jnp.uint32),
            jnp.zeros(num_pages, jnp.int32),
            jnp.zeros(num_slots, jnp.int32),
            of_scales(cache),
            sample,
        )


# ---- what a digest is


def of_pages(entries: Pool, pages: Int32[Array, "N"], rows: Int32[Array, "N"]) -> UInt32[Array, "N"]:
    """The digest of the first `rows` tokens of each page, from the bytes that are there now. A page that does not exist
    reads as zeros."""
    total = jnp.zeros(pages.shape, jnp.uint32)
    for kind, pool in enumerate(entries[name] for name in sorted(entries)):
        exists = (pages >= 0) & (pages < pool.shape[1])
        found = pool.at[:, jnp.where(exists, pages, pool.shape[1])].get(mode="fill", fill_value=0)
        offsets = jnp.arange(pool.shape[2], dtype=jnp.int32)
        each = jnp.where(offsets < rows[:, None], _placed(found, kind, offsets, pool.shape[2]), jnp.uint32(0))
        total += jnp.sum(each, axis=(0, 2), dtype=jnp.uint32)
    return total


def of_rows(entries: Pool, pages: Int32[Array, "N"], offsets: Int32[Array, "N"]) -> UInt32[Array, "N"]:
    """What the token at each (page, offset) adds to the digest of its page."""
    total = jnp.zeros(pages.shape, jnp.uint32)
    for kind, pool in enumerate(entries[name] for name in sorted(entries)):
        found = pool.at[:, jnp.where(pages >= 0, pages, pool.shape[1]), offsets].get(mode="fill", fill_value=0)
        total += jnp.sum(_placed(found, kind, offsets, pool.shape[2]), axis=0, dtype=jnp.uint32)
    return total


def of_block(entries: dict[str, Shaped[Array, "L T width"]]) -> UInt32[Array, ""]:
    """One digest of T tokens of every kind and layer on their way between pools."""
    total = jnp.uint32(0)
    for kind, rows in enumerate(entries[name] for name in sorted(entries)):
        tokens = rows.shape[1]
        total += jnp.sum(_placed(rows, kind, jnp.arange(tokens, dtype=jnp.int32), tokens), dtype=jnp.uint32)
    return total


def of_scales(cache: KVCache) -> UInt32[Array, ""]:
    """One digest of the scales of every kind and layer."""
    together = jnp.concatenate([cache.scales[name] for name in sorted(cache.scales)])
    return _of_words(_words(together[None]))[0]


def intact(
    entries: Pool, pages: Int32[Array, "N"], rows: Int32[Array, "N"], expected: UInt32[Array, "N"]
) -> Bool[Array, "N"]:
    """Whether the first `rows` tokens of each page have the digest that is expected of them: the one comparison for
    pages that are about to be trusted, in rotation, at the end of a request, on reuse, or when they arrive from
    elsewhere with the digest that their sender took."""
    return of_pages(entries, pages, rows) == expected


def _placed(found: Shaped[Array, "L *N width"], kind: int, offsets, page_size: int) -> UInt32[Array, "L *N"]:
    """The summand of each row, with its kind, layer and offset in it."""
    layers = found.shape[0]
    layer = jnp.arange(layers, dtype=jnp.uint32).reshape(layers, *[1] * (found.ndim - 2))
    place = (kind * layers + layer) * page_size + jnp.maximum(offsets, 0).astype(jnp.uint32)
    return scramble(_of_words(_words(found)) ^ scramble(place))


def _of_words(words: UInt32[Array, "*N W"]) -> UInt32[Array, "*N"]:
    places = scramble(jnp.arange(words.shape[-1], dtype=jnp.uint32))
    return jnp.sum(scramble(words ^ places), axis=-1, dtype=jnp.uint32)


def _words(rows: Shaped[Array, "*N width"]) -> UInt32[Array, "*N W"]:
    """The bytes of each row as 32-bit words, the last one filled up with zeros."""
    each = 4 // rows.dtype.itemsize
    if each > 1:
        rows = jnp.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, -rows.shape[-1] % each)])
        rows = rows.reshape(*rows.shape[:-1], -1, each)
    return jax.lax.bitcast_convert_type(rows, jnp.uint32)


# ---- keeping it


def record(
    digests: Digests, cache: KVCache, grant: Grant, pages: Int32[Array, "B T"], offsets: Int32[Array, "B T"]
) -> Digests:
    """After a step wrote its tokens to (`pages`, `offsets`), INVALID for none, and copied what `grant` lists.

    What is added is read back from the pool, so that it speaks of the bytes as they are stored.
    """
    with jax.named_scope("record_digests"):
        count = digests.values.shape[0]
        source, target = (jnp.where(p >= 0, p, count) for p in (grant.copy_source, grant.copy_target))
        copied = lambda a: a.at[target].set(a.at[source].get(mode="fill", fill_value=0), mode="drop")  # noqa: E731
        pages, offsets = pages.reshape(-1), offsets.reshape(-1)
        page = jnp.where(pages >= 0, pages, count)
        fresh = jnp.where(offsets == 0, page, count)  # the first token of a page that was just handed out
        added = of_rows(cache.entries, pages, offsets)
        values = copied(digests.values).at[fresh].set(jnp.uint32(0), mode="drop").at[page].add(added, mode="drop")
        rows = copied(digests.rows).at[fresh].set(0, mode="drop").at[page].add(1, mode="drop")
        return dataclasses.replace(digests, values=values, rows=rows)


def rotate(digests: Digests, state: AllocatorState, slots: Int32[Array, "B"]) -> Digests:
    """Move the cursor of each slot past the pages that this step checked, back to the first page after the last one.

    A page that a slot holds is therefore checked at least once in any `steps_to_check` steps of that slot.
    """
    row = jnp.maximum(slots, 0)
    after = digests.cursors[row] + digests.sample
    after = jnp.where(after < pages_needed(state.lengths[row], state.page_size), after, 0)
    target = jnp.where(slots >= 0, slots, digests.cursors.shape[0])
    return dataclasses.replace(digests, cursors=digests.cursors.at[target].set(after, mode="drop"))


def steps_to_check(max_pages_per_slot: int, sample: int) -> int:
    """Any so many steps of a slot check each of its pages at least once: one round over a slot that is full."""
    return -(-max_pages_per_slot // sample)


def open_slots(digests: Digests, slots: Int32[Array, "B"]) -> Digests:
    """Slots of new requests start at their first page."""
    target = jnp.where(slots >= 0, slots, digests.cursors.shape[0])
    return dataclasses.replace(digests, cursors=digests.cursors.at[target].set(0, mode="drop"))


# ---- checking it


def verify(digests: Digests, cache: KVCache, state: AllocatorState, slots: Int32[Array, "B"]) -> Bool[Array, "B"]:
    """Of each slot: whether its row of the page table and the tokens counted in its pages fit its length, the scales
    are those of the start, and the pages under its cursor hold what was written. False for an INVALID slot."""
    with jax.named_scope("verify_digests"):
        row = jnp.maximum(slots, 0)
        pages, rows, covered = _held(state, row)
        counted = jnp.where(pages >= 0, digests.rows[jnp.maximum(pages, 0)], 0)
        fits = jnp.all(counted == rows, axis=1) & jnp.all(covered | (pages == INVALID), axis=1)
        column = digests.cursors[row][:, None] + jnp.arange(digests.sample)
        last = pages_needed(state.lengths[row], state.page_size)[:, None] - 1
        column = jnp.clip(column, 0, jnp.maximum(last, 0))
        chosen = [jnp.take_along_axis(a, column, axis=1).reshape(-1) for a in (pages, rows)]
        expected = jnp.where(chosen[1] > 0, digests.values[jnp.maximum(chosen[0], 0)], jnp.uint32(0))
        good = intact(cache.entries, chosen[0], chosen[1], expected).reshape(column.shape)
        return (slots >= 0) & fits & jnp.all(good, axis=1) & (of_scales(cache) == digests.scales)


def audit(digests: Digests, cache: KVCache, state: AllocatorState, slot: Int32[Array, ""]) -> Bool[Array, "columns"]:
    """Whether each page of a slot holds what was written to it, all of them at once; True for columns without a page.

    Run before a request is told that it is complete: what the rotation has not reached is then checked too.
    """
    pages, rows, _ = (a[0] for a in _held(state, slot[None]))
    return holds(digests, cache, pages, rows)


def holds(digests: Digests, cache: KVCache, pages: Int32[Array, "columns"], rows: Int32[Array, "columns"]):
    """Whether each page [columns] holds what was written to its first `rows` tokens, and no more was. Pages without any
    come last and hold. They are read BLOCK at a time, only as many as there are."""
    columns = pages.shape[0]
    fill = -columns % BLOCK
    pages, rows = jnp.pad(pages, (0, fill), constant_values=INVALID), jnp.pad(rows, (0, fill))
    expected = jnp.where(rows > 0, digests.values[jnp.maximum(pages, 0)], jnp.uint32(0))

    def block(i: Int32[Array, ""], good: Bool[Array, "columns"]) -> Bool[Array, "columns"]:
        cut = [jax.lax.dynamic_slice_in_dim(a, i * BLOCK, BLOCK) for a in (pages, rows, expected)]
        return jax.lax.dynamic_update_slice_in_dim(good, intact(cache.entries, *cut), i * BLOCK, axis=0)

    with jax.named_scope("audit"):
        blocks = pages_needed(jnp.sum(rows > 0, dtype=jnp.int32), BLOCK)
        good = jax.lax.fori_loop(0, blocks, block, jnp.ones(columns + fill, bool))
        counted = jnp.where(pages >= 0, digests.rows[jnp.maximum(pages, 0)], 0) == rows
        return (good & counted)[:columns]


def _held(state: AllocatorState, slots: Int32[Array, "B"]):
    """Pages [B columns] of each slot, the tokens [B columns] that its length puts in them, and which it covers."""
    length = jnp.clip(state.lengths[slots], 0, state.capacity)[:, None]
    first = jnp.arange(state.max_pages_per_slot, dtype=jnp.int32) * state.page_size
    pages = state.page_table[slots]
    return pages, jnp.clip(length - first, 0, state.page_size), first < length
