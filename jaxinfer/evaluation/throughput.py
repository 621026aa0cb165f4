"""Decode speed of an engine: so many requests at once, every one decoding, prefill left out."""

import time
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from jaxinfer.engine import Engine, SamplingParams


@dataclass(frozen=True)
class DecodeRun:
    """`step_seconds`: wall time of each engine step of the run, in which each of `concurrency` requests got one token."""

    concurrency: int
    step_seconds: Float[np.ndarray, " steps"]

    @property
    def tokens_per_s(self) -> float:
        return self.concurrency * len(self.step_seconds) / float(self.step_seconds.sum())

    @property
    def itl_ms(self) -> Float[np.ndarray, " steps"]:
        """Inter-token latency in milliseconds."""
        return 1e3 * self.step_seconds


def decode_run(engine: Engine, concurrency: int, prompt_tokens: int, new_tokens: int, seed: int = 0) -> DecodeRun:
    """Time `new_tokens` decode steps of `concurrency` requests with random prompts, all in their decode phase.

    The engine must be idle; it is idle again afterwards. ValueError where the requests do not fit at once.
    """
    if engine.busy or concurrency > engine.config.max_slots:
        raise ValueError(f"{concurrency} requests at once on an engine with {engine.config.max_slots} slots, busy: {engine.busy}")
    rng = np.random.default_rng(seed)
    # Two tokens more: the first comes from prefill, and no request may end while another is being timed.
    params = SamplingParams(max_tokens=new_tokens + 2, ignore_eos=True)
    for prompt in rng.integers(0, engine.model.config.vocab, (concurrency, prompt_tokens)):
        engine.submit(prompt.tolist(), params)
    while engine.decoding < concurrency:
        engine.step()
    engine.synchronise()
    times = [time.perf_counter()]
    for _ in range(new_tokens):
        engine.step()
        times.append(time.perf_counter())
    for _ in engine.run():
        pass
    return DecodeRun(concurrency, np.diff(times))
