"""How the products' kernels are launched: one program a block of rows, a tile of outputs and a part of the inputs."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.grouped_matmul.blocks import RowBlocks

MULTIPROCESSORS = 132  # of an H200


@dataclass(frozen=True)
class Tuning:
    """Rows and outputs of a program, parts that the inputs are split in, and launch parameters."""

    rows: int
    columns: int
    splits: int
    warps: int
    stages: int


def height(rows: int, most: int = 128) -> int:
    """Rows of a program: those there are as a power of two, from the tensor cores' 16 up."""
    return min(most, max(16, 1 << (rows - 1).bit_length()))


def splits(rows: int, programs: int, chunks: int, least: int = 1) -> int:
    """As many parts of the inputs, each of `least` chunks, as it takes to occupy the GPU, and none that would have no
    chunk. Their sums, which go through its cache, grow with the rows: for many rows four parts at most."""
    wanted = MULTIPROCESSORS * (2 if rows <= 16 else 1)
    parts = min(wanted // programs, chunks // least, chunks if rows <= 128 else 4)
    return -(-chunks // -(-chunks // max(1, parts)))


def launch(
    kernel: Callable,
    name: str,
    layer: Int32[Array, ""],
    blocks: RowBlocks,
    operands: tuple[jax.Array, ...],
    shape: tuple[int, ...],
    dtype,
    tuning: Tuning,
    interpret: bool,
) -> Float[Array, "A ... N"]:
    """The product of `shape` in `dtype`. `kernel` gets references to the layer, the blocks' groups, first and last
    rows, the operands, and the result with one axis in front, the parts of the inputs (in float32 where there are
    several). Rows in no block are left undefined."""
    out = (tuning.splits, *shape)
    scalars = (layer.reshape(1), blocks.group, blocks.first, blocks.last)
    parts = pl.pallas_call(
        kernel,
        grid=(blocks.group.shape[0], -(-shape[-1] // tuning.columns), tuning.splits),
        in_specs=[_whole(operand.shape) for operand in (*scalars, *operands)],
        out_specs=_whole(out),
        out_shape=jax.ShapeDtypeStruct(out, jnp.float32 if tuning.splits > 1 else dtype),
        compiler_params=plgpu.CompilerParams(num_warps=tuning.warps, num_stages=tuning.stages),
        interpret=interpret,
        name=name,
    )(*scalars, *operands)
    return parts.sum(axis=0).astype(dtype) if tuning.splits > 1 else parts[0]


def share(first, last, chunks: int, tuning: Tuning):
    """Within a kernel: the chunks of the inputs that a program takes. A block with no rows reads nothing."""
    size = -(-chunks // tuning.splits)
    start = pl.program_id(2) * jnp.int32(size)
    return start, jnp.where(last > first, jnp.minimum(start + size, chunks), start)


def _whole(shape: tuple[int, ...]) -> pl.BlockSpec:
    return pl.BlockSpec(shape, lambda *_: (0,) * len(shape))
