"""Paged attention as Pallas Triton kernels: one program a piece of a block of query rows (see `blocks`).

A program walks its tiles of tokens: looks up their pages, loads their entries (masked by length, so that nothing
outside it is read), converts e4m3 to float16 once, multiplies on the tensor cores and keeps an online softmax in
float32. The score of a row is dot(row, key) * factor, with everything that scales (softmax scale, key scale, log2 e and
the row's own magnitude, which is divided out so that float16 can't overflow) in that one float32 factor.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int32, Shaped

from pallas_kernels.paged_attention import blocks
from pallas_kernels.paged_attention.blocks import Pieces
from pallas_kernels.triton_primitives import widen_e4m3

NEGATIVE = -1e30
LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Tuning:
    """Rows of a block, tokens of a tile, warps of a program, and how many tiles it keeps in flight."""

    rows: int
    tile: int
    warps: int
    depth: int

    def stages(self, dtype, page_size: int) -> int:
        """Triton's number of stages for that depth. Where tiles wait for page numbers that are loaded like them, and
        where they are converted, it spends two a tile."""
        twice = dtype == jnp.uint8 or page_size < self.tile
        return self.depth * (2 if twice else 1) + 1


@dataclass(frozen=True)
class _Layout:
    """What a kernel has to know of its operands at compile time."""

    kv_heads: int
    blocks: int
    blocks_a_head: int
    page_size: int
    tile: int
    key_width: tuple[int, ...]  # the query's parts, each a power of two
    value_width: int


def mla_attention(
    query: Float[Array, "B T H width"],
    pool: Shaped[Array, "L pages page_size width"],
    layer: Int32[Array, ""],
    page_table: Int32[Array, "B M"],
    limits: Int32[Array, "B T"],
    kv_scale: Float[Array, ""],
    *,
    latent: int,
    softmax_scale: float,
    tuning: Tuning,
    interpret: bool,
) -> Float[Array, "B T H latent"]:
    """`limits`: how many entries each query token sees, 0 for padding. The rest as in `api.mla_attention`."""
    parts = (latent, query.shape[-1] - latent)
    factor = kv_scale * softmax_scale
    out = _attend(_mla_tile, query, (pool,), layer, page_table, limits, factor, 1, parts, latent, tuning, interpret)
    return out * kv_scale


def gqa_attention(
    query: Float[Array, "B T H head"],
    key_pool: Shaped[Array, "L pages page_size kv_width"],
    value_pool: Shaped[Array, "L pages page_size kv_width"],
    layer: Int32[Array, ""],
    page_table: Int32[Array, "B M"],
    limits: Int32[Array, "B T"],
    key_scale: Float[Array, "..."],
    value_scale: Float[Array, "..."],
    *,
    softmax_scale: float,
    tuning: Tuning,
    interpret: bool,
) -> Float[Array, "B T H head"]:
    """`limits` as in `mla_attention`; a scale of one number, or `[L, pages, page_size, kv_heads]`, one an entry."""
    head = query.shape[-1]
    kv_heads = key_pool.shape[-1] // head
    pools = [key_pool, value_pool]
    per_token = key_scale.ndim > 0
    if per_token:
        pools += [key_scale, value_scale]
    factor = jnp.float32(softmax_scale) if per_token else key_scale * softmax_scale
    out = _attend(
        _gqa_tile, query, pools, layer, page_table, limits, factor, kv_heads, (head,), head, tuning, interpret
    )
    return out if per_token else out * value_scale


def _mla_tile(load, query, pools, layout: _Layout, kv_head):
    """Scores and values of a tile; the values are the first part of the entries."""
    latent, rope = layout.key_width
    values = load(pools[0], 0, latent)
    scores = plgpu.dot(query[0], values.T) + plgpu.dot(query[1], load(pools[0], latent, rope).T)
    return scores, values, None


def _gqa_tile(load, query, pools, layout: _Layout, kv_head):
    head = layout.value_width
    scores = plgpu.dot(query[0], load(pools[0], kv_head * head, head).T)
    values = load(pools[1], kv_head * head, head)
    if len(pools) == 2:
        return scores, values, None
    return scores * load(pools[2], kv_head, 1)[None, :], values, load(pools[3], kv_head, 1)[None, :]


def _attend(tile, query, pools, layer, page_table, limits, factor, kv_heads, parts, value_width, tuning, interpret):
    dtype = jnp.float16 if pools[0].dtype == jnp.uint8 else jnp.bfloat16
    rows, limit = blocks.cut(query.astype(jnp.float32), limits, kv_heads, tuning.rows)
    largest = jnp.maximum(jnp.abs(rows).max(axis=-1), 1e-30)
    rows, factors = (rows / largest[..., None]).astype(dtype), largest * (factor * LOG2_E)
    page_size = pools[0].shape[2]
    # Whole tiles of pages, so that the look-up of a tile never leaves the table.
    spare = -page_table.shape[1] % max(tuning.tile // page_size, 1)
    table = jnp.pad(page_table, ((0, 0), (0, spare)), constant_values=-1)
    a_head = len(limit) // (len(table) * kv_heads)
    layout = _Layout(kv_heads, len(limit), a_head, page_size, tuning.tile, parts, value_width)
    seen = limit.max(axis=1)
    tiles = -(-seen // tuning.tile)
    # The interpreter takes its programs one by one: few pieces show it all there is.
    wanted = 4 if interpret else blocks.PIECES
    is_split = layout.blocks < 2 * wanted
    pieces = blocks.split(tiles, wanted) if is_split else blocks.whole(tiles)
    operands = (layer.reshape(1), pieces.block, pieces.first, pieces.last, rows, limit, seen, factors, table, *pools)
    out = _run_pieces(tile, operands, layout, is_split, tuning, interpret)
    if is_split:
        partial_sum, peak, total = out
        out = [_combine(partial_sum, peak, total, limit, pieces, interpret)]
    return blocks.join(out[0], query.shape[:3], kv_heads)


def _run_pieces(tile, operands, layout: _Layout, is_split: bool, tuning: Tuning, interpret: bool):
    pieces, pool = operands[1].shape[0], operands[9]
    stages = tuning.stages(pool.dtype, layout.page_size)
    shapes = [(tuning.rows, layout.value_width)] + [(tuning.rows,)] * 2 * is_split
    return pl.pallas_call(
        partial(_piece, tile=tile, layout=layout, is_split=is_split),
        grid=(pieces,),
        in_specs=[_whole(operand) for operand in operands],
        out_specs=[_own(shape) for shape in shapes],
        out_shape=[jax.ShapeDtypeStruct((pieces, *shape), jnp.float32) for shape in shapes],
        compiler_params=plgpu.CompilerParams(num_warps=tuning.warps, num_stages=stages),
        interpret=interpret,
        name=f"paged{tile.__name__.removesuffix('_tile')}",
    )(*operands)


def _whole(operand) -> pl.BlockSpec:
    return pl.BlockSpec(operand.shape, lambda *_: (0,) * operand.ndim)


def _own(shape: tuple[int, ...]) -> pl.BlockSpec:
    """One entry along the first axis for each program."""
    return pl.BlockSpec((None, *shape), lambda index, *_: (index,) + (0,) * len(shape))


def _piece(
    layer, block_of, first, last, rows, limit, seen, factor, table, *refs, tile, layout: _Layout, is_split: bool
):
    """Attention of one block's rows over one piece of its tokens: normalised, or (sum, peak, total) to be combined."""
    pools, outs = refs[: len(refs) - (3 if is_split else 1)], refs[len(refs) - (3 if is_split else 1) :]
    piece = pl.program_id(0)
    block = jnp.minimum(block_of[piece], layout.blocks - 1)
    head_block = block // layout.blocks_a_head
    sequence, kv_head = head_block // layout.kv_heads, head_block % layout.kv_heads
    query = [rows[block, :, pl.ds(sum(layout.key_width[:i]), w)] for i, w in enumerate(layout.key_width)]
    limits, factors, count = limit[block, :], factor[block, :], seen[block]

    def body(index, carry):
        peak, total, out = carry
        load = _loader(layer[0], table, sequence, index, count, layout)
        tokens = load.tokens
        scores, values, weight = tile(load, query, pools, layout, kv_head)
        shown = load.there[None, :] & (tokens[None, :] < limits[:, None])
        scores = jnp.where(shown, scores * factors[:, None], NEGATIVE)
        new_peak = jnp.maximum(peak, scores.max(axis=1))
        shrink = jnp.exp2(peak - new_peak)
        weights = jnp.where(shown, jnp.exp2(scores - new_peak[:, None]), 0.0)
        total = total * shrink + weights.sum(axis=1)
        if weight is not None:
            weights = weights * weight
        return new_peak, total, out * shrink[:, None] + plgpu.dot(weights.astype(values.dtype), values)

    height, width = limits.shape[0], layout.value_width
    start = (jnp.full((height,), NEGATIVE), jnp.zeros((height,)), jnp.zeros((height, width)))
    peak, total, out = jax.lax.fori_loop(first[piece], last[piece], body, start)
    if is_split:
        # Rows that are padding, and pieces that are none, cost no memory traffic.
        used = (limits > 0) & (block_of[piece] < layout.blocks)
        plgpu.store(outs[0], out, mask=jnp.broadcast_to(used[:, None], out.shape))
        outs[1][...], outs[2][...] = peak, total
    else:
        outs[0][...] = out / jnp.where(total == 0.0, 1.0, total)[:, None]


class _loader:
    """Loads a tile's entries from a pool: zero where `there` is false, which is past the sequence's end (`count`) and
    where the table has no page."""

    def __init__(self, layer, table, sequence, index, count, layout: _Layout):
        self.layer, self.tile = layer, layout.tile
        within = jnp.arange(layout.tile, dtype=jnp.int32)
        self.tokens = index * layout.tile + within
        inside = self.tokens < count
        if layout.page_size % layout.tile == 0:
            first = index * layout.tile
            page = table[sequence, first // layout.page_size]
            self.pages, self.offsets = jnp.maximum(page, 0), first % layout.page_size + within
            self.there = inside & (page >= 0)
        else:
            pages = plgpu.load(table.at[sequence, self.tokens // layout.page_size], mask=inside, other=-1)
            self.pages, self.offsets = jnp.maximum(pages, 0)[:, None], self.tokens % layout.page_size
            self.there = inside & (pages >= 0)

    def __call__(self, pool, first, width: int):
        """Columns `first` .. `first + width` as values, `[tile, width]`; of a pool of scales `[tile]`."""
        if width == 1:
            pages = self.pages if self.pages.ndim == 0 else self.pages[:, 0]
            return plgpu.load(pool.at[self.layer, pages, self.offsets, first], mask=self.there, other=0)
        columns = first + jnp.arange(width, dtype=jnp.int32)[None, :]
        mask = jnp.broadcast_to(self.there[:, None], (self.tile, width))
        stored = plgpu.load(pool.at[self.layer, self.pages, self.offsets[:, None], columns], mask=mask, other=0)
        return widen_e4m3(stored) if stored.dtype == jnp.uint8 else jax.lax.bitcast_convert_type(stored, jnp.bfloat16)


def _combine(out, peak, total, limit, pieces: Pieces, interpret: bool) -> Float[Array, "N block width"]:
    """Sum of the pieces' results, each weighted by 2^(its peak - the highest)."""
    (_, height, width), count = out.shape, limit.shape[0]
    columns = min(width, 4096 // height)  # 32 numbers a thread: more of them would spill
    operands = (pieces.start, pieces.count, limit, out, peak, total)
    return pl.pallas_call(
        _combine_kernel,
        grid=(count, width // columns),
        in_specs=[_whole(operand) for operand in operands],
        out_specs=pl.BlockSpec((None, height, columns), lambda n, c: (n, 0, c)),
        out_shape=jax.ShapeDtypeStruct((count, height, width), jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="combine",
    )(*operands)


def _combine_kernel(start, count, limit, out, peak, total, joined):
    block, columns = pl.program_id(0), pl.ds(pl.program_id(1) * joined.shape[1], joined.shape[1])
    first = start[block]
    used = jnp.broadcast_to((limit[block, :] > 0)[:, None], joined.shape)

    def body(index, carry):
        high, weight, so_far = carry
        here = peak[index, :]
        new_high = jnp.maximum(high, here)
        shrink, grow = jnp.exp2(high - new_high), jnp.exp2(here - new_high)
        part = plgpu.load(out.at[index, :, columns], mask=used, other=0.0)
        return new_high, weight * shrink + total[index, :] * grow, so_far * shrink[:, None] + part * grow[:, None]

    height = joined.shape[0]
    empty = (jnp.full((height,), NEGATIVE), jnp.zeros((height,)), jnp.zeros(joined.shape))
    _, weight, so_far = jax.lax.fori_loop(first, first + count[block], body, empty)
    joined[...] = so_far / jnp.where(weight == 0.0, 1.0, weight)[:, None]
