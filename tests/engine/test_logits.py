"""What is served equals a plain forward pass over each text alone."""

import jax
import numpy as np
import pytest

from jaxinfer.checkpoints.model import Model
from jaxinfer.config import EngineConfig, Precision
from jaxinfer.engine import SamplingParams
from tests.engine.conftest import ENGINE, FLOAT32, SMALL, assert_idle, plain_logits, prompts, serve

TOLERANCE = 1e-4  # of float32 logits of size 1 to 30: sums in another order


def differences(served, model, params, ids, *events) -> np.ndarray:
    """The largest of each token's logits that was drawn from, against the plain ones of the same text."""
    found = []
    done = served.run(*events)
    for i in ids:
        text, rows = done[i].prompt + done[i].tokens, served.logits[i]
        assert len(rows) == len(done[i].tokens) > 0
        plain = plain_logits(model, params, text)
        first = len(done[i].prompt) - 1
        found.append(np.abs(np.array(rows) - plain[first : first + len(rows)]).max(axis=-1))
    return np.concatenate(found)


def test_sixteen_mixed_requests_of_the_trained_model():
    """Continuous batching, chunked prefill, pages of 16: lengths at, before and after every kind of boundary."""
    model = Model.load("tiny")
    served = serve(model, EngineConfig(precision=FLOAT32, num_pages=512))
    lengths = [1, 2, 15, 16, 17, 31, 32, 33, 48, 64, 65, 255, 256, 257, 300, 500]
    ids, events = [], []
    for i, prompt in enumerate(prompts(3, lengths)):
        ids.append(served.engine.submit(prompt, SamplingParams(max_tokens=8 + i, ignore_eos=True)))
        events += served.engine.step()  # they arrive while others run
    worst = differences(served, model, model.prepared(FLOAT32), ids, *events).max()
    print(f"largest difference {worst:.2e}")
    assert worst <= TOLERANCE


@pytest.mark.parametrize("seed", range(3))
def test_random_lengths_in_a_pool_that_runs_out(short_of_pages, small_model, seed):
    """Preempted requests are computed anew, and go on where they were."""
    lengths = np.random.default_rng(seed).integers(1, 30, 8)
    before = short_of_pages.engine.counters.preemptions
    ids = [short_of_pages.engine.submit(p, SamplingParams(24, ignore_eos=True)) for p in prompts(seed, lengths)]
    assert differences(short_of_pages, small_model, small_model.params, ids).max() <= TOLERANCE
    assert short_of_pages.engine.counters.preemptions > before


@pytest.mark.parametrize("kv, tolerance", [("bf16", 0.05), ("fp8_e4m3", 0.5)])
def test_narrow_pages_stay_near(small_model, kv, tolerance):
    """2^-9 and 2^-4 of relative rounding in every latent, through two layers, on logits of size 4. The median token:
    with random weights rounding sends a few to other experts, which moves them by any amount."""
    served = serve(small_model, ENGINE.replace(precision=Precision.parse("f32", kv)))
    ids = [served.engine.submit(p, SamplingParams(16, ignore_eos=True)) for p in prompts(5, [3, 4, 5, 31])]
    found = differences(served, small_model, small_model.params, ids)
    assert 1e-4 < np.median(found) < tolerance


def test_eight_devices_serve_what_one_does(served, small_model):
    """Logits and the allocator's arrays, over a run with more requests than slots."""
    eight = serve(small_model, ENGINE.replace(devices=8))
    sharding = eight.engine.programs.params["sparse"]["mlp"]["gate"].sharding
    assert len(sharding.device_set) == 8 and not sharding.is_fully_replicated
    texts = prompts(11, [1, 4, 5, 8, 9, 17, 30])
    runs = []
    for each in (served, eight):
        # Both from the same start: what ran before has left the slots in another order.
        each.engine.state = each.engine.programs.create_state()
        each.engine.scheduler.free_slots.sort(reverse=True)
        ids = [each.engine.submit(p, SamplingParams(12, ignore_eos=True)) for p in texts]
        done = each.run()
        runs.append(([np.array(each.logits[i]) for i in ids], [done[i].tokens for i in ids]))
        assert_idle(each.engine)
    for one, other in zip(*(r[0] for r in runs), strict=True):
        np.testing.assert_allclose(one, other, atol=TOLERANCE, rtol=0)
    assert runs[0][1] == runs[1][1]
    first, second = (jax.tree.map(np.asarray, s.engine.state.allocator) for s in (served, eight))
    jax.tree.map(np.testing.assert_array_equal, first, second)
    assert SMALL.moe.experts % 8 == 0
