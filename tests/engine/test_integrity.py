"""A page that changed hands under a running request: that request ends, the others don't notice."""

import dataclasses

import jax.numpy as jnp
import pytest

from jaxinfer.cache import allocator
from jaxinfer.engine import SamplingParams
from tests.engine.conftest import ENGINE, prompts, serve


def start(served):
    """Three requests past their prefill."""
    engine = served.engine
    ids = [engine.submit(p, SamplingParams(16, ignore_eos=True)) for p in prompts(40, [5, 9, 14])]
    while engine.decoding < 3:
        engine.step()
    return ids


def retag(state, page):
    return dataclasses.replace(state, page_tags=state.page_tags.at[page].add(1))


def free_too_early(state, page):
    """The page goes back to the free list and to another slot, as a bookkeeping error would have it."""
    state = dataclasses.replace(
        state,
        reference_counts=state.reference_counts.at[page].set(0),
        free_list=state.free_list.at[state.free_count].set(page),
        free_count=state.free_count + 1,
    )
    state, granted = allocator.allocate(state, jnp.array([3]), jnp.array([4]), max_new_pages=1)[:2]
    return state


def point_elsewhere(state, page, slot):
    other = state.page_table[(slot + 1) % 3, 0]
    return dataclasses.replace(state, page_table=state.page_table.at[slot, 0].set(other))


@pytest.fixture(scope="module")
def served(small_model):
    """An engine of this module's own, whose pages get lost."""
    return serve(small_model, ENGINE)


@pytest.mark.parametrize("fault", ["tag", "freed", "table", "slot tag"])
def test_only_the_request_whose_page_it_is_ends(served, fault):
    engine = served.engine
    engine.state = engine.programs.create_state()
    start(served)
    clean = [c.tokens for _, c in sorted(served.run().items())]

    ids = start(served)
    victim = engine._requests[ids[1]]
    slot, said = victim.slot, len(victim.output)
    state = engine.state.allocator
    page = int(state.page_table[slot, 1])
    damaged = {
        "tag": lambda: retag(state, page),
        "freed": lambda: free_too_early(state, page),
        "table": lambda: point_elsewhere(state, page, slot),
        "slot tag": lambda: dataclasses.replace(state, slot_tags=state.slot_tags.at[slot].add(1)),
    }[fault]()
    engine.state = dataclasses.replace(engine.state, allocator=damaged)
    done = {e.request: e.completion for e in engine.run() if e.completion}
    assert done[ids[1]].finish_reason == "integrity" and f"slot {slot}" in done[ids[1]].error
    # Nothing drawn after the damage: what was in flight before it may still come out.
    assert len(done[ids[1]].tokens) <= said + 1 and done[ids[1]].tokens == clean[1][: len(done[ids[1]].tokens)]
    assert [done[ids[0]].tokens, done[ids[2]].tokens] == [clean[0], clean[2]]
    assert engine.counters.mismatches >= 1
