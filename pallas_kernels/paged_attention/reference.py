"""Paged attention in jnp: an online softmax over blocks of pages, with as many turns as the longest row needs.

Nothing outside a row's length is read into a result: entries beyond it, pages that are not there and rows that are
padding are replaced by zeros before any product, so that a NaN in them reaches no output.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Shaped

BLOCK_TOKENS = 128
NEGATIVE = -1e30  # finite, so that a row with nothing to attend to gives 0 and not NaN
STORED_AS = {jnp.dtype(jnp.uint8): jnp.float8_e4m3fn, jnp.dtype(jnp.uint16): jnp.bfloat16}  # pools keep the bits


def mla_attention(
    query: Float[Array, "B T H width"],
    pool: Shaped[Array, "L pages page_size width"],
    layer: Int32[Array, ""],
    page_table: Int32[Array, "B M"],
    lengths: Int32[Array, " B"],
    positions: Int32[Array, "B T"],
    *,
    latent: int,
    kv_scale: Float[Array, ""],
    softmax_scale: float,
) -> Float[Array, "B T H latent"]:
    """Absorbed MLA: every head attends over the one latent entry of a token (its `latent` first values and the rope
    part), and the values are the latent itself. Query positions below 0 are padding and give zeros. Float32."""

    def keys_and_values(pages, valid):
        entry = _gather(pool, layer, pages, valid, kv_scale)[:, :, None]
        return entry, entry[..., :latent]

    return _attend(query, keys_and_values, pool.shape[2], latent, page_table, lengths, positions, softmax_scale)


def gqa_attention(
    query: Float[Array, "B T H head"],
    key_pool: Shaped[Array, "L pages page_size kv_width"],
    value_pool: Shaped[Array, "L pages page_size kv_width"],
    layer: Int32[Array, ""],
    page_table: Int32[Array, "B M"],
    lengths: Int32[Array, " B"],
    positions: Int32[Array, "B T"],
    *,
    key_scale: Float[Array, ""],
    value_scale: Float[Array, ""],
    softmax_scale: float,
) -> Float[Array, "B T H head"]:
    """Grouped-query attention: query head h reads key-value head h // (H / kv_heads). Padding as in `mla_attention`."""
    head = query.shape[-1]

    def keys_and_values(pages, valid):
        split = lambda a: a.reshape(*a.shape[:2], -1, head)  # noqa: E731
        keys = split(_gather(key_pool, layer, pages, valid, key_scale))
        return keys, split(_gather(value_pool, layer, pages, valid, value_scale))

    return _attend(query, keys_and_values, key_pool.shape[2], head, page_table, lengths, positions, softmax_scale)


def _gather(pool, layer, pages, valid, scale):
    """Entries of `pages` `[B, S, width]` in float32, zero where not `valid` `[B, S]`."""
    stored = pool[layer, jnp.maximum(pages, 0)]
    if stored.dtype in STORED_AS:
        stored = jax.lax.bitcast_convert_type(stored, STORED_AS[stored.dtype])
    rows = stored.astype(jnp.float32).reshape(*valid.shape, -1)
    return jnp.where(valid[..., None], rows * scale, 0)


def _attend(query, keys_and_values, page_size, value_width, page_table, lengths, positions, softmax_scale):
    rows, tokens, heads, width = query.shape
    pages_a_block = min(max(1, BLOCK_TOKENS // page_size), page_table.shape[1])
    block = pages_a_block * page_size
    table = jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % pages_a_block)), constant_values=-1)
    scaled = query.astype(jnp.float32) * softmax_scale

    def body(index, carry):
        peak, total, out = carry
        pages = jax.lax.dynamic_slice_in_dim(table, index * pages_a_block, pages_a_block, axis=1)
        place = index * block + jnp.arange(block)
        valid = (place < lengths[:, None]) & jnp.repeat(pages >= 0, page_size, axis=1)
        keys, values = keys_and_values(pages, valid)
        grouped = scaled.reshape(rows, tokens, keys.shape[2], -1, width)
        scores = jnp.einsum("btkgd,bskd->btkgs", grouped, keys).reshape(rows, tokens, heads, block)
        seen = (valid[:, None] & (place <= positions[..., None]))[:, :, None]
        scores = jnp.where(seen, scores, NEGATIVE)
        new_peak = jnp.maximum(peak, scores.max(axis=-1))
        shrink = jnp.exp(peak - new_peak)
        weights = jnp.where(seen, jnp.exp(scores - new_peak[..., None]), 0)
        grouped_weights = weights.reshape(rows, tokens, values.shape[2], -1, block)
        part = jnp.einsum("btkgs,bskd->btkgd", grouped_weights, values).reshape(rows, tokens, heads, value_width)
        return new_peak, total * shrink + weights.sum(axis=-1), out * shrink[..., None] + part

    shape = (rows, tokens, heads)
    start = (jnp.full(shape, NEGATIVE), jnp.zeros(shape), jnp.zeros((*shape, value_width)))
    _, total, out = jax.lax.fori_loop(0, -(-jnp.max(lengths) // block), body, start)
    return out / jnp.where(total == 0, 1, total)[..., None]
