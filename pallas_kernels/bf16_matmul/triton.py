"""Products with 16-bit weights as one Pallas Triton kernel: blocks of rows, each times the matrix of its group.

The weights are the left operand (outputs by inputs), since tensor cores take at least 64 rows on that side and decode
has few; they go from shared memory to the tensor cores as they lie, transposed there where outputs lie together. Block-
scaled e4m3 weights become 16 bits in registers first, and the product of each tile takes its block's scale.
"""

from functools import partial, reduce
from operator import and_

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.fp8_matmul.reference import BLOCK
from pallas_kernels.grouped_matmul.blocks import RowBlocks
from pallas_kernels.grouped_matmul.launch import Tuning, launch, share
from pallas_kernels.triton_primitives import widen_e4m3

CHUNK = 64  # inputs that the kernel takes at a time


def block_matmul(
    x: Float[Array, "A parts K"],
    weight: Float[Array, "L first second third"],
    order: str,
    layer: Int32[Array, ""],
    blocks: RowBlocks,
    dtype,
    tuning: Tuning,
    interpret: bool,
    scale: Float[Array, "L groups*second/128 third/128"] | None = None,
) -> Float[Array, "A parts N"]:
    """Rows of each block times its group's matrix, in `dtype`. `order` names the weight's last three axes: `g`, groups,
    `k`, inputs, and `n`, outputs. `parts`: one, or one a group, which then takes that part of every row. With `scale`
    the weight is e4m3, `g` its first axis, and no tile may reach over a block's end. Rows in no block are left
    undefined."""
    sizes = dict(zip(order, weight.shape[1:], strict=True))
    kernel = partial(_kernel, order=order, sizes=sizes, tuning=tuning)
    operands = (x, weight) if scale is None else (x, weight, scale)
    shape = (*x.shape[:2], sizes["n"])
    return launch(kernel, "w16a16", layer, blocks, operands, shape, dtype, tuning, interpret)


def _kernel(layer, group_of, first_of, last_of, x, weight, *rest, order: str, sizes: dict[str, int], tuning: Tuning):
    *scale, out = rest
    block, split, outputs = pl.program_id(0), pl.program_id(2), pl.program_id(1) * tuning.columns
    group, first, last = group_of[block], first_of[block], last_of[block]
    part = group if x.shape[1] > 1 else 0
    column = outputs + jnp.arange(tuning.columns, dtype=jnp.int32)
    row = first + jnp.arange(tuning.rows, dtype=jnp.int32)

    def weights(chunk):
        """A tile, outputs by inputs."""
        place = chunk * CHUNK + jnp.arange(CHUNK, dtype=jnp.int32)
        together = order.index("k") > order.index("n")
        k, n = (place[None, :], column[:, None]) if together else (place[:, None], column[None, :])
        where = {"g": group, "k": k, "n": n}
        tile = weight.at[layer[0], *(where[axis] for axis in order)]
        found = _load(tile, (k, sizes["k"], CHUNK), (n, sizes["n"], tuning.columns))
        if scale:
            found = widen_e4m3(lax.bitcast_convert_type(found, jnp.uint8)).astype(x.dtype)
        return found if together else found.T

    def step(chunk):
        """The scale of the tile's block."""
        start = {"n": outputs, "k": chunk * CHUNK}
        above = group * weight.shape[2] + start[order[1]]
        return plgpu.load(scale[0].at[layer[0], lax.div(above, BLOCK), lax.div(start[order[2]], BLOCK)])

    def body(chunk, total):
        place = chunk * CHUNK + jnp.arange(CHUNK, dtype=jnp.int32)[None, :]
        used = row[:, None] < last
        mask = used & (place < sizes["k"]) if sizes["k"] % CHUNK else jnp.broadcast_to(used, (tuning.rows, CHUNK))
        right = plgpu.load(x.at[row[:, None], part, place], mask=mask, other=0.0)
        product = plgpu.dot(weights(chunk), right.T)
        return total + (product * step(chunk) if scale else product)

    start, stop = share(first, last, -(-sizes["k"] // CHUNK), tuning)
    total = lax.fori_loop(start, stop, body, jnp.zeros((tuning.columns, tuning.rows), jnp.float32))
    inside = (row[:, None] < last) & (column[None, :] < sizes["n"])
    plgpu.store(out.at[split, row[:, None], part, column[None, :]], total.T.astype(out.dtype), mask=inside)


def _load(place, *axes):
    """A tile without what is past the matrix; each axis as its indices, how many there are, and those of a tile."""
    masks = [index < size for index, size, width in axes if size % width]
    shape = jnp.broadcast_shapes(*(index.shape for index, *_ in axes))
    mask = jnp.broadcast_to(reduce(and_, masks), shape) if masks else None
    return plgpu.load(place, mask=mask, other=None if mask is None else 0.0)
