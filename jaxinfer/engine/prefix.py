"""The prefix cache: pages of prompts and answers that are kept, and given to requests that begin alike.

The host has the tree (`cache.prefix`), the device the pages (`cache.sharing`). The host never waits to learn which
pages a slot has: once a text is in pages the device takes a hold of them and says which, and that is read when the step
that was dispatched before has been read. In the same way the device says whether the pages given to a new request still
are what the tree takes them for (tags, and with digests the bytes); that is read before any token of the request is.

What the host counts as the cache's: the pages of the tree, and those whose hold has not been read while their request
has gone.
"""

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxinfer.cache import INVALID
from jaxinfer.cache.prefix import Node, PrefixTree
from jaxinfer.config import EngineConfig
from jaxinfer.engine.request import Request
from jaxinfer.steps import ServingState

if TYPE_CHECKING:
    from jaxinfer.engine.engine import Counters
    from jaxinfer.engine.programs import Programs


@dataclass(eq=False)
class Unread:
    """An answer of the device that the host has not read, to what was dispatched for a request after the step `after`.
    """

    request: Request
    epoch: int
    after: Any
    answer: Any

    @property
    def current(self) -> bool:
        """Whether the request still has the slot that it had."""
        return self.request.slot != INVALID and self.request.preemptions == self.epoch


@dataclass(eq=False)
class Taken(Unread):
    """Holds taken of the pages of a text; `fresh` of them may be new and not in the tree."""

    tokens: list[int]
    fresh: int


@dataclass(eq=False)
class Adopted(Unread):
    """Pages of the tree given to a request."""

    path: list[Node]


class PrefixCache:
    """One engine's cache. Does nothing, and costs nothing, where the configuration does not ask for it.

    Methods that take a `ServingState` dispatch to the device and return the next one. `in_flight` are the engine's
    steps that have not been read.
    """

    def __init__(self, config: EngineConfig, programs: "Programs", counters: "Counters", in_flight: deque):
        self.config, self.programs, self.counters, self.in_flight = config, programs, counters, in_flight
        self.tree = PrefixTree(config.page_size)
        self.paths: dict[Request, list[Node]] = {}
        self.unread: deque[Taken | Adopted] = deque()

    # ---- what the scheduler counts with

    @property
    def pages(self) -> int:
        """Pages that are the cache's, shared with requests or not."""
        # The later of two holds on one slot has the pages of the earlier one too.
        gone = {(e.request, e.epoch): e.fresh for e in self.unread if isinstance(e, Taken) and not e.current}
        return len(self.tree) + sum(gone.values())

    @property
    def evictable(self) -> int:
        """Those of them that can be had back at once."""
        return len(self.tree.idle)

    def shared(self, request: Request) -> int:
        """Pages of a request that are the cache's too: the first ones of its slot."""
        return len(self.paths.get(request, ()))

    def claim(self, request: Request) -> int:
        """Find the pages that the cache has of a request's context, all but its last token, which must be computed for
        its logits, and hold on to them. Returns how many."""
        if not self.config.prefix_cache:
            return 0
        path = self.tree.match(request.context[:-1])
        self.tree.acquire(path)
        self.paths[request] = path
        return len(path)

    def leave(self, request: Request) -> None:
        """The request has none of its pages any more. Harmless when repeated."""
        self.tree.release(self.paths.pop(request, []))

    # ---- what is dispatched

    def open(self, state: ServingState, requests: list[Request]) -> ServingState:
        """Put the claimed pages of admitted requests in their slots."""
        for request in requests if self.config.prefix_cache else ():
            path = self.paths[request]
            if not request.preemptions:
                request.cached_tokens = len(path) * self.config.page_size
                self.counters.prefix_lookups += 1
                self.counters.prefix_prompt_tokens += len(request.prompt)
                self.counters.prefix_hit_tokens += request.cached_tokens
            state = self._adopt(state, request, path) if path else state
        return state

    def keep(self, state: ServingState, request: Request) -> ServingState:
        """Take a hold of the whole pages of a request's text, as far as they are filled."""
        text = request.prompt + request.output
        count = min(request.cached, len(text)) // self.config.page_size
        fresh = count - self.shared(request)
        if not self.config.prefix_cache or fresh <= 0:
            return state
        state, hold = self.programs.keep(state, np.int32(request.slot), np.int32(count))
        tokens = text[: count * self.config.page_size]
        self.unread.append(Taken(request, request.preemptions, self._last(), _on_the_way(hold), tokens, fresh))
        return state

    def evict(self, state: ServingState, count: int) -> ServingState:
        """Give back so many pages that nobody uses, or all there are, the least recently used first."""
        nodes: list[Node] = []
        while len(nodes) < count and (node := self.tree.evict()) is not None:
            nodes.append(node)
        self.counters.prefix_evictions += len(nodes)
        return self._drop(state, [(node.page, node.tag) for node in nodes])

    def settle(self, state: ServingState) -> tuple[ServingState, Adopted | None]:
        """Read what the device has answered, as far as all steps dispatched before have been read.

        Stops at pages that a request was given and that are not what the tree took them for: these are forgotten and
        returned, and the caller must write the books anew (`held`) and not let the request go on.
        """
        while self.unread and not any(step is self.unread[0].after for step in self.in_flight):
            entry = self.unread.popleft()
            if isinstance(entry, Taken):
                state = self._enter(state, entry)
            elif not (good := np.asarray(entry.answer)[: len(entry.path)]).all():
                self._forget(entry.path[int(good.argmin())])
                return state, entry
        return state, None

    # ---- what failed its check

    def forget(self, request: Request, column: int) -> None:
        """Pages of a request, from `column` on, are not to be trusted, nor is what was computed from them."""
        if column < self.shared(request):
            self._forget(self.paths[request][column])

    def held(self) -> np.ndarray:
        """Of each page whether it is the tree's, for the books to be written anew; holds not read yet are void."""
        self.unread = deque(e for e in self.unread if isinstance(e, Adopted))
        kept = np.zeros(self.config.num_pages, bool)
        kept[list(self.tree.pages)] = True
        return kept

    def _forget(self, node: Node) -> None:
        self.tree.forget(node)
        for path in self.paths.values():
            del path[next((i for i, each in enumerate(path) if each not in self.tree), len(path)) :]

    # ---- the parts

    def _enter(self, state: ServingState, entry: Taken) -> ServingState:
        """Put the pages of a text in the tree. A request that has duplicates of pages in it is given those instead, and
        the duplicates are free (fault 6)."""
        count = len(entry.tokens) // self.config.page_size
        pages, tags, taken = (np.asarray(a)[:count].tolist() for a in entry.answer)
        path, spare = self.tree.insert(entry.tokens, pages, tags, taken)
        for later in self.unread:  # of the same slot, when its request has ended soon after its prompt
            if isinstance(later, Taken) and (later.request, later.epoch) == (entry.request, entry.epoch):
                later.fresh = min(later.fresh, len(later.tokens) // self.config.page_size - count)
        self.tree.acquire(path)
        if entry.current and len(path) >= self.shared(entry.request):
            self.leave(entry.request)
            self.paths[entry.request] = path
            if [node.page for node in path] != pages[: len(path)]:
                state = self._adopt(state, entry.request, path)
        else:
            self.tree.release(path)
        return self._drop(state, [(pages[column], tags[column]) for column in spare])

    def _adopt(self, state: ServingState, request: Request, path: list[Node]) -> ServingState:
        columns = self.config.max_pages_per_slot
        pages, tags = _filled([(node.page, node.tag) for node in path], columns)
        state, good = self.programs.adopt(state, np.int32(request.slot), pages, tags)
        self.unread.append(Adopted(request, request.preemptions, self._last(), _on_the_way(good), list(path)))
        return state

    def _drop(self, state: ServingState, entries: list[tuple[int, int]]) -> ServingState:
        size = self.config.max_pages_per_slot
        for start in range(0, len(entries), size):
            state = self.programs.drop(state, *_filled(entries[start : start + size], size))
        return state

    def _last(self) -> Any:
        return self.in_flight[-1] if self.in_flight else None


def _filled(entries: list[tuple[int, int]], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Pages and tags in arrays of one size."""
    pages, tags = np.full(size, INVALID, np.int32), np.zeros(size, np.uint32)
    for i, entry in enumerate(entries):
        pages[i], tags[i] = entry
    return pages, tags


def _on_the_way(arrays: Any) -> Any:
    for leaf in jax.tree.leaves(arrays):
        leaf.copy_to_host_async()
    return arrays
