"""The prefill worker: prompts in, first tokens and KV out."""

from collections import deque

from jaxinfer.engine.engine import Engine
from jaxinfer.engine.request import Request
from jaxinfer.engine.transfer import Handoff, Ticket


class PrefillWorker(Engine):
    """An engine of the role `prefill`. A request that goes on after its first token leaves here, in `handoffs`."""

    def __init__(self, model, config, on_logits=None):
        super().__init__(model, config.replace(role="prefill"), on_logits)
        self.handoffs: deque[Handoff] = deque()

    @property
    def ready(self) -> bool:
        """Whether `step` would not wait for the device."""
        return not self._in_flight or self._in_flight[0].ready

    def forget_gone(self) -> None:
        self.handoffs.clear()

    def _depth(self) -> int:
        return 1 if self.scheduler.next_chunk() else 0

    def _dispatch_decode(self) -> None:
        """Decode is elsewhere."""

    def _after_token(self, request: Request) -> None:
        """Read the request's KV out of its pages, give them back, and let it go."""
        if self.config.integrity == "digest" and not self._audit(request).all():
            self._mismatch(request)
            return
        starts = range(0, request.cached, self.config.transfer_tokens)
        blocks = tuple(self.programs.export(self.state, request.slot, start) for start in starts)
        self.scheduler.leave(request)
        self._release(request)
        del self._requests[request.id]
        self.counters.handed_over += 1
        self.handoffs.append(Handoff(Ticket.of(request), request.cached, blocks))
