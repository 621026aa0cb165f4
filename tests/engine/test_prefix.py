"""Prompts that begin alike share pages, and nobody can tell from the logits."""

import dataclasses
import os

import jax
import numpy as np
import pytest

from jaxinfer.cache import integrity
from jaxinfer.config import Precision
from jaxinfer.engine import SamplingParams
from jaxinfer.errors import UserError
from tests.engine.conftest import ENGINE, plain_logits, prompts, serve
from tests.engine.test_soak import COMPILED

PAGE = ENGINE.page_size
TOLERANCE = 1e-4  # of float32 logits of size 1 to 30: sums in another order
REQUESTS = int(os.environ.get("PREFIX_REQUESTS", "300"))
CACHED = ENGINE.replace(prefix_cache=True, integrity="digest")


@pytest.fixture(scope="module")
def served(small_model):
    return serve(small_model, CACHED)


@pytest.fixture(scope="module")
def small_pool(small_model):
    """Room for three prompts or so."""
    return serve(small_model, CACHED.replace(num_pages=24, max_queue=6))


@pytest.fixture
def empty(served):
    """The engine with nothing in its cache."""
    served.engine.drop_prefixes()
    return served


def ask(served, *texts, tokens=6):
    """The completions of `texts`, served at once, and the logits of each."""
    ids = [served.engine.submit(text, SamplingParams(tokens, ignore_eos=True)) for text in texts]
    done = {e.request: e.completion for e in served.engine.run() if e.completion}
    assert_sound(served.engine)
    return [done[i] for i in ids], [np.array(served.logits.pop(i)) for i in ids]


def assert_sound(engine):
    """Idle: every page is free or the cache's, each of those in the tree, none in use."""
    state, tree = engine.state.allocator, engine.prefix.tree
    assert integrity.check_invariants(state) == []
    assert int(state.free_count) + len(tree) == engine.config.num_pages == engine.scheduler.free_pages + len(tree)
    assert np.flatnonzero(np.asarray(state.kept)).tolist() == sorted(tree.pages)
    assert len(tree.idle) == len(tree) and not engine.prefix.unread and not engine.prefix.paths


LENGTHS = [1, *(n * PAGE + d for n in (1, 2, 5) for d in (-1, 0, 1))]


def worst_between_cold_and_cached(served, lengths=LENGTHS):
    """The largest difference over prompts of all lengths around page boundaries; each in turn cold and cached."""
    [longest] = prompts(50, [max(lengths) + PAGE])
    found = []
    for n in lengths:
        served.engine.drop_prefixes()
        (cold,), (before,) = ask(served, longest[:n])
        ask(served, longest)
        (cached,), (after,) = ask(served, longest[:n])
        assert cold.cached_tokens == 0 and cached.cached_tokens == (n - 1) // PAGE * PAGE
        same = [a == b for a, b in zip(cold.tokens, cached.tokens, strict=True)]
        shared = same.index(False) + 1 if False in same else len(same)  # logits after another token are of another text
        found.append(np.abs(before[:shared] - after[:shared]).max())
    return found


def test_cold_and_cached_logits_agree_at_every_page_boundary(served):
    """Fault 5."""
    assert max(worst_between_cold_and_cached(served)) <= TOLERANCE


def test_and_in_pages_of_fp8(small_model):
    """Against each other, not against float32: with one shape of prefill both store the same rounded entries, so that
    the tolerance is that of float32. (Sums in another order could move an entry by 2^-4 of itself, to the next value.)
    """
    served = serve(small_model, CACHED.replace(precision=Precision.parse("f32", "fp8_e4m3")))
    found = worst_between_cold_and_cached(served)
    print(f"cold and cached in fp8: {np.array(found)}")
    assert max(found) <= TOLERANCE


def test_a_conversation_goes_on_from_its_answer(empty, small_model):
    [first, more] = prompts(51, [9, 3])
    [said], _ = ask(empty, first, tokens=10)
    [then], [logits] = ask(empty, said.prompt + said.tokens + more)
    assert then.cached_tokens == (9 + 10 - 1) // PAGE * PAGE  # the last token of an answer is in no page
    plain = plain_logits(small_model, small_model.params, then.prompt + then.tokens)
    assert np.abs(logits - plain[len(then.prompt) - 1 : -1]).max() <= TOLERANCE


def test_of_two_alike_at_once_one_is_given_the_pages_of_the_other(empty):
    """Fault 6: neither finds anything, both fill pages; soon the tables name the same pages, and the duplicates are
    free while both go on."""
    engine = empty.engine
    [text] = prompts(52, [4 * PAGE])
    before = dataclasses.replace(engine.counters)
    [alone], _ = ask(empty, text, tokens=12)
    engine.drop_prefixes()
    for _ in range(2):
        engine.submit(text, SamplingParams(12, ignore_eos=True))
    while engine.decoding < 2 or engine.prefix.unread:
        engine.step()
    rows = [np.asarray(engine.state.allocator.page_table)[r.slot, :4].tolist() for r in engine.scheduler.running]
    assert rows[0] == rows[1] == [node.page for node in engine.prefix.tree.match(text)]
    assert np.asarray(engine.state.allocator.reference_counts)[rows[0]].tolist() == [3] * 4
    assert int(engine.state.allocator.free_count) >= engine.scheduler.free_pages
    done = [e.completion for e in engine.run() if e.completion]
    assert [c.tokens for c in done] == [alone.tokens] * 2
    assert_sound(engine)
    assert engine.counters.prefix_lookups == before.prefix_lookups + 3


def test_the_hit_rate_is_that_of_prompt_tokens(empty):
    counters = empty.engine.counters
    for name in ("prefix_lookups", "prefix_prompt_tokens", "prefix_hit_tokens", "prefill_tokens"):
        setattr(counters, name, 0)
    [text] = prompts(53, [21])
    for _ in range(3):
        ask(empty, text)
    assert (counters.prefix_lookups, counters.prefix_prompt_tokens, counters.prefix_hit_tokens) == (3, 63, 40)
    assert counters.prefix_hit_rate == 40 / 63 and counters.prefill_tokens == 23


def test_without_the_cache_nothing_is_kept(short_of_pages):
    [text] = prompts(54, [21])
    done = [ask(short_of_pages, text)[0][0] for _ in range(2)]
    assert done[1].cached_tokens == 0 and not np.asarray(short_of_pages.engine.state.allocator.kept).any()


def test_the_least_recently_used_make_room(small_pool):
    """A pool that holds three prompts: the one asked for again stays, the one after it goes."""
    texts = prompts(55, [29] * 4)
    for place in (0, 1, 2, 0, 3):
        ask(small_pool, texts[place], tokens=2)
    assert small_pool.engine.counters.prefix_evictions > 0 == small_pool.engine.counters.preemptions
    found = [len(small_pool.engine.prefix.tree.match(text)) for text in texts]
    assert found[0] == found[3] == 7 > found[1]


# ---- damage


def edit(engine, page, level):
    """Another tag, or other bytes, in a page that only the cache has."""
    state = engine.state
    if level == "digest":
        pool = np.array(state.cache.entries["latent"])
        pool[:, page] += 1
        pool = jax.device_put(pool, state.cache.entries["latent"].sharding)
        cache = dataclasses.replace(state.cache, entries={"latent": pool})
        engine.state = dataclasses.replace(state, cache=cache)
    else:
        tags = np.array(state.allocator.page_tags)
        tags[page] ^= 1
        tags = jax.device_put(tags, state.allocator.page_tags.sharding)
        engine.state = dataclasses.replace(state, allocator=dataclasses.replace(state.allocator, page_tags=tags))


@pytest.fixture(scope="module", params=["tags", "digest"])
def at_level(request, small_model, served):
    return served if request.param == "digest" else serve(small_model, CACHED.replace(integrity="tags"))


def test_a_damaged_cached_page_is_never_served(at_level):
    """It is found when it is to be used again, forgotten with all that follows it, and computed anew."""
    engine, level = at_level.engine, at_level.engine.config.integrity
    [text, other] = prompts(56, [22, 10])
    [cold], [before] = ask(at_level, text)
    ask(at_level, other)
    path = engine.prefix.tree.match(text)
    edit(engine, path[2].page, level)
    count = dataclasses.replace(engine.counters)
    ids = [engine.submit(each, SamplingParams(6, ignore_eos=True)) for each in (text, other)]
    done = {e.request: e.completion for e in engine.run() if e.completion}
    np.testing.assert_allclose(np.array(at_level.logits[ids[0]]), before, atol=TOLERANCE)
    assert done[ids[0]].tokens == cold.tokens and done[ids[0]].finish_reason == "length"
    assert done[ids[1]].preemptions == 0 and engine.counters.prefix_refusals == count.prefix_refusals + 1
    # The page went through quarantine, so that nothing is left that the tree's old nodes could match.
    assert engine.counters.quarantined > count.quarantined and path[2] not in engine.prefix.tree
    assert_sound(engine)


def test_a_page_that_fails_in_use_is_not_given_to_the_next(at_level):
    engine, level = at_level.engine, at_level.engine.config.integrity
    engine.drop_prefixes()
    [text] = prompts(57, [22])
    [cold], [before] = ask(at_level, text, tokens=20)
    victims = [engine.submit(text, SamplingParams(20, ignore_eos=True)) for _ in range(2)]
    while engine.decoding < 2 or engine.prefix.unread:
        engine.step()
    path = list(engine.prefix.paths[engine._requests[victims[0]]])
    edit(engine, path[1].page, level)
    done = {e.request: e.completion for e in engine.run() if e.completion}
    assert [done[i].finish_reason for i in victims] == ["integrity"] * 2
    assert path[0] in engine.prefix.tree and path[1] not in engine.prefix.tree
    refusals = engine.counters.prefix_refusals
    [late], [after] = ask(at_level, text, tokens=20)
    assert late.tokens == cold.tokens and late.cached_tokens == PAGE
    np.testing.assert_allclose(after, before, atol=TOLERANCE)
    assert engine.counters.prefix_refusals == refusals  # it was not even offered the page


# ---- anything in any order


def shared_wrongly(engine) -> list[str]:
    """Pages in two slots that are not kept, or slots whose first pages are not those that the host thinks."""
    state = jax.tree.map(np.asarray, engine.state.allocator)
    used = np.bincount(state.page_table[state.page_table >= 0], minlength=engine.config.num_pages)
    found = [f"page {page} is shared but not kept" for page in np.flatnonzero((used > 1) & ~state.kept)]
    for request, path in engine.prefix.paths.items():
        row = state.page_table[request.slot, : len(path)].tolist()
        if row != [node.page for node in path]:
            found.append(f"slot {request.slot} has {row}, not its path")
    return found


def test_a_random_schedule_finds_no_difference(small_pool, small_model):
    """Requests of a family that share beginnings, and goes on with answers; cancels; a pool so small that pages are
    evicted and requests preempted. Every token's logits against a plain forward pass over that text alone.

    PREFIX_REQUESTS=5000 makes it as long as the claim.
    """
    served, engine, rng = small_pool, small_pool.engine, np.random.default_rng(0)
    compilations: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration, **_: compilations.append(event) if event == COMPILED else None
    )
    roots = prompts(60, [40] * 4)
    tails = prompts(61, [9] * 3)
    submitted = ended = cancelled = refused = compared = step = 0
    worst, hits, during_serving, last = 0.0, 0, 0, []
    while submitted < REQUESTS or engine.busy:
        if submitted < REQUESTS and rng.random() < 0.4:
            text = roots[rng.integers(4)][: rng.integers(1, 37)] + tails[rng.integers(3)][: rng.integers(0, 9)]
            if last and rng.random() < 0.2:
                text = last[rng.integers(len(last))][: rng.integers(30, 46)]
            try:
                engine.submit(text, SamplingParams(int(rng.integers(1, 17)), ignore_eos=True))
                submitted += 1
            except UserError:
                refused += 1
        if engine._requests and rng.random() < 0.02:
            engine.cancel(int(rng.choice(sorted(engine._requests))))
            cancelled += 1
        before = len(compilations)
        events = engine.step()
        during_serving += len(compilations) - before
        for done in [e.completion for e in events if e.completion]:
            ended += 1
            hits += done.cached_tokens > 0
            rows, text = served.logits.pop(done.id, []), done.prompt + done.tokens
            if done.tokens:
                plain = plain_logits(small_model, small_model.params, text)[len(done.prompt) - 1 : -1]
                worst = max(worst, float(np.abs(np.array(rows[: len(done.tokens)]) - plain).max()))
                compared += len(done.tokens)
                last = [text, *last[:5]]
        step += 1
        # The host never counts on a page that is not there.
        assert int(engine.state.allocator.free_count) >= engine.scheduler.free_pages >= 0
        if step % 20 == 0:
            assert integrity.check_invariants(engine.state.allocator) == []
            assert len(engine.prefix.tree) <= engine.config.num_pages
            assert shared_wrongly(engine) == []
    counters = engine.counters
    print(f"{ended} requests, {compared} tokens, {step} steps, largest difference {worst:.2e}: {counters}")
    assert worst <= TOLERANCE
    assert ended == submitted and cancelled and hits > ended // 3
    assert counters.preemptions > REQUESTS // 50 and counters.prefix_evictions > REQUESTS // 3
    assert counters.repairs == counters.mismatches == counters.prefix_refusals == 0
    assert during_serving == 0
    assert_sound(engine)
    assert max(len(engine.prefix.tree.pages), len(engine.prefix.tree.idle)) <= 24
