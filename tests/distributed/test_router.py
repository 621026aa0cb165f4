"""Workers as processes: they serve what one engine serves, and their deaths cost what they must and no more."""

import time

import numpy as np
import pytest

from jaxinfer.checkpoints.model import Model
from jaxinfer.distributed.router import Router
from jaxinfer.engine import SamplingParams
from jaxinfer.errors import UserError
from tests.engine.conftest import ENGINE, prompts, serve

LENGTHS = [1, 4, 5, 8, 9, 16, 17, 30]


def sampling(i: int, tokens: int = 24) -> SamplingParams:
    return SamplingParams(tokens, temperature=float(i % 2), seed=i, ignore_eos=True, logprobs=5)


def submit(engine, seed: int, tokens: int = 24) -> list[int]:
    return [engine.submit(t, sampling(i, tokens)) for i, t in enumerate(prompts(seed, LENGTHS))]


def finish(router: Router, *events) -> dict:
    return {e.request: e.completion for e in (*events, *router.run()) if e.completion}


def assert_nothing_is_held(router: Router) -> None:
    """No page, no request and no KV on offer in any worker; the books agree."""
    deadline = time.monotonic() + 10
    while True:
        found = router.census()
        held = [c for c in found if c["held"] or c["requests"] or c["offered"]]
        if not held or time.monotonic() > deadline:
            break
    assert len(found) == len(router.peers) and held == []
    assert all(c["problems"] == [] for c in found)


def assert_same(one, other) -> None:
    assert (one.tokens, one.text, one.finish_reason) == (other.tokens, other.text, other.finish_reason)
    for mine, theirs in zip(one.logprobs, other.logprobs, strict=True):
        assert [t for t, _ in mine.top] == [t for t, _ in theirs.top]
        np.testing.assert_allclose([p for _, p in mine.top], [p for _, p in theirs.top], atol=1e-4, rtol=0)


@pytest.fixture(scope="module")
def expected(checkpoint):
    """What one engine gives for the prompts of seed 1."""
    served = serve(Model.load(checkpoint), ENGINE)
    ids = submit(served.engine, 1)
    done = served.run()
    return [done[i] for i in ids]


def test_log_probabilities_are_those_of_one_engine(deployment, expected):
    _, router = deployment
    ids = submit(router, 1)
    done = finish(router)
    for request, other in zip(ids, expected, strict=True):
        assert_same(done[request], other)
    assert_nothing_is_held(router)
    assert router.counters.handed_over > len(ids) and router.counters.preemptions  # some went back and forth


def test_a_prefill_worker_killed_in_mid_transfer_costs_nothing(deployment, expected):
    """Its KV is lost on the way: the requests are prefilled by the other, with the same outcome."""
    fleet, router = deployment
    events, killed = [], []
    handle = router._on_handoff

    def kill_first(peer, message):
        if not killed:
            killed.append(peer)
            fleet.kill([p.spec for p in router.peers].index(peer.spec))
        handle(peer, message)

    router._on_handoff = kill_first
    ids = submit(router, 1)
    done = finish(router, *events)
    router._on_handoff = handle
    assert killed
    for request, other in zip(ids, expected, strict=True):
        assert_same(done[request], other)
    fleet.restart([p.spec for p in router.peers].index(killed[0].spec))
    wait_for_all(router)
    assert_nothing_is_held(router)


def test_a_dead_decode_worker_fails_its_requests_at_once_and_is_used_again(deployment, expected):
    fleet, router = deployment
    index = next(i for i, p in enumerate(router.peers) if p.spec.role == "decode")
    ids, events = submit(router, 1), []
    while not router.peers[index].holds:
        events += router.step()
    fleet.kill(index)
    start = time.monotonic()
    while router.peers[index].channel is not None:
        events += router.step()
    assert time.monotonic() - start < 5 and not router.peers[index].holds
    fleet.restart(index)
    done = finish(router, *events)
    for request, other in zip(ids, expected, strict=True):
        if done[request].finish_reason == "failed":
            assert f"request {request}: the decode worker 127.0.0.1" in done[request].error
        else:
            assert_same(done[request], other)
    assert 0 < sum(done[i].finish_reason == "failed" for i in ids) < len(ids)
    wait_for_all(router)
    assert_nothing_is_held(router)
    again = submit(router, 1)
    done = finish(router)
    assert_same(done[again[0]], expected[0])


def test_cancelled_and_late_requests_leave_nothing(deployment):
    _, router = deployment
    ids = submit(router, 2, tokens=30)
    events = []
    for request in ids:
        events += router.step()
        router.cancel(request)
    assert {c.finish_reason for c in finish(router, *events).values()} <= {"cancelled", "length"}
    limit, router.layout = router.layout, type(router.layout)(**{**vars(router.layout), "request_timeout_s": 0.0})
    late = router.submit([9] * 8, SamplingParams(20))
    [done] = [c for i, c in finish(router).items() if i == late]
    router.layout = limit
    assert done.finish_reason == "failed" and "request_timeout_s 0" in done.error
    assert_nothing_is_held(router)


def test_a_router_that_leaves_leaves_nothing_behind(deployment):
    """What it had asked for is cancelled, and the next router finds the workers free."""
    _, router = deployment
    other = Router(router.layout)  # takes the place of the first at every worker
    for prompt in prompts(3, LENGTHS):
        other.submit(prompt, SamplingParams(30, ignore_eos=True))
    for _ in range(5):
        other.step()
    other.close()
    router.step()  # finds its connections closed
    wait_for_all(router)
    assert_nothing_is_held(router)


def test_what_can_never_be_served_is_refused(deployment):
    _, router = deployment
    for tokens, params, what in [
        ([], SamplingParams(4), "the prompt is empty"),
        ([9] * 60, SamplingParams(5), "exceed the context of 64 tokens"),
        ([5000], SamplingParams(4), "token 5000 is outside the vocabulary"),
    ]:
        with pytest.raises(UserError, match=what):
            router.submit(tokens, params)


def wait_for_all(router: Router) -> None:
    deadline = time.monotonic() + 120
    while any(p.channel is None for p in router.peers):
        router.step()
        assert time.monotonic() < deadline
