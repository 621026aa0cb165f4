"""Products of 16-bit activations and weights: the public functions and how the kernel is launched.

Floors of one call with M rows, K inputs, N outputs and E' groups that have rows (1 for the plain product):

bytes: 2 E' N K + 2 M K + 2 M N;   FLOPs: 2 M K N

On an H200 the plain product is bound by bytes up to some 210 rows. Weights come whole, all layers of them, with the
layer to use: XLA's own products are calls of a library that take a copy of the layer.
"""

import dataclasses
from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.bf16_matmul import reference
from pallas_kernels.bf16_matmul.triton import CHUNK, block_matmul
from pallas_kernels.grouped_matmul.blocks import even_blocks, row_blocks
from pallas_kernels.grouped_matmul.launch import Tuning, height, splits
from pallas_kernels.implementation import first_problem, not_addressable, run

TYPES = (jnp.bfloat16, jnp.float16)


def bf16_matmul(
    x: Float[Array, "M K"],
    weight: Float[Array, "L K N"],
    layer: Int32[Array, ""],
    *,
    dtype=None,
    implementation: str = "auto",
) -> Float[Array, "M N"]:
    """`x @ weight[layer]` in `dtype` (that of `x` unless given; float32 for what must not be rounded), accumulated in
    float32: products of 16-bit numbers are exact in it.

    ValueError for shapes that don't fit each other, and where the kernel can't take the operands (see `run`).
    """
    _check(x.shape[-1], weight.shape[-2], x, weight)
    dtype = jnp.dtype(dtype or x.dtype)

    def plain(x, weight, layer):
        return reference.bf16_matmul(x, weight, layer).astype(dtype)

    def kernel(x, weight, layer, interpret):
        tuning = plain_tuning(x.shape[0], *weight.shape[-2:])
        blocks = even_blocks(x.shape[0], tuning.rows)
        return block_matmul(x[:, None], weight[:, None], "gkn", layer, blocks, dtype, tuning, interpret)[:, 0]

    return run(implementation, plain, kernel, x, weight, layer, problem=_problem(x, weight))


def bf16_grouped_matmul(
    x: Float[Array, "A K"],
    weight: Float[Array, "L E K N"],
    layer: Int32[Array, ""],
    counts: Int32[Array, " E"],
    *,
    implementation: str = "auto",
) -> Float[Array, "A N"]:
    """Row i times `weight[layer, e]` of its group: rows are sorted by group, `counts` says how many each has, rows
    beyond the last give zeros. Any distribution is exact: no row is dropped. Errors as in `bf16_matmul`."""
    _check(x.shape[-1], weight.shape[-2], x, weight)

    def kernel(x, weight, layer, counts, interpret):
        tuning = grouped_tuning(x.shape[0], counts.shape[0], weight.shape[-1])
        blocks = row_blocks(counts, x.shape[0], tuning.rows)
        out = block_matmul(x[:, None], weight, "gkn", layer, blocks, x.dtype, tuning, interpret)[:, 0]
        return jnp.where((jnp.arange(x.shape[0]) < counts.sum())[:, None], out, 0)

    operands = (x, weight, layer, counts)
    return run(implementation, reference.bf16_grouped_matmul, kernel, *operands, problem=_problem(x, weight))


def bf16_heads_matmul(
    x: Float[Array, "M H K"],
    weight: Float[Array, "L C H*D"],
    layer: Int32[Array, ""],
    *,
    transposed: bool,
    implementation: str = "auto",
) -> Float[Array, "M H N"]:
    """Head h of `x` times `weight[layer][:, h*D : (h+1)*D]` (K = C, N = D), or, `transposed`, times its transpose
    (K = D, N = C). What latent attention does around its absorbed form. Type and errors as in `bf16_matmul`."""
    heads, width = x.shape[1], weight.shape[-1] // x.shape[1]
    _check(weight.shape[-1], heads * width, x, weight)
    _check(x.shape[-1], width if transposed else weight.shape[-2], x, weight)

    def kernel(x, weight, layer, interpret):
        outputs = weight.shape[1] if transposed else width
        tuning = heads_tuning(x.shape[0], heads, x.shape[-1], outputs)
        by_head = weight.reshape(*weight.shape[:2], heads, width)
        blocks = even_blocks(x.shape[0], tuning.rows, heads)
        return block_matmul(x, by_head, "ngk" if transposed else "kgn", layer, blocks, x.dtype, tuning, interpret)

    plain = partial(reference.bf16_heads_matmul, transposed=transposed)
    return run(implementation, plain, kernel, x, weight, layer, problem=_problem(x, weight))


def fp8_heads_matmul(
    x: Float[Array, "M H K"],
    weight: Float[Array, "L H*D C"],
    scale: Float[Array, "L H*D/128 C/128"],
    layer: Int32[Array, ""],
    *,
    transposed: bool,
    implementation: str = "auto",
) -> Float[Array, "M H N"]:
    """`bf16_heads_matmul` with weights as `fp8_matmul` has them, outputs by inputs. `x` is not rounded to e4m3: what is
    multiplied are the weights' values, exact. D must be a multiple of 64, or the kernel can't take it."""
    heads, width = x.shape[1], weight.shape[-2] // x.shape[1]
    _check(weight.shape[-2], heads * width, x, weight)
    _check(x.shape[-1], width if transposed else weight.shape[-1], x, weight)

    def kernel(x, weight, scale, layer, interpret):
        outputs = weight.shape[2] if transposed else width
        tuning = heads_tuning(x.shape[0], heads, x.shape[-1], outputs)
        columns = 128 if transposed or width % 128 == 0 else 64
        tuning = dataclasses.replace(tuning, columns=columns)
        by_head = weight.reshape(weight.shape[0], heads, width, weight.shape[2])
        blocks, order = even_blocks(x.shape[0], tuning.rows, heads), "gkn" if transposed else "gnk"
        return block_matmul(x, by_head, order, layer, blocks, x.dtype, tuning, interpret, scale)

    plain = partial(reference.fp8_heads_matmul, transposed=transposed)
    types = None if x.dtype in TYPES else f"activations in {x.dtype}: the kernel takes bfloat16 and float16"
    widths = f"heads {width} wide: the FP8 kernel takes multiples of {CHUNK}" if width % CHUNK else None
    problem = first_problem(types, widths, not_addressable("the weights", weight))
    return run(implementation, plain, kernel, x, weight, scale, layer, problem=problem)


def plain_tuning(rows: int, inputs: int, outputs: int) -> Tuning:
    """Launch parameters of a plain product."""
    return heads_tuning(rows, 1, inputs, outputs)


def heads_tuning(rows: int, heads: int, inputs: int, outputs: int) -> Tuning:
    """Launch parameters of one product a head."""
    size = height(rows)
    columns, warps, stages = _launch(size, outputs)
    programs = heads * -(-rows // size) * -(-outputs // columns)
    parts = splits(rows, programs, -(-inputs // CHUNK), stages)  # shorter than the loads in flight, parts only wait
    return Tuning(size, columns, parts, warps, stages)


def grouped_tuning(rows: int, groups: int, outputs: int) -> Tuning:
    """Launch parameters: blocks of about an even share of the rows."""
    size = height(max(rows // groups, 1))
    columns, warps, stages = _launch(size, outputs)
    return Tuning(size, columns, 1, warps, stages)


def _launch(size: int, outputs: int) -> tuple[int, int, int]:
    """Outputs of a program, warps and stages."""
    if size <= 64:
        return 128, 4, 4
    return (256, 8, 4) if outputs > 128 else (128, 8, 4)


def takes(x, weight) -> bool:
    """Whether the kernels take these types."""
    return _problem(x, weight) is None


def _check(one: int, other: int, x, weight) -> None:
    if one != other:
        raise ValueError(f"x {x.shape}, weight {weight.shape}: their inputs differ, or heads don't divide the columns")


def _problem(x, weight) -> str | None:
    if x.dtype == weight.dtype and x.dtype in TYPES:
        return None
    return f"activations in {x.dtype}, weights in {weight.dtype}: the kernel takes both in bfloat16 or float16"
