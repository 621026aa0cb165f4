"""The decode worker: requests with their KV in, tokens out."""

import logging

import jax
import numpy as np

from jaxinfer.engine.engine import Engine, InFlight
from jaxinfer.engine.request import Request, Status
from jaxinfer.engine.transfer import Arrival, Ticket

logger = logging.getLogger("jaxinfer.transfer")


class DecodeWorker(Engine):
    """An engine of the role `decode`. It prefills nothing: a request that loses its pages goes back, in `returned`."""

    def __init__(self, model, config, on_logits=None):
        super().__init__(model, config.replace(role="decode", prefix_cache=False), on_logits)
        self.returned: list[Ticket] = []
        self._claims: dict[int, jax.Array] = {}  # the tag under which each slot was claimed for KV on its way

    def take(self, ticket: Ticket, arrival: Arrival) -> None:
        """Queue a request whose KV is here or on its way."""
        request = ticket.request(self.model)
        request.arrival = arrival
        super().accept(request)

    def forget_gone(self) -> None:
        self.returned.clear()

    @property
    def awaiting(self) -> list[Request]:
        """Requests that have a slot and wait for their KV."""
        return [r for r in self.scheduler.running if r.status is Status.TRANSFER]

    def _admit(self) -> list[Request]:
        admitted = super()._admit()
        for request in admitted:
            assert request.arrival is not None
            request.arrival.start()
            self._claims[request.slot] = self.programs.claim(self.state, np.array([request.slot], np.int32))
        return admitted

    def _dispatch_prefill(self) -> None:
        """Put the KV that has come into pages."""
        for request in self.awaiting:
            assert request.arrival is not None
            if request.arrival.ready:
                self._insert(request, request.arrival)
            elif request.arrival.lost:
                logger.warning("request %d goes back to prefill: %s", request.id, request.arrival.lost)
                self._send_back(request)

    def _insert(self, request: Request, arrival: Arrival) -> None:
        slots, size = np.array([request.slot], np.int32), self.config.transfer_tokens
        tags = self._claims.pop(request.slot)
        for i, block in enumerate(arrival.blocks()):
            start, count = np.int32(i * size), np.int32(min(size, arrival.tokens - i * size))
            self.state, output = self.programs.insert(self.state, slots, tags, start, count, block)
            self._in_flight.append(InFlight([request], [request.preemptions], [False], output))
        request.cached, request.status, request.arrival = arrival.tokens, Status.DECODE, None

    def _wait_again(self, request: Request) -> None:
        request.arrival = None
        del self._requests[request.id]
        self.returned.append(Ticket.of(request))
