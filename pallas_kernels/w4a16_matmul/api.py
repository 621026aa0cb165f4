"""Products of 16-bit activations with 4-bit weights: the public functions and how the kernel is launched.

Floors of one call with M rows, K inputs, N outputs and E' groups that have rows (1 for the plain product):

bytes: E' * N * (K / 2 + 2 K / group) + 2 M K + 2 M N;   FLOPs: 2 M K N

On an H200 the plain product is bound by bytes up to some 110 rows. Weights come whole, all layers of them, with the
layer to use: a kernel that takes a slice of an array makes XLA copy the slice.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, UInt16

from pallas_kernels.grouped_matmul.blocks import even_blocks, row_blocks
from pallas_kernels.grouped_matmul.launch import Tuning, height, splits
from pallas_kernels.implementation import first_problem, not_addressable, run
from pallas_kernels.w4a16_matmul import reference
from pallas_kernels.w4a16_matmul.layout import BLOCK, CHUNK, GROUPS, WORDS
from pallas_kernels.w4a16_matmul.triton import block_matmul

ACTIVATIONS = (jnp.bfloat16, jnp.float16)


def w4a16_matmul(
    x: Float[Array, "M K"],
    words: UInt16[Array, "L K/32 N*8"],
    scale: Float[Array, "L K/group N"],
    layer: Int32[Array, ""],
    *,
    implementation: str = "auto",
) -> Float[Array, "M N"]:
    """`x @ weights[layer]` in the type of `x`, accumulated in float32; the group is K over the rows of `scale`.

    `words` as `layout.pack` makes them. The kernel rounds each scaled weight to the type of `x`: its results are within
    1e-2 of the reference's largest. ValueError for shapes that don't fit each other, and where the kernel can't take
    the operands (see `run`).
    """
    group = _group(x, words, scale)

    def plain(x, words, scale, layer):
        return reference.w4a16_matmul(x, words, scale, layer, group)

    def kernel(x, words, scale, layer, interpret):
        tuning = plain_tuning(x.shape[0], x.shape[1], scale.shape[-1])
        blocks = even_blocks(x.shape[0], tuning.rows)
        return block_matmul(x, words[:, None], scale[:, None], layer, blocks, tuning, interpret)

    return run(implementation, plain, kernel, x, words, scale, layer, problem=_problem(x, words, scale, group))


def w4a16_grouped_matmul(
    x: Float[Array, "A K"],
    words: UInt16[Array, "L E K/32 N*8"],
    scale: Float[Array, "L E K/group N"],
    layer: Int32[Array, ""],
    counts: Int32[Array, " E"],
    *,
    implementation: str = "auto",
) -> Float[Array, "A N"]:
    """Row i times `weights[layer, e]` of its group: rows are sorted by group, `counts` says how many each has, rows
    beyond the last give zeros. Any distribution is exact: no row is dropped. Type, tolerance and errors as in
    `w4a16_matmul`."""
    group = _group(x, words, scale)

    def plain(x, words, scale, layer, counts):
        return reference.w4a16_grouped_matmul(x, words, scale, layer, counts, group)

    def kernel(x, words, scale, layer, counts, interpret):
        tuning = grouped_tuning(x.shape[0], counts.shape[0], scale.shape[-1])
        blocks = row_blocks(counts, x.shape[0], tuning.rows)
        out = block_matmul(x, words, scale, layer, blocks, tuning, interpret)
        return jnp.where((jnp.arange(x.shape[0]) < counts.sum())[:, None], out, 0)

    operands = (x, words, scale, layer, counts)
    return run(implementation, plain, kernel, *operands, problem=_problem(x, words, scale, group))


def plain_tuning(rows: int, inputs: int, outputs: int) -> Tuning:
    """Launch parameters of a plain product."""
    size = height(rows)
    columns, warps, stages = _launch(size, outputs)
    programs = -(-rows // size) * -(-outputs // columns)
    return Tuning(size, columns, splits(rows, programs, -(-inputs // CHUNK)), warps, stages)


def grouped_tuning(rows: int, groups: int, outputs: int) -> Tuning:
    """Launch parameters: blocks of about an even share of the rows."""
    size = height(max(rows // groups, 1), 64)
    columns, warps, stages = _launch(size, outputs)
    return Tuning(size, columns, 1, warps, stages)


def _launch(size: int, outputs: int) -> tuple[int, int, int]:
    """Outputs of a program, warps and stages. Many rows need more outputs, or the assembler puts the tensor cores'
    instructions one after the other."""
    if size <= 32:
        return 128, 4, 3
    return (256, 8, 2) if outputs > 128 else (128, 4 if size <= 64 else 8, 2)


def _group(x, words, scale) -> int:
    inputs, outputs = x.shape[-1], scale.shape[-1]
    if words.shape[-2:] != (inputs // BLOCK, outputs * WORDS) or inputs % BLOCK or inputs % scale.shape[-2]:
        shapes = f"x {x.shape}, words {words.shape}, scale {scale.shape}"
        raise ValueError(f"{shapes}: for K inputs and N outputs words are [..., K/32, N*8] and scale [..., K/group, N]")
    return inputs // scale.shape[-2]


def _problem(x, words, scale, group: int) -> str | None:
    return first_problem(
        f"groups of {group} inputs: the W4A16 kernel takes {GROUPS}" if group not in GROUPS else None,
        None if x.dtype in ACTIVATIONS else f"activations in {x.dtype}: the W4A16 kernel takes bfloat16 and float16",
        f"words in {words.dtype}: the W4A16 kernel takes uint16" if words.dtype != jnp.uint16 else None,
        not_addressable("the words", words),
    )
