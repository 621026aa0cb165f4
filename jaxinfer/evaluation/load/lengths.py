"""Length mixes: how many tokens requests bring and ask for, drawn from a seed.

Prompts are random tokens; their text means nothing, only their length costs. Outputs are exact: the end token is
ignored.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jaxinfer.engine import SamplingParams
from jaxinfer.errors import UserError

DEFAULTS = {"fixed": (64, 32), "random": (64, 32), "sharegpt": (215, 198), "agent": (384, 32)}
"""Input and output tokens of each mix where none are asked for. ShareGPT: vLLM's throughput benchmark on 1,000 of its
conversations reports 215,196 prompt and 198,343 output tokens. For `agent` the input is the shared prefix."""
SPREAD = {"input": 1.2, "output": 0.9}
"""Standard deviations of the logarithms of ShareGPT-like lengths. The means are published, these are assumed: many
short questions and a long tail, answers more alike than questions."""
TURNS = 4  # of an agent's session


@dataclass(frozen=True)
class Job:
    """One request: its prompt, and the tokens it asks for, which it gets exactly."""

    prompt: list[int]
    output: int

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(max_tokens=self.output, ignore_eos=True)


@dataclass(frozen=True)
class Mix:
    """`kind`: one of DEFAULTS. `input` and `output` are tokens: exact (`fixed`), the middle of an even draw from half
    to one and a half times as many (`random`), the mean of a log-normal draw (`sharegpt`), or the prefix that all
    sessions share and the answer to each of their turns (`agent`)."""

    kind: str = "fixed"
    input: int = 64
    output: int = 32

    def __post_init__(self) -> None:
        if self.kind not in DEFAULTS:
            raise UserError(f"unknown length mix {self.kind!r}; there are: {', '.join(DEFAULTS)}")
        for name in ("input", "output"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1 token, not {getattr(self, name)}")

    @classmethod
    def of(cls, kind: str, input: int | None = None, output: int | None = None) -> "Mix":
        """The mix called `kind`, with its own lengths where none are given. UserError where there is none."""
        own = DEFAULTS.get(kind, (1, 1))
        return cls(kind, own[0] if input is None else input, own[1] if output is None else output)

    def jobs(self, count: int, vocab: int, room: int, seed: int) -> list[Job]:
        """`count` requests with tokens below `vocab`, none longer than `room` in all: the prompt is cut to leave a
        quarter of the room, the output to what the prompt leaves."""
        rng = np.random.default_rng([seed, 17])
        most = max(1, room - max(1, room // 4))
        jobs = []
        for prompt, output in _DRAWS[self.kind](self, rng, count, vocab):
            kept = prompt[: max(most, room - output)]
            jobs.append(Job(kept.tolist(), max(1, min(output, room - len(kept)))))
        return jobs


Draw = Callable[[Mix, np.random.Generator, int, int], list[tuple[np.ndarray, int]]]


def _fixed(mix: Mix, rng: np.random.Generator, count: int, vocab: int) -> list[tuple[np.ndarray, int]]:
    return [(rng.integers(0, vocab, mix.input), mix.output) for _ in range(count)]


def _random(mix: Mix, rng: np.random.Generator, count: int, vocab: int) -> list[tuple[np.ndarray, int]]:
    draw = lambda middle: int(rng.integers((middle + 1) // 2, middle + middle // 2 + 1))  # noqa: E731
    return [(rng.integers(0, vocab, draw(mix.input)), draw(mix.output)) for _ in range(count)]


def _sharegpt(mix: Mix, rng: np.random.Generator, count: int, vocab: int) -> list[tuple[np.ndarray, int]]:
    def draw(name: str) -> int:
        mean, spread = getattr(mix, name), SPREAD[name]
        return max(1, round(rng.lognormal(math.log(mean) - spread**2 / 2, spread)))

    return [(rng.integers(0, vocab, draw("input")), draw("output")) for _ in range(count)]


def _agent(mix: Mix, rng: np.random.Generator, count: int, vocab: int) -> list[tuple[np.ndarray, int]]:
    """Sessions of TURNS requests. A turn's prompt is the prefix, the turns before it (an answer and as much of a tool's
    result each), and a new message. First turns come first; none waits for the answer of the one before."""
    sessions = -(-count // TURNS)
    prefix = rng.integers(0, vocab, mix.input)
    said = rng.integers(0, vocab, (sessions, TURNS * 2 * mix.output))
    turns = [(turn, session) for turn in range(TURNS) for session in range(sessions)]
    return [(np.append(prefix, said[s, : (t + 1) * 2 * mix.output]), mix.output) for t, s in turns[:count]]


_DRAWS: dict[str, Draw] = {"fixed": _fixed, "random": _random, "sharegpt": _sharegpt, "agent": _agent}
