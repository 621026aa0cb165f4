"""The host's plan: who gets a slot, who is prefilled next, who decodes, who must give way.

The scheduler counts pages itself, from lengths it knows, so that it never asks the device; the device's allocator
refuses what it was asked in error. A request holds the pages of its whole context from admission on; those at its front
that the prefix cache has too are counted there, once. What the cache alone has is as good as free.
"""

from collections import deque
from dataclasses import dataclass

from jaxinfer.config import EngineConfig
from jaxinfer.engine.prefix import PrefixCache
from jaxinfer.engine.request import Request, Status


@dataclass(frozen=True)
class Chunk:
    """One prefill step: for each request, where its chunk starts and how many tokens it has; `shape` is the bucket."""

    shape: tuple[int, int]
    requests: list[Request]
    counts: list[int]


class Scheduler:
    """Queue, slots and page arithmetic. First come, first served; the youngest gives way."""

    def __init__(self, config: EngineConfig, prefix: PrefixCache):
        self.config, self.prefix = config, prefix
        self.first_status = Status.TRANSFER if config.role == "decode" else Status.PREFILL
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in order of admission
        self.free_slots = list(range(config.max_slots - 1, -1, -1))

    def pages(self, tokens: int) -> int:
        return -(-tokens // self.config.page_size)

    def held(self, request: Request) -> int:
        """Pages reserved for a running request."""
        return self.pages(max(request.cached, len(request.context)))

    @property
    def free_pages(self) -> int:
        own = sum(self.held(r) - self.prefix.shared(r) for r in self.running)
        return self.config.num_pages - own - self.prefix.pages

    def admit(self) -> list[Request]:
        """Requests that get a slot now, in order of arrival: the head of the queue waits until it fits, and leaves a
        page for every running request to grow into."""
        admitted = []
        free = self.free_pages + self.prefix.evictable - len(self.running)
        while self.waiting and self.free_slots:
            request, evictable = self.waiting[0], self.prefix.evictable
            whole = self.pages(len(request.context) + 1)
            shared = self.prefix.claim(request)
            need = whole - shared + evictable - self.prefix.evictable
            if need > free and (self.running or whole > self.config.num_pages):
                self.prefix.leave(request)
                break
            free -= need
            self.waiting.popleft()
            request.slot, request.status = self.free_slots.pop(), self.first_status
            request.cached, request.dispatched = shared * self.config.page_size, request.confirmed
            self.running.append(request)
            admitted.append(request)
        return admitted

    def next_chunk(self) -> Chunk | None:
        """The prefill bucket with the most useful tokens for its time, filled in order of admission."""
        prefilling = [r for r in self.running if r.status is Status.PREFILL]
        if not prefilling:
            return None

        def counts(shape):
            rows, tokens = shape
            return [min(tokens, len(r.context) - r.cached) for r in prefilling[:rows]]

        def worth(shape):
            return sum(counts(shape)) / (64 + shape[0] * shape[1])  # 64: what a step costs however small, in tokens

        best = max(self.config.prefill_buckets, key=worth)
        return Chunk(best, prefilling[: best[0]], counts(best))

    def decodable(self) -> list[Request]:
        """Requests that can take one more token."""
        return [r for r in self.running if r.status is Status.DECODE and r.dispatched < r.params.max_tokens]

    def growth(self, batch: list[Request]) -> int:
        """Pages that one more token for each of `batch` needs."""
        return sum(self.pages(r.cached + 1) - self.held(r) for r in batch)

    def short_of_pages(self, batch: list[Request]) -> bool:
        """Whether that is more than are free or can be evicted."""
        return self.growth(batch) > self.free_pages + self.prefix.evictable

    def youngest(self) -> Request:
        """The running request that gives way first."""
        return self.running[-1]

    def leave(self, request: Request) -> None:
        """Take a request out of the queue or off its slot. Harmless when it is in neither."""
        if request in self.running:
            self.running.remove(request)
            self.free_slots.append(request.slot)
        elif request in self.waiting:
            self.waiting.remove(request)
