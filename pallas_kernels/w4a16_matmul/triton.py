"""W4A16 products as one Pallas Triton kernel: blocks of rows, each times the matrix of its group.

A program makes the products of up to `rows` rows with `columns` outputs, over all inputs or one of `splits` parts of
them. The weights are the left operand (outputs by inputs): they go from shared memory to registers, become bfloat16
there (one logic operation, one subtraction and one multiplication by the scale for two weights) and feed the tensor
cores from registers; the activations, few rows, are the right operand in shared memory.
"""

from functools import partial, reduce
from operator import and_

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int32, UInt16

from pallas_kernels.grouped_matmul.blocks import RowBlocks
from pallas_kernels.grouped_matmul.launch import Tuning, launch, share
from pallas_kernels.triton_primitives import nibble
from pallas_kernels.w4a16_matmul.layout import BLOCK, CHUNK, PLANES, WORDS, by_plane


def block_matmul(
    x: Float[Array, "A K"],
    words: UInt16[Array, "L E K/32 N*8"],
    scale: Float[Array, "L E K/group N"],
    layer: Int32[Array, ""],
    blocks: RowBlocks,
    tuning: Tuning,
    interpret: bool,
) -> Float[Array, "A N"]:
    """Rows of each block times its group's matrix, in the type of `x`. Rows in no block are left undefined."""
    inputs, shape = x.shape[1], (x.shape[0], scale.shape[-1])
    kernel = partial(_kernel, inputs=inputs, group=inputs // scale.shape[-2], tuning=tuning)
    operands = (by_plane(x), words, scale)
    return launch(kernel, "w4a16", layer, blocks, operands, shape, x.dtype, tuning, interpret)


def _kernel(layer, group_of, first_of, last_of, x, words, scale, out, *, inputs: int, group: int, tuning: Tuning):
    block, split = pl.program_id(0), pl.program_id(2)
    first, last = first_of[block], last_of[block]
    outputs = scale.shape[-1]
    column = pl.program_id(1) * tuning.columns + jnp.arange(tuning.columns, dtype=jnp.int32)[:, None]
    row = first + jnp.arange(tuning.rows, dtype=jnp.int32)[:, None]
    load = partial(_weights, words, scale, layer[0], group_of[block], column, inputs=inputs, group=group)

    def body(chunk, total):
        planes = load(chunk, dtype=x.dtype)
        for j, weights in enumerate(planes):
            place = chunk * CHUNK + j * (CHUNK // PLANES) + jnp.arange(CHUNK // PLANES, dtype=jnp.int32)[None, :]
            mask = jnp.broadcast_to(row < last, (tuning.rows, CHUNK // PLANES))
            total += plgpu.dot(weights, plgpu.load(x.at[row, place], mask=mask, other=0.0).T)
        return total

    start, stop = share(first, last, -(-inputs // CHUNK), tuning)
    total = lax.fori_loop(start, stop, body, jnp.zeros((tuning.columns, tuning.rows), jnp.float32))
    inside = (row < last) & (outputs > column.T)
    plgpu.store(out.at[split, row, column.T], total.T.astype(out.dtype), mask=inside)


def _weights(words, scale, layer, expert, column, chunk, *, inputs: int, group: int, dtype):
    """The four planes of a chunk's weights, each `[columns, 64]`, scaled."""
    columns, width = column.shape[0], CHUNK // PLANES
    word = jnp.arange(width, dtype=jnp.int32)[None, :]
    # lax.div and lax.rem, not // and %, whose rounding hides from Triton that eight words lie together.
    block = chunk * (CHUNK // BLOCK) + lax.div(word, jnp.int32(WORDS))
    part = chunk * (CHUNK // group) + jnp.arange(CHUNK // group, dtype=jnp.int32)[None, :]

    def masked(place, limit: int) -> dict:
        """Keywords of a load that leaves out what is past the matrix; none where the matrix is whole tiles."""
        masks = [column < scale.shape[-1]] if scale.shape[-1] % columns else []
        masks += [place < limit] if inputs % CHUNK else []
        shape = (columns, place.shape[1])
        return {"mask": jnp.broadcast_to(reduce(and_, masks), shape), "other": 0} if masks else {}

    place = words.at[layer, expert, block, column * WORDS + lax.rem(word, jnp.int32(WORDS))]
    bits = plgpu.load(place, **masked(block, inputs // BLOCK))
    steps = plgpu.load(scale.at[layer, expert, part, column], **masked(part, inputs // group))
    steps = jnp.broadcast_to(steps.astype(dtype)[:, :, None], (columns, CHUNK // group, width // (CHUNK // group)))
    steps = steps.reshape(columns, width)
    return [nibble(bits, j, dtype) * steps for j in range(PLANES)]
