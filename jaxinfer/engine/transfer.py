"""What passes between a prefill and a decode worker: a `Ticket`, the request as plain values, and an `Arrival`, its KV.

A ticket goes prefill -> decode with the KV, and back without it where the decode worker had to give up its pages: the
request is then prefilled anew, and goes on where it was.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import jax

from jaxinfer.checkpoints.model import Model
from jaxinfer.engine.request import Request, SamplingParams, TokenLogprob
from jaxinfer.engine.stopping import take_text
from jaxinfer.steps import Block


@dataclass(frozen=True)
class Ticket:
    """A request between workers: its number, what was asked, and what it has had so far (as in `Request`)."""

    id: int
    prompt: list[int]
    params: SamplingParams
    output: list[int] = dataclasses.field(default_factory=list)
    confirmed: int = 0
    preemptions: int = 0
    recomputed: bool = False
    ending: tuple[str, str, tuple[int, ...]] | None = None
    logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, request: Request) -> Self:
        """The ticket of a request that leaves a worker."""
        fields = {f.name: getattr(request, f.name) for f in dataclasses.fields(cls)}
        copies: dict[str, Any] = {name: list(v) if isinstance(v, list) else v for name, v in fields.items()}
        return cls(**copies)

    def request(self, model: Model) -> Request:
        """The request as a worker takes it up: its text is what its tokens give when they are read again."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        request = Request(decoder=model.stream_decoder(), **values)
        for token in self.output:
            take_text(request, token, model.end_tokens)
        return request

    def again(self) -> "Ticket":
        """The ticket of a request whose KV was lost: what it has had becomes part of what is prefilled."""
        return dataclasses.replace(self, preemptions=self.preemptions + 1)

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """The inverse of `to_dict`."""
        logprobs = [TokenLogprob(t["token"], t["logprob"], tuple(map(tuple, t["top"]))) for t in values["logprobs"]]
        reason = values["ending"]
        ending = (reason[0], reason[1], tuple(reason[2])) if reason else None
        params = SamplingParams(**{**values["params"], "stop_tokens": tuple(values["params"]["stop_tokens"])})
        return cls(**{**values, "params": params, "logprobs": logprobs, "ending": ending})


class Arrival(Protocol):
    """KV of one request on its way to a decode worker."""

    @property
    def tokens(self) -> int:
        """How many it has."""
        ...

    @property
    def lost(self) -> str:
        """Why it won't come, or ""."""
        ...

    @property
    def ready(self) -> bool:
        """Whether it can be written to pages without waiting; never once it is lost."""
        ...

    @property
    def told(self) -> Any:
        """Where it is, as plain JSON values, for other processes that pull it too."""
        ...

    def start(self) -> None:
        """There is a slot for it now: let it come."""

    def blocks(self) -> Sequence[Block]:
        """It, in order, on the decode worker's devices."""
        ...


@dataclass(frozen=True)
class Handoff:
    """A request that leaves a prefill worker, with the KV of its first `tokens` tokens in `blocks`."""

    ticket: Ticket
    tokens: int
    blocks: tuple[Block, ...]


class LocalArrival:
    """KV that comes from another mesh of this process."""

    lost, told = "", None

    def __init__(self, handoff: Handoff, shardings: Block):
        self.tokens = handoff.tokens
        self._blocks, self._shardings = list(handoff.blocks), shardings

    def start(self) -> None:
        self._blocks = [jax.device_put(block, self._shardings) for block in self._blocks]

    @property
    def ready(self) -> bool:
        return all(leaf.is_ready() for leaf in jax.tree.leaves(self._blocks))

    def blocks(self) -> list[Block]:
        return self._blocks
