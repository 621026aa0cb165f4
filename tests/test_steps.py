"""The serving steps: they compute what the plain model does, and nothing that a row does not own reaches it.

Slots hold texts over pages of 4 tokens. The same jitted steps serve all tests; states are never donated here, so that
one can be kept and compared.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.cache import INVALID, AllocatorState, allocator
from jaxinfer.cache.integrity import check_invariants
from jaxinfer.cache.kv import KVCache
from jaxinfer.config import GQAConfig, MLAConfig, ModelConfig, MoEConfig, RopeConfig
from jaxinfer.models.decoder import forward
from jaxinfer.quantization.formats import KVFormat
from jaxinfer.sampling import SamplingState
from jaxinfer.steps import (
    MISMATCH,
    NO_PAGE,
    OK,
    ServingState,
    admit_step,
    decode_step,
    prefill_step,
    release_step,
    verify_step,
)

PAGE, PAGES, SLOTS, COLUMNS, CHUNK, VOCAB, TOP = 4, 20, 4, 6, 8, 37, 3
NAN = {"f32": np.float32(np.nan), "bf16": np.uint16(0x7FC0), "fp8_e4m3": np.uint8(0x7F)}
TOLERANCE = 1e-4  # float32, logits of order 1

MLA = ModelConfig(
    name="latent",
    vocab=VOCAB,
    hidden=32,
    layers=2,
    dense_layers=1,
    dense_intermediate=48,
    attention=MLAConfig(heads=4, kv_lora=16, nope_dim=8, rope_dim=4, v_dim=8),
    moe=MoEConfig(experts=4, top_k=2, intermediate=16),
    rope=RopeConfig(interleaved=True),
    max_position=64,
)
GQA = MLA.replace(name="grouped", attention=GQAConfig(heads=4, kv_heads=2, head_dim=8))
NEITHER = np.full(SLOTS, INVALID, np.int32)


class Server:
    """The jitted steps of one model and KV format, and requests of random tokens."""

    def __init__(self, config: ModelConfig, kv: str, params):
        self.config, self.kv, self.params = config, kv, params
        make = lambda step: jax.jit(functools.partial(step, config, jnp.float32, TOP))  # noqa: E731
        self.decode_checked, self.prefill_checked = make(decode_step), make(prefill_step)
        self.tokens = np.random.default_rng(0).integers(0, VOCAB, (SLOTS, COLUMNS * PAGE)).astype(np.int32)

    def start(self, slots=range(SLOTS)) -> ServingState:
        """Fresh requests, drawing with a seed each, in `slots`."""
        scales = {kind: jnp.full(self.config.layers, 0.02) for kind in self.config.attention.entries}
        entries, format = self.config.attention.entries, KVFormat.parse(self.kv)
        cache = KVCache.create(entries, self.config.layers, PAGES, PAGE, format, scales)
        state = ServingState(cache, AllocatorState.create(PAGES, SLOTS, COLUMNS, PAGE), SamplingState.create(SLOTS))
        return admit(state, *request_rows(slots))

    def prefill(self, state, counts, last=True):
        """The next `counts` tokens of the texts of slots 0, 1, ...; 0 for a slot that does not take part."""
        counts = np.array(counts, np.int32)
        slots = np.where(counts > 0, np.arange(SLOTS), INVALID).astype(np.int32)
        before = np.asarray(state.allocator.lengths)
        chunk = np.zeros((SLOTS, CHUNK), np.int32)
        for row, count in enumerate(counts):
            chunk[row, :count] = self.tokens[row, before[row] : before[row] + count]
        flags = np.broadcast_to(last, SLOTS)
        return self.prefill_checked(self.params, state, slots, chunk, counts, flags, verify(state, slots))

    def decode(self, state, slots):
        slots = np.array([*slots, *NEITHER][:SLOTS], np.int32)
        return self.decode_checked(self.params, state, slots, verify(state, slots))


def request_rows(slots):
    """Slots to admit, and settings: slot 0 greedy, the others drawing, all with log-probabilities."""
    padded = np.array([*slots, *NEITHER][:SLOTS], np.int32)
    rows = SamplingState.create(SLOTS)
    rows = dataclasses.replace(
        rows,
        temperature=jnp.where(padded == 0, 0.0, 1.0),
        top_p=jnp.ones(SLOTS),
        seeds=jnp.asarray(padded + 100, jnp.uint32),
        logprobs=jnp.full(SLOTS, 2, jnp.int32),
    )
    return padded, rows


admit, release, verify = jax.jit(admit_step), jax.jit(release_step), jax.jit(verify_step)
allocate = jax.jit(allocator.allocate)
fork = jax.jit(allocator.fork)


@pytest.fixture(scope="module")
def serve(random_params):
    """A `Server` by model and KV format, made once."""
    return functools.cache(lambda config, kv="f32": Server(config, kv, random_params(config)))


@pytest.fixture(scope="module")
def server(serve):
    return serve(MLA)


def same(one, other) -> None:
    """Bit for bit, all leaves."""
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), one, other)


def held(state: ServingState, slot: int) -> np.ndarray:
    row = np.asarray(state.allocator.page_table)[slot]
    return row[row >= 0]


def poison(state: ServingState, kv: str, slots=()) -> ServingState:
    """NaN in every place of the pool that no slot's length covers, and in all places of `slots`."""
    covered = np.zeros((PAGES, PAGE), bool)
    for slot, length in enumerate(np.asarray(state.allocator.lengths)):
        for index, page in enumerate(held(state, slot)):
            covered[page] |= (index * PAGE + np.arange(PAGE) < length) & (slot not in slots)
    assert covered.any() and not covered.all()
    entries = {
        kind: jnp.where(covered[None, :, :, None], pool, NAN[kv]) for kind, pool in state.cache.entries.items()
    }
    return dataclasses.replace(state, cache=dataclasses.replace(state.cache, entries=entries))


# ---- the same as the plain model


@pytest.mark.parametrize("config", [MLA, GQA], ids=lambda c: c.name)
def test_steps_equal_the_plain_model(serve, config):
    """Faults 5 and 22: prompts one short of a page, a page, one more, two pages; decoded across the next page boundary.
    Every step's logits are those of the whole text so far, and a greedy slot's tokens are their largest."""
    server = serve(config)
    state, prompt = server.start(), [PAGE - 1, PAGE, PAGE + 1, 2 * PAGE]
    state, output = server.prefill(state, [2, PAGE, 3, PAGE], last=[False, True, False, False])
    assert output.status.tolist() == [OK] * 4
    assert (np.asarray(output.tokens) >= 0).tolist() == [False, True, False, False]
    assert state.sampling.emitted.tolist() == [0, 1, 0, 0]
    seen = {1: [np.asarray(output.logits)[1]]}
    new = {1: [int(output.tokens[1])]}
    state, output = server.prefill(state, [1, 0, 2, PAGE])
    for slot in (0, 2, 3):
        seen[slot], new[slot] = [np.asarray(output.logits)[slot]], [int(output.tokens[slot])]
    for step in range(6):
        state, output = server.decode(state, order := [[3, 1, 0, 2], [0, 1, 2, 3]][step % 2])
        assert output.status.tolist() == [OK] * 4
        for row, slot in enumerate(order):
            seen[slot].append(np.asarray(output.logits)[row])
            new[slot].append(int(output.tokens[row]))
    assert state.allocator.lengths.tolist() == [length + 6 for length in prompt]
    assert state.sampling.emitted.tolist() == [7] * 4 and not check_invariants(state.allocator)

    texts = np.zeros((SLOTS, COLUMNS * PAGE), np.int32)
    for slot, length in enumerate(prompt):
        texts[slot, : length + 7] = [*server.tokens[slot, :length], *new[slot]]
    positions = np.broadcast_to(np.arange(COLUMNS * PAGE, dtype=np.int32), texts.shape)
    expected, _ = jax.jit(functools.partial(forward, config))(server.params, texts, positions, np.ones_like(texts))
    for slot, length in enumerate(prompt):
        difference = abs(np.array(seen[slot]) - np.asarray(expected)[slot, length - 1 : length + 6])
        assert difference.max() < TOLERANCE
    assert new[0] == [int(logits.argmax()) for logits in seen[0]]


def test_output_holds_the_logits_and_their_log_probabilities(server):
    state, output = server.prefill(server.start(), [3, 4, 5, 6])
    logits = np.asarray(output.logits, np.float64)
    normal = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    tokens = np.asarray(output.tokens)
    assert tokens[0] == logits[0].argmax() and logits.dtype == np.float64 and output.logits.dtype == jnp.float32
    np.testing.assert_allclose(output.logprobs.chosen, normal[np.arange(SLOTS), tokens], rtol=1e-4)
    np.testing.assert_array_equal(output.logprobs.top_tokens, np.argsort(-normal, axis=1)[:, :TOP])
    np.testing.assert_array_equal(state.sampling.last_token, tokens)


def test_a_forked_slot_goes_its_own_way(server):
    """Both hold the same five tokens, the second page shared and half full: the first to write copies it, and each then
    decodes as its own text."""
    state = server.start([0, 1])
    state, _ = server.prefill(state, [5, 0, 0, 0])
    pages, granted = fork(state.allocator, jnp.array([0]), jnp.array([2]))
    assert granted.all()
    next_tokens = jnp.array([11, 0, 12, 0], jnp.int32)
    sampling = dataclasses.replace(
        state.sampling, owner_tags=pages.slot_tags, last_token=next_tokens, temperature=jnp.zeros(SLOTS)
    )
    state = dataclasses.replace(state, allocator=pages, sampling=sampling)
    together, output = server.decode(state, [0, 2])
    assert held(together, 0)[0] == held(together, 2)[0] and held(together, 0)[1] != held(together, 2)[1]
    assert not check_invariants(together.allocator)
    later, second = server.decode(together, [0, 2])
    for row, slot in enumerate([0, 2]):
        alone = server.start([0, 1])
        alone, _ = server.prefill(alone, [5, 0, 0, 0])
        greedy = dataclasses.replace(
            alone.sampling, last_token=jnp.full(SLOTS, next_tokens[slot]), temperature=jnp.zeros(SLOTS)
        )
        alone, one = server.decode(dataclasses.replace(alone, sampling=greedy), [0])
        np.testing.assert_allclose(output.logits[row], one.logits[0], atol=TOLERANCE)
        alone, two = server.decode(alone, [0])
        np.testing.assert_allclose(second.logits[row], two.logits[0], atol=TOLERANCE)
    assert abs(output.logits[0] - output.logits[1]).max() > 0.1


# ---- nothing that is not a row's own reaches it


@pytest.mark.parametrize(
    ("config", "kv"),
    [(MLA, "f32"), (MLA, "bf16"), (MLA, "fp8_e4m3"), (GQA, "f32")],
    ids=["latent f32", "latent bf16", "latent fp8", "grouped f32"],
)
def test_poison_reaches_no_logit(serve, config, kv):
    """Fault 13: with NaN in all unallocated and freed pages and behind the last token of partial ones, before every
    step, each output is bit for bit that of a clean pool. With narrow formats the later tokens come from prefill steps
    of one token each, which saves compilation."""
    server = serve(config, kv)

    def outputs(spoil):
        state, out = server.prefill(spoil(server.start()), [5, 8, 3, 6], last=[False, True, True, True])
        yield out
        state, out = server.prefill(spoil(state), [6, 0, 0, 0])
        yield out
        state = release(state, np.array([1, *NEITHER[1:]], np.int32))
        for slots in ([0, 2, 3], [3, 0, 2], [2, 0, 3]):
            state, out = decode(spoil(state), slots)
            yield out
        state = admit(state, *request_rows([1]))  # new pages, lately freed and full of NaN
        state, out = server.prefill(spoil(state), [0, 7, 0, 0])
        yield out
        state, out = decode(spoil(state), [0, 1, 2, 3])
        yield out

    def decode(state, slots):
        if kv == "f32":
            return server.decode(state, slots)
        return server.prefill(state, np.isin(np.arange(SLOTS), slots).astype(int))

    def spoil(state):
        return poison(state, kv) if state.allocator.lengths.any() else everywhere(state, kv)

    for clean, spoilt in zip(outputs(lambda state: state), outputs(spoil), strict=True):
        assert np.isfinite(spoilt.logits).all()
        same(spoilt, clean)


def everywhere(state: ServingState, kv: str) -> ServingState:
    entries = {kind: jnp.full_like(pool, NAN[kv]) for kind, pool in state.cache.entries.items()}
    return dataclasses.replace(state, cache=dataclasses.replace(state.cache, entries=entries))


@pytest.mark.parametrize("kv", ["f32", "bf16", "fp8_e4m3"])
def test_the_poison_is_poison(serve, kv):
    """NaN within a length does reach the logits of its row, and of no other."""
    server = serve(MLA, kv)
    state, _ = server.prefill(server.start(), [5, 6, 7, 8])
    _, output = server.prefill(poison(state, kv, slots=[2]), [1, 1, 1, 1])
    assert np.isnan(output.logits).any(axis=1).tolist() == [False, False, True, False]


def test_a_step_of_padding_changes_nothing(server):
    state, _ = server.prefill(server.start(), [5, 6, 7, 8])
    for after, output in (server.prefill(state, [0, 0, 0, 0]), server.decode(state, NEITHER)):
        same(after, state)
        assert (np.asarray(output.tokens) == INVALID).all() and np.isfinite(output.logits).all()


def test_padding_rows_change_no_other_slot(server):
    """A row between paddings gives what it gives without, and only its own slot and page change."""
    state, _ = server.prefill(server.start(), [5, 6, 7, 8])
    first, one = server.decode(state, [2])
    second, other = server.decode(state, [INVALID, INVALID, 2])
    assert one.tokens[0] == other.tokens[2]
    np.testing.assert_allclose(one.logits[0], other.logits[2], atol=1e-6)
    same(first.allocator, second.allocator)
    same(first.sampling, second.sampling)
    assert first.allocator.lengths.tolist() == [5, 6, 8, 8]
    assert first.sampling.emitted.tolist() == [1, 1, 2, 1]
    page = held(first, 2)[1]
    for kind, pool in first.cache.entries.items():
        changed = (np.asarray(pool) != np.asarray(state.cache.entries[kind])).any(axis=(0, 3))
        assert {(int(p), int(o)) for p, o in np.argwhere(changed)} == {(int(page), 7 % PAGE)}


@pytest.mark.parametrize("step", ["decode", "prefill"])
@pytest.mark.parametrize("damage", ["page tag", "expected tag", "page table", "owner", "page freed"])
def test_an_unverified_row_neither_reads_nor_writes(server, step, damage):
    """Fault 1: slot 1 lost a page, or itself, to another. It gets no token, nothing of it changes, its result does not
    depend on what is in the pages; the other rows are bit for bit as ever."""
    state, _ = server.prefill(server.start(), [5, 6, 7, 5])
    run = {
        "decode": lambda s: server.decode(s, [3, 1, 0, 2]),
        "prefill": lambda s: server.prefill(s, [4, 3, 1, 2]),
    }[step]
    row, others = (1, [0, 2, 3])
    pages, page = state.allocator, held(state, 1)[0]
    wrong = {
        "page tag": lambda: dataclasses.replace(pages, page_tags=pages.page_tags.at[page].add(1)),
        "expected tag": lambda: dataclasses.replace(pages, expected_tags=pages.expected_tags.at[1, 1].add(1)),
        "page table": lambda: dataclasses.replace(pages, page_table=pages.page_table.at[1, 0].set(held(state, 2)[0])),
        "page freed": lambda: dataclasses.replace(pages, reference_counts=pages.reference_counts.at[page].set(0)),
        "owner": lambda: dataclasses.replace(pages, slot_tags=pages.slot_tags.at[1].add(1)),
    }[damage]()
    damaged = dataclasses.replace(state, allocator=wrong)
    assert verify(damaged, np.arange(SLOTS)).tolist() == [True, False, True, True]
    (after, output), (_, expected) = run(damaged), run(state)

    assert output.status.tolist() == [MISMATCH if r == row else OK for r in range(SLOTS)]
    assert int(output.tokens[row]) == INVALID
    for leaf, good in zip(jax.tree.leaves(output), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(leaf)[others], np.asarray(good)[others])
    for field in ("page_table", "expected_tags", "lengths"):
        np.testing.assert_array_equal(getattr(after.allocator, field)[1], getattr(wrong, field)[1])
    for leaf, before in zip(jax.tree.leaves(after.sampling), jax.tree.leaves(state.sampling), strict=True):
        assert leaf[1] == before[1]
    for kind, pool in after.cache.entries.items():  # what was slot 1's is untouched
        mine = held(state, 1)
        np.testing.assert_array_equal(np.asarray(pool)[:, mine], np.asarray(state.cache.entries[kind])[:, mine])
    spoilt, output_again = run(poison(damaged, "f32", slots=[1]) if damage != "page table" else damaged)
    same(output_again, output)
    same(spoilt.allocator, after.allocator)


@pytest.mark.parametrize("step", ["decode", "prefill"])
def test_a_refused_row_neither_reads_nor_writes(server, step):
    """Fault 21: no page is free. The row that needs one says so and is as before; rows with room go on, bit for bit."""
    state, _ = server.prefill(server.start([0, 1, 2]), [5, 8, 6, 0])
    run = {
        "decode": lambda s: server.decode(s, [0, 1, 2]),
        "prefill": lambda s: server.prefill(s, [2, 3, 1, 0]),
    }[step]
    taken = state.allocator
    while int(taken.free_count):  # others take all pages
        count = min(int(taken.free_count), COLUMNS) * PAGE
        taken, grant = allocate(taken, jnp.array([3]), jnp.array([count]))
        assert grant.granted.all()
        # They are gone for good: the slot forgets them.
        taken = dataclasses.replace(
            taken, page_table=taken.page_table.at[3].set(INVALID), lengths=taken.lengths.at[3].set(0)
        )
    full = dataclasses.replace(state, allocator=taken)
    (after, output), (_, expected) = run(full), run(state)
    assert output.status.tolist()[:3] == [OK, NO_PAGE, OK] and int(output.tokens[1]) == INVALID
    assert np.isfinite(output.logits).all()
    for leaf, good in zip(jax.tree.leaves(output), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(leaf)[[0, 2]], np.asarray(good)[[0, 2]])
    for field in ("page_table", "expected_tags", "lengths"):
        np.testing.assert_array_equal(getattr(after.allocator, field)[1], getattr(taken, field)[1])
    for leaf, before in zip(jax.tree.leaves(after.sampling), jax.tree.leaves(state.sampling), strict=True):
        assert leaf[1] == before[1]
    for kind, pool in after.cache.entries.items():
        mine = held(state, 1)
        np.testing.assert_array_equal(np.asarray(pool)[:, mine], np.asarray(state.cache.entries[kind])[:, mine])
    _, output_again = run(poison(full, "f32", slots=[1, 3]))
    same(output_again, output)


# ---- slots


def test_admission_sets_the_row_and_the_owner(server):
    state = server.start([2, 0])
    slots, rows = request_rows([2, 0])
    for place, slot in enumerate([2, 0]):
        assert float(state.sampling.temperature[slot]) == float(rows.temperature[place])
        assert int(state.sampling.seeds[slot]) == int(rows.seeds[place]) == slot + 100
        assert int(state.sampling.owner_tags[slot]) == int(state.allocator.slot_tags[slot])
    assert state.sampling.top_p.tolist() == [1, 0, 1, 0]
    assert verify(state, np.array([0, 1, 2, INVALID], np.int32)).tolist() == [True, False, True, False]


def test_a_slot_in_use_is_not_admitted_again(server):
    state, _ = server.prefill(server.start([0]), [5, 0, 0, 0])
    slots, rows = request_rows([0])
    same(admit(state, slots, dataclasses.replace(rows, seeds=rows.seeds + 1)), state)


def test_release_gives_back_the_pages_and_the_next_owner_has_another_tag(server):
    """Faults 23 and 24: what the former owner was given no longer verifies, and releasing twice frees once."""
    state, _ = server.prefill(server.start([0, 1]), [5, 6, 0, 0])
    stale = state.sampling.owner_tags
    slots = np.array([1, *NEITHER[1:]], np.int32)
    state = release(state, slots)
    assert int(state.allocator.free_count) == PAGES - 2 and state.allocator.lengths.tolist() == [5, 0, 0, 0]
    assert verify(state, np.arange(SLOTS)).tolist() == [True, False, False, False]
    again = release(state, slots)
    assert int(again.allocator.free_count) == PAGES - 2 and not check_invariants(again.allocator)
    state = admit(again, *request_rows([1]))
    state, output = server.prefill(state, [0, 3, 0, 0])
    assert output.status.tolist()[1] == OK
    former = dataclasses.replace(state, sampling=dataclasses.replace(state.sampling, owner_tags=stale))
    assert verify(former, np.arange(SLOTS)).tolist()[:2] == [True, False]
