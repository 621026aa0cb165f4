"""Measures: what a run under load took, for each request and in all."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxinfer.evaluation.statistics import distribution

BARS = "▁▂▃▄▅▆▇█"


@dataclass
class Trace:
    """One request: prompt tokens, seconds since the start at which it arrived and at which each token came, and how it
    ended ('' while it has not)."""

    input: int
    arrived: float
    tokens: list[float] = field(default_factory=list)
    ended: float = 0.0
    reason: str = ""

    @property
    def completed(self) -> bool:
        """Whether it got what it asked for."""
        return self.reason in ("length", "stop")

    @property
    def ttft(self) -> float:
        return self.tokens[0] - self.arrived

    @property
    def e2e(self) -> float:
        return self.ended - self.arrived

    @property
    def tpot(self) -> float:
        """Seconds for each token after the first, of which there must be one."""
        return (self.e2e - self.ttft) / (len(self.tokens) - 1)


class Series:
    """Values over time in bounded memory: at most `most` points, of which every second is dropped when they are full.
    Mean (weighted by time) and peak are of all values, those dropped included."""

    def __init__(self, most: int = 200):
        if most < 2:
            raise ValueError(f"a series needs room for 2 points, not {most}")
        self.most, self.points = most, list[tuple[float, float]]()
        self.peak = 0.0
        self._stride, self._seen = 1, 0
        self._area, self._start, self._last = 0.0, 0.0, (0.0, 0.0)

    def add(self, seconds: float, value: float) -> None:
        """A value that holds from `seconds` on; times must not go back."""
        if self._seen:
            self._area += (seconds - self._last[0]) * self._last[1]
        else:
            self._start = seconds
        self._last, self.peak = (seconds, value), max(self.peak, value)
        if self._seen % self._stride == 0:
            if len(self.points) == self.most:
                self.points, self._stride = self.points[::2], self._stride * 2
            if self._seen % self._stride == 0:
                self.points.append((seconds, value))
        self._seen += 1

    @property
    def mean(self) -> float:
        span = self._last[0] - self._start
        return self._area / span if span > 0 else self._last[1]

    def __str__(self) -> str:
        """A line of bars from 0 to 1 over the time of the run, the highest value of each piece."""
        width, start, span = 32, self._start, max(self._last[0] - self._start, 1e-9)
        highest = [0.0] * width
        for seconds, value in self.points:
            i = min(width - 1, int((seconds - start) / span * width))
            highest[i] = max(highest[i], value)
        return "".join(BARS[min(7, int(value * 8))] for value in highest)


@dataclass
class LoadResult:
    """A run: its requests, those refused, seconds from first arrival to last end, KV use (share of pages held after
    each step), the requests that got a token in one step (`decoding`), those that got none (`waiting`: in the queue or
    in prefill), and the share of prompt tokens that were in the prefix cache."""

    traces: list[Trace]
    refused: int
    preemptions: int
    seconds: float
    kv_used: Series
    decoding: Series
    waiting: Series
    peak_concurrency: int
    prefix_hit_rate: float

    @property
    def completed(self) -> list[Trace]:
        return [trace for trace in self.traces if trace.completed]

    @property
    def output_tokens_per_s(self) -> float:
        """Tokens of all requests, a second."""
        return sum(len(t.tokens) for t in self.traces) / self.seconds

    @property
    def input_tokens_per_s(self) -> float:
        """Prompt tokens of the requests that completed, a second."""
        return sum(t.input for t in self.completed) / self.seconds

    def fields(self) -> dict[str, Any]:
        """The columns of a row."""
        return {
            "requests": len(self.traces) + self.refused,
            "completed": len(self.completed),
            "refused": self.refused,
            "preemptions": self.preemptions,
            "seconds": self.seconds,
            "requests_per_s": len(self.completed) / self.seconds,
            "input_tokens_per_s": self.input_tokens_per_s,
            "output_tokens_per_s": self.output_tokens_per_s,
            "total_tokens_per_s": self.input_tokens_per_s + self.output_tokens_per_s,
            "decoding": {"mean": self.decoding.mean, "peak": int(self.decoding.peak)},
            "waiting": {"mean": self.waiting.mean, "peak": int(self.waiting.peak)},
            "peak_concurrency": self.peak_concurrency,
            "kv_used": {"mean": self.kv_used.mean, "peak": self.kv_used.peak},
            "prefix_hit_rate": self.prefix_hit_rate,
            **latencies(self.completed),
        }


def latencies(completed: Sequence[Trace]) -> dict[str, dict[str, float] | None]:
    """`ttft_ms`, `tpot_ms`, `itl_ms` and `e2e_ms` of requests that completed, each a distribution; None where there is
    no value, as of gaps between the tokens of one-token answers."""
    more = [t for t in completed if len(t.tokens) > 1]
    return {
        "ttft_ms": _milliseconds(t.ttft for t in completed),
        "tpot_ms": _milliseconds(t.tpot for t in more),
        "itl_ms": _milliseconds(gap for t in more for gap in np.diff(t.tokens)),
        "e2e_ms": _milliseconds(t.e2e for t in completed),
    }


def _milliseconds(seconds: Iterable[float]) -> dict[str, float] | None:
    values = [1e3 * s for s in seconds]
    return distribution(values) if values else None
