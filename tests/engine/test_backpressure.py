"""Too much asked at once: a full queue, a pool too small for the next token, a caller that stops reading."""

import pytest

from jaxinfer.engine import LLM, SamplingParams
from jaxinfer.engine.readers import Readers
from jaxinfer.errors import UserError
from tests.engine.conftest import assert_idle, prompts

LONG = SamplingParams(40, ignore_eos=True)


@pytest.fixture
def llm(served) -> LLM:
    face = LLM.__new__(LLM)
    face.engine = served.engine
    return face


@pytest.fixture
def readers(served) -> Readers:
    return Readers(served.engine)


# ---- a full queue


def test_a_full_queue_takes_again_once_a_request_has_a_slot(served):
    engine = served.engine
    ids = [engine.submit([9], LONG) for _ in range(engine.config.max_queue)]
    with pytest.raises(UserError, match=r"the queue is full with 16 requests; try again later"):
        engine.submit([9], LONG)
    first = engine.step()
    more = [engine.submit([9], LONG) for _ in range(engine.config.max_slots)]
    with pytest.raises(UserError, match="the queue is full"):
        engine.submit([9], LONG)
    assert sorted(served.run(*first)) == ids + more


def test_the_queue_holds_its_limit_and_the_preempted_at_most(short_of_pages):
    engine = short_of_pages.engine
    limit, slots = engine.config.max_queue, engine.config.max_slots
    before, longest, events, ids = engine.counters.preemptions, 0, [], []
    for prompt in prompts(40, [11] * 60):
        while len(engine.scheduler.waiting) >= limit:
            events += engine.step()
            longest = max(longest, len(engine.scheduler.waiting))
            assert engine._events == []  # what a step gave is its caller's
        ids.append(engine.submit(prompt, SamplingParams(30, ignore_eos=True)))
    done = short_of_pages.run(*events)
    assert sorted(done) == ids and engine.counters.preemptions - before > 10
    assert limit <= longest <= limit + slots


def test_who_asks_and_cancels_without_fetching_events_is_refused_in_the_end(served):
    engine, taken = served.engine, 0
    with pytest.raises(UserError, match="the queue is full"):
        for _ in range(1000):
            engine.cancel(engine.submit([9], LONG))
            taken += 1
    assert taken == engine.config.max_queue == len(engine._events)
    assert len(engine.step()) == taken
    engine.cancel(engine.submit([9], LONG))
    engine.step()
    assert_idle(engine)


# ---- a pool too small for the next token


def test_a_pool_for_one_and_a_quarter_serves_everybody_the_oldest_first(short_of_pages):
    """Each request grows to 16 of 20 pages; four slots want to grow at once."""
    engine = short_of_pages.engine
    ids = [engine.submit(prompt, SamplingParams(54, ignore_eos=True)) for prompt in prompts(41, [10] * 6)]
    ends, steps = [], 0
    while engine.busy:
        ends += [event for event in engine.step() if event.completion]
        steps += 1
        assert steps < 6 * (54 + 10) * 3, "no end in sight"
        assert 0 <= engine.kv_used() <= 1
    done = {event.request: event.completion for event in ends}
    preempted = sum(c.preemptions for c in done.values())
    assert [event.request for event in ends] == ids and done[ids[0]].preemptions == 0 and preempted >= 5
    assert all(c.finish_reason == "length" and len(c.tokens) == 54 for c in done.values())
    assert_idle(engine)


# ---- a caller that stops reading


def test_streams_read_in_any_order_say_all_of_their_text(llm):
    texts, params = prompts(42, [5, 9, 7]), SamplingParams(12, ignore_eos=True)
    whole = [c.text for c in llm.generate(texts, params)]
    streams = [llm.stream(prompt, params) for prompt in texts]
    said = [next(stream) for stream in streams]
    assert llm.generate(texts[:1], params)[0].text == whole[0]  # between two pieces of open streams
    for place in (2, 0, 1):
        said[place] += "".join(streams[place])
    assert said == whole
    assert_idle(llm.engine)
    assert llm._readers._inboxes == {} and llm._readers._pieces == set()


def test_an_unread_request_holds_up_nobody_gives_its_pages_back_and_leaves_only_what_it_asked_for(readers):
    """One reader stops after its first token; fifty others come and go in the meantime."""
    engine, params = readers.engine, SamplingParams(20, ignore_eos=True)
    [prompt] = prompts(43, [9])
    unread = readers.submit(prompt, params)
    events = readers.events(unread)
    first = next(events)
    for other in prompts(44, [6] * 50):
        request = readers.submit(other, SamplingParams(3, ignore_eos=True))
        assert sum(len(e.tokens) for e in readers.events(request)) == 3
        readers.close(request)
        assert len(readers._inboxes) == 1 and len(readers._inboxes[unread]) <= 20
    assert_idle(engine)
    rest = list(events)
    assert len(rest) == 19 and rest[-1].completion is not None
    assert [t for e in (first, *rest) for t in e.tokens] == rest[-1].completion.tokens
    readers.close(unread)
    assert readers._inboxes == {}


def test_closing_a_reader_drops_what_it_left_and_cancels(readers):
    engine = readers.engine
    [prompt] = prompts(45, [9])
    request = readers.submit(prompt, LONG)
    next(readers.events(request))
    for _ in range(5):
        readers.step()
    assert len(readers._inboxes[request]) > 2
    readers.close(request)
    readers.close(request)
    readers.step()
    assert readers._inboxes == {} and readers._pieces == set()
    assert_idle(engine)


def test_events_that_went_to_somebody_else_are_missed_aloud(readers):
    request = readers.submit([9, 8, 7], SamplingParams(4, ignore_eos=True))
    list(readers.engine.run())
    with pytest.raises(RuntimeError, match=f"events of request {request} went to another caller"):
        list(readers.events(request))
    assert_idle(readers.engine)
