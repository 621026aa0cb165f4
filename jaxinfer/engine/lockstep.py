"""One engine in several processes: each runs all of it, in step, on its share of the devices.

What an engine decides follows from what was asked of it and from what its steps gave, and the latter is the same in
every process. So it is enough that the leader tells the others, before each step, what was submitted and cancelled
since the last one. What it saw in that one it tells them too: a process that saw something else says so and ends,
before a wrong token goes on.
"""

import dataclasses
import json
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import jax
import numpy as np

from jaxinfer.checkpoints.model import Model
from jaxinfer.config import EngineConfig, ModelConfig
from jaxinfer.engine.engine import Engine, Event
from jaxinfer.engine.request import SamplingParams
from jaxinfer.parallel.multihost import GRACE, Peer, PeerGone


def agreement(model: ModelConfig, config: EngineConfig) -> dict[str, str]:
    """What the processes of one engine must have in common, for `multihost.start`."""
    parts = {"model": model, "engine": config}
    return {f"{where}.{name}": str(value) for where, part in parts.items() for name, value in vars(part).items()}


class Lockstep(Engine):
    """The engine of the leader. It is used as any engine; the others are in `follow`. PeerGone from any call, for ever
    after, once one of them is gone: then nothing is served any more."""

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        followers: Sequence[Peer],
        on_logits: Callable[[int, int, np.ndarray], Any] | None = None,
    ):
        self._followers, self._asked, self._seen = followers, [], 0
        super().__init__(model, config, on_logits)

    def submit(self, prompt: str | list[int], params: SamplingParams | None = None) -> int:
        self._check_followers()
        request = self._requests[super().submit(prompt, params)]
        self._asked.append(["submit", request.prompt, dataclasses.asdict(request.params)])
        return request.id

    def cancel(self, request_id: int) -> None:
        if request_id in self._requests:
            self._asked.append(["cancel", request_id])
        super().cancel(request_id)

    def step(self) -> list[Event]:
        self._tell({"asked": self._asked, "seen": self._seen})
        self._asked = []
        try:
            events = super().step()
        except jax.errors.JaxRuntimeError:
            self._check_followers(GRACE / 2)  # most likely the end of one of them, whose news may come later
            raise
        self._seen = summary(events)
        return events

    def stop(self) -> None:
        """End the followers, after what they are doing. Nothing can be served afterwards."""
        try:
            self._tell({"stop": True, "seen": self._seen})
        finally:
            self._close()

    def _tell(self, message: dict[str, Any]) -> None:
        self._check_followers()
        try:
            for follower in self._followers:
                follower.send(message)
        except PeerGone:
            self._close()
            raise

    def _check_followers(self, wait: float = 0.0) -> None:
        try:
            for follower in self._followers:
                follower.check(wait / len(self._followers))
        except PeerGone:
            self._close()
            raise

    def _close(self) -> None:
        for follower in self._followers:
            follower.close()


def follow(engine: Engine, leader: Peer) -> None:
    """Do what the leader does until it stops. PeerGone when it is gone or has seen something else."""
    seen = 0
    try:
        while True:
            message = leader.receive()
            if message["seen"] != seen:
                raise PeerGone(f"step {engine.counters.steps} came out otherwise than in {leader}")
            if "stop" in message:
                return
            for what, *arguments in message["asked"]:
                _ask(engine, what, *arguments)
            seen = summary(engine.step())
    except Exception as error:
        if isinstance(error, jax.errors.JaxRuntimeError):
            leader.check(GRACE / 2)  # most likely its end, whose news may come later
        with suppress(PeerGone):
            leader.send(str(error))
        raise
    finally:
        leader.close()


def _ask(engine: Engine, what: str, *arguments: Any) -> None:
    if what == "submit":
        prompt, params = arguments
        engine.submit(prompt, SamplingParams(**params))
    else:
        engine.cancel(*arguments)


def summary(events: list[Event]) -> int:
    """A checksum of what a step gave, times left out."""
    told = [(e.request, e.text, e.tokens, e.completion and e.completion.finish_reason) for e in events]
    return zlib.crc32(json.dumps(told).encode())
