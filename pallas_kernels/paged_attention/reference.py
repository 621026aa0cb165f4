"""Paged attention in jnp: an online softmax over blocks of pages, with as many turns as the longest row needs.

Nothing outside a row's length is read into a result: entries beyond it, pages that are not there and rows that are
padding are replaced by zeros before any product, so that a NaN in them reaches no output.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Shaped

BLOCK_TOKENS = 64  # of 32 to 256, the fastest on the CPU at decode
NEGATIVE = -1e30  # finite, so that a row with nothing to attend to gives 0 and not NaN


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
        # Both whole, so that one read serves: XLA on the CPU would decode the pages again for values of another width.
        entry = jax.lax.optimization_barrier(_gather(pool, layer, pages, valid, kv_scale)[:, :, None])
        return entry, entry

    width = pool.shape[3]
    out = _attend(query, 1, keys_and_values, pool.shape[2], width, page_table, lengths, positions, softmax_scale)
    return out[..., :latent]


def gqa_attention(
    query: Float[Array, "B T H head"],
    key_pool: Shaped[Array, "L pages page_size kv_width"],
    value_pool: Shaped[Array, "L pages page_size kv_width"],
    layer: Int32[Array, ""],
    page_table: Int32[Array, "B M"],
    lengths: Int32[Array, " B"],
    positions: Int32[Array, "B T"],
    *,
    key_scale: Float[Array, "..."],
    value_scale: Float[Array, "..."],
    softmax_scale: float,
) -> Float[Array, "B T H head"]:
    """Grouped-query attention: query head h reads key-value head h // (H / kv_heads). Padding as in `mla_attention`.
    Scales are one number each, or pools `[L, pages, page_size, kv_heads]` of one an entry."""
    head = query.shape[-1]

    def keys_and_values(pages, valid):
        return gather(key_pool, key_scale, pages, valid), gather(value_pool, value_scale, pages, valid)

    def gather(pool, scale, pages, valid):
        if scale.ndim == 0:
            return _gather(pool, layer, pages, valid, scale).reshape(*valid.shape, -1, head)
        values = _gather(pool, layer, pages, valid, 1).reshape(*valid.shape, -1, head)
        return values * _gather(scale, layer, pages, valid, 1)[..., None]

    kv_heads = key_pool.shape[3] // head
    return _attend(
        query, kv_heads, keys_and_values, key_pool.shape[2], head, page_table, lengths, positions, softmax_scale
    )


def _gather(pool, layer, pages, valid, scale):
    """Entries of `pages` `[B, S, width]` in float32, zero where not `valid` `[B, S]`."""
    rows = _as_float32(pool[layer, jnp.maximum(pages, 0)]).reshape(*valid.shape, -1)
    return jnp.where(valid[..., None], rows * scale, 0)


def _as_float32(stored):
    """The values that a pool's bits stand for. E4M3 is put together from its fields, which the CPU does twice as fast
    as its own conversion: as float32 with the exponent moved by 120, subnormals (mantissa m, no leading one) as
    2x - 2^-6."""
    if stored.dtype == jnp.uint16:
        return jax.lax.bitcast_convert_type(stored, jnp.bfloat16).astype(jnp.float32)
    if stored.dtype != jnp.uint8:
        return stored.astype(jnp.float32)
    bits = stored.astype(jnp.uint32)
    sign, magnitude = (bits & 0x80) << 24, bits & 0x7F
    value = jax.lax.bitcast_convert_type(sign | ((magnitude << 20) + (120 << 23)), jnp.float32)
    smallest_normal = jax.lax.bitcast_convert_type(sign | (121 << 23), jnp.float32)
    value = jnp.where(magnitude < 8, 2 * value - smallest_normal, value)
    return jnp.where(magnitude == 0x7F, jnp.nan, value)


def _attend(query, kv_heads, keys_and_values, page_size, value_width, page_table, lengths, positions, softmax_scale):
    """Row and key-value head are one axis R = B * kv_heads, token and query head of the group another, Q: products of
    three axes are what XLA on the CPU is quick at."""
    rows, tokens, heads, width = query.shape
    group = heads // kv_heads
    pages_a_block = min(max(1, BLOCK_TOKENS // page_size), page_table.shape[1])
    block = pages_a_block * page_size
    table = jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % pages_a_block)), constant_values=-1)
    queries = (query.astype(jnp.float32) * softmax_scale).reshape(rows, tokens, kv_heads, group, width)
    queries = queries.swapaxes(1, 2).reshape(rows * kv_heads, tokens * group, width)
    last_seen = jnp.repeat(positions, group, axis=1)

    def body(index, carry):
        peak, total, out = carry
        pages = jax.lax.dynamic_slice_in_dim(table, index * pages_a_block, pages_a_block, axis=1)
        place = index * block + jnp.arange(block)
        valid = (place < lengths[:, None]) & jnp.repeat(pages >= 0, page_size, axis=1)
        keys, values = (a.swapaxes(1, 2).reshape(-1, block, a.shape[-1]) for a in keys_and_values(pages, valid))
        seen = jnp.repeat(valid[:, None] & (place <= last_seen[..., None]), kv_heads, axis=0)
        scores = jnp.where(seen, jnp.einsum("rqd,rsd->rqs", queries, keys), NEGATIVE)
        new_peak = jnp.maximum(peak, scores.max(axis=-1))
        shrink = jnp.exp(peak - new_peak)
        weights = jnp.where(seen, jnp.exp(scores - new_peak[..., None]), 0)
        part = jnp.einsum("rqs,rsd->rqd", weights, values)
        return new_peak, total * shrink + weights.sum(axis=-1), out * shrink[..., None] + part

    shape = queries.shape[:2]
    start = (jnp.full(shape, NEGATIVE), jnp.zeros(shape), jnp.zeros((*shape, value_width)))
    _, total, out = jax.lax.fori_loop(0, -(-jnp.max(lengths) // block), body, start)
    out = (out / jnp.where(total == 0, 1, total)[..., None]).reshape(rows, kv_heads, tokens, group, value_width)
    return out.swapaxes(1, 2).reshape(rows, tokens, heads, value_width)
