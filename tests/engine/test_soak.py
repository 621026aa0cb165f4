"""Ten thousand steps of random load: no page lost or shared, nothing grows, nothing compiles."""

import gc

import jax
import numpy as np

from jaxinfer.cache import integrity
from jaxinfer.engine import SamplingParams
from jaxinfer.errors import UserError
from tests.engine.conftest import assert_idle

STEPS = 10_000
COMPILED = "/jax/core/compile/backend_compile_duration"


def random_params(rng) -> SamplingParams:
    return SamplingParams(
        max_tokens=int(rng.integers(1, 30)),
        temperature=float(rng.choice([0.0, 1.0])),
        top_p=float(rng.choice([0.5, 1.0])),
        top_k=int(rng.choice([0, 5])),
        logprobs=int(rng.choice([0, 0, 2])),
        stop=("a",) if rng.random() < 0.2 else (),
    )


def test_random_load_with_cancels_and_preemption(short_of_pages):
    served = short_of_pages
    engine, rng = served.engine, np.random.default_rng(0)
    compilations: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration, **_: compilations.append(event) if event == COMPILED else None
    )
    live: set[int] = set()
    submitted = refused = cancelled = ended = 0
    arrays, preempted = [], engine.counters.preemptions
    for step in range(STEPS):
        if rng.random() < 0.25:
            try:
                live.add(engine.submit(rng.integers(7, 1024, rng.integers(1, 34)).tolist(), random_params(rng)))
                submitted += 1
            except UserError:
                refused += 1
        if live and rng.random() < 0.03:
            engine.cancel(int(rng.choice(sorted(live))))
            cancelled += 1
        for event in engine.step():
            if event.completion:
                live.remove(event.request)
                ended += 1
        if step % 500 == 499:
            served.logits.clear()
            assert integrity.check_invariants(engine.state.allocator) == []
            assert int(np.asarray(engine.state.allocator.reference_counts).max(initial=0)) <= 1
            gc.collect()
            arrays.append(len(jax.live_arrays()))
    ended += sum(event.completion is not None for event in engine.run())
    assert_idle(engine)
    assert ended == submitted > 1000 and cancelled > 200 and refused > 0
    assert engine.counters.preemptions - preempted > 100
    assert max(arrays[1:]) <= arrays[0] + 8, arrays
    # The invariants are computed in numpy; whatever compiled did so in serving.
    assert compilations == []
