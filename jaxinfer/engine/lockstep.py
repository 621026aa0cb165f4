"""One engine in several processes: each runs all of it, in step, on its share of the devices.

What an engine decides follows from what was asked of it and from what its steps gave, and the latter is the same in
every process. So it is enough that the leader tells the others, before each step, what was asked and cancelled since
the last one, and what KV of another worker has come, which is not the same everywhere (`copies`). What it saw in that
step it tells them too: a process that saw something else says so and ends, and the worker with it, before another step.
"""

import functools
import itertools
import json
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxinfer.checkpoints.model import Model
from jaxinfer.config import EngineConfig, ModelConfig
from jaxinfer.engine.copies import Copy, Pull, news, verdicts
from jaxinfer.engine.decode import DecodeWorker
from jaxinfer.engine.engine import Engine, Event
from jaxinfer.engine.prefill import PrefillWorker
from jaxinfer.engine.request import Request
from jaxinfer.engine.transfer import Arrival, Ticket
from jaxinfer.parallel.peer import GRACE, Peer, PeerGone, together


def agreement(model: ModelConfig, config: EngineConfig) -> dict[str, str]:
    """What the processes of one engine must have in common, for `multihost.start`. That they have the same weights is
    for their owner to see to."""
    parts = {"model": model, "engine": config}
    return {f"{where}.{name}": str(value) for where, part in parts.items() for name, value in vars(part).items()}


class Lockstep(Engine):
    """The engine of process 0, used as any engine; the others `follow`. Once one of them is gone, `step` raises
    PeerGone, for ever after. An engine that is idle should be stepped now and then all the same: a process that takes
    no notice of such a loss is ended (`Peer`)."""

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        followers: Sequence[Peer],
        on_logits: Callable[[int, int, np.ndarray], Any] | None = None,
    ):
        self._followers = followers
        self._asked: list[list[Any]] = []
        self._seen = 0
        with together(followers):
            super().__init__(model, config, on_logits)

    def accept(self, request: Request, first: bool = False) -> int:
        self._asked.append(["accept", Ticket.of(request).to_dict(), first])
        return super().accept(request, first)

    def cancel(self, request_id: int) -> None:
        if request_id in self._requests:
            self._asked.append(["cancel", request_id])
        super().cancel(request_id)

    def step(self) -> list[Event]:
        with together(self._followers):
            self._tell({"asked": self._asked, "seen": self._seen})
            self._asked = []
            events = super().step()
        self._seen = summary(events)
        return events

    def stop(self) -> None:
        """End the followers after what they are doing. Nothing can be served afterwards."""
        with together(self._followers):
            self._tell({"stop": True, "seen": self._seen})
        for follower in self._followers:
            follower.close(GRACE)

    def _tell(self, message: dict[str, Any]) -> None:
        for follower in self._followers:
            follower.send(message)


class LockstepPrefill(Lockstep, PrefillWorker):
    """A prefill worker in step. The KV in its handoffs is whole in every process: the leader's is offered."""


class LockstepDecode(Lockstep, DecodeWorker):
    """A decode worker in step. Every process pulls a copy of its own of the KV that it takes."""

    def __init__(self, *arguments, **options):
        self._numbers = itertools.count()
        super().__init__(*arguments, **options)

    def take(self, ticket: Ticket, arrival: Arrival) -> None:
        copy = Copy(arrival, next(self._numbers), 1 + len(self._followers))
        self._asked.append(["take", ticket.to_dict(), arrival.told, copy.number])
        super().take(ticket, copy)

    def step(self) -> list[Event]:
        told = [each for follower in self._followers for message in follower.received() for each in message]
        for request, why in verdicts(self, [*news(self), *told]):
            self._asked.append(["settle", request, why])
        return super().step()


def follow(engine: Engine, leader: Peer, pull: Pull | None = None) -> None:
    """Do what the leader does until it stops; a decode worker gets KV by `pull`. PeerGone when the leader is gone or
    has seen something else."""
    asked = ASKED | {"take": functools.partial(_take, pull)}
    seen = 0
    with together([leader]):
        while "stop" not in (message := leader.receive()):
            _compare(engine, seen, message["seen"])
            for what, *arguments in message["asked"]:
                asked[what](engine, *arguments)
            seen = summary(engine.step())
            engine.forget_gone()  # the leader passes it on
            if isinstance(engine, DecodeWorker) and (told := news(engine)):
                leader.send(told)
        _compare(engine, seen, message["seen"])
        jax.distributed.shutdown()  # while process 0, where its books are kept, is still there
    leader.close()


ASKED: dict[str, Callable[..., Any]] = {
    "accept": lambda engine, ticket, first: engine.accept(Ticket.from_dict(ticket).request(engine.model), first),
    "cancel": lambda engine, request: engine.cancel(request),
    "settle": lambda engine, request, why: engine.under_way[request].arrival.settle(why),
}
"""What a leader may ask of its followers; and `take`, for which they need a way to get KV."""


def _take(pull: Pull | None, engine: Engine, ticket: dict[str, Any], told: Any, number: int) -> None:
    assert pull is not None and isinstance(engine, DecodeWorker)
    engine.take(Ticket.from_dict(ticket), Copy(pull(told), number))


def _compare(engine: Engine, here: int, there: int) -> None:
    if here != there:
        raise PeerGone(f"step {engine.counters.steps} came out otherwise in process {jax.process_index()} than in 0")


def summary(events: list[Event]) -> int:
    """A checksum of what a step gave, times left out."""
    told = [(e.request, e.text, e.tokens, e.completion and e.completion.finish_reason) for e in events]
    return zlib.crc32(json.dumps(told).encode())
