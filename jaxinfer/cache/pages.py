"""The pool: one array for each kind of cache entry, `[layers, pages, page_size, width]`.

A kind is, say, the compressed latent of MLA, or keys, or the scales that go with them. Which page belongs to
whom is the business of `jaxinfer.cache.allocator`; here page indexes are taken as they come, except that one
that does not exist (INVALID, or beyond the pool) is never read and never written.

Writing is in place when the pool is donated, also in the carry of a scan. On the CPU that is so only for
elements that XLA keeps as they are (integers, float32, float16): it computes in a wider type for bfloat16 and
the float8 types and converts the whole pool back and forth at every write. Such a pool is therefore kept as
unsigned integers of the same width, `storage_dtype`; `write` stores the bits of its rows and `gather` gives
them back as the type that it is asked for. On accelerators this costs nothing.

Letters: L layers, P pages, W width of an entry (elements), N entries, B slots, M pages of a slot.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32, Shaped

Pool = dict[str, Shaped[Array, "layers pages page_size width"]]
DType = Any
"""Anything that `jnp.dtype` takes."""


def storage_dtype(dtype: DType) -> jnp.dtype:
    """The type in which a pool of such elements is kept: unsigned integers for bfloat16 and float8, otherwise
    itself.
    """
    dtype = jnp.dtype(dtype)
    if dtype in (jnp.dtype(jnp.float32), jnp.dtype(jnp.float16)) or not jnp.issubdtype(dtype, jnp.floating):
        return dtype
    return jnp.dtype(f"uint{8 * dtype.itemsize}")


def create(
    kinds: Mapping[str, tuple[int, int]], num_pages: int, page_size: int, dtype: DType | Mapping[str, DType]
) -> Pool:
    """A pool of zeros. `kinds` gives (layers, width) for each kind, `dtype` one type for all or one for each
    kind.

    The type is taken as it is; see `storage_dtype`. Raises ValueError when a size is below 1, KeyError for a
    kind without a type.

    >>> pool = create({"latent": (27, 576)}, num_pages=4096, page_size=64, dtype=storage_dtype(jnp.bfloat16))
    """
    pool = {}
    for kind, (layers, width) in kinds.items():
        shape = (layers, num_pages, page_size, width)
        if min(shape) < 1:
            raise ValueError(f"{kind}: sizes must be at least 1, got [layers, pages, page_size, width] = {shape}")
        pool[kind] = jnp.zeros(shape, dtype[kind] if isinstance(dtype, Mapping) else dtype)
    return pool


def write(
    pool_array: Shaped[Array, "layers pages page_size width"],
    layer: int | Int32[Array, ""],
    page: Int32[Array, "entries"],
    offset: Int32[Array, "entries"],
    rows: Shaped[Array, "entries width"],
) -> Shaped[Array, "layers pages page_size width"]:
    """Store one row for each (page, offset) of a layer, in place when the pool is donated.

    A row whose layer, page or offset does not exist is dropped. Two rows for one place: either may win.
    Raises TypeError when rows are neither of the pool's type nor of a type whose bits the pool stores;
    nothing is converted silently.
    """
    layers, pages, page_size, _ = pool_array.shape
    exists = (page >= 0) & (page < pages) & (offset >= 0) & (offset < page_size) & (layer >= 0) & (layer < layers)
    page = jnp.where(exists, page, pages)
    with jax.named_scope("pool_write"):
        return pool_array.at[layer, page, offset].set(_as_stored(rows, pool_array.dtype), mode="drop")


def copy(pool: Pool, source: Int32[Array, "batch"], target: Int32[Array, "batch"], count: Int32[Array, ""]) -> Pool:
    """Copy the first `count` source pages to the target pages, every kind and layer, in place when the pool
    is donated.

    A pair that names a page that does not exist is skipped. No page may be a source and a target in one call.
    """

    def copy_one(i: Int32[Array, ""], pool: Pool) -> Pool:
        num_pages = next(iter(pool.values())).shape[1]
        pair = jnp.stack([source[i], target[i]])
        # A pair to skip copies page 0 onto itself, which is cheaper than a branch.
        pair = jnp.where(jnp.all((pair >= 0) & (pair < num_pages)), pair, 0)
        moved = {kind: jax.lax.dynamic_slice_in_dim(array, pair[0], 1, axis=1) for kind, array in pool.items()}
        return {
            kind: jax.lax.dynamic_update_slice_in_dim(array, moved[kind], pair[1], axis=1)
            for kind, array in pool.items()
        }

    with jax.named_scope("pool_copy"):
        return jax.lax.fori_loop(0, jnp.minimum(count, source.shape[0]), copy_one, pool)


def gather(
    pool_array: Shaped[Array, "layers pages page_size width"],
    layer: int | Int32[Array, ""],
    pages: Int32[Array, "batch columns"],
    lengths: Int32[Array, "batch"] | None = None,
    *,
    dtype: DType | None = None,
) -> Shaped[Array, "batch tokens width"]:
    """The entries of each slot in order, `tokens` = columns * page_size. Pages that do not exist give zeros.

    With `lengths` (tokens), entries from there on are zeros too: the rest of a last page still holds what its
    former owner left there, and a NaN in it would survive a mask that multiplies. `dtype` is the type whose
    bits the pool stores, if not its own.
    """
    _, num_pages, page_size, width = pool_array.shape
    index = jnp.where((pages >= 0) & (pages < num_pages), pages, num_pages)
    with jax.named_scope("pool_gather"):
        found = pool_array.at[layer, index].get(mode="fill", fill_value=0)
        found = found.reshape(pages.shape[0], pages.shape[1] * page_size, width)
        if lengths is not None:
            covered = jnp.arange(found.shape[1]) < lengths[:, None]
            found = jnp.where(covered[:, :, None], found, jnp.zeros((), found.dtype))
        return found if dtype is None else _as_read(found, dtype)


def _as_stored(rows: Shaped[Array, "entries width"], dtype: jnp.dtype) -> Shaped[Array, "entries width"]:
    """Rows as the pool keeps them: as they are, or their bits."""
    if rows.dtype == dtype:
        return rows
    if storage_dtype(rows.dtype) == dtype:
        return jax.lax.bitcast_convert_type(rows, dtype)
    raise TypeError(f"rows of {rows.dtype} do not go into a pool of {dtype}; convert or quantise them first")


def _as_read(found: Shaped[Array, "*shape"], dtype: DType) -> Shaped[Array, "*shape"]:
    """The reverse of `_as_stored`."""
    if found.dtype == jnp.dtype(dtype):
        return found
    if storage_dtype(dtype) == found.dtype:
        return jax.lax.bitcast_convert_type(found, dtype)
    raise TypeError(f"a pool of {found.dtype} does not hold the bits of {jnp.dtype(dtype)}")
