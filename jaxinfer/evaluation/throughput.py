"""Speed of an engine by phase: so many requests at once, all of them decoding, or all in their prefill."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import Float

from jaxinfer.engine import Engine, SamplingParams


@dataclass(frozen=True)
class DecodeRun:
    """`step_seconds`: wall time of each engine step of the run; each of `concurrency` requests got one token in it."""

    concurrency: int
    step_seconds: Float[np.ndarray, " steps"]

    @property
    def tokens_per_s(self) -> float:
        return self.concurrency * len(self.step_seconds) / float(self.step_seconds.sum())

    @property
    def itl_ms(self) -> Float[np.ndarray, " steps"]:
        """Inter-token latency in milliseconds."""
        return 1e3 * self.step_seconds


@dataclass(frozen=True)
class PrefillRun:
    """`tokens` of prompts, `concurrency` prompts at a time, prefilled in so many seconds."""

    concurrency: int
    tokens: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True)
class BareRun:
    """Wall times of the compiled check, of the compiled decode step, which has the check in it, and of the last look at
    one request's pages, each waited for."""

    verify_seconds: Float[np.ndarray, " steps"]
    decode_seconds: Float[np.ndarray, " steps"]
    audit_seconds: Float[np.ndarray, " steps"]


def decode_run(engine: Engine, concurrency: int, prompt_tokens: int, steps: int, seed: int = 0) -> DecodeRun:
    """Time `steps` engine steps of `concurrency` requests with random prompts, all in their decode phase.

    The engine must be idle; it is idle again afterwards. ValueError where the requests do not fit at once.
    """
    with _decoding(engine, concurrency, prompt_tokens, steps, seed):
        engine.synchronise()
        times = [time.perf_counter()]
        for _ in range(steps):
            engine.step()
            times.append(time.perf_counter())
    return DecodeRun(concurrency, np.diff(times))


def prefill_run(
    engine: Engine, concurrency: int, prompt_tokens: int, at_least: int = 16, seed: int = 0
) -> PrefillRun:
    """Time prompts from submission to their one token, `concurrency` at a time, until `at_least` prompts are done.

    The engine must be idle; it is idle again afterwards.
    """
    vocab, times = engine.model.config.vocab, -(-at_least // concurrency)
    prompts = np.random.default_rng(seed).integers(0, vocab, (times, concurrency, prompt_tokens)).tolist()
    one = SamplingParams(max_tokens=1, ignore_eos=True)
    engine.synchronise()
    start = time.perf_counter()
    for together in prompts:
        for prompt in together:
            engine.submit(prompt, one)
        while engine.busy:
            engine.step()
    return PrefillRun(concurrency, times * concurrency * prompt_tokens, time.perf_counter() - start)


def bare_run(engine: Engine, concurrency: int, prompt_tokens: int, steps: int, seed: int = 0) -> BareRun:
    """Time the check and the decode step alone on the same kind of requests: no scheduler, no text, no host."""
    verify, decode, audit = np.zeros(steps), np.zeros(steps), np.zeros(steps)
    programs = engine.programs
    with _decoding(engine, concurrency, prompt_tokens, steps, seed):
        slots = engine.decode_slots()
        jax.block_until_ready(programs.verify(engine.state, slots))  # compiles it
        for i in range(steps):
            start = time.perf_counter()
            jax.block_until_ready(programs.verify(engine.state, slots))
            between = time.perf_counter()
            engine.state, output = programs.decode(programs.params, engine.state, slots)
            jax.block_until_ready(output.tokens)
            after = time.perf_counter()
            jax.block_until_ready(programs.audit(engine.state, np.int32(0)))
            verify[i], decode[i], audit[i] = between - start, after - between, time.perf_counter() - after
    return BareRun(verify, decode, audit)


@contextlib.contextmanager
def _decoding(engine: Engine, concurrency: int, prompt_tokens: int, steps: int, seed: int) -> Iterator[None]:
    """So many requests past their prefill, none of which ends within `steps`; all are cancelled afterwards."""
    if engine.busy or concurrency > engine.config.max_slots:
        raise ValueError(f"{concurrency} requests at once need an idle engine with as many slots")
    prompts = np.random.default_rng(seed).integers(0, engine.model.config.vocab, (concurrency, prompt_tokens))
    # Room for the steps dispatched while the last of the requests is still in its prefill.
    params = SamplingParams(max_tokens=steps + concurrency + 8, ignore_eos=True)
    requests = [engine.submit(prompt.tolist(), params) for prompt in prompts]
    while engine.decoding < concurrency:
        engine.step()
    try:
        yield
    finally:
        for request in requests:
            engine.cancel(request)
        engine.step()
        engine.synchronise()
