"""The router: the face of an engine over prefill and decode workers that are processes of their own.

A request waits here for a prefill worker, its KV for a decode worker. What a dead prefill worker had is prefilled on
another; what a dead decode worker had fails at once; what is not done in time fails and is cancelled. A worker that
comes back is used again.
"""

import dataclasses
import itertools
import select
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from jaxinfer.config import ModelConfig, config_from_dict
from jaxinfer.distributed import wire
from jaxinfer.distributed.layout import Layout, WorkerSpec
from jaxinfer.distributed.wire import Channel, Gone, Message
from jaxinfer.engine.engine import Counters, Event
from jaxinfer.engine.request import Completion, SamplingParams, TokenLogprob
from jaxinfer.engine.transfer import Ticket
from jaxinfer.errors import UserError

CONNECT_S = 0.5  # how long one attempt to reach a worker may take
AGAIN_S = 0.25  # and how long until the next
WAIT_S = 0.02  # how long a step waits for a message where there is none


@dataclass(eq=False)
class Peer:
    """A worker as the router sees it. `holds`: ids of the requests that are there."""

    spec: WorkerSpec
    channel: Channel | None = None
    holds: set[int] = field(default_factory=set)
    tried: float = -AGAIN_S
    address: str = ""  # of its KV
    kv_used: float = 0.0
    census: Message | None = None


@dataclass(eq=False)
class Flight:
    """A request under way: its last ticket, where it is (None: here), and what its caller has seen."""

    ticket: Ticket
    arrived: float
    peer: Peer | None = None
    source: tuple[Peer, Message] | None = None  # the worker that keeps its KV until it is pulled, and where
    first_token: float = 0.0
    tokens: list[int] = field(default_factory=list)
    text: str = ""


class Router:
    """`submit`, `cancel`, `step`, `run` as in `Engine`; prompts are tokens. Not for use by several threads at once."""

    def __init__(self, layout: Layout, start_s: float = 120.0):
        """Waits until every worker answers. UserError where one does not within `start_s` seconds, or is not what the
        others can be joined with."""
        self.layout = layout
        self.peers = [Peer(spec) for spec in layout.workers]
        self.waiting: deque[int] = deque()  # requests to prefill
        self.restarts = 0
        self._ids = itertools.count()
        self._flights: dict[int, Flight] = {}
        self._events: list[Event] = []
        self._identity: Message = {}
        self._without_since: float | None = None
        self._failed = 0
        self._connect_all(start_s)
        known = {name: value for name, value in self._identity["model"].items() if name != "kv_scales"}
        self.model_config: ModelConfig = config_from_dict(known)
        first = {role: layout.of_role(role)[0].precision for role in ("prefill", "decode")}
        self.precision: str = f"prefill: {first['prefill']}; decode: {first['decode']}"

    # ---- the caller's side ----

    def submit(self, prompt: list[int], params: SamplingParams | None = None) -> int:
        """Queue a prompt; its id. UserError where it can never be served or the queue is full."""
        params, tokens = params or SamplingParams(), [int(t) for t in prompt]
        self.check(tokens, params)
        ticket = Ticket(next(self._ids), tokens, params)
        self._flights[ticket.id] = Flight(ticket, time.perf_counter())
        self.waiting.append(ticket.id)
        return ticket.id

    def check(self, tokens: list[int], params: SamplingParams) -> None:
        """UserError where such a request can never be served, or the queue is full now."""
        vocab, room = self.model_config.vocab, min(self.layout.max_context, self.model_config.max_position)
        if not tokens:
            raise UserError("the prompt is empty; give at least one token")
        if bad := [t for t in [*tokens, *params.stop_tokens] if not 0 <= t < vocab]:
            raise UserError(f"token {bad[0]} is outside the vocabulary of {vocab}")
        if params.logprobs > self.layout.logprobs:
            raise UserError(f"{params.logprobs} logprobs asked for, the workers give at most {self.layout.logprobs}")
        if len(tokens) + params.max_tokens > room:
            raise UserError(
                f"a prompt of {len(tokens)} tokens and {params.max_tokens} more exceed the context of {room} tokens; "
                "shorten the prompt or lower max_tokens"
            )
        if len(self.waiting) >= self.layout.max_queue:
            raise UserError(f"the queue is full with {self.layout.max_queue} requests; try again later")

    def cancel(self, request_id: int) -> None:
        """End a request wherever it is; its pages are released. Harmless for one that has ended."""
        if request_id in self._flights:
            self._end_here(request_id, "cancelled", "")

    @property
    def busy(self) -> bool:
        return bool(self._flights or self._events)

    @property
    def counters(self) -> Counters:
        """What the workers that are there have done together; they are asked."""
        values = [found["counters"] for found in self.census()]
        names = [f.name for f in dataclasses.fields(Counters) if f.name != "finished"]
        return Counters(**{name: sum(v[name] for v in values) for name in names})

    def step(self) -> list[Event]:
        """Pass on what has come and what waits; what became known since the last call."""
        self._reconnect()
        self._dispatch()
        self._receive(0.0 if self._events else WAIT_S)
        self._expire()
        events, self._events = self._events, []
        return events

    def run(self) -> Iterator[Event]:
        """Events until nothing is left to do."""
        while self.busy:
            yield from self.step()

    def census(self, timeout: float = 10.0) -> list[Message]:
        """How the books of every worker stand. UserError where one does not answer in time."""
        asked = [p for p in self.peers if p.channel is not None]
        for peer in asked:
            peer.census = None
            self._send(peer, {"type": "census"})
        deadline = time.monotonic() + timeout
        while any(p.census is None and p.channel is not None for p in asked):
            if time.monotonic() > deadline:
                raise UserError(f"a worker did not answer within {timeout:g} s")
            self._receive(WAIT_S)
        return [p.census for p in asked if p.census is not None]

    def kv_used(self) -> float:
        """The share of decode's pages that requests hold, from 0 to 1, as the workers last said."""
        used = [p.kv_used for p in self._alive("decode")]
        return sum(used) / len(used) if used else 0.0

    def close(self, stop: bool = False) -> None:
        """Leave the workers; `stop` them too."""
        for peer in self.peers:
            if peer.channel is not None:
                if stop:
                    self._send(peer, {"type": "stop"})
                if peer.channel is not None:
                    peer.channel.close()
                    peer.channel = None

    # ---- workers that come and go ----

    def _connect_all(self, start_s: float) -> None:
        deadline = time.monotonic() + start_s
        while missing := [p for p in self.peers if p.channel is None]:
            for peer in missing:
                self._try(peer)
            if time.monotonic() > deadline:
                raise UserError(f"{missing[0].spec} does not answer; start it, or mend host and port in the layout")
            time.sleep(WAIT_S)

    def _reconnect(self) -> None:
        now = time.monotonic()
        for peer in self.peers:
            if peer.channel is None and now - peer.tried > AGAIN_S:
                self._try(peer)

    def _try(self, peer: Peer) -> None:
        peer.tried = time.monotonic()
        channel = wire.connect(peer.spec.host, peer.spec.port, CONNECT_S)
        if channel is None:
            return
        try:
            hello = channel.receive(CONNECT_S)
        except Gone:
            hello = None
        if hello is None:
            channel.close()
            return
        self._check_identity(peer, hello)
        peer.channel, peer.address = channel, hello["address"]

    def _check_identity(self, peer: Peer, hello: Message) -> None:
        """UserError names what a worker and the first one, or the layout, do not have in common."""
        if hello["role"] != peer.spec.role:
            raise UserError(f"{peer.spec}: role is {hello['role']} there, {peer.spec.role} in the layout")
        self._identity = self._identity or hello
        for name in ("version", "jax", "model", "page_size", "transfer_tokens", "kv"):
            if hello[name] != self._identity[name]:
                mine, theirs = (str(h[name])[:60] for h in (hello, self._identity))
                raise UserError(f"{peer.spec}: {name} is {mine} there and {theirs} elsewhere; they can't be joined")

    def _lose(self, peer: Peer) -> None:
        """A worker is gone: decode's requests fail, those it was to prefill wait for another."""
        if peer.channel is not None:
            peer.channel.close()
        peer.channel, peer.census = None, None
        held, peer.holds = peer.holds, set()
        self.restarts += 1
        for request in sorted(held, reverse=True):
            flight = self._flights[request]
            if peer.spec.role == "decode":
                self._end_here(request, "failed", f"request {request}: the {peer.spec} died")
            else:
                self._wait(flight, first=True)

    # ---- out ----

    def _alive(self, role: str) -> list[Peer]:
        return [p for p in self.peers if p.spec.role == role and p.channel is not None]

    def _dispatch(self) -> None:
        """Give prompts to prefill workers, so many that their KV finds room in decode soon."""
        decode = self._alive("decode")
        room = sum(2 * p.spec.max_slots for p in decode) - sum(f.peer is not None for f in self._flights.values())
        while self.waiting and room > 0 and decode and (workers := self._alive("prefill")):
            flight = self._flights[self.waiting.popleft()]
            peer = min(workers, key=lambda p: len(p.holds))
            message = {"type": "request", "ticket": flight.ticket.to_dict(), "first": flight.ticket.preemptions > 0}
            self._give(flight, peer, message)
            room -= 1

    def _give(self, flight: Flight, peer: Peer, message: Message) -> None:
        flight.peer = peer
        peer.holds.add(flight.ticket.id)
        self._send(peer, message)

    def _send(self, peer: Peer, message: Message) -> None:
        if peer.channel is None:
            return
        try:
            peer.channel.send(message)
        except Gone:
            self._lose(peer)

    def _wait(self, flight: Flight, first: bool = False) -> None:
        """Back to the queue."""
        flight.peer = None
        (self.waiting.appendleft if first else self.waiting.append)(flight.ticket.id)

    # ---- in ----

    def _receive(self, wait: float) -> None:
        channels = {p.channel: p for p in self.peers if p.channel is not None}
        if not channels:
            time.sleep(wait)
            return
        ready, _, _ = select.select(list(channels), [], [], wait)
        for channel in ready:
            peer = channels[channel]
            try:
                while peer.channel is channel and (message := channel.receive()) is not None:
                    self._handle(peer, message)
            except Gone:
                if peer.channel is channel:
                    self._lose(peer)

    def _handle(self, peer: Peer, message: Message) -> None:
        kind = message["type"]
        if kind == "census":
            peer.census = message
        elif kind == "events":
            peer.kv_used = message["kv_used"]
            for event in message["events"]:
                self._on_event(peer, event)
        elif kind == "handoff":
            self._on_handoff(peer, message)
        elif kind == "returned":
            self._on_returned(peer, Ticket.from_dict(message["ticket"]))
        else:
            self._on_pulled(peer, message)

    def _on_event(self, peer: Peer, event: dict[str, Any]) -> None:
        request = event["request"]
        flight = self._flights.get(request)
        if flight is None or flight.peer is not peer:
            return  # ended here already, or lives elsewhere by now
        tokens = tuple(event["tokens"])
        flight.tokens += tokens
        flight.text += event["text"]
        if tokens and not flight.first_token:
            flight.first_token = time.perf_counter()
        completion = event["completion"] and self._complete(flight, event["completion"])
        if completion:
            peer.holds.discard(request)
            del self._flights[request]
        self._events.append(Event(request, event["text"], tokens, completion))

    def _complete(self, flight: Flight, values: dict[str, Any]) -> Completion:
        now = time.perf_counter()
        logprobs = [TokenLogprob(t["token"], t["logprob"], tuple(map(tuple, t["top"]))) for t in values["logprobs"]]
        times = {"ttft": (flight.first_token or now) - flight.arrived, "e2e": now - flight.arrived}
        return Completion(**{**values, **times, "logprobs": logprobs, "precision": self.precision})

    def _on_handoff(self, peer: Peer, message: Message) -> None:
        request = message["ticket"]["id"]
        flight = self._flights.get(request)
        if flight is None or flight.peer is not peer:
            self._send(peer, {"type": "drop", "key": message["place"]["key"]})
            return
        peer.holds.discard(request)
        flight.ticket, flight.source = Ticket.from_dict(message["ticket"]), (peer, message["place"])
        if workers := self._alive("decode"):
            target = min(workers, key=lambda p: len(p.holds))
            self._give(flight, target, {**message, "type": "kv"})
        else:
            self._give_up_source(flight)
            flight.ticket = flight.ticket.again()
            self._wait(flight, first=True)

    def _on_returned(self, peer: Peer, ticket: Ticket) -> None:
        flight = self._flights.get(ticket.id)
        if flight is not None and flight.peer is peer:
            peer.holds.discard(ticket.id)
            flight.ticket = ticket
            self._wait(flight, first=True)

    def _on_pulled(self, taker: Peer, message: Message) -> None:
        """KV was taken, or won't be: its sender can forget it, or must drop it."""
        kind = "taken" if message["type"] == "taken" else "drop"
        address = message["place"]["address"]
        flight = self._flights.get(message["id"])
        if flight is not None:
            flight.source = None
        for peer in self._alive("prefill"):
            if peer.address == address:
                self._send(peer, {"type": kind, "key": message["place"]["key"], "copies": taker.spec.processes})

    # ---- ends ----

    def _give_up_source(self, flight: Flight) -> None:
        if flight.source is not None:
            peer, place = flight.source
            if peer.address == place["address"]:  # not one that came back since, with keys of its own
                self._send(peer, {"type": "drop", "key": place["key"]})
            flight.source = None

    def _end_here(self, request: int, reason: str, error: str) -> None:
        """End a request for its caller now, and have its worker let go of it."""
        flight = self._flights.pop(request)
        if flight.peer is None:
            self.waiting.remove(request)
        else:
            flight.peer.holds.discard(request)
            self._send(flight.peer, {"type": "cancel", "id": request})
            if flight.peer.channel is None:
                self._give_up_source(flight)
        self._failed += reason == "failed"
        now = time.perf_counter()
        times = ((flight.first_token or now) - flight.arrived, now - flight.arrived)
        ticket = flight.ticket
        said = (flight.tokens, flight.text, reason, error)
        completion = Completion(request, ticket.prompt, *said, [], ticket.preemptions, *times, self.precision)
        self._events.append(Event(request, completion=completion))

    def _expire(self) -> None:
        """Fail what is not done in time, and what waits for workers that do not come back."""
        now, limit = time.perf_counter(), self.layout.request_timeout_s
        for request, flight in list(self._flights.items()):
            if now - flight.arrived > limit:
                self._end_here(request, "failed", f"request {request}: no end within request_timeout_s {limit:g}")
        missing = next((role for role in ("prefill", "decode") if not self._alive(role)), None)
        if missing is None or not self.waiting:
            self._without_since = None
            return
        self._without_since = self._without_since or now
        if now - self._without_since > self.layout.wait_s:
            for request in list(self.waiting):
                error = f"request {request}: no {missing} worker came back within wait_s {self.layout.wait_s:g}"
                self._end_here(request, "failed", error)
