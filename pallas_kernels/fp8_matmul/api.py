"""Products in block-scaled FP8: the public functions and how the kernel is launched.

Floors of one call with M rows, K inputs, N outputs and E' groups that have rows (1 for the plain product):

bytes: E' * N * K + 4 M K (bfloat16 activations in, e4m3 out and in again) + 2 M N;   FLOPs: 2 M K N, at the FP8 rate

Weights are outputs by inputs with one float32 scale over 128x128, as in the published FP8 checkpoints, all layers at
once with the layer to use.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.fp8_matmul import reference
from pallas_kernels.fp8_matmul.reference import BLOCK
from pallas_kernels.fp8_matmul.triton import block_matmul
from pallas_kernels.grouped_matmul.blocks import even_blocks, row_blocks
from pallas_kernels.grouped_matmul.launch import Tuning, height, splits
from pallas_kernels.implementation import first_problem, not_addressable, run


def fp8_matmul(
    x: Float[Array, "M K"],
    weight: Float[Array, "L N K"],
    scale: Float[Array, "L N/128 K/128"],
    layer: Int32[Array, ""],
    *,
    implementation: str = "auto",
) -> Float[Array, "M N"]:
    """`x @ weights[layer].T` in the type of `x`, with `x` rounded to e4m3 over each 128 inputs of a row.

    The kernel's results are within 5e-3 of the reference's largest (the FP8 tensor cores add up 128 products with 14
    bits). ValueError for shapes that don't fit each other, and where the kernel can't take the operands (see `run`).
    """
    _check(x, weight, scale)

    def kernel(x, weight, scale, layer, interpret):
        tuning = plain_tuning(x.shape[0], x.shape[1], weight.shape[-2])
        blocks = even_blocks(x.shape[0], tuning.rows)
        return block_matmul(x, weight[:, None], scale[:, None], layer, blocks, tuning, interpret)

    problem = _problem(weight, scale)
    return run(implementation, reference.fp8_matmul, kernel, x, weight, scale, layer, problem=problem)


def fp8_grouped_matmul(
    x: Float[Array, "A K"],
    weight: Float[Array, "L E N K"],
    scale: Float[Array, "L E N/128 K/128"],
    layer: Int32[Array, ""],
    counts: Int32[Array, " E"],
    *,
    implementation: str = "auto",
) -> Float[Array, "A N"]:
    """Row i times `weights[layer, e].T` of its group: rows are sorted by group, `counts` says how many each has, rows
    beyond the last give zeros. Any distribution is exact: no row is dropped. The rest as in `fp8_matmul`."""
    _check(x, weight, scale)

    def kernel(x, weight, scale, layer, counts, interpret):
        tuning = grouped_tuning(x.shape[0], counts.shape[0])
        blocks = row_blocks(counts, x.shape[0], tuning.rows)
        out = block_matmul(x, weight, scale, layer, blocks, tuning, interpret)
        return jnp.where((jnp.arange(x.shape[0]) < counts.sum())[:, None], out, 0)

    operands = (x, weight, scale, layer, counts)
    return run(implementation, reference.fp8_grouped_matmul, kernel, *operands, problem=_problem(weight, scale))


def plain_tuning(rows: int, inputs: int, outputs: int) -> Tuning:
    """Launch parameters of a plain product."""
    size = height(rows)
    programs = -(-rows // size) * -(-outputs // BLOCK)
    return Tuning(size, BLOCK, splits(rows, programs, inputs // BLOCK), *_launch(size))


def grouped_tuning(rows: int, groups: int) -> Tuning:
    """Launch parameters: blocks of about an even share of the rows."""
    size = height(max(rows // groups, 1))
    return Tuning(size, BLOCK, 1, *_launch(size))


def _launch(size: int) -> tuple[int, int]:
    """Warps and stages."""
    return (4, 4) if size <= 64 else (8, 4)


def _check(x, weight, scale) -> None:
    inputs, outputs = x.shape[-1], weight.shape[-2]
    wanted = (*weight.shape[:-2], -(-outputs // BLOCK), inputs // BLOCK)
    if weight.shape[-1] != inputs or inputs % BLOCK or scale.shape != wanted:
        shapes = f"x {x.shape}, weight {weight.shape}, scale {scale.shape}"
        raise ValueError(f"{shapes}: weight is [..., N, K], scale [..., N/128, K/128], K a multiple of {BLOCK}")


def _problem(weight, scale) -> str | None:
    return first_problem(
        None if weight.dtype == jnp.float8_e4m3fn else f"weights in {weight.dtype}: the FP8 kernel takes float8_e4m3fn",
        None if scale.dtype == jnp.float32 else f"scales in {scale.dtype}: the FP8 kernel takes float32",
        not_addressable("the weights", weight),
    )
