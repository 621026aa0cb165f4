"""KV between processes, by `jax.experimental.transfer`: a prefill worker offers it under a key, a decode one pulls.

A pull that is not done in time, or whose sender dies, is lost and never waited for. What is offered and not pulled
stays in the sender's memory until it is dropped. A worker over several processes pulls a copy for each of them.
"""

import itertools
import time
from typing import Any

import jax
import numpy as np
from jax.experimental import transfer

from jaxinfer.parallel.sharding import spread
from jaxinfer.steps import Block

Place = dict[str, Any]
"""Where offered KV can be pulled: `address` of its server, the first of its `keys`, and how many blocks there are."""


class Exchange:
    """This process's end, at an address of its own `host`. Blocks cross on one device a process; `shardings` places
    them on all devices of the worker, of which each process sees to its own."""

    def __init__(self, host: str, block: Block, shardings: Block):
        self._device = next(iter(shardings.digest.addressable_devices))  # type: ignore[attr-defined]
        host = f"[{host}]" if ":" in host else host
        self._server = transfer.start_transfer_server(self._device.client, f"{host}:0", [f"{host}:0"])
        self._block, self._shardings = block, shardings
        self._connections: dict[str, Any] = {}
        self._keys = itertools.count(1)
        self._offered: dict[int, tuple[int, int, float]] = {}  # key: copies, blocks, when

    @property
    def address(self) -> str:
        return self._server.address()

    @property
    def offered(self) -> int:
        """Requests whose KV waits to be pulled."""
        return len(self._offered)

    def offer(self, blocks: tuple[Block, ...], copies: int = 1) -> Place:
        """Let so many other processes pull these blocks, each once."""
        key = next(self._keys)
        for i, block in enumerate(blocks):
            leaves = [_on(leaf, self._device) for leaf in jax.tree.leaves(block)]
            for copy in range(copies):
                self._server.await_pull(_uuid(key, copy, i), leaves)
        self._offered[key] = (copies, len(blocks), time.monotonic())
        return {"address": self.address, "key": key, "blocks": len(blocks)}

    def taken(self, key: int, copies: int = 1) -> None:
        """The first `copies` were pulled; nobody comes for the others."""
        offered, blocks, _ = self._offered.pop(key, (0, 0, 0.0))
        for copy in range(copies, offered):
            for i in range(blocks):  # pulled by this process itself, which is the one way to take it back
                self._pull(self.address, key, copy, i)

    def drop(self, key: int) -> None:
        """Give up what was offered."""
        self.taken(key, 0)

    def drop_older(self, seconds: float) -> None:
        """Give up what nobody came for in so long."""
        now = time.monotonic()
        for key in [k for k, (_, _, since) in self._offered.items() if now - since > seconds]:
            self.drop(key)

    def pull(self, place: Place) -> list[Block]:
        """Blocks that another process offers; their arrays are ready when they are here, or have failed."""
        copy = jax.process_index()
        return [self._pull(place["address"], place["key"], copy, i) for i in range(place["blocks"])]

    def placed(self, blocks: list[Block]) -> list[Block]:
        """Blocks that are here, on all devices of this worker."""
        return [spread(block, self._shardings) for block in blocks]

    def forget(self, address: str) -> None:
        """The process there is gone: the next one starts a connection of its own."""
        self._connections.pop(address, None)

    def _pull(self, address: str, key: int, copy: int, index: int) -> Block:
        if address not in self._connections:
            self._connections[address] = self._server.connect(address)
        place = jax.sharding.SingleDeviceSharding(self._device)
        leaves, tree = jax.tree.flatten(self._block)
        specs = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place) for leaf in leaves]
        return jax.tree.unflatten(tree, self._connections[address].pull(_uuid(key, copy, index), specs))


class RemoteArrival:
    """KV of one request that another process offers; pulled from `start` on, lost `limit` seconds later."""

    def __init__(self, exchange: Exchange, place: Place, tokens: int, limit: float):
        self.tokens, self.lost, self.place = tokens, "", place
        self._exchange, self._limit = exchange, limit
        self._blocks: list[Block] = []
        self._deadline = float("inf")
        self._checked = False
        self.started = False

    @property
    def told(self) -> dict[str, Any]:
        return {"place": self.place, "tokens": self.tokens}

    def start(self) -> None:
        self.started = True
        self._deadline = time.monotonic() + self._limit
        try:
            self._blocks = self._exchange.pull(self.place)
        except jax.errors.JaxRuntimeError as error:
            self._lose(f"its KV could not be pulled: {error}")

    @property
    def ready(self) -> bool:
        if self.lost:
            return False
        if not all(leaf.is_ready() for leaf in jax.tree.leaves(self._blocks)):
            if time.monotonic() > self._deadline:
                self._lose(f"its KV did not come within {self._limit:g} s")
            return False
        if not self._checked:
            try:
                jax.block_until_ready(self._blocks)
            except jax.errors.JaxRuntimeError as error:
                self._lose(f"its KV did not come: {error}")
                return False
            self._checked = True
        return True

    def blocks(self) -> list[Block]:
        return self._exchange.placed(self._blocks)

    def _lose(self, why: str) -> None:
        self.lost = " ".join(why.split())[:200]
        self._blocks = []
        self._exchange.forget(self.place["address"])


def _uuid(key: int, copy: int, index: int) -> int:
    return (key << 32) + (copy << 20) + index


def _on(leaf: jax.Array, device: jax.Device) -> jax.Array:
    """An array on one device: its parts together where it is split."""
    if leaf.is_fully_replicated:
        return leaf.addressable_data(0)
    return jax.device_put(np.asarray(leaf), device)
