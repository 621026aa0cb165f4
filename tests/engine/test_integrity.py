"""A page that changed hands or contents under a running request: that request ends, the others do not notice, and no
page is lost."""

import dataclasses
import json
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.cache import allocator
from jaxinfer.engine import SamplingParams
from jaxinfer.engine.request import Status
from jaxinfer.errors import UserError
from tests.engine.conftest import ENGINE, assert_idle, prompts, serve

LENGTHS, TOKENS = (5, 9, 14), 16
VICTIM = 1  # of the three
WHOLE = ENGINE.max_pages_per_slot


def start(served, decoding=3):
    """Three requests past their prefill."""
    engine = served.engine
    engine.state = engine.programs.create_state()
    served.logits.clear()
    ids = [engine.submit(p, SamplingParams(TOKENS, ignore_eos=True)) for p in prompts(40, LENGTHS)]
    while engine.decoding < decoding:
        engine.step()
    return ids


def finish(served):
    """Completions in the order of the requests, what their callers were told, and that nothing is left."""
    events = list(served.engine.run())
    assert_idle(served.engine)
    done = {e.request: e.completion for e in events if e.completion}
    return [done[i] for i in sorted(done)]


@pytest.fixture(scope="module")
def clean(small_model):
    """What the three say when nothing is wrong; the same at every level."""
    served = serve(small_model, ENGINE.replace(integrity="off"))
    ids = start(served)
    return [c.tokens for c in finish(served)], [np.array(served.logits[i]) for i in ids]


@pytest.fixture(scope="module")
def tags(small_model):
    return serve(small_model, ENGINE)


@pytest.fixture(scope="module")
def digest(small_model):
    return serve(small_model, ENGINE.replace(integrity="digest"))


@pytest.fixture(scope="module")
def again(small_model):
    """Every page checked before every read, and failed requests computed anew."""
    return serve(small_model, ENGINE.replace(integrity="digest", digest_pages=WHOLE, on_mismatch="recompute"))


def retag(state, slot, page):
    return dataclasses.replace(state, page_tags=state.page_tags.at[page].add(1))


def free_too_early(state, slot, page):
    """The page goes back to the free list and to another slot, as a bookkeeping error would have it."""
    state = dataclasses.replace(
        state,
        reference_counts=state.reference_counts.at[page].set(0),
        free_list=state.free_list.at[state.free_count].set(page),
        free_count=state.free_count + 1,
    )
    state, granted = allocator.allocate(state, jnp.array([3]), jnp.array([4]), max_new_pages=1)[:2]
    return allocator.release(state, jnp.array([3]))


def point_elsewhere(state, slot, page):
    other = state.page_table[(slot + 1) % 3, 0]
    return dataclasses.replace(state, page_table=state.page_table.at[slot, 0].set(other))


def reopen(state, slot, page):
    return dataclasses.replace(state, slot_tags=state.slot_tags.at[slot].add(1))


def shorten(state, slot, page):
    return dataclasses.replace(state, lengths=state.lengths.at[slot].add(-1))


def damage_books(engine, victim, change):
    slot = engine._requests[victim].slot
    page = int(engine.state.allocator.page_table[slot, 1])
    damaged = change(engine.state.allocator, slot, page)
    place = lambda new, old: jax.device_put(new, old.sharding)  # noqa: E731
    damaged = jax.tree.map(place, damaged, engine.state.allocator)
    engine.state = dataclasses.replace(engine.state, allocator=damaged)


def damage_bytes(engine, victim, column=1):
    """Another request's page over one of the victim's. Returns the page."""
    slot = engine._requests[victim].slot
    table = np.asarray(engine.state.allocator.page_table)
    target, source = int(table[slot, column]), int(table[(slot + 1) % 3, 0])
    pool = engine.state.cache.entries["latent"]
    pool = jax.device_put(pool.at[:, target].set(pool[:, source]), pool.sharding)
    cache = dataclasses.replace(engine.state.cache, entries={"latent": pool})
    engine.state = dataclasses.replace(engine.state, cache=cache)
    return target


def others_are_untouched(served, ids, done, clean):
    tokens, logits = clean
    for place in {0, 1, 2} - {VICTIM}:
        assert done[place].finish_reason == "length" and done[place].tokens == tokens[place]
        np.testing.assert_array_equal(np.array(served.logits[ids[place]]), logits[place])


@pytest.mark.parametrize("level", ["tags", "digest"])
@pytest.mark.parametrize("fault", [retag, free_too_early, point_elsewhere, reopen])
def test_only_the_request_whose_page_it_is_ends(request, clean, level, fault):
    served = request.getfixturevalue(level)
    engine = served.engine
    before = engine.counters.mismatches
    ids = start(served)
    victim = engine._requests[ids[VICTIM]]
    said, slot = len(victim.output), victim.slot
    damage_books(engine, ids[VICTIM], fault)
    done = finish(served)
    tokens = done[VICTIM].tokens
    assert done[VICTIM].finish_reason == "integrity" and f"slot {slot}" in done[VICTIM].error
    # Nothing drawn after the damage: what was in flight before it may still come out.
    assert len(tokens) <= said + 1 and tokens == clean[0][VICTIM][: len(tokens)]
    others_are_untouched(served, ids, done, clean)
    assert engine.counters.mismatches == before + 1


@pytest.mark.parametrize("level", ["tags", "digest", "again"])
def test_every_level_says_the_same_when_nothing_is_wrong(request, clean, level):
    served = request.getfixturevalue(level)
    ids = start(served)
    done = finish(served)
    assert [c.tokens for c in done] == clean[0]
    for i, logits in zip(ids, clean[1], strict=True):
        np.testing.assert_array_equal(np.array(served.logits[i]), logits)


def test_tags_do_not_see_wrong_bytes(tags, clean):
    ids = start(tags)
    damage_bytes(tags.engine, ids[VICTIM])
    done = finish(tags)
    assert done[VICTIM].finish_reason == "length"
    assert not np.array_equal(np.array(tags.logits[ids[VICTIM]]), clean[1][VICTIM])


def test_a_digest_does_within_a_round(digest, clean):
    ids = start(digest)
    said = len(digest.engine._requests[ids[VICTIM]].output)
    page = damage_bytes(digest.engine, ids[VICTIM])
    done = finish(digest)
    assert done[VICTIM].finish_reason == "integrity"
    assert f"page {page} does not hold what was written to it" in done[VICTIM].error
    assert len(done[VICTIM].tokens) <= said + 1 + WHOLE
    others_are_untouched(digest, ids, done, clean)


def test_the_last_look_catches_what_the_rotation_has_not_reached(digest, clean):
    """Damaged with only one token to come: it is not shown, and the request does not end as complete."""
    engine = digest.engine
    ids = start(digest)
    victim = engine._requests[ids[VICTIM]]
    while victim.dispatched < TOKENS - 1:
        engine.step()
    cursor = int(engine.state.digests.cursors[victim.slot])
    damage_bytes(engine, ids[VICTIM], column=(cursor + 3) % 5)
    done = finish(digest)
    assert done[VICTIM].finish_reason == "integrity" and len(done[VICTIM].tokens) == TOKENS - 1
    assert done[VICTIM].text == engine.model.tokenizer.decode(done[VICTIM].tokens)[: len(done[VICTIM].text)]
    others_are_untouched(digest, ids, done, clean)


def test_a_length_is_seen_at_once_with_digests(digest, clean):
    ids = start(digest)
    said = len(digest.engine._requests[ids[VICTIM]].output)
    damage_books(digest.engine, ids[VICTIM], shorten)
    done = finish(digest)
    assert done[VICTIM].finish_reason == "integrity" and len(done[VICTIM].tokens) <= said + 1
    others_are_untouched(digest, ids, done, clean)


# ---- computed anew


@pytest.mark.parametrize("fault", [retag, free_too_early, point_elsewhere, reopen, "bytes"])
def test_a_failed_request_can_be_computed_anew(again, clean, fault):
    """Its caller notices nothing but time; nobody else notices anything."""
    engine = again.engine
    before = dataclasses.replace(engine.counters)
    ids = start(again)
    if fault == "bytes":
        damage_bytes(engine, ids[VICTIM])
    else:
        damage_books(engine, ids[VICTIM], fault)
    done = finish(again)
    assert done[VICTIM].finish_reason == "length" and done[VICTIM].preemptions == 1
    assert done[VICTIM].tokens == clean[0][VICTIM]
    np.testing.assert_allclose(np.array(again.logits[ids[VICTIM]]), clean[1][VICTIM], atol=1e-4)
    others_are_untouched(again, ids, done, clean)
    assert engine.counters.recomputed == before.recomputed + 1 and engine.counters.mismatches == before.mismatches + 1


def test_the_second_failure_ends_it(again):
    engine = again.engine
    ids = start(again)
    damage_books(engine, ids[VICTIM], retag)
    victim = engine._requests[ids[VICTIM]]
    while not (victim.recomputed and victim.status is Status.DECODE and victim.cached > 8):
        engine.step()
    damage_books(engine, ids[VICTIM], retag)
    done = finish(again)
    assert done[VICTIM].finish_reason == "integrity"


def test_tokens_drawn_from_damaged_pages_are_not_built_upon(small_model, clean):
    """Damage is found late, after tokens were shown that are wrong: computed anew they come out otherwise, which ends
    the request; or the same, and it goes on."""
    served = serve(small_model, ENGINE.replace(integrity="digest", on_mismatch="recompute"))
    for column in range(3):
        ids = start(served)
        victim = served.engine._requests[ids[VICTIM]]
        damage_bytes(served.engine, ids[VICTIM], column)
        done = finish(served)
        assert victim.recomputed
        if done[VICTIM].finish_reason == "length":
            assert done[VICTIM].tokens == clean[0][VICTIM]
        else:
            assert done[VICTIM].finish_reason == "integrity" and "come out otherwise" in done[VICTIM].error
        others_are_untouched(served, ids, done, clean)


# ---- what the operator sees


def test_one_line_of_the_log_tells_it_all(tags, caplog):
    engine = tags.engine
    ids = start(tags)
    slot = engine._requests[ids[VICTIM]].slot
    page = int(engine.state.allocator.page_table[slot, 1])
    held = int((np.asarray(engine.state.allocator.page_table)[slot] >= 0).sum())
    expected = int(engine.state.allocator.expected_tags[slot, 1])
    damage_books(engine, ids[VICTIM], retag)
    before = engine.counters.quarantined
    with caplog.at_level(logging.ERROR, logger="jaxinfer.integrity"):
        finish(tags)
    [line] = [json.loads(r.message) for r in caplog.records if r.name == "jaxinfer.integrity"]
    assert line["event"] == "integrity" and line["action"] == "abort" and line["bad_pages"] == 1
    assert line["request"] == ids[VICTIM] and line["slot"] == slot and 0 < line["step"] <= engine.counters.steps
    owners = line["pages"][0].pop("owners")
    assert line["pages"] == [{"column": 1, "page": page, "expected": expected, "found": expected + 1}]
    assert owners[0] == ids[VICTIM] and len(owners) <= 4
    assert engine.counters.quarantined == before + held > before + 2  # all the pages of the slot


def test_a_page_remembers_its_last_owners(tags):
    engine = tags.engine
    engine.state = engine.programs.create_state()
    ids = []
    for _ in range(6):
        ids.append(engine.submit([9] * 6, SamplingParams(3, ignore_eos=True)))
        list(engine.run())
    rings = np.asarray(engine.state.owners.ring)
    used = rings[rings[:, 0] >= 0]
    assert used[:, 0].tolist() == [ids[-1]] * len(used) and used.tolist() == [ids[:1:-1]] * len(used)


def test_a_contradicting_free_list_is_written_anew(tags, clean):
    """Fault 21 in the engine: more is said to be free than is. Nobody is given a page in use, nobody is aborted."""
    engine = tags.engine
    ids = start(tags)
    damage_books(engine, ids[VICTIM], lambda s, *_: dataclasses.replace(s, free_count=s.free_count + 3))
    before = engine.counters.repairs
    done = finish(tags)
    assert engine.counters.repairs > before
    assert [c.finish_reason for c in done] == ["length"] * 3 and [c.tokens for c in done] == clean[0]


@pytest.mark.parametrize(
    "bad", [{"integrity": "full"}, {"integrity": "Tags"}, {"on_mismatch": "retry"}, {"digest_pages": 0}]
)
def test_a_level_that_there_is_not_is_refused(bad):
    with pytest.raises(UserError, match=next(iter(bad))):
        ENGINE.replace(**bad)
