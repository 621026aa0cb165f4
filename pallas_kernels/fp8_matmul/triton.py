"""Block-scaled FP8 products as one Pallas Triton kernel: blocks of rows, each times the matrix of its group.

Over each 128 inputs the FP8 tensor cores add up a product of e4m3 tiles; it is scaled by the row's and the weight
block's scale and added to a float32 total (arXiv:2412.19437, section 3.3.2). Both operands must have their inputs
together in memory, since those tensor cores can't transpose: hence weights are outputs by inputs.
"""

from functools import partial

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.fp8_matmul.reference import BLOCK, quantize_rows
from pallas_kernels.grouped_matmul.blocks import RowBlocks
from pallas_kernels.grouped_matmul.launch import Tuning, launch, share
from pallas_kernels.triton_primitives import dot_e4m3, multiply_add


def block_matmul(
    x: Float[Array, "A K"],
    weight: Float[Array, "L E N K"],
    scale: Float[Array, "L E N/128 K/128"],
    layer: Int32[Array, ""],
    blocks: RowBlocks,
    tuning: Tuning,
    interpret: bool,
) -> Float[Array, "A N"]:
    """Rows of each block times its group's matrix, in the type of `x`. Rows in no block are left undefined."""
    values, row_scale = quantize_rows(x)
    kernel, shape = partial(_kernel, tuning=tuning), (x.shape[0], weight.shape[-2])
    operands = (values, row_scale.T, weight, scale)
    return launch(kernel, "fp8", layer, blocks, operands, shape, x.dtype, tuning, interpret)


def _kernel(layer, group_of, first_of, last_of, x, row_scale, weight, scale, out, *, tuning: Tuning):
    block, tile, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    group, first, last = group_of[block], first_of[block], last_of[block]
    outputs, inputs = weight.shape[-2:]
    column = tile * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)[:, None]
    row = first + jnp.arange(tuning.rows, dtype=jnp.int32)
    used = row < last
    row_mask = jnp.broadcast_to(used[:, None], (tuning.rows, BLOCK))
    column_mask = jnp.broadcast_to(column < outputs, (BLOCK, BLOCK)) if outputs % BLOCK else None
    padding = 0.0 if outputs % BLOCK else None

    def steps_of(chunk):
        row_steps = plgpu.load(row_scale.at[chunk, row], mask=used & (chunk < stop), other=0.0)
        return row_steps * plgpu.load(scale.at[layer[0], group, tile, chunk], mask=chunk < stop, other=0.0)

    def body(chunk, carry):
        total, steps = carry
        place = chunk * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)[None, :]
        left = plgpu.load(weight.at[layer[0], group, column, place], mask=column_mask, other=padding)
        right = plgpu.load(x.at[row[:, None], place], mask=row_mask, other=0.0)
        next_steps = steps_of(chunk + 1)  # a turn ahead, since Triton keeps only the products' operands in flight
        spread = jnp.broadcast_to(steps[None, :], total.shape)
        return multiply_add(dot_e4m3(left, right.T), spread, total), next_steps

    start, stop = share(first, last, inputs // BLOCK, tuning)
    total = jnp.zeros((BLOCK, tuning.rows), jnp.float32)
    total, _ = lax.fori_loop(start, stop, body, (total, steps_of(start)))
    inside = used[:, None] & (outputs > column.T)
    plgpu.store(out.at[split, row[:, None], column.T], total.T.astype(out.dtype), mask=inside)
