"""A worker process: one engine of one role, driven by messages of the router it is connected to.

Router to worker: `request` (a ticket to prefill), `kv` (a ticket, and where its KV is), `cancel`, `taken` (KV that was
pulled), `drop` (KV that nobody will pull), `census`, `stop`. Worker to router: `hello`, `events`, `handoff` (a ticket,
and where its KV is), `returned` (a ticket whose pages are gone), `taken` (KV that was pulled) or `unwanted` (that won't
be), `census`.

When the router goes, what it had asked for is cancelled, and the worker waits for the next.

Of a worker over several processes the first is the one that the router knows; the others follow it (`spanning`).
"""

import dataclasses
import select
import time
from importlib import metadata
from typing import Any

import jax
import numpy as np

from jaxinfer.cache import integrity
from jaxinfer.checkpoints.model import Model
from jaxinfer.config import EngineConfig, config_to_dict
from jaxinfer.distributed.exchange import Exchange, RemoteArrival
from jaxinfer.distributed.layout import Layout, WorkerSpec
from jaxinfer.distributed.spanning import engine_of, join
from jaxinfer.distributed.wire import Channel, Gone, Listener, Message
from jaxinfer.engine.decode import DecodeWorker
from jaxinfer.engine.engine import Event
from jaxinfer.engine.lockstep import Lockstep
from jaxinfer.engine.prefill import PrefillWorker
from jaxinfer.engine.transfer import Ticket
from jaxinfer.parallel.peer import together

IDLE_S = 0.5  # how long an idle worker waits for a message at a time
POLL_S = 0.0005  # and one that waits for KV only


def identity(model: Model, config: EngineConfig) -> Message:
    """What workers that are joined must have in common, and what a router must know of one."""
    tail = [float(np.asarray(leaf, np.float32).reshape(-1)[-1]) for leaf in jax.tree.leaves(model.kv_scales)]
    return {
        "version": metadata.version("jaxinfer"),
        "jax": jax.__version__,
        "model": {**config_to_dict(model.config), "kv_scales": tail},
        "page_size": config.page_size,
        "transfer_tokens": config.transfer_tokens,
        "kv": str(config.handover if config.role == "prefill" else config.precision.kv),
    }


class Worker:
    """The engine, its end of the exchange, and the port where a router finds it."""

    def __init__(self, layout: Layout, spec: WorkerSpec):
        """Takes the port before anything else, then loads and compiles. UserError on bad input."""
        self.spec, self.layout = spec, layout
        self._listener = Listener(spec.host, spec.port)
        self._followers = join(layout, spec, 0)
        with together(self._followers):
            self.engine: PrefillWorker | DecodeWorker = engine_of(layout, spec, self._followers)
            programs = self.engine.programs
            self._exchange = Exchange(spec.host, programs.block, programs.block_shardings)
        self._copies = max(worker.processes for worker in layout.of_role("decode"))
        self._arrivals: dict[int, RemoteArrival] = {}
        self._stopped = False

    def serve(self) -> None:
        """Serve one router after the other, until one says stop. PeerGone where another process of this worker ends."""
        with together(self._followers):
            while not self._stopped:
                if (channel := self._listener.accept(IDLE_S)) is not None:
                    self._session(channel)
                self._check()
        self._listener.close()
        if isinstance(self.engine, Lockstep):
            self.engine.stop()

    def _check(self) -> None:
        for follower in self._followers:
            follower.check()

    def _session(self, channel: Channel) -> None:
        try:
            channel.send(self._hello())
            while not self._stopped:
                channel = self._newer(channel)
                self._receive(channel)
                self._advance(channel)
        except Gone:
            pass
        finally:
            channel.close()
        self._clear()

    def _newer(self, channel: Channel) -> Channel:
        """A router that connects while another is there takes its place: the other may have died without a word."""
        if not select.select([self._listener], [], [], 0)[0] or (newer := self._listener.accept(0.1)) is None:
            return channel
        channel.close()
        self._clear()
        newer.send(self._hello())
        return newer

    def _hello(self) -> Message:
        who = {"type": "hello", "role": self.spec.role, "address": self._exchange.address}
        return {**who, **identity(self.engine.model, self.engine.config)}

    def _clear(self) -> None:
        """Cancel all that is under way: nobody is there to hear of it."""
        for request in list(self.engine.under_way):
            self.engine.cancel(request)
        while self.engine.busy:
            self.engine.step()
        self.engine.forget_gone()
        self._arrivals.clear()
        self._exchange.drop_older(0.0)

    # ---- what comes

    def _receive(self, channel: Channel) -> None:
        wait = 0.0 if self.engine.busy else IDLE_S
        if wait:
            select.select([channel.fileno(), self._listener.fileno()], [], [], wait)
        while (message := channel.receive()) is not None:
            answer = getattr(self, f"_on_{message['type']}")(message)
            if answer is not None:
                channel.send(answer)

    def _on_request(self, message: Message) -> None:
        self.engine.accept(Ticket.from_dict(message["ticket"]).request(self.engine.model), first=message["first"])

    def _on_kv(self, message: Message) -> None:
        assert isinstance(self.engine, DecodeWorker)
        ticket = Ticket.from_dict(message["ticket"])
        arrival = RemoteArrival(self._exchange, message["place"], message["tokens"], self.layout.pull_timeout_s)
        self._arrivals[ticket.id] = arrival
        self.engine.take(ticket, arrival)

    def _on_cancel(self, message: Message) -> None:
        self.engine.cancel(message["id"])

    def _on_taken(self, message: Message) -> None:
        self._exchange.taken(message["key"], message["copies"])

    def _on_drop(self, message: Message) -> None:
        self._exchange.drop(message["key"])

    def _on_stop(self, message: Message) -> None:
        self._stopped = True

    def _on_census(self, message: Message) -> Message:
        """How the books stand: for whoever wants to know that nothing was lost. `held`: pages that are neither free nor
        in the prefix cache."""
        state = self.engine.state.allocator
        kept = int(np.count_nonzero(np.asarray(state.kept)))
        return {
            "type": "census",
            "held": state.num_pages - int(state.free_count) - kept,
            "kept": kept,
            "requests": len(self.engine.under_way),
            "offered": self._exchange.offered,
            "problems": integrity.check_invariants(state),
            "counters": dataclasses.asdict(self.engine.counters),
        }

    # ---- what goes

    def _advance(self, channel: Channel) -> None:
        if not self.engine.busy:
            self._check()
            return
        events = self.engine.step()
        if events:
            told = [event_to_dict(e) for e in events]
            channel.send({"type": "events", "events": told, "kv_used": self.engine.kv_used()})
        if isinstance(self.engine, PrefillWorker):
            self._send_handoffs(channel, self.engine)
        else:
            self._send_arrived(channel)
            while self.engine.returned:
                channel.send({"type": "returned", "ticket": self.engine.returned.pop(0).to_dict()})
            if self.engine.awaiting and not self.engine.decoding:
                time.sleep(POLL_S)
        self._exchange.drop_older(self.layout.request_timeout_s)

    def _send_handoffs(self, channel: Channel, engine: PrefillWorker) -> None:
        while engine.handoffs:
            handoff = engine.handoffs.popleft()
            place = self._exchange.offer(handoff.blocks, self._copies)
            ticket = handoff.ticket.to_dict()
            channel.send({"type": "handoff", "ticket": ticket, "tokens": handoff.tokens, "place": place})

    def _send_arrived(self, channel: Channel) -> None:
        """Tell what became of KV: `taken` once the pull was begun and is over, `unwanted` where it never began."""
        for request, arrival in list(self._arrivals.items()):
            under_way = self.engine.under_way.get(request)
            if under_way is not None and under_way.arrival is not None:
                continue
            del self._arrivals[request]
            kind = "taken" if arrival.started else "unwanted"
            channel.send({"type": kind, "id": request, "place": arrival.place})


def event_to_dict(event: Event) -> dict[str, Any]:
    """An event as plain JSON values."""
    return dataclasses.asdict(event)
