"""Who had a page: the last few requests that each page was handed to, or that came to share it, kept on the device for
the log of a mismatch."""

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from jaxinfer.cache.allocator import INVALID

RING = 4


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Owners:
    """`requests`: the request in each slot. `ring`: the last RING requests of each page, the newest first, INVALID
    where there were fewer."""

    requests: Int32[Array, "slots"]
    ring: Int32[Array, "pages RING"]

    @classmethod
    def create(cls, num_pages: int, num_slots: int) -> "Owners":
        return cls(jnp.full(num_slots, INVALID, jnp.int32), jnp.full((num_pages, RING), INVALID, jnp.int32))


def open_slots(owners: Owners, slots: Int32[Array, "B"], requests: Int32[Array, "B"]) -> Owners:
    """Note which request is in each slot."""
    target = jnp.where(slots >= 0, slots, owners.requests.shape[0])
    return dataclasses.replace(owners, requests=owners.requests.at[target].set(requests, mode="drop"))


def record(
    owners: Owners, slots: Int32[Array, "B"], pages: Int32[Array, "B T"], offsets: Int32[Array, "B T"]
) -> Owners:
    """Enter the request of each slot for the pages to which this step wrote a first token."""
    with jax.named_scope("record_owners"):
        return enter(owners, slots, jnp.where(offsets == 0, pages, INVALID))


def enter(owners: Owners, slots: Int32[Array, "B"], pages: Int32[Array, "B T"]) -> Owners:
    """Enter the request of each slot as the newest that has its `pages` (INVALID: none)."""
    page = jnp.where(pages >= 0, pages, owners.ring.shape[0])
    before = owners.ring.at[page, : RING - 1].get(mode="fill", fill_value=INVALID)
    request = jnp.broadcast_to(owners.requests[jnp.maximum(slots, 0)][:, None, None], (*pages.shape, 1))
    ring = owners.ring.at[page].set(jnp.concatenate([request, before], axis=-1), mode="drop")
    return dataclasses.replace(owners, ring=ring)
