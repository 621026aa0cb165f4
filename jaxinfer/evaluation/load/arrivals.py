"""Arrivals: when requests come. Closed loop: so many callers, each asking again when it is answered. Open loop: they
come at a rate, whatever the engine does, and queue when it is slow."""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from jaxtyping import Float

from jaxinfer.errors import UserError


class Arrivals(Protocol):
    """When the next of a run's requests is due."""

    def due(self, sent: int, live: int, now: float) -> float | None:
        """When request number `sent` arrived, in seconds since the start, or None while it has not: `live` requests are
        unanswered `now`."""

    def wait(self, sent: int, now: float) -> float:
        """Seconds from `now` until request number `sent` arrives with nothing else to do."""


@dataclass(frozen=True)
class ClosedLoop:
    """`concurrency` callers, each with one request at a time."""

    concurrency: int

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise UserError(f"concurrency must be at least 1, not {self.concurrency}")

    def due(self, sent: int, live: int, now: float) -> float | None:
        return now if live < self.concurrency else None

    def wait(self, sent: int, now: float) -> float:
        return 0.0


@dataclass(frozen=True)
class Poisson:
    """`rate` requests a second on average, independent of each other and of the engine; the first comes at once.
    A request arrives when it was due, also where the engine was busy and could not take it: its waiting counts."""

    rate: float
    requests: int
    seed: int = 0
    times: Float[np.ndarray, " requests"] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 < self.rate < float("inf"):
            raise UserError(f"rate must be above 0 requests a second, not {self.rate:g}")
        gaps = np.random.default_rng([self.seed, 23]).exponential(1 / self.rate, self.requests)
        object.__setattr__(self, "times", np.cumsum(gaps) - gaps[:1])

    def due(self, sent: int, live: int, now: float) -> float | None:
        arrival = float(self.times[sent])
        return arrival if arrival <= now else None

    def wait(self, sent: int, now: float) -> float:
        return max(0.0, float(self.times[sent]) - now)
