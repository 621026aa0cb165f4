"""Attention over paged entries: the public functions, what the kernels support, and how they are launched.

Floors of one call, with n entries seen by a sequence in all and `bits` the pool's element size:

mla_attention  bytes: n * width * bits / 8 + queries and results; FLOPs: 2 * T * H * n * (width + latent)
gqa_attention  bytes: n * 2 * kv_width * bits / 8 + ...;          FLOPs: 4 * T * H * n * head

Decode at 8 or 16 heads a GPU (MLA) is bound by bytes; at 64 heads MLA does 240 FLOPs a byte, beyond an H200's 206.
"""

from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Shaped

from pallas_kernels.implementation import first_problem, not_addressable, run
from pallas_kernels.paged_attention import reference, triton
from pallas_kernels.paged_attention.triton import Tuning

PAGE_SIZES = (16, 32, 64)
STORED = (jnp.uint8, jnp.uint16)  # the bits of e4m3 and bfloat16


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
    implementation: str = "auto",
) -> Float[Array, "B T H latent"]:
    """Absorbed MLA: every head attends over the one latent entry of a token (its `latent` first values and the rope
    part), and the values are the latent itself. Query positions below 0 are padding and give zeros. Float32.

    A query sees the entries before its length and not after its position; table entries below 0 hold none. Decode is
    one token a row, prefill a chunk of them. The kernel's results are within 2e-3 of the reference's largest
    (float16 or bfloat16 weights and queries). ValueError where the kernel can't take the operands (see `run`).
    """
    check = first_problem(_pool_problem("the pool", pool), _width_problem(latent, query.shape[-1] - latent))
    operands = (query, pool, layer, page_table, lengths, positions, jnp.asarray(kv_scale, jnp.float32))

    def plain(query, pool, layer, page_table, lengths, positions, kv_scale):
        scales = {"kv_scale": kv_scale, "softmax_scale": softmax_scale}
        return reference.mla_attention(query, pool, layer, page_table, lengths, positions, latent=latent, **scales)

    def kernel(query, pool, layer, page_table, lengths, positions, kv_scale, interpret):
        limits = _limits(lengths, positions)
        tuning = mla_tuning(query.shape[1] * query.shape[2], pool.dtype)
        launch = partial(triton.mla_attention, latent=latent, softmax_scale=softmax_scale, tuning=tuning)
        return launch(query, pool, layer, page_table, limits, kv_scale, interpret=interpret)

    return run(implementation, plain, kernel, *operands, problem=check)


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
    implementation: str = "auto",
) -> Float[Array, "B T H head"]:
    """Grouped-query attention: query head h reads key-value head h // (H / kv_heads). Padding, tolerance and errors as
    in `mla_attention`. Scales are one number each, or pools `[L, pages, page_size, kv_heads]` of one an entry."""
    check = first_problem(
        _pool_problem("the key pool", key_pool),
        _pool_problem("the value pool", value_pool),
        _width_problem(query.shape[-1]),
    )
    scales = (jnp.asarray(key_scale, jnp.float32), jnp.asarray(value_scale, jnp.float32))
    operands = (query, key_pool, value_pool, layer, page_table, lengths, positions, *scales)

    def plain(query, keys, values, layer, page_table, lengths, positions, key_scale, value_scale):
        scales = {"key_scale": key_scale, "value_scale": value_scale, "softmax_scale": softmax_scale}
        return reference.gqa_attention(query, keys, values, layer, page_table, lengths, positions, **scales)

    def kernel(query, keys, values, layer, page_table, lengths, positions, key_scale, value_scale, interpret):
        kv_heads = keys.shape[-1] // query.shape[-1]
        tuning = gqa_tuning(query.shape[1] * query.shape[2] // kv_heads, query.shape[-1], keys.dtype)
        launch = partial(triton.gqa_attention, softmax_scale=softmax_scale, tuning=tuning, interpret=interpret)
        limits = _limits(lengths, positions)
        return launch(query, keys, values, layer, page_table, limits, key_scale, value_scale)

    return run(implementation, plain, kernel, *operands, problem=check)


def mla_tuning(rows: int, dtype) -> Tuning:
    """Launch parameters for so many query rows (tokens times heads) a sequence: the tallest blocks without a spill."""
    return Tuning(16 if rows <= 16 or dtype == jnp.uint8 else 32, tile=64, warps=8, depth=2)


def gqa_tuning(rows: int, head: int, dtype) -> Tuning:
    """Launch parameters for so many query rows (tokens times group) a sequence and key-value head."""
    tile = 128 if head <= 64 else 64 if head <= 128 else 32
    converted = dtype == jnp.uint8
    if rows <= 16:
        return Tuning(16, tile, warps=4, depth=3 if converted else 2)
    if rows <= 32:
        return Tuning(32, tile, warps=4 if converted else 8, depth=3)
    return Tuning(64, min(tile, 64), warps=4, depth=2) if rows <= 64 else Tuning(128, min(tile, 64), warps=8, depth=2)


def _limits(lengths, positions):
    """Entries that each query token sees."""
    return jnp.maximum(jnp.minimum(lengths[:, None], positions + 1), 0).astype(jnp.int32)


def _pool_problem(name: str, pool) -> str | None:
    if pool.dtype not in STORED:
        return f"{name} is {pool.dtype}: the attention kernels read uint8 (e4m3 bits) and uint16 (bfloat16 bits)"
    if pool.shape[2] not in PAGE_SIZES:
        return f"{name} has pages of {pool.shape[2]} tokens: the attention kernels read {PAGE_SIZES}"
    return not_addressable(name, pool)


def _width_problem(*widths: int) -> str | None:
    if all(width >= 16 and width & (width - 1) == 0 for width in widths):
        return None
    return f"widths {widths} of the query's parts: the attention kernels take powers of two from 16"
