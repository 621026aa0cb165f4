"""KV for a decode worker over several processes, each of which pulls a copy of its own.

When a copy is there differs from process to process, so no process may act on it. Each says what became of its own; the
leader says to all, before the same step, that the KV is ready once every copy is, or lost as soon as one is.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxinfer.engine.decode import DecodeWorker
from jaxinfer.engine.transfer import Arrival
from jaxinfer.steps import Block

Pull = Callable[[Any], Arrival]
"""KV that comes from where an arrival's `told` says."""
News = Sequence[Any]
"""What became of a process's copy: the number of its `Copy`, and why it was lost, or ""."""


class Copy:
    """This process's copy, as the engine's `Arrival`: `ready` and `lost` only once the leader has said so. `number`:
    the same in all processes, and never given again; `missing`: for the leader, copies of which nothing is known."""

    def __init__(self, own: Arrival, number: int, missing: int = 0):
        self.own, self.number, self.missing = own, number, missing
        self.tokens, self.ready, self.lost = own.tokens, False, ""
        self.reported = False

    @property
    def told(self) -> Any:
        return self.own.told

    def start(self) -> None:
        self.own.start()

    def blocks(self) -> Sequence[Block]:
        return self.own.blocks()

    def settle(self, why: str) -> None:
        """The leader's word: ready, or lost for the reason given."""
        self.ready, self.lost = not why, why


def news(engine: DecodeWorker) -> list[News]:
    """What has become known of this process's copies since the last call."""
    found = [c for _, c in _copies(engine) if not c.reported and (c.own.ready or c.own.lost)]
    for copy in found:
        copy.reported = True
    return [(copy.number, copy.own.lost) for copy in found]


def verdicts(engine: DecodeWorker, told: list[News]) -> Iterator[tuple[int, str]]:
    """The leader's: settle what the news of all processes decide; yields each request, and why its KV was lost, or "".
    News of a copy that nobody waits for any more are dropped."""
    waiting = {copy.number: (request, copy) for request, copy in _copies(engine)}
    for number, why in told:
        if number not in waiting:
            continue
        request, copy = waiting[number]
        copy.missing -= 1
        if why or not copy.missing:
            copy.settle(why)
            del waiting[number]
            yield request, why


def _copies(engine: DecodeWorker) -> Iterator[tuple[int, Copy]]:
    for request in engine.awaiting:
        assert isinstance(request.arrival, Copy)
        yield request.id, request.arrival
