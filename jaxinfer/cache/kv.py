"""KVCache: the pool of pages with its number format and scales, as one pytree that steps take and return."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Shaped

from jaxinfer.cache import pages
from jaxinfer.quantization.formats import KVFormat


class Places(Protocol):
    """Where new entries go: a page and an offset in it for each token, INVALID for none."""

    @property
    def pages(self) -> Int32[Array, "B T"]: ...
    @property
    def offsets(self) -> Int32[Array, "B T"]: ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """`entries`: kind to stored pages `[layers, pages, page_size, width]`; `scales`: kind to one scale a layer."""

    entries: dict[str, Shaped[Array, "layers pages page_size width"]]
    scales: dict[str, Float[Array, " layers"]]
    format: KVFormat = dataclasses.field(metadata={"static": True})

    @classmethod
    def create(
        cls,
        kinds: dict[str, int],
        layers: int | Mapping[str, int],
        num_pages: int,
        page_size: int,
        format: KVFormat,
        scales: dict[str, Float[Array, " layers"]] | None = None,
    ) -> "KVCache":
        """Empty pages for entries of `kinds` (name to width in values) in so many `layers`, or of each kind in as many
        as it says. `scales` are those of a scaled format; without them, and in every other format, they are 1."""
        deep = {kind: layers if isinstance(layers, int) else layers[kind] for kind in kinds}
        shapes = {kind: (deep[kind], width) for kind, width in kinds.items()}
        # Copies: the cache is donated to every step, and the scales of the checkpoint must outlive it.
        own = {
            kind: jnp.array(scales[kind], copy=True) if scales is not None and format.scaled else jnp.ones(deep[kind])
            for kind in kinds
        }
        return cls(pages.create(shapes, num_pages, page_size, format.dtype), own, format)

    def write(
        self, kind: str, layer: Int32[Array, ""], places: Places, rows: Float[Array, "B T width"]
    ) -> "KVCache":
        """The cache with `rows` encoded and stored; rows whose page is INVALID are dropped."""
        stored = self.format.encode(rows.reshape(-1, rows.shape[-1]), self.scales[kind][layer])
        entry = pages.write(
            self.entries[kind], layer, places.pages.reshape(-1), places.offsets.reshape(-1), stored
        )
        return dataclasses.replace(self, entries={**self.entries, kind: entry})

    def copy_pages(
        self, source: Int32[Array, " B"], target: Int32[Array, " B"], count: Int32[Array, ""]
    ) -> "KVCache":
        """The cache after copying the first `count` source pages to the targets, in every layer."""
        return dataclasses.replace(self, entries=pages.copy(self.entries, source, target, count))

    def extract(
        self,
        page: Int32[Array, " C"],
        count: Int32[Array, ""],
        format: KVFormat,
        scales: dict[str, Float[Array, " layers"]],
    ) -> dict[str, Shaped[Array, "layers T width"]]:
        """The first `count` of the T = C * page_size tokens of some pages, in every layer, as `format` stores them with
        `scales`; zeros after them. In the cache's own format the bytes are those of the pages."""

        def one(kind: str, layer: Int32[Array, ""]) -> Shaped[Array, "T width"]:
            found = pages.gather(self.entries[kind], layer, page[None], count[None])[0]
            if format == self.format:
                return found
            scale = scales[kind][layer] if format.scaled else jnp.float32(1)
            return format.encode(self.format.decode(found, self.scales[kind][layer]), scale)

        return {
            kind: jax.lax.map(lambda layer, kind=kind: one(kind, layer), jnp.arange(len(pool), dtype=jnp.int32))
            for kind, pool in self.entries.items()
        }

    def store(self, places: Places, rows: dict[str, Shaped[Array, "layers T width"]]) -> "KVCache":
        """The cache with rows that are in its own format already, in every layer; those without a page are dropped."""
        page, offset = places.pages.reshape(-1), places.offsets.reshape(-1)

        def stored(kind: str, pool):
            write = lambda layer, pool: pages.write(pool, layer, page, offset, rows[kind][layer])  # noqa: E731
            return jax.lax.fori_loop(0, len(pool), write, pool)

        return dataclasses.replace(self, entries={kind: stored(kind, pool) for kind, pool in self.entries.items()})

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes over all layers."""
        return sum(a.shape[0] * a.shape[3] * a.dtype.itemsize for a in self.entries.values())
