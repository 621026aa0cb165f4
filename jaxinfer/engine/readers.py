"""Readers: every event goes to the reader of its request, whoever moves the engine on."""

from collections import deque
from collections.abc import Iterator

from jaxinfer.engine.engine import Engine, Event
from jaxinfer.engine.request import SamplingParams
from jaxinfer.engine.separated import Separated


class Readers:
    """An inbox for each request that somebody reads, in one thread.

    A reader that stops reading stops nobody: its request goes on to its end when others move the engine, gives back its
    pages there, and leaves at most one event for each token it asked for. Closing drops those.
    """

    def __init__(self, engine: Engine | Separated):
        self.engine = engine
        self._inboxes: dict[int, deque[Event]] = {}
        self._pieces: set[int] = set()

    def submit(self, prompt: str | list[int], params: SamplingParams | None, pieces: bool = True) -> int:
        """Queue a prompt whose events are kept until they are read: all of them, or without `pieces` only the end.
        UserError as from `Engine.submit`."""
        request = self.engine.submit(prompt, params)
        self._inboxes[request] = deque()
        if pieces:
            self._pieces.add(request)
        return request

    def events(self, request: int) -> Iterator[Event]:
        """The events of a request up to its end, in order; the engine moves on while there is none.

        RuntimeError where they never come, because somebody else called `Engine.step` and got them.
        """
        inbox = self._inboxes[request]
        while True:
            while not inbox:
                if not self.engine.busy:
                    raise RuntimeError(f"the events of request {request} went to another caller of Engine.step")
                self.step()
            event = inbox.popleft()
            yield event
            if event.completion is not None:
                return

    def step(self) -> None:
        """Move the engine on, and put what came of it where it belongs. Events without a reader are dropped."""
        for event in self.engine.step():
            inbox = self._inboxes.get(event.request)
            if inbox is not None and (event.completion is not None or event.request in self._pieces):
                inbox.append(event)

    def close(self, request: int) -> None:
        """Forget a request and what it left unread; it is cancelled if it has not ended."""
        self._inboxes.pop(request, None)
        self._pieces.discard(request)
        self.engine.cancel(request)
