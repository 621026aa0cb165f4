"""QuantizedTensor: a weight in a number format, as a pytree that takes the place of a plain array.

Weights lie as `[..., inputs, outputs]` with any number of leading stack axes (layers, experts). Model code calls
`matmul` and `take` and never asks which kind it holds.
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int32, Shaped

from jaxinfer.errors import UserError
from jaxinfer.parallel.kernels import current
from jaxinfer.quantization.formats import FP8_BLOCK, WeightFormat, to_e4m3
from pallas_kernels.bf16_matmul import bf16_grouped_matmul, bf16_heads_matmul, bf16_matmul, fp8_heads_matmul, takes
from pallas_kernels.fp8_matmul import fp8_grouped_matmul, fp8_matmul
from pallas_kernels.grouped_matmul import grouped_matmul as plain_grouped_matmul
from pallas_kernels.w4a16_matmul import w4a16_grouped_matmul, w4a16_matmul
from pallas_kernels.w4a16_matmul.layout import BLOCK, WORDS, pack
from pallas_kernels.w4a16_matmul.layout import dequantize as dequantize_words

INT4_LIMIT = 7.5  # symmetric: codes -8..7, the scale maps the largest magnitude to half a step beyond 7


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedTensor:
    """`data` and `scale` of one weight.

    fp8_e4m3: data e4m3 `[..., N, K]`, scale float32 `[..., ceil(N/128), ceil(K/128)]`: as published checkpoints have
              it, and the only way round that FP8 tensor cores read.
    int4:gG:  data uint16 `[..., K/32, N*8]` (code + 8, four to a word as `pallas_kernels.w4a16_matmul.layout` says),
              scale bf16 `[..., K/G, N]`.
    """

    data: Shaped[Array, "..."]
    scale: Float[Array, "..."]
    format: WeightFormat = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        *stack, rows, columns = self.data.shape
        return (*stack, rows * BLOCK, columns // WORDS) if self.format.kind == "int4" else (*stack, columns, rows)

    @property
    def nbytes(self) -> int:
        return self.data.size * self.data.dtype.itemsize + self.scale.size * self.scale.dtype.itemsize

    def take(self, *index) -> "QuantizedTensor":
        return QuantizedTensor(self.data[index], self.scale[index], self.format)

    def dequantize(self, dtype=jnp.float32) -> Float[Array, "... inputs outputs"]:
        if self.format.kind == "int4":
            return dequantize_words(self.data, self.scale, self.format.group).astype(dtype)
        rows, columns = self.data.shape[-2:]
        scale = jnp.repeat(self.scale, FP8_BLOCK, axis=-2)[..., :rows, :]
        scale = jnp.repeat(scale, FP8_BLOCK, axis=-1)[..., :columns]
        return (self.data.astype(jnp.float32) * scale).astype(dtype).swapaxes(-1, -2)


Weight = jax.Array | QuantizedTensor


def parts_of(weight: Weight) -> tuple[jax.Array, ...]:
    """The arrays that `weight` is kept in."""
    return (weight.data, weight.scale) if isinstance(weight, QuantizedTensor) else (weight,)


def quantize(weight: Float[Array, "... inputs outputs"], format: WeightFormat) -> Weight:
    """`weight` in `format`, rounded to nearest. UserError where the group size does not divide the inputs.

    Error of a value: for int4 at most half a step, scale / 2, and at the top of the codes up to 0.53 scale, because
    the scale (largest magnitude of the group / 7.5) is rounded to bf16 and may come out 2^-8 too small. For e4m3
    (3 mantissa bits) 2^-4 of its magnitude, or 2^-10 scale where it is below the normal numbers, 2^-6 scale.
    """
    if format.kind == "int4":
        return _quantize_int4(weight, format)
    if format.kind == "fp8_e4m3":
        return _quantize_fp8(weight, format)
    return weight.astype(format.dtype)


def _quantize_int4(weight, format: WeightFormat) -> QuantizedTensor:
    *stack, inputs, outputs = weight.shape
    check_group(inputs, format)
    groups = weight.astype(jnp.float32).reshape(*stack, inputs // format.group, format.group, outputs)
    scale = (jnp.abs(groups).max(axis=-2) / INT4_LIMIT).astype(jnp.bfloat16)
    step = jnp.where(scale == 0, 1, scale).astype(jnp.float32)[..., None, :]
    codes = (jnp.clip(jnp.round(groups / step), -8, 7) + 8).astype(jnp.uint8).reshape(*stack, inputs, outputs)
    return QuantizedTensor(pack(codes), scale, format)


def check_group(inputs: int, format: WeightFormat, name: str = "a matrix") -> None:
    if format.kind == "int4" and inputs % format.group:
        raise UserError(f"group size {format.group} does not divide the {inputs} inputs of {name}")


def _quantize_fp8(weight, format: WeightFormat) -> QuantizedTensor:
    weight = weight.swapaxes(-1, -2)
    *stack, rows, columns = weight.shape
    pad = [(0, 0)] * len(stack) + [(0, -rows % FP8_BLOCK), (0, -columns % FP8_BLOCK)]
    padded = jnp.pad(weight.astype(jnp.float32), pad)
    row_blocks, column_blocks = padded.shape[-2] // FP8_BLOCK, padded.shape[-1] // FP8_BLOCK
    blocks = padded.reshape(*stack, row_blocks, FP8_BLOCK, column_blocks, FP8_BLOCK)
    scale = jnp.abs(blocks).max(axis=(-3, -1)) / 448.0
    step = jnp.where(scale == 0, 1, scale)[..., :, None, :, None]
    data = to_e4m3(blocks / step).reshape(padded.shape)[..., :rows, :columns]
    return QuantizedTensor(data, scale, format)


def take(weight: Weight, *index) -> Weight:
    """One layer (or one layer's expert) of a stacked weight."""
    return weight.take(*index) if isinstance(weight, QuantizedTensor) else weight[index]


def dequantize(weight: Weight, dtype=jnp.float32) -> Float[Array, "... inputs outputs"]:
    return weight.dequantize(dtype) if isinstance(weight, QuantizedTensor) else weight.astype(dtype)


def matmul(
    x: Float[Array, "... inputs"],
    weight: Weight,
    layer: Int32[Array, ""],
    axes: tuple[str, str] = ("", ""),
) -> Float[Array, "... outputs"]:
    """`x @ weight[layer]`, accumulated in float32, in the type of `x`. `axes`: logical names of inputs and outputs.

    Where kernels run (`parallel.kernels`) a weight is read as it is kept, and FP8 products round `x` too, to e4m3 over
    each 128 inputs of a row.
    """
    if call := _kernel_for(x, weight, (bf16_matmul, w4a16_matmul, fp8_matmul)):
        return _kernel(call, x.reshape(-1, x.shape[-1]), weight, layer, axes).reshape(*x.shape[:-1], weight.shape[-1])
    matrix = dequantize(take(weight, layer), x.dtype)
    return jnp.matmul(x, matrix, preferred_element_type=jnp.float32).astype(x.dtype)


def exact_matmul(
    x: Float[Array, "N inputs"], weight: Float[Array, "L inputs outputs"], layer: Int32[Array, ""]
) -> Float[Array, "N outputs"]:
    """`x @ weight[layer]` in float32, of a plain weight that is whole on every device. Kernels take 16-bit operands as
    they are: their products are exact in float32."""
    if call := _kernel_for(x, weight, (bf16_matmul, None, None)):
        return _kernel(functools.partial(call, dtype=jnp.float32), x, weight, layer, ("", ""))
    return jnp.matmul(x.astype(jnp.float32), weight[layer].astype(jnp.float32), precision="highest")


def heads_matmul(
    x: Float[Array, "... H K"], weight: Weight, layer: Int32[Array, ""], transposed: bool
) -> Float[Array, "... H N"]:
    """Each head of `x` times its columns of `weight[layer]`, or their transpose; columns are split by head. The rest as
    in `matmul`, but kernels don't round `x` to e4m3 and take no int4, which is expanded."""
    *shape, heads, inputs = x.shape
    quantized, parts = isinstance(weight, QuantizedTensor), parts_of(weight)
    axis = current().axis("heads", heads)
    # A head is whole tiles, and scales lie split as their weights do.
    aligned = weight.shape[-1] // heads % 64 == 0
    fits = not quantized or (aligned and current().axis("heads", parts[1].shape[-2]) == axis)
    call = _kernel_for(x, weight, (bf16_heads_matmul, None, fp8_heads_matmul)) if fits else None
    if call:
        rows, columns = P(None, axis, None), P(None, axis, None) if quantized else P(None, None, axis)
        call = functools.partial(call, transposed=transposed)
        spread = current().split(call, (rows, *[columns] * len(parts), P()), rows)
        return spread(x.reshape(-1, heads, inputs), *parts, layer).reshape(*shape, heads, -1)
    matrix = dequantize(take(weight, layer), x.dtype).reshape(weight.shape[-2], heads, -1)
    return jnp.einsum("...hd,chd->...hc" if transposed else "...hc,chd->...hd", x, matrix)


def grouped_matmul(
    x: Float[Array, "A inputs"],
    weight: Weight,
    layer: Int32[Array, ""],
    counts: Int32[Array, " E"],
    axes: tuple[str, str] = ("", ""),
) -> Float[Array, "A outputs"]:
    """Rows sorted by expert, each times `weight[layer, expert]`; `counts` says how many rows each expert has. The rest
    as in `matmul`."""
    if call := _kernel_for(x, weight, (bf16_grouped_matmul, w4a16_grouped_matmul, fp8_grouped_matmul)):
        return _kernel(call, x, weight, layer, axes, counts)
    return plain_grouped_matmul(x, lambda e: dequantize(take(weight, layer, e), x.dtype), counts, weight.shape[-1])


def _kernel_for(x, weight: Weight, calls: tuple[Callable | None, Callable | None, Callable | None]) -> Callable | None:
    """Of the kernels for plain, int4 and FP8 weights, the one that takes these; none where kernels don't run."""
    plain, int4, fp8 = calls
    if not current().used:
        return None
    if isinstance(weight, QuantizedTensor):
        return int4 if weight.format.kind == "int4" else fp8
    return plain if takes(x, weight) else None


def _kernel(call, x, weight: Weight, layer, axes: tuple[str, str], *counts):
    """A kernel on every device's part of the weight: whole groups of inputs, whose products are then summed, or some
    of the outputs."""
    setting, parts = current(), parts_of(weight)
    stored = weight.format.stored_axes(axes) if isinstance(weight, QuantizedTensor) else axes
    split = {a: setting.axis(a, *(p.shape[i - 2] for p in parts)) for i, a in enumerate(stored)}
    inputs, outputs = split[axes[0]], split[axes[1]]
    part = P(*[None] * (parts[0].ndim - 2), *(split[axis] for axis in stored))
    operands = (P(None, inputs), *[part] * len(parts), P(), *[P()] * len(counts))
    spread = setting.split(call, operands, P(None, outputs), over=inputs)
    return spread(x, *parts, layer, *counts)
