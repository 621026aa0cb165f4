"""Requests: what is asked (`SamplingParams`), what is under way (`Request`), what came of it (`Completion`)."""

import enum
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jaxinfer.errors import UserError
from jaxinfer.text.tokenizer import StreamDecoder

if TYPE_CHECKING:
    from jaxinfer.engine.transfer import Arrival

MAX_STOPS = 16


@dataclass(frozen=True)
class SamplingParams:
    """How a request's tokens are chosen and when it ends.

    `temperature` 0 is greedy. `top_p` 1, `top_k` 0 and `min_p` 0 keep every token. `seed` None is drawn from the
    request's id, so that a run repeats. `logprobs` is how many of the likeliest tokens to report with each token.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_tokens: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_tokens", tuple(self.stop_tokens))
        rules = [
            (self.max_tokens >= 1, f"max_tokens must be at least 1, not {self.max_tokens}"),
            (0 <= self.temperature < float("inf"), f"temperature must be 0 or more, not {self.temperature}"),
            (0 < self.top_p <= 1, f"top_p must be above 0 and at most 1, not {self.top_p}"),
            (self.top_k >= 0, f"top_k must be 0 (all) or more, not {self.top_k}"),
            (0 <= self.min_p <= 1, f"min_p must be between 0 and 1, not {self.min_p}"),
            (self.logprobs >= 0, f"logprobs must be 0 or more, not {self.logprobs}"),
            (len(self.stop) <= MAX_STOPS, f"at most {MAX_STOPS} stop strings, not {len(self.stop)}"),
            (all(self.stop), "a stop string must not be empty"),
            (self.seed is None or 0 <= self.seed < 2**32, f"seed must be between 0 and 2^32 - 1, not {self.seed}"),
        ]
        for holds, message in rules:
            if not holds:
                raise UserError(message)


class Status(enum.Enum):
    """Where a request is in its life: waiting -> prefill -> decode -> done, back to waiting when preempted. In a decode
    worker of its own, TRANSFER (its KV is on the way) takes the place of PREFILL."""

    WAITING = "waiting"
    PREFILL = "prefill"
    TRANSFER = "transfer"
    DECODE = "decode"
    DONE = "done"


@dataclass(frozen=True)
class TokenLogprob:
    """Natural log-probability of a token, and the likeliest tokens of its place."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(eq=False)
class Request:
    """One request under way. The scheduler and the engine write it; nobody else does."""

    id: int
    prompt: list[int]
    params: SamplingParams
    decoder: StreamDecoder
    arrived: float = field(default_factory=time.perf_counter)
    status: Status = Status.WAITING
    slot: int = -1
    output: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    text: str = ""  # decoded so far, without what may still turn out to be a stop string
    held: str = ""  # decoded but held back: the beginning of a stop string, perhaps
    cached: int = 0  # tokens in pages once every dispatched step has run
    dispatched: int = 0  # output tokens that dispatched steps will have given
    confirmed: int = 0  # output tokens that stand; fewer than all while they are computed anew and compared
    recomputed: bool = False  # its pages have failed once and it was given another chance
    ending: tuple[str, str, tuple[int, ...]] | None = None  # reason, text and tokens of the end, until confirmed
    finish_reason: str = ""
    error: str = ""
    preemptions: int = 0
    arrival: "Arrival | None" = None  # its KV, in a decode worker, until it is in pages
    cached_tokens: int = 0  # of the prompt, that the prefix cache had
    first_token_at: float = 0.0
    finished_at: float = 0.0

    @property
    def context(self) -> list[int]:
        """What must be in pages before decoding goes on: the prompt, after a preemption also the output that stands."""
        return self.prompt + self.output[: self.confirmed] if self.preemptions else self.prompt

    def completion(self) -> "Completion":
        return Completion(
            self.id,
            self.prompt,
            self.output,
            self.text,
            self.finish_reason,
            self.error,
            self.logprobs,
            self.preemptions,
            (self.first_token_at or self.finished_at) - self.arrived,
            self.finished_at - self.arrived,
            cached_tokens=self.cached_tokens,
        )


@dataclass(frozen=True)
class Completion:
    """What a request ended in. `finish_reason`: stop, length, cancelled, integrity (its pages failed verification).
    Times in seconds since the request arrived. `precision` says what formats it ran at, `cached_tokens` how many tokens
    of the prompt were in the prefix cache."""

    id: int
    prompt: list[int]
    tokens: list[int]
    text: str
    finish_reason: str
    error: str
    logprobs: list[TokenLogprob]
    preemptions: int
    ttft: float
    e2e: float
    precision: str = ""
    cached_tokens: int = 0
