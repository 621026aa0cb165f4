"""Attention over chosen positions of paged entries (DSA): the bits of the chosen entries of each query are gathered to
pages of its own, and the paged attention runs on those, kernel or reference.

Bytes of a call: each query's K chosen entries three times (read, written, read again), K * width * bits / 8 each.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Shaped

from pallas_kernels.paged_attention.api import mla_attention

QUERIES = 64  # at a time: their gathered entries (151 MB of 2048 x 576 in bf16) are all that a call holds


def chosen_mla_attention(
    query: Float[Array, "B T H width"],
    pool: Shaped[Array, "L pages page_size width"],
    layer: Int32[Array, ""],
    page_table: Int32[Array, "B M"],
    lengths: Int32[Array, " B"],
    positions: Int32[Array, "B T"],
    chosen: Int32[Array, "B T K"],
    *,
    latent: int,
    kv_scale: Float[Array, ""],
    softmax_scale: float,
    implementation: str = "auto",
) -> Float[Array, "B T H latent"]:
    """`mla_attention` where each query sees only its `chosen` positions. A position below 0, after the query's own,
    not below its row's length, or in no page counts as not chosen and is not read; without any, the result is zeros.
    Errors as `mla_attention`."""
    page_table, lengths = jnp.asarray(page_table), jnp.asarray(lengths)  # indexed by traced rows
    _, num_pages, size, width = pool.shape
    batch, tokens, heads, _ = query.shape
    count = chosen.shape[-1]
    chosen = jnp.pad(chosen, ((0, 0), (0, 0), (0, -count % size)), constant_values=-1)
    options: dict[str, Any] = {"latent": latent, "kv_scale": kv_scale, "softmax_scale": softmax_scale}
    options["implementation"] = implementation

    def attend(query, places, row, position):
        """N queries, each a sequence of its own."""
        column = jnp.clip(places // size, 0, page_table.shape[1] - 1)
        page = page_table[row[:, None], column]
        valid = (places >= 0) & (places <= position[:, None]) & (places < lengths[row][:, None])
        valid &= (places < page_table.shape[1] * size) & (page >= 0) & (page < num_pages)
        # Those that count come first: the kernel sees a sequence of that length and nothing behind it.
        order = jnp.argsort(~valid, axis=1, stable=True)
        page, offset = (jnp.take_along_axis(jnp.where(valid, a, 0), order, 1) for a in (page, places % size))
        seen = valid.sum(axis=1, dtype=jnp.int32)
        entries = pool[layer, page, offset]
        entries = jnp.where((jnp.arange(places.shape[1]) < seen[:, None])[..., None], entries, 0)
        own = jnp.arange(places.size // size, dtype=jnp.int32).reshape(len(places), -1)
        own_pool = entries.reshape(1, -1, size, width)
        return mla_attention(query[:, None], own_pool, jnp.int32(0), own, seen, seen[:, None] - 1, **options)[:, 0]

    rows = jnp.repeat(jnp.arange(batch, dtype=jnp.int32), tokens)
    flat = (query.reshape(-1, heads, width), chosen.reshape(batch * tokens, -1), rows, positions.reshape(-1))
    if batch * tokens <= QUERIES:
        return attend(*flat).reshape(batch, tokens, heads, latent)
    fill = -(batch * tokens) % QUERIES
    blocks = [jnp.pad(a, ((0, fill), *[(0, 0)] * (a.ndim - 1)), constant_values=-1 if a.ndim < 3 else 0) for a in flat]
    blocks[2] = jnp.maximum(blocks[2], 0)
    out = jax.lax.map(lambda block: attend(*block), [a.reshape(-1, QUERIES, *a.shape[1:]) for a in blocks])
    return out.reshape(-1, heads, latent)[: batch * tokens].reshape(batch, tokens, heads, latent)
