"""Prefill and decode as two workers: they serve what one engine serves, and KV lands where it belongs or nowhere."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.cache import INVALID
from jaxinfer.config import GQAConfig, PhasePrecision, Precision
from jaxinfer.engine import Completion, SamplingParams, Separated
from jaxinfer.engine.transfer import Ticket
from jaxinfer.errors import UserError
from jaxinfer.steps import MISMATCH, OK
from tests.engine.conftest import ENGINE, FLOAT32, assert_idle, plain_logits, prompts

PREFILL = ENGINE.replace(transfer_tokens=8, first_device=1)
DECODE = ENGINE.replace(transfer_tokens=8, num_pages=16)  # too few for all slots: some requests go back
LENGTHS = [1, 3, 4, 5, 7, 8, 9, 16, 17, 30]  # around pages of 4 and blocks of 8


class Served:
    """Two workers, and the logits that they drew from, by request and place in the output."""

    def __init__(self, model, prefill, decode):
        self.logits: dict[int, dict[int, np.ndarray]] = {}
        note = lambda r, place, row: self.logits.setdefault(r, {}).__setitem__(place, row.copy())  # noqa: E731
        self.engine = Separated(model, prefill, decode, note)

    def run(self, *earlier) -> dict[int, Completion]:
        done = {e.request: e.completion for e in (*earlier, *self.engine.run()) if e.completion}
        for worker in (self.engine.prefill, self.engine.decode):
            assert_idle(worker)
        return done

    def rows(self, request: int) -> np.ndarray:
        return np.array([self.logits[request][place] for place in sorted(self.logits[request])])


@pytest.fixture(scope="module")
def apart(small_model) -> Served:
    return Served(small_model, PREFILL, DECODE)


def sampling(i: int, tokens: int = 12) -> SamplingParams:
    return SamplingParams(tokens, temperature=float(i % 2), seed=i, ignore_eos=True, logprobs=2)


def test_logits_are_those_of_one_engine(apart, served, small_model):
    """Mixed lengths, more requests than slots, a decode pool that runs out: also of a plain forward pass alone."""
    texts, before = prompts(1, LENGTHS), apart.engine.counters.preemptions
    ids = [apart.engine.submit(t, sampling(i)) for i, t in enumerate(texts)]
    others = [served.engine.submit(t, sampling(i)) for i, t in enumerate(texts)]
    done, expected = apart.run(), served.run()
    for mine, theirs in zip(ids, others, strict=True):
        one, other = done[mine], expected[theirs]
        assert (one.tokens, one.text, one.finish_reason) == (other.tokens, other.text, other.finish_reason)
        np.testing.assert_allclose(apart.rows(mine), np.array(served.logits[theirs]), atol=1e-4, rtol=0)
        plain = plain_logits(small_model, small_model.params, one.prompt + one.tokens)[len(one.prompt) - 1 : -1]
        np.testing.assert_allclose(apart.rows(mine), plain, atol=1e-4, rtol=0)
        np.testing.assert_allclose([t.logprob for t in one.logprobs], [t.logprob for t in other.logprobs], atol=1e-4)
        assert 0 < one.ttft < one.e2e
    assert apart.engine.counters.preemptions > before
    workers = (apart.engine.prefill, apart.engine.decode)
    assert {w.programs.mesh.devices.item() for w in workers} == set(jax.devices()[:2])


def test_formats_of_each_phase_hold(small_model):
    """BF16 pages in prefill, FP8 in decode: the first token's logits are those of bf16 pages, the pages that decode
    reads hold what one FP8 engine would have written, within the two roundings."""
    phases = PhasePrecision(Precision.parse("fp8_e4m3", "bf16"), Precision.parse("int4:g32", "fp8_e4m3"))
    served = Served(
        small_model, PREFILL.replace(precision=phases.prefill), DECODE.replace(precision=phases.decode, num_pages=64)
    )
    [prompt] = prompts(2, [21])
    request = served.engine.submit(prompt, SamplingParams(8, ignore_eos=True))
    done = served.run()[request]
    assert done.precision == "prefill: weights fp8_e4m3, KV bf16; decode: weights int4:g32, KV fp8_e4m3"
    weights = {name: small_model.prepared(getattr(phases, name)) for name in ("prefill", "decode")}
    text = done.prompt + done.tokens
    first = plain_logits(small_model, weights["prefill"], text)[len(prompt) - 1]
    rest = plain_logits(small_model, weights["decode"], text)[len(prompt) : -1]
    found = np.abs(served.rows(request)[1:] - rest).max(axis=-1)
    assert np.abs(served.rows(request)[0] - first).max() < 0.05
    assert 1e-4 < np.median(found) < 0.5
    assert served.engine.decode.state.cache.entries["latent"].dtype == np.uint8


def blocks_of(engine: Separated, prompt: list[int]):
    """The handoff of one prompt, taken between the workers."""
    ticket = Ticket(next(engine._ids), prompt, SamplingParams(4, ignore_eos=True))
    engine.prefill.accept(ticket.request(engine.model))
    while not engine.prefill.handoffs:
        engine.prefill.step()
    return engine.prefill.handoffs.popleft()


def open_slot(programs, state, slot: int):
    slots = np.full(ENGINE.max_slots, INVALID, np.int32)
    slots[0] = slot
    rows = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), state.sampling)
    state = programs.admit(state, slots, rows, slots)
    return state, np.asarray(programs.claim(state, slots[:1])), slots


@pytest.mark.parametrize("case", ["right", "late", "twice", "out of order", "unsound"])
def test_kv_lands_in_its_slot_or_nowhere(apart, case):
    """A late write after its slot went to another request, a repeated one, one before its time (faults 2 and 23)."""
    engine = apart.engine
    block = jax.device_put(blocks_of(engine, prompts(3, [8])[0]).blocks[0], engine.decode.programs.block_shardings)
    programs = engine.decode.programs
    state, tags, slots = open_slot(programs, programs.create_state(), 2)
    start = np.int32(8 if case == "out of order" else 0)
    if case == "late":
        state, _, slots = open_slot(programs, programs.release(state, slots), 2)
    if case == "unsound":
        block = dataclasses.replace(block, sound=jax.device_put(np.False_, block.sound.sharding))
    if case == "twice":
        state, _ = programs.insert(state, slots[:1], tags, start, np.int32(8), block)
    before = jax.tree.map(np.array, (state.allocator, state.cache))
    state, output = programs.insert(state, slots[:1], tags, start, np.int32(8), block)
    after = jax.tree.map(np.array, (state.allocator, state.cache))
    assert int(output.status[0]) == (OK if case == "right" else MISMATCH)
    same = all(np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (before, after)), strict=True))
    assert same == (case != "right")


def test_torn_kv_is_refused_and_the_request_computed_anew(small_model):
    """A block whose bytes are not those that were sent (fault 4), with digests."""
    config = {"integrity": "digest", "on_mismatch": "recompute"}
    served = Served(small_model, PREFILL.replace(**config), DECODE.replace(**config, num_pages=64))
    engine, [prompt] = served.engine, prompts(4, [13])
    whole = engine.submit(prompt, SamplingParams(6, ignore_eos=True))
    expected = served.run()[whole].tokens
    export = engine.prefill.programs.export
    torn = []

    def tear(state, slot, start):
        block = export(state, slot, start)
        if start == 8 and not torn:
            torn.append(start)
            entries = {kind: rows.at[0, 1].set(0) for kind, rows in block.entries.items()}
            block = dataclasses.replace(block, entries=entries)
        return block

    engine.prefill.programs.export = tear
    request = engine.submit(prompt, SamplingParams(6, ignore_eos=True))
    done = served.run()[request]
    assert torn and engine.counters.mismatches == engine.counters.recomputed == 1
    assert (done.finish_reason, done.tokens) == ("length", expected)


@pytest.mark.parametrize("steps", range(0, 14, 2))
def test_cancel_at_every_point_gives_everything_back(apart, steps):
    texts, events = prompts(20, [20, 9, 1, 30, 7, 7]), []
    ids = [apart.engine.submit(p, SamplingParams(4 + i, ignore_eos=True)) for i, p in enumerate(texts)]
    for _ in range(steps):
        events += apart.engine.step()
    for request in ids[::2]:
        apart.engine.cancel(request)
        apart.engine.cancel(request)
    done = apart.run(*events)
    assert set(done) == set(ids)
    assert all(len(done[i].tokens) == 4 + place for place, i in enumerate(ids) if place % 2)


def test_what_one_worker_cannot_take_is_refused(apart):
    with pytest.raises(UserError, match="exceed the context of 64 tokens"):
        apart.engine.submit([9] * 60, SamplingParams(5))
    with pytest.raises(UserError, match="transfer_tokens 6 is not a multiple of page_size 4"):
        ENGINE.replace(role="decode", transfer_tokens=6)
    assert not apart.engine.busy


def test_nothing_compiles_while_serving(apart):
    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration, **_: compiled.append(event) if "backend_compile" in event else None
    )
    for i, text in enumerate(prompts(5, LENGTHS)):
        apart.engine.submit(text, sampling(i))
    apart.run()
    assert compiled == []


def test_keys_and_values_cross_between_two_devices_and_two(small_model, random_params):
    """Grouped-query attention, whose pages are split by head on both sides."""
    config = small_model.config.replace(attention=GQAConfig(heads=8, kv_heads=4, head_dim=16))
    scales = {kind: jnp.ones(config.layers) for kind in config.attention.entries}
    model = dataclasses.replace(small_model, config=config, params=random_params(config), kv_scales=scales)
    served = Served(model, PREFILL.replace(devices=2, first_device=2), DECODE.replace(devices=2, num_pages=64))
    ids = [served.engine.submit(t, SamplingParams(6, ignore_eos=True)) for t in prompts(6, [3, 8, 21])]
    done = served.run()
    for request in ids:
        text = done[request].prompt + done[request].tokens
        plain = plain_logits(model, model.params, text)[len(done[request].prompt) - 1 : -1]
        np.testing.assert_allclose(served.rows(request), plain, atol=1e-4, rtol=0)
    assert not served.engine.decode.state.cache.entries["key"].sharding.is_fully_replicated


def test_float32_is_what_both_ran_at(apart):
    assert apart.engine.precision == str(PhasePrecision(FLOAT32, FLOAT32))
