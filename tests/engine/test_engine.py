"""What a caller sees: stops, limits, streams, seeds, log-probabilities, cancellation, refusals."""

import numpy as np
import pytest
import scipy.special

from jaxinfer.engine import LLM, SamplingParams
from jaxinfer.errors import UserError
from tests.engine.conftest import assert_idle, prompts


@pytest.fixture
def llm(served) -> LLM:
    face = LLM.__new__(LLM)
    face.engine = served.engine
    return face


def test_greedy_takes_the_likeliest_and_max_tokens_ends(served):
    ids = [served.engine.submit(p, SamplingParams(9, ignore_eos=True)) for p in prompts(0, [3, 8, 20])]
    done = served.run()
    for i in ids:
        assert done[i].finish_reason == "length" and len(done[i].tokens) == 9
        assert done[i].tokens == [int(row.argmax()) for row in served.logits[i]]
        assert 0 < done[i].ttft <= done[i].e2e
        assert done[i].precision == "weights f32, KV f32"


def test_completions_come_in_the_order_of_the_prompts(llm):
    texts = prompts(1, range(1, 12))
    done = llm.generate(texts, SamplingParams(4))
    assert [c.prompt for c in done] == texts
    assert_idle(llm.engine)


def test_a_stop_token_ends_and_is_not_shown(llm):
    [prompt] = prompts(2, [7])
    free = llm.generate([prompt], SamplingParams(12, ignore_eos=True))[0]
    stop = free.tokens[5]
    first = free.tokens.index(stop)
    stopped = llm.generate([prompt], SamplingParams(12, ignore_eos=True, stop_tokens=(stop,)))[0]
    assert stopped.finish_reason == "stop" and stopped.tokens == free.tokens[: first + 1]
    assert stopped.text == llm.model.tokenizer.decode(free.tokens[:first])


def test_a_stop_string_across_tokens_ends_and_nothing_of_it_is_streamed(llm):
    [prompt] = prompts(4, [7])
    free = llm.generate([prompt], SamplingParams(16, ignore_eos=True))[0].text
    stop = free[5:11]
    cut = free[: free.index(stop)]
    params = SamplingParams(16, ignore_eos=True, stop=(stop, "never said"))
    assert llm.generate([prompt], params)[0].text == cut
    pieces = list(llm.stream(prompt, params))
    assert "".join(pieces) == cut and len(pieces) > 1
    assert_idle(llm.engine)


def test_what_looked_like_a_stop_string_and_was_none_is_shown_at_the_end(llm):
    [prompt] = prompts(6, [7])
    free = llm.generate([prompt], SamplingParams(8, ignore_eos=True))[0].text
    assert llm.generate([prompt], SamplingParams(8, ignore_eos=True, stop=free[-3:] + "#"))[0].text == free


def test_streamed_pieces_are_the_text(llm):
    [prompt] = prompts(7, [9])
    whole = llm.generate([prompt], SamplingParams(20, ignore_eos=True))[0].text
    assert "".join(llm.stream(prompt, SamplingParams(20, ignore_eos=True))) == whole


def test_leaving_a_stream_cancels_its_request(llm):
    [prompt] = prompts(8, [9])
    stream = llm.stream(prompt, SamplingParams(40, ignore_eos=True))
    next(stream)
    stream.close()
    llm.engine.step()
    assert_idle(llm.engine)


def test_a_seed_gives_the_same_tokens_in_any_company(llm):
    [prompt] = prompts(9, [11])
    params = SamplingParams(16, temperature=1.0, seed=123, ignore_eos=True)
    alone = llm.generate([prompt], params)[0].tokens
    others = prompts(10, [1, 5, 13, 30, 2])
    mixed = [SamplingParams(8 + i, temperature=0.7, seed=i, ignore_eos=True) for i in range(5)]
    for place in (0, 3, 5):
        texts, each = list(others), list(mixed)
        texts.insert(place, prompt)
        each.insert(place, params)
        assert llm.generate(texts, each)[place].tokens == alone
    assert llm.generate([prompt], SamplingParams(16, temperature=1.0, seed=124, ignore_eos=True))[0].tokens != alone


def test_top_k_one_is_greedy_and_min_p_one_too(llm):
    texts = prompts(12, [4, 9])
    greedy = [c.tokens for c in llm.generate(texts, SamplingParams(10, ignore_eos=True))]
    for narrow in ({"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-6}):
        params = SamplingParams(10, temperature=2.0, seed=5, ignore_eos=True, **narrow)
        assert [c.tokens for c in llm.generate(texts, params)] == greedy


def test_log_probabilities_are_those_of_the_logits(served):
    [prompt] = prompts(13, [6])
    request = served.engine.submit(prompt, SamplingParams(6, temperature=0.8, seed=3, ignore_eos=True, logprobs=3))
    other = served.engine.submit(prompt, SamplingParams(6, ignore_eos=True))
    done = served.run()
    expected = scipy.special.log_softmax(np.array(served.logits[request]), axis=-1)
    for place, (token, found) in enumerate(zip(done[request].tokens, done[request].logprobs, strict=True)):
        best = np.argsort(-expected[place], kind="stable")[:3]
        assert found.token == token and [t for t, _ in found.top] == best.tolist()
        np.testing.assert_allclose([found.logprob], [expected[place, token]], atol=1e-5)
        np.testing.assert_allclose([p for _, p in found.top], expected[place, best], atol=1e-5)
    assert done[other].logprobs == []


@pytest.mark.parametrize("steps", range(9))
def test_cancel_at_every_point_gives_everything_back(served, steps):
    """In the queue, in every chunk of the prefill, in decode, with steps in flight, twice, and after the end."""
    engine = served.engine
    texts = prompts(20, [20, 9, 1, 30, 7, 7])
    ids = [engine.submit(p, SamplingParams(4 + i, ignore_eos=True)) for i, p in enumerate(texts)]
    events = [event for _ in range(steps) for event in engine.step()]
    for victim in (ids[0], ids[3], ids[5]):
        engine.cancel(victim)
        engine.cancel(victim)
    events += list(engine.run())
    assert_idle(engine)
    done = {e.request: e.completion for e in events if e.completion}
    ends = [e.request for e in events if e.completion]
    assert sorted(ends) == ids
    for i in ids:
        assert done[i].finish_reason in (("cancelled", "length") if i in (ids[0], ids[3], ids[5]) else ("length",))
        told = [t for e in events if e.request == i for t in e.tokens]
        assert told == done[i].tokens and "".join(e.text for e in events if e.request == i) == done[i].text
    engine.cancel(ids[1])
    engine.cancel(10**9)


def test_a_preempted_request_says_the_same(short_of_pages, served):
    texts = prompts(30, [12, 13, 14, 15])
    params = [SamplingParams(20, temperature=1.0, seed=i, ignore_eos=True) for i in range(4)]
    runs = []
    for each in (served, short_of_pages):
        ids = [each.engine.submit(t, p) for t, p in zip(texts, params, strict=True)]
        done = each.run()
        runs.append([(done[i].tokens, done[i].text) for i in ids])
        preempted = sum(done[i].preemptions for i in ids)
    assert preempted > 0
    assert runs[0] == runs[1]


@pytest.mark.parametrize(
    "prompt, params, message",
    [
        ([], {}, "the prompt is empty"),
        ([1024], {}, "token 1024 is outside the vocabulary of 1024"),
        ([5, -1], {}, "token -1 is outside"),
        ([5] * 60, {"max_tokens": 5}, "exceed the context of 64 tokens"),
        ([5], {"stop_tokens": (2000,)}, "stop token 2000"),
        ([5], {"logprobs": 6}, "at most 5"),
    ],
)
def test_what_can_never_be_served_is_refused_at_once(served, prompt, params, message):
    with pytest.raises(UserError, match=message) as caught:
        served.engine.submit(prompt, SamplingParams(**params))
    assert "\n" not in str(caught.value)
    assert_idle(served.engine)


def test_a_prompt_longer_than_the_pool_is_refused(small_model, short_of_pages):
    engine = short_of_pages.engine
    with pytest.raises(UserError, match="exceed the context of 64"):
        engine.submit([5] * 63, SamplingParams(2))
    engine.scheduler.config = engine.config = engine.config.replace(num_pages=8)
    try:
        with pytest.raises(UserError, match="exceed the pool of 8 pages of 32 tokens"):
            engine.submit([5] * 30, SamplingParams(3))
    finally:
        engine.scheduler.config = engine.config = engine.config.replace(num_pages=20)


def test_a_full_queue_refuses_and_loses_nothing(served):
    limit = served.engine.config.max_queue
    ids = [served.engine.submit([9], SamplingParams(1)) for _ in range(limit)]
    with pytest.raises(UserError, match="the queue is full"):
        served.engine.submit([9], SamplingParams(1))
    assert sorted(served.run()) == ids


def test_one_bad_prompt_among_many_queues_none(llm):
    with pytest.raises(UserError, match="empty"):
        llm.generate([[5], [], [6]], SamplingParams(2))
    llm.engine.step()
    assert_idle(llm.engine)


@pytest.mark.parametrize(
    "bad",
    [
        {"max_tokens": 0},
        {"max_tokens": -3},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_k": -1},
        {"min_p": 2.0},
        {"seed": 2**32},
        {"stop": ("",)},
        {"logprobs": -1},
    ],
)
def test_bad_sampling_parameters_are_named(bad):
    with pytest.raises(UserError) as caught:
        SamplingParams(**bad)
    assert next(iter(bad)).split("_")[0] in str(caught.value) and "\n" not in str(caught.value)
