"""One engine in several processes: each runs all of it, in step, on its share of the devices.

What an engine decides follows from what was asked of it and from what its steps gave, and the latter is the same in
every process. So it is enough that the leader tells the others, before each step, what was submitted and cancelled
since the last one. What it saw in that one it tells them too: a process that saw something else says so and ends, and
the worker with it, before another step.
"""

import dataclasses
import json
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxinfer.checkpoints.model import Model
from jaxinfer.config import EngineConfig, ModelConfig
from jaxinfer.engine.engine import Engine, Event
from jaxinfer.engine.request import SamplingParams
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

    def submit(self, prompt: str | list[int], params: SamplingParams | None = None) -> int:
        request = self._requests[super().submit(prompt, params)]
        self._asked.append(["submit", request.prompt, dataclasses.asdict(request.params)])
        return request.id

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


def follow(engine: Engine, leader: Peer) -> None:
    """Do what the leader does until it stops. PeerGone when it is gone or has seen something else."""
    seen = 0
    with together([leader]):
        while "stop" not in (message := leader.receive()):
            _compare(engine, seen, message["seen"])
            for what, *arguments in message["asked"]:
                ASKED[what](engine, *arguments)
            seen = summary(engine.step())
        _compare(engine, seen, message["seen"])
        jax.distributed.shutdown()  # while process 0, where its books are kept, is still there
    leader.close()


ASKED: dict[str, Callable[..., Any]] = {
    "submit": lambda engine, prompt, params: engine.submit(prompt, SamplingParams(**params)),
    "cancel": lambda engine, request: engine.cancel(request),
}
"""What a leader may ask of its followers."""


def _compare(engine: Engine, here: int, there: int) -> None:
    if here != there:
        raise PeerGone(f"step {engine.counters.steps} came out otherwise in process {jax.process_index()} than in 0")


def summary(events: list[Event]) -> int:
    """A checksum of what a step gave, times left out."""
    told = [(e.request, e.text, e.tokens, e.completion and e.completion.finish_reason) for e in events]
    return zlib.crc32(json.dumps(told).encode())
