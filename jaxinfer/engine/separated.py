"""Prefill and decode apart, in one process: two workers on meshes of their own, behind the face of one engine."""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxinfer.checkpoints.model import Model
from jaxinfer.config import EngineConfig, PhasePrecision
from jaxinfer.engine.decode import DecodeWorker
from jaxinfer.engine.engine import Counters, Event
from jaxinfer.engine.prefill import PrefillWorker
from jaxinfer.engine.request import SamplingParams
from jaxinfer.engine.transfer import LocalArrival, Ticket

IDLE_S = 0.0005  # how long to sleep where both workers wait for a device


@dataclass
class Times:
    """When a request came and when its first token was seen (seconds, one clock)."""

    arrived: float
    first_token: float = 0.0


class Separated:
    """A prefill and a decode worker, each with its weights, pages and devices; the KV of a prompt goes from one to the
    other in decode's format. A prompt that is prefilled does not hold up the requests that decode.

    Not for use by several threads at once.
    """

    def __init__(
        self,
        model: Model,
        prefill: EngineConfig,
        decode: EngineConfig,
        on_logits: Callable[[int, int, np.ndarray], Any] | None = None,
    ):
        """Compiles everything. What the two must agree on (page handover, limits) is taken from `decode`."""
        shared = {"handover": decode.precision.kv, "transfer_tokens": decode.transfer_tokens}
        self.decode = DecodeWorker(model, decode, on_logits)
        self.prefill = PrefillWorker(model, prefill.replace(**shared, logprobs=decode.logprobs), on_logits)
        self.model, self.config = model, self.decode.config
        self.precision = str(PhasePrecision(prefill.precision, decode.precision))
        self._ids = itertools.count()
        self._times: dict[int, Times] = {}
        self._events: list[Event] = []

    @classmethod
    def of(cls, model: Model, config: EngineConfig, phases: PhasePrecision) -> "Separated":
        """Two workers of one configuration, each at the precision of its phase; on devices of their own where there
        are enough."""
        apart = config.devices if 2 * config.devices <= len(jax.devices()) else 0
        prefill = config.replace(precision=phases.prefill, first_device=apart)
        return cls(model, prefill, config.replace(precision=phases.decode))

    def submit(self, prompt: str | list[int], params: SamplingParams | None = None) -> int:
        """Queue a prompt (text or tokens); its id. UserError where it can never be served or the queue is full."""
        params = params or SamplingParams()
        tokens = self.model.encode(prompt) if isinstance(prompt, str) else [int(t) for t in prompt]
        self.check(tokens, params)
        ticket = Ticket(next(self._ids), tokens, params)
        self._times[ticket.id] = Times(time.perf_counter())
        return self.prefill.accept(ticket.request(self.model))

    def check(self, tokens: list[int], params: SamplingParams) -> None:
        """UserError where such a request can never be served, or the queue is full now."""
        for worker in (self.decode, self.prefill):
            worker.check(tokens, params)

    def cancel(self, request_id: int) -> None:
        """End a request wherever it is; its pages are released. Harmless for one that has ended."""
        for worker in (self.prefill, self.decode):
            worker.cancel(request_id)

    @property
    def busy(self) -> bool:
        """Whether a request is under way, or an event has not been handed out."""
        return bool(self._times or self._events)

    @property
    def counters(self) -> Counters:
        """What both have done together."""
        values = [dataclasses.asdict(w.counters) for w in (self.prefill, self.decode)]
        finished: dict[str, int] = {}
        for each in values:
            for reason, count in each.pop("finished").items():
                finished[reason] = finished.get(reason, 0) + count
        return Counters(**{name: sum(v[name] for v in values) for name in values[0]}, finished=finished)

    @property
    def decoding(self) -> int:
        """Requests past their prefill."""
        return self.decode.decoding

    def kv_used(self) -> float:
        """The share of decode's pages that requests hold, from 0 to 1."""
        return self.decode.kv_used()

    def synchronise(self) -> None:
        """Wait until the devices have done everything that was dispatched."""
        for worker in (self.prefill, self.decode):
            worker.synchronise()

    def step(self) -> list[Event]:
        """Move every request on; what became known since the last call. Never waits for the prefill of one while
        another can decode."""
        decodes = bool(self.decode.decoding)
        if self.prefill.busy and self._room() and (self.prefill.ready or not decodes):
            self._note(self.prefill.step())
        while self.prefill.handoffs:
            handoff = self.prefill.handoffs.popleft()
            self.decode.take(handoff.ticket, LocalArrival(handoff, self.decode.programs.block_shardings))
        if self.decode.busy:
            self._note(self.decode.step())
        for ticket in self.decode.returned:
            self.prefill.accept(ticket.request(self.model), first=True)
        self.decode.returned.clear()
        if not decodes and self.decode.awaiting:
            time.sleep(IDLE_S)
        events, self._events = self._events, []
        return events

    def _room(self) -> bool:
        """Whether decode can take more: KV that waits for a slot there is held outside any pool."""
        return len(self.decode.scheduler.waiting) < self.decode.config.max_slots

    def run(self) -> Iterator[Event]:
        """Events until nothing is left to do."""
        while self.busy:
            yield from self.step()

    def _note(self, events: list[Event]) -> None:
        for event in events:
            times = self._times[event.request]
            if event.tokens and not times.first_token:
                times.first_token = time.perf_counter()
            if event.completion is not None:
                event = dataclasses.replace(event, completion=self._complete(event.completion, times))
                del self._times[event.request]
            self._events.append(event)

    def _complete(self, completion, times: Times):
        now = time.perf_counter()
        ttft = (times.first_token or now) - times.arrived
        return dataclasses.replace(completion, ttft=ttft, e2e=now - times.arrived, precision=self.precision)

