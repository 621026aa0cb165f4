"""Scene: an engine under load at the moment of a fault, and the means to damage its state without compiling anything.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxinfer.engine import Engine
from jaxinfer.engine.request import Request
from jaxinfer.steps import ServingState

Change = Callable[[np.ndarray], Any]
"""Changes an array in place."""


@dataclass(frozen=True)
class Scene:
    """`victim`: a running request with pages, drawn at random; `rng`: for every other choice of the fault."""

    engine: Engine
    victim: Request
    rng: np.random.Generator

    # ---- what there is

    @property
    def slot(self) -> int:
        return self.victim.slot

    def read(self, field: str) -> np.ndarray:
        """An array of the allocator, as it is now."""
        return np.asarray(getattr(self.engine.state.allocator, field))

    def pages(self, slot: int | None = None) -> np.ndarray:
        """The pages of a slot (the victim's), in order."""
        row = self.read("page_table")[self.slot if slot is None else slot]
        return row[row >= 0]

    def page(self) -> int:
        """One page of the victim's."""
        return int(self.rng.choice(self.pages()))

    def column(self) -> int:
        """The place of one page of the victim's in its table."""
        return int(self.rng.integers(len(self.pages())))

    def rows(self, page: int) -> int:
        """Tokens of the victim in one of its pages."""
        size = self.engine.config.page_size
        column = int(np.flatnonzero(self.pages() == page)[0])
        return int(np.clip(self.read("lengths")[self.slot] - column * size, 0, size))

    def other_slot(self) -> int | None:
        """The slot of another request that has pages, or None."""
        slots = [r.slot for r in self.engine.scheduler.running if r is not self.victim and len(self.pages(r.slot))]
        return int(self.rng.choice(slots)) if slots else None

    # ---- damage

    def edit(self, field: str, change: Change) -> None:
        """Change an array of the allocator."""
        allocator = self.engine.state.allocator
        changed: dict[str, Any] = {field: _edited(getattr(allocator, field), change)}
        self._replace(allocator=dataclasses.replace(allocator, **changed))

    def edit_pool(self, change: Change) -> None:
        """Change the stored entries [layers, pages, page_size, width] of one kind."""
        cache = self.engine.state.cache
        kind = str(self.rng.choice(sorted(cache.entries)))
        entries = cache.entries | {kind: _edited(cache.entries[kind], change)}
        self._replace(cache=dataclasses.replace(cache, entries=entries))

    def edit_scales(self, change: Change) -> None:
        """Change the scales [layers] of one kind."""
        cache = self.engine.state.cache
        kind = str(self.rng.choice(sorted(cache.scales)))
        scales = cache.scales | {kind: _edited(cache.scales[kind], change)}
        self._replace(cache=dataclasses.replace(cache, scales=scales))

    def edit_digests(self, change: Change) -> bool:
        """Change the digests [pages]; False where the level keeps none."""
        digests = self.engine.state.digests
        if digests is None:
            return False
        self._replace(digests=dataclasses.replace(digests, values=_edited(digests.values, change)))
        return True

    def flip(self, array: np.ndarray, index: Any, bit: int | None = None) -> None:
        """Turn one bit of one element, any of them unless it is given."""
        raw = array.view(f"u{array.itemsize}")
        bit = int(self.rng.integers(8 * array.itemsize)) if bit is None else bit
        raw[index] ^= raw.dtype.type(1 << bit)

    def _replace(self, **parts: Any) -> None:
        self.engine.state = dataclasses.replace(self.engine.state, **parts)

    @property
    def state(self) -> ServingState:
        return self.engine.state


def _edited(array: jax.Array, change: Change) -> jax.Array:
    """A copy with the change, where the array was, so that the compiled steps take it as they took the array."""
    copy = np.array(array)
    one = copy.reshape(1) if copy.ndim == 0 else copy  # so that a scalar can be changed in place too
    change(one)
    return jax.device_put(copy, array.sharding)
