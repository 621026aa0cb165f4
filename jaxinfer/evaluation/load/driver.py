"""The driver: offers jobs to an engine as they arrive, and notes when each token comes back.

It knows only the face that all engines have: `submit`, `step`, `busy`, `counters`, `kv_used`.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from jaxinfer.engine import Event, SamplingParams
from jaxinfer.errors import UserError
from jaxinfer.evaluation.load.arrivals import Arrivals
from jaxinfer.evaluation.load.lengths import Job
from jaxinfer.evaluation.load.measures import LoadResult, Series, Trace


class Served(Protocol):
    """What an engine must offer to be driven. `counters` are those of `Engine`."""

    precision: str

    @property
    def counters(self) -> Any: ...

    def submit(self, prompt: list[int], params: SamplingParams) -> int: ...

    def cancel(self, request_id: int) -> None: ...

    def step(self) -> list[Event]: ...

    def kv_used(self) -> float: ...

    @property
    def busy(self) -> bool: ...


def drive(
    engine: Served,
    jobs: Sequence[Job],
    arrivals: Arrivals,
    after_end: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> LoadResult:
    """Serve every job. One that the engine refuses is counted and not asked again; its caller waits for a step.

    The engine must be idle, and is idle again afterwards, also when the run is interrupted. A job that could never be
    served counts as refused too: check lengths before. `after_end` is called once for each job.
    """
    run = _Run(engine, jobs, arrivals, after_end, clock)
    try:
        while run.sent < len(jobs) or engine.busy:
            run.submit_due()
            if engine.busy:
                run.step()
            elif run.sent < len(jobs):
                sleep(arrivals.wait(run.sent, run.now))
    finally:
        for request in run.live:
            engine.cancel(request)
        while engine.busy:
            engine.step()
    return run.result()


class _Run:
    """One run under way."""

    def __init__(
        self,
        engine: Served,
        jobs: Sequence[Job],
        arrivals: Arrivals,
        after_end: Callable[[], None],
        clock: Callable[[], float],
    ):
        if engine.busy:
            raise ValueError("the engine must be idle")
        self.engine, self.jobs, self.arrivals, self.after_end = engine, jobs, arrivals, after_end
        self.traces: list[Trace] = []
        self.live: dict[int, Trace] = {}
        self.sent = self.refused = self.turned_away = self.peak = 0
        self.kv_used, self.decoding, self.waiting = Series(), Series(), Series()
        self._before = self._counts()
        self._clock, self._start = clock, clock()

    @property
    def now(self) -> float:
        return self._clock() - self._start

    def submit_due(self) -> None:
        """Submit what has arrived. A caller turned away holds its place until the next step."""
        self.turned_away = 0
        while self.sent < len(self.jobs):
            arrived = self.arrivals.due(self.sent, len(self.live) + self.turned_away, self.now)
            if arrived is None:
                return
            job = self.jobs[self.sent]
            self.sent += 1
            try:
                request = self.engine.submit(job.prompt, job.params)
            except UserError:
                self.refused += 1
                self.turned_away += 1
                self.after_end()
                continue
            self.live[request] = Trace(len(job.prompt), arrived)
            self.traces.append(self.live[request])
            self.peak = max(self.peak, len(self.live))

    def step(self) -> None:
        """One step of the engine, and a note of everything that it gave, at one time."""
        events = [event for event in self.engine.step() if event.request in self.live]
        now = self.now
        self.kv_used.add(now, self.engine.kv_used())
        given = len({event.request for event in events if event.tokens})
        self.waiting.add(now, len(self.live) - given)
        if given:  # a step that only prefills says nothing of how many decode
            self.decoding.add(now, given)
        for event in events:
            trace = self.live[event.request]
            trace.tokens += [now] * len(event.tokens)
            if event.completion is not None:
                trace.ended, trace.reason = now, event.completion.finish_reason
                del self.live[event.request]
                self.after_end()

    def result(self) -> LoadResult:
        first = min((t.arrived for t in self.traces), default=0.0)
        seconds = max((t.ended for t in self.traces), default=0.0) - first
        after, before = self._counts(), self._before
        preemptions, hits, tokens = (b - a for a, b in zip(before, after, strict=True))
        series = (self.kv_used, self.decoding, self.waiting)
        rate = hits / max(tokens, 1)
        return LoadResult(self.traces, self.refused, preemptions, max(seconds, 1e-9), *series, self.peak, rate)

    def _counts(self) -> tuple[int, int, int]:
        """Preemptions, and of prompt tokens those found in the prefix cache and all that were looked up."""
        counters = self.engine.counters
        return counters.preemptions, counters.prefix_hit_tokens, counters.prefix_prompt_tokens
