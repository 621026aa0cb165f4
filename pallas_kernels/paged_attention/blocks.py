"""How attention is cut into work: blocks of query rows that read the same entries, and pieces of their tokens.

A row is one head of one query token. The rows that share a key-value head stand together, token after token, in blocks
of a tensor-core tile's height; with one token a request that is decode, with a chunk of them it is prefill. When there
are few blocks, each one's tokens are split into pieces of equal size, whatever the mix of lengths (flash decoding), and
the pieces' results are combined by their peaks.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

PIECES = 264  # two for each of an H200's 132 multiprocessors, so that a long last one weighs half


def cut(
    query: Float[Array, "B T H width"], limits: Int32[Array, "B T"], kv_heads: int, size: int
) -> tuple[Float[Array, "N size width"], Int32[Array, "N size"]]:
    """Rows by sequence and key-value head, in N = B * kv_heads * ceil(T * H / kv_heads / size) blocks, and how many
    entries each row sees (0: padding)."""
    batch, tokens, heads, width = query.shape
    group = heads // kv_heads
    rows = query.reshape(batch, tokens, kv_heads, group, width).swapaxes(1, 2).reshape(batch * kv_heads, -1, width)
    each = jnp.broadcast_to(limits[:, None, :, None], (batch, kv_heads, tokens, group)).reshape(batch * kv_heads, -1)
    rows = jnp.where(each[..., None] > 0, rows, 0)  # what a padding token holds may be NaN
    pad = -rows.shape[1] % size
    rows, each = jnp.pad(rows, ((0, 0), (0, pad), (0, 0))), jnp.pad(each, ((0, 0), (0, pad)))
    return rows.reshape(-1, size, width), each.reshape(-1, size)


def join(out: Float[Array, "N size width"], shape: tuple[int, int, int], kv_heads: int) -> Float[Array, "B T H width"]:
    """The inverse of `cut` for results; `shape` is (B, T, H)."""
    batch, tokens, heads = shape
    rows = out.reshape(batch * kv_heads, -1, out.shape[-1])[:, : tokens * heads // kv_heads]
    by_head = rows.reshape(batch, kv_heads, tokens, heads // kv_heads, -1)
    return by_head.swapaxes(1, 2).reshape(batch, tokens, heads, -1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pieces:
    """Piece w covers tiles `first[w]` up to `last[w]` of block `block[w]` (N: none); those of block n begin at
    `start[n]` and are `count[n]`."""

    block: Int32[Array, " W"]
    first: Int32[Array, " W"]
    last: Int32[Array, " W"]
    start: Int32[Array, " N"]
    count: Int32[Array, " N"]


def split(tiles: Int32[Array, " N"], wanted: int = PIECES) -> Pieces:
    """`tiles` of each block in pieces of one size, about `wanted`: W = N + wanted hold every mix of lengths."""
    blocks = tiles.shape[0]
    size = jnp.maximum(-(-tiles.sum() // wanted), 1)
    count = -(-tiles // size)
    end = jnp.cumsum(count)
    piece = jnp.arange(blocks + wanted, dtype=jnp.int32)
    block = (piece[:, None] >= end[None, :]).sum(axis=1).astype(jnp.int32)
    own = jnp.minimum(block, blocks - 1)
    first = (piece - (end - count)[own]) * size
    last = jnp.where(block < blocks, jnp.minimum(first + size, tiles[own]), first)
    return Pieces(block, first.astype(jnp.int32), last.astype(jnp.int32), (end - count).astype(jnp.int32), count)


def whole(tiles: Int32[Array, " N"]) -> Pieces:
    """One piece a block: nothing to combine."""
    index = jnp.arange(tiles.shape[0], dtype=jnp.int32)
    return Pieces(index, jnp.zeros_like(index), tiles.astype(jnp.int32), index, jnp.ones_like(index))
