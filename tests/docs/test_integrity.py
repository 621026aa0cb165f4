"""What docs/*.md say: each numbered sentence names tests that exist; integrity's without a better place are here."""

import dataclasses
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.cache import AllocatorState, allocator, digest, integrity
from jaxinfer.cache.digest import Digests
from jaxinfer.cache.kv import KVCache
from jaxinfer.engine import SamplingParams
from jaxinfer.engine.programs import on_copies
from jaxinfer.evaluation.faults.host import aligned
from jaxinfer.parallel.sharding import make_mesh
from jaxinfer.quantization.formats import KVFormat
from tests.engine.conftest import ENGINE, SMALL, prompts, serve, small_model  # noqa: F401

ROOT = Path(__file__).parent.parent.parent
P, S, M, PAGE = 8, 4, 4, 4
allocate, release = jax.jit(allocator.allocate), jax.jit(allocator.release)
fork, verify = jax.jit(allocator.fork), jax.jit(integrity.verify)


@pytest.mark.parametrize("page, least", [("integrity", 20), ("backpressure", 14)])
def test_every_sentence_names_tests_that_exist(page, least):
    text = (ROOT / "docs" / f"{page}.md").read_text()
    numbers = [int(n) for n in re.findall(r"^(\d+)\. ", text, re.M)]
    assert numbers == list(range(1, len(numbers) + 1)) and len(numbers) >= least
    blocks = re.split(r"^\d+\. ", text, flags=re.M)[1:]
    for number, block in zip(numbers, blocks, strict=True):
        named = re.findall(r"(tests/[\w/]+\.py)::(\w+)", block)
        assert named, f"sentence {number} names no test"
        for file, name in named:
            source = (ROOT / file).read_text()
            assert f"def {name}(" in source or f"{name} = " in source, f"sentence {number}: no {name} in {file}"


# ---- tags


def test_a_stale_entry_verifies_again_after_two_to_the_32_grants_and_not_before():
    """The page of a stale entry is handed out again, with the counter at each place around a whole turn."""
    state, _ = allocate(AllocatorState.create(P, S, M, PAGE), jnp.array([0]), jnp.array([PAGE]))
    first = int(state.next_tag) - 1
    stale = [getattr(state, name).at[1].set(getattr(state, name)[0]) for name in ("page_table", "expected_tags")]
    freed = release(state, jnp.array([0]))
    for later in (1, 2, 2**16, 2**31, 2**32 - 1, 2**32, 2**32 + 1):
        moved = dataclasses.replace(freed, next_tag=jnp.uint32((first + later) % 2**32))
        again, _ = allocate(moved, jnp.array([2]), jnp.array([PAGE]))
        forged = dataclasses.replace(
            again, page_table=again.page_table.at[1].set(stale[0][1]),
            expected_tags=again.expected_tags.at[1].set(stale[1][1]), lengths=again.lengths.at[1].set(PAGE),
        )  # fmt: skip
        assert int(again.page_table[2, 0]) == int(stale[0][1, 0])
        assert bool(verify(forged, jnp.array([1]))[0]) == (later == 2**32)


def test_two_holders_of_one_page():
    state, _ = allocate(AllocatorState.create(P, S, M, PAGE), jnp.array([0]), jnp.array([2 * PAGE]))
    state, _ = fork(state, jnp.array([0]), jnp.array([1]))
    both = jnp.array([0, 1])
    assert np.asarray(verify(state, both)).tolist() == [True, True]
    page = int(state.page_table[0, 1])
    damaged = dataclasses.replace(state, page_tags=state.page_tags.at[page].add(1))
    assert np.asarray(verify(damaged, both)).tolist() == [False, False]
    alone = release(state, jnp.array([0]))
    assert np.asarray(verify(alone, both)).tolist() == [True, True] and int(alone.lengths[0]) == 0
    assert int(alone.reference_counts[page]) == 1 and int(alone.lengths[1]) == 2 * PAGE


def test_rows_exchanged_with_their_tags_are_not_noticed():
    state, _ = allocate(AllocatorState.create(P, S, M, PAGE), jnp.array([0, 1]), jnp.array([5, 6]))
    swap = jnp.array([1, 0, 2, 3])
    swapped = dataclasses.replace(
        state,
        page_table=state.page_table[swap],
        expected_tags=state.expected_tags[swap],
        lengths=state.lengths[swap],
    )
    assert np.asarray(verify(swapped, jnp.arange(2), state.slot_tags[:2])).all()


# ---- order


def test_check_and_release_in_the_same_step():
    """One program, the state donated: the check sees the state of its place in the order, nothing between."""

    def both(state, slots, tags):
        before = integrity.verify(state, slots, tags)
        after = allocator.release(state, slots)
        return after, before, integrity.verify(after, slots, tags)

    state, _ = allocate(AllocatorState.create(P, S, M, PAGE), jnp.array([0, 1]), jnp.array([5, 6]))
    tags = state.slot_tags[:2] + 0
    after, before, then = jax.jit(both, donate_argnums=0)(state, jnp.array([0, 1]), tags)
    assert np.asarray(before).all() and not np.asarray(then).any()
    assert int(after.free_count) == P


@pytest.fixture(scope="module")
def served(small_model):  # noqa: F811
    return serve(small_model, ENGINE.replace(integrity="digest"))


def test_the_check_is_in_the_program_that_reads(served):
    """A tag that changes just before the step is dispatched, with no call to a check in between."""
    engine = served.engine
    engine.state = engine.programs.create_state()
    engine.submit([9] * 6, SamplingParams(8, ignore_eos=True))
    while engine.decoding < 1:
        engine.step()
    slots = engine.decode_slots()
    tags = engine.state.allocator.page_tags
    pages = dataclasses.replace(engine.state.allocator, page_tags=jax.device_put(tags + 1, tags.sharding))
    state = dataclasses.replace(engine.state, allocator=pages)
    engine.state, output = engine.programs.decode(engine.programs.params, state, slots)
    assert int(output.tokens[0]) == -1 and int(output.status[0]) == 1
    engine.state = engine.programs.create_state()
    list(engine.run())


def test_a_donated_state_is_gone(served):
    engine = served.engine
    state = engine.programs.create_state()
    slots = np.full(ENGINE.max_slots, -1, np.int32)
    engine.programs.decode(engine.programs.params, state, jax.device_put(slots, engine._place))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((state.allocator, state.cache.entries, state.digests)))
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(state.allocator.page_tags)


def test_a_host_array_may_be_written_to_once_the_step_is_enqueued():
    """Fault 8, with an array at a place from which jax would read it without a copy, behind a long computation."""

    def slow(x, a):
        return (jax.lax.fori_loop(0, 30, lambda _, y: jnp.tanh(y @ y), x).sum() * 0).astype(jnp.int32) + a

    x, wrong = jnp.ones((400, 400)), {}
    for name, program in (("bare", jax.jit(slow)), ("copied", on_copies(jax.jit(slow)))):
        found = []
        for _ in range(4):
            array = aligned(np.zeros(16, np.int32))
            result = program(x, array)
            array[...] = 7
            found.append(bool(np.asarray(result).any()))
        wrong[name] = any(found)
    assert not wrong["copied"]
    if not wrong["bare"]:
        pytest.skip("here jax copies by itself")


def test_what_a_step_was_given_is_never_written_again(served, monkeypatch):
    """Fault 8: every host array that goes into a step is kept, and still the same when all is over."""
    engine = served.engine
    engine.state = engine.programs.create_state()
    given: list[tuple[np.ndarray, np.ndarray]] = []

    def watched(program):
        def call(*arguments):
            for leaf in jax.tree.leaves(arguments):
                if isinstance(leaf, np.ndarray):
                    assert not any(np.shares_memory(leaf, earlier) for earlier, _ in given)
                    given.append((leaf, leaf.copy()))
            return program(*arguments)

        return call

    for name in ("admit", "prefill", "decode", "release"):
        monkeypatch.setattr(engine.programs, name, watched(getattr(engine.programs, name)))
    for prompt in prompts(3, [3, 9, 14, 5, 8]):
        engine.submit(prompt, SamplingParams(6, ignore_eos=True))
    list(engine.run())
    assert len(given) > 20
    for array, before in given:
        np.testing.assert_array_equal(array, before)


def test_eight_devices_keep_the_same_digests():
    """Pages split by head over eight devices: the digest is the one of the whole page, and one changed value on one
    device is seen."""
    cache = KVCache.create({"key": 64, "value": 64}, SMALL.layers, P, PAGE, KVFormat.parse("fp8_e4m3"))
    rng = np.random.default_rng(0)
    entries = {k: jnp.asarray(rng.integers(0, 256, a.shape, np.uint8)) for k, a in cache.entries.items()}
    pages, rows = jnp.arange(P), jnp.full(P, PAGE)
    split = jax.sharding.NamedSharding(make_mesh(8), jax.sharding.PartitionSpec(None, None, None, "tp"))
    apart = {kind: jax.device_put(array, split) for kind, array in entries.items()}
    of_pages = jax.jit(digest.of_pages)
    np.testing.assert_array_equal(of_pages(apart, pages, rows), of_pages(entries, pages, rows))
    apart["value"] = jax.device_put(entries["value"].at[1, 3, 2, 61].add(1), split)
    changed = np.asarray(of_pages(apart, pages, rows)) != np.asarray(of_pages(entries, pages, rows))
    assert changed.tolist() == [page == 3 for page in range(P)]
    assert Digests.create(cache, S, 1).values.shape == (P,)
