"""What runs on the device while serving: `admit_step`, `prefill_step`, `verify_step`, `decode_step`, `release_step`;
for what failed its check: `audit_step`, `quarantine_step`; for prompts that begin alike: `keep_step`, `adopt_step`,
`drop_step`; and between a prefill and a decode worker: `export_step`, `claim_step`, `insert_step`.

Each is a pure function of a `ServingState` that returns the next one. They are jitted by `engine.programs` with
shardings and donation, for a few shapes, before the first request.

Letters: B rows of a decode batch, R rows and T tokens of a prefill chunk, S slots, V vocabulary.
"""

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, Shaped, UInt32

from jaxinfer.cache import INVALID, AllocatorState, allocator, digest, integrity, owners, quarantine, sharing
from jaxinfer.cache.digest import Digests
from jaxinfer.cache.kv import KVCache
from jaxinfer.cache.owners import Owners
from jaxinfer.cache.sharing import Hold
from jaxinfer.config import ModelConfig
from jaxinfer.models.attention import PagedContext
from jaxinfer.models.decoder import Params, bind
from jaxinfer.quantization.formats import KVFormat
from jaxinfer.sampling import Logprobs, SamplingState, log_probabilities, sample

OK, MISMATCH, NO_PAGE = 0, 1, 2


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ServingState:
    """Everything on the device that changes while serving. `owners` is kept from the level `tags` on, `digests` at the
    level `digest`; what is None costs nothing."""

    cache: KVCache
    allocator: AllocatorState
    sampling: SamplingState
    owners: Owners | None = None
    digests: Digests | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepOutput:
    """What a step gives each row: `status` (OK, MISMATCH: its check failed, NO_PAGE: none was free), the new
    token (INVALID unless the row is OK and has one), log-probabilities, and the logits it was drawn from; the last two
    only where a token can be drawn."""

    status: Int32[Array, " B"]
    tokens: Int32[Array, " B"]
    logprobs: Logprobs | None = None
    logits: Float[Array, "B V"] | None = None


def admit_step(
    state: ServingState, slots: Int32[Array, " S"], rows: SamplingState, requests: Int32[Array, " S"] | None = None
) -> ServingState:
    """Open empty `slots` (INVALID: none) for new requests that sample as `rows` says. `requests` are their numbers, for
    the record of a page's owners."""
    pages, opened = allocator.open_slots(state.allocator, slots)
    target = jnp.where(opened, slots, pages.num_slots)
    tags = pages.slot_tags[jnp.where(opened, slots, 0)]
    rows = dataclasses.replace(rows, owner_tags=tags)
    sampling = jax.tree.map(lambda all, new: all.at[target].set(new, mode="drop"), state.sampling, rows)
    state = dataclasses.replace(state, allocator=pages, sampling=sampling)
    opened_slots = jnp.where(opened, slots, INVALID)
    if state.owners is not None and requests is not None:
        state = dataclasses.replace(state, owners=owners.open_slots(state.owners, opened_slots, requests))
    if state.digests is not None:
        state = dataclasses.replace(state, digests=digest.open_slots(state.digests, opened_slots))
    return state


def release_step(state: ServingState, slots: Int32[Array, " S"]) -> ServingState:
    """Give back the pages of `slots` (INVALID: none)."""
    return dataclasses.replace(state, allocator=allocator.release(state.allocator, slots))


def verify_step(state: ServingState, slots: Int32[Array, " B"]) -> Bool[Array, " B"]:
    """Whether each slot still is the request's and owns every page that its length covers: checked before any read.
    With digests, also whether the pages whose turn it is hold what was written to them."""
    tags = state.sampling.owner_tags[jnp.maximum(slots, 0)]
    verified = integrity.verify(state.allocator, slots, tags)
    if state.digests is not None:
        verified &= digest.verify(state.digests, state.cache, state.allocator, slots)
    return verified


def audit_step(state: ServingState, slot: Int32[Array, ""]) -> Bool[Array, " M"]:
    """Whether each page of one slot holds what was written to it; True throughout without digests."""
    if state.digests is None:
        return jnp.ones(state.allocator.max_pages_per_slot, bool)
    return digest.audit(state.digests, state.cache, state.allocator, slot)


def quarantine_step(
    state: ServingState,
    slots: Int32[Array, " S"],
    scales: dict[str, Float[Array, " L"]],
    kept: Bool[Array, " P"] | None = None,
) -> tuple[ServingState, Int32[Array, ""]]:
    """Empty `slots` (INVALID: none) whose check failed, and put the books in order (`quarantine.restore`). Returns how
    many pages had to be set aside. `scales` are those of the start, whatever became of the ones in use; `kept` are the
    pages that the prefix cache has."""
    pages, cache, count = quarantine.restore(state.allocator, state.cache, slots, kept)
    cache = dataclasses.replace(cache, scales=scales)
    return dataclasses.replace(state, allocator=pages, cache=cache), count


def keep_step(
    state: ServingState, slot: Int32[Array, ""], count: Int32[Array, ""]
) -> tuple[ServingState, Hold]:
    """Take a hold of the first `count` whole pages of a slot for the prefix cache: arrays [M]."""
    pages, hold = sharing.keep(state.allocator, slot[None], count[None])
    return dataclasses.replace(state, allocator=pages), Hold(*(a[0] for a in hold))


def adopt_step(
    state: ServingState, slot: Int32[Array, ""], pages: Int32[Array, " M"], tags: UInt32[Array, " M"]
) -> tuple[ServingState, Bool[Array, " M"]]:
    """Give kept `pages` (INVALID behind the last) to a slot, if each of them still is what it was kept as. Returns
    which are; nothing changes unless all are."""
    none = pages == INVALID
    good = none | allocator.matches(state.allocator, pages, tags)
    if state.digests is not None:
        rows = jnp.where(none, 0, state.allocator.page_size)
        good &= digest.holds(state.digests, state.cache, pages, rows)
    slots = jnp.where(jnp.all(good), slot, INVALID)[None]
    before = state.allocator.page_table[jnp.maximum(slots, 0)]
    books, granted = sharing.adopt(state.allocator, slots, pages[None], tags[None])
    state = dataclasses.replace(state, allocator=books)
    if state.owners is not None:
        new = jnp.where(granted[:, None] & (pages != before), pages, INVALID)
        state = dataclasses.replace(state, owners=owners.enter(state.owners, slots, new))
    return state, jnp.where(jnp.all(good), granted, good)


def drop_step(state: ServingState, pages: Int32[Array, " M"], tags: UInt32[Array, " M"]) -> ServingState:
    """Let go of kept `pages` (INVALID: none) that still carry the tags."""
    return dataclasses.replace(state, allocator=sharing.drop(state.allocator, pages, tags))


def decode_step(
    config: ModelConfig,
    dtype,
    logprobs: int,
    params: Params,
    state: ServingState,
    slots: Int32[Array, " B"],
    verified: Bool[Array, " B"],
) -> tuple[ServingState, StepOutput]:
    """One more token for each of `slots`. A row that is not `verified` reads no page, writes none and gets no token."""
    ones = jnp.where(slots >= 0, 1, 0)
    tokens = state.sampling.last_token[jnp.maximum(slots, 0)][:, None]
    return _advance(
        config, dtype, logprobs, params, state, slots, tokens, ones, ones > 0, verified, max_new_pages=1
    )


def prefill_step(
    config: ModelConfig,
    dtype,
    logprobs: int,
    params: Params,
    state: ServingState,
    slots: Int32[Array, " R"],
    tokens: Int32[Array, "R T"],
    counts: Int32[Array, " R"],
    last: Bool[Array, " R"],
    verified: Bool[Array, " R"],
) -> tuple[ServingState, StepOutput]:
    """The next `counts` tokens of each prompt, from the front of its row of `tokens`; a `last` chunk gives the first
    token. Earlier chunks are read from pages, so rows are verified here too."""
    pages = -(-tokens.shape[1] // state.allocator.page_size) + 1
    return _advance(
        config, dtype, logprobs, params, state, slots, tokens, counts, last, verified, max_new_pages=pages
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Block:
    """KV of some tokens of one request on its way to another pool: rows of every kind, in the format of that pool; the
    digest of those bytes; and whether the pages they were read from were still the request's (`sound`)."""

    entries: dict[str, Shaped[Array, "layers T width"]]
    digest: UInt32[Array, ""]
    sound: Bool[Array, ""]


def export_step(
    format: KVFormat,
    tokens: int,
    state: ServingState,
    slot: Int32[Array, ""],
    start: Int32[Array, ""],
    scales: dict[str, Float[Array, " L"]],
) -> Block:
    """The KV of `tokens` tokens of a slot from `start` (a whole number of pages) on, checked as before any read."""
    pages = state.allocator
    columns = start // pages.page_size + jnp.arange(tokens // pages.page_size, dtype=jnp.int32)
    page = jnp.where(columns < pages.max_pages_per_slot, pages.page_table[slot, columns], INVALID)
    sound = verify_step(state, slot[None])[0]
    count = jnp.where(sound, jnp.clip(pages.lengths[slot] - start, 0, tokens), 0)
    entries = state.cache.extract(page, count, format, scales)
    return Block(entries, digest.of_block(entries), sound)


def claim_step(state: ServingState, slots: Int32[Array, " B"]) -> UInt32[Array, " B"]:
    """The tags under which requests have their slots now: what an `insert_step` must show later."""
    return state.sampling.owner_tags[jnp.maximum(slots, 0)]


def insert_step(
    state: ServingState,
    slots: Int32[Array, " 1"],
    tags: UInt32[Array, " 1"],
    start: Int32[Array, ""],
    count: Int32[Array, ""],
    block: Block,
) -> tuple[ServingState, StepOutput]:
    """Put the next `count` tokens of a request into the pages of its slot.

    The slot must still carry the tag that it had when the KV was asked for, own its pages, and be at `start`: what
    comes late, twice, out of order or for another request takes no page and writes nothing (faults 2 and 23). With
    digests the bytes must also be those that were sent (fault 4).
    """
    before = state.allocator.lengths[jnp.maximum(slots, 0)]
    sound = block.sound & integrity.verify(state.allocator, slots, tags) & (before == start)
    if state.digests is not None:
        sound &= digest.of_block(block.entries) == block.digest
    tokens = next(iter(block.entries.values())).shape[1]
    limit = tokens // state.allocator.page_size
    pages, grant = allocator.append(
        state.allocator, jnp.where(sound, slots, INVALID), count[None], max_new_pages=limit
    )
    live = jnp.where(grant.granted, slots, INVALID)
    context = _context(pages, live, before, count[None], tokens)
    state = dataclasses.replace(state, allocator=pages, cache=state.cache.store(context, block.entries))
    status = jnp.where(sound, jnp.where(grant.granted, OK, NO_PAGE), MISMATCH)
    return _record(state, live, grant, context), StepOutput(status, jnp.full(1, INVALID, jnp.int32))


def _advance(config, dtype, logprobs, params, state, slots, tokens, counts, emits, verified, max_new_pages):
    before = state.allocator.lengths[jnp.maximum(slots, 0)]
    pages, grant = allocator.append(
        state.allocator, jnp.where(verified, slots, INVALID), counts, max_new_pages=max_new_pages
    )
    cache = state.cache.copy_pages(grant.copy_source, grant.copy_target, grant.copies)
    live = jnp.where(grant.granted, slots, INVALID)
    context = _context(pages, live, before, counts, tokens.shape[1])
    hidden, cache = bind(config, params).paged(tokens, context, cache, dtype)
    final = jnp.take_along_axis(hidden, jnp.maximum(counts - 1, 0)[:, None, None], axis=1)[:, 0]
    logits = bind(config, params).logits(final)
    with jax.named_scope("sample"):
        rows = jax.tree.map(lambda a: a[jnp.maximum(slots, 0)], state.sampling)
        new = sample(logits, rows)
        chances = log_probabilities(logits, new, jnp.where(live >= 0, rows.logprobs, 0), logprobs)
    has_token = grant.granted & emits
    sampling = _note_tokens(state.sampling, jnp.where(has_token, slots, INVALID), new)
    status = jnp.where(verified, jnp.where(grant.granted, OK, NO_PAGE), MISMATCH)
    output = StepOutput(status, jnp.where(has_token, new, INVALID), chances, logits)
    after = dataclasses.replace(state, cache=cache, allocator=pages, sampling=sampling)
    return _record(after, live, grant, context), output


def _record(state: ServingState, live: Int32[Array, " B"], grant: allocator.Grant, context: PagedContext):
    """Keep the books of the pages that a step wrote to, as far as the level asks for them."""
    if state.owners is not None:
        state = dataclasses.replace(state, owners=owners.record(state.owners, live, context.pages, context.offsets))
    if state.digests is not None:
        digests = digest.record(state.digests, state.cache, grant, context.pages, context.offsets)
        state = dataclasses.replace(state, digests=digest.rotate(digests, state.allocator, live))
    return state


def _context(pages: AllocatorState, live, before, counts, tokens: int) -> PagedContext:
    """Positions and pages of the new tokens. Rows without a live slot are padding throughout."""
    offset = jnp.arange(tokens)
    new = (offset < counts[:, None]) & (live >= 0)[:, None]
    positions = jnp.where(new, before[:, None] + offset, INVALID)
    page, place = allocator.positions_to_pages(pages, live, positions)
    row = jnp.maximum(live, 0)
    table = jnp.where((live >= 0)[:, None], pages.page_table[row], INVALID)
    return PagedContext(positions, page, place, table, jnp.where(live >= 0, pages.lengths[row], 0))


def _note_tokens(sampling: SamplingState, slots, tokens) -> SamplingState:
    target = jnp.where(slots >= 0, slots, sampling.emitted.shape[0])
    return dataclasses.replace(
        sampling,
        last_token=sampling.last_token.at[target].set(tokens, mode="drop"),
        emitted=sampling.emitted.at[target].add(1, mode="drop"),
    )
