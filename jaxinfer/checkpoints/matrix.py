"""A matrix as checkpoints store it, `[outputs, inputs]`: plain, FP8 in blocks, or packed INT4; read and turned into the
project's own layouts without a change of value."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jaxtyping import Float, Int32, Shaped, UInt8

from jaxinfer.checkpoints.tensors import Tensors
from jaxinfer.errors import UserError
from jaxinfer.quantization.formats import FP8_BLOCK, INT4_GROUPS, WeightFormat
from pallas_kernels.w4a16_matmul.layout import pack

BF16, F32, E4M3 = (np.dtype(t) for t in (ml_dtypes.bfloat16, np.float32, ml_dtypes.float8_e4m3fn))
Format = WeightFormat | np.dtype
"""A quantised format, or the type in which a plain matrix is kept."""
FP8 = WeightFormat.parse("fp8_e4m3")
_pack = jax.jit(pack)


@dataclass(frozen=True)
class Matrix:
    """`data` [N, K]: values, e4m3 values or 4-bit codes 0..15; `scale`: none, [N/128, K/128] or [N, K/group]."""

    data: Shaped[np.ndarray, "N K"]
    scale: Shaped[np.ndarray, "..."] | None
    format: Format

    def take(self, rows: Int32[np.ndarray, " n"]) -> "Matrix":
        """Some of the outputs. FP8 blocks must come whole: see `takes_blocks`."""
        if self.format == FP8:
            assert self.scale is not None
            return Matrix(self.data[rows], self.scale[rows[::FP8_BLOCK] // FP8_BLOCK], FP8)
        return Matrix(self.data[rows], None if self.scale is None else self.scale[rows], self.format)

    def values(self) -> Float[np.ndarray, "N K"]:
        """The numbers, float32."""
        data = self.data.astype(np.float32)
        if self.scale is None:
            return data
        scale = self.scale.astype(np.float32)
        if self.format == FP8:
            wide = scale.repeat(FP8_BLOCK, 0)[: data.shape[0]].repeat(FP8_BLOCK, 1)
            return data * wide[:, : data.shape[1]]
        return (data - 8) * scale.repeat(data.shape[1] // scale.shape[1], 1)

    def turned(self) -> list[np.ndarray]:
        """[inputs, outputs] in the layout of a plain array, or of the data and scale of a QuantizedTensor."""
        if self.scale is None:
            return [self.data.T]
        if self.format == FP8:
            return [self.data, self.scale]
        return [np.asarray(_pack(np.ascontiguousarray(self.data.T))), self.scale.T]


def takes_blocks(rows: Int32[np.ndarray, " n"]) -> bool:
    """Whether each 128 of `rows` are one FP8 block of the matrix they are taken from."""
    if len(rows) % FP8_BLOCK:
        return False
    blocks = rows.reshape(-1, FP8_BLOCK)
    return bool((blocks == blocks[:, :1] // FP8_BLOCK * FP8_BLOCK + np.arange(FP8_BLOCK)).all())


class Matrices:
    """The matrices of a checkpoint by the name of their module; `names` are those the table knows, to the file's."""

    def __init__(self, tensors: Tensors, names: Mapping[str, str]):
        self.tensors, self.names = tensors, names

    def __contains__(self, module: str) -> bool:
        return f"{module}.weight" in self.names or f"{module}.weight_packed" in self.names

    def parts(self, module: str) -> list[str]:
        """Names, as the table knows them, of the tensors that the matrix is made of."""
        parts = ("weight", "weight_scale_inv", "weight_packed", "weight_scale", "weight_shape")
        return [f"{module}.{part}" for part in parts if f"{module}.{part}" in self.names]

    def format(self, module: str, outputs: int, inputs: int) -> Format:
        """How the matrix is stored. UserError where it has another shape than [outputs, inputs], or lacks its scale."""
        if f"{module}.weight_packed" in self.names:
            self.expect(f"{module}.weight_packed", (outputs, inputs // 8), np.dtype(np.int32))
            scale = self.expect(f"{module}.weight_scale", None, BF16, F32)
            group = inputs // scale.shape[1] if len(scale.shape) == 2 and scale.shape[1] else 0
            if group not in INT4_GROUPS or scale.shape != (outputs, inputs // group):
                raise self.wrong(f"{module}.weight_scale", f"{list(scale.shape)} makes no groups of {INT4_GROUPS}")
            return WeightFormat("int4", group, False)
        entry = self.expect(f"{module}.weight", (outputs, inputs))
        if entry.dtype == E4M3:
            blocks = (-(-outputs // FP8_BLOCK), -(-inputs // FP8_BLOCK))
            self.expect(f"{module}.weight_scale_inv", blocks, F32, BF16)
            return FP8
        return plain_dtype(entry.dtype, lambda why: self.wrong(f"{module}.weight", why))

    def read(self, module: str, format: Format) -> Matrix:
        """The matrix, whose `format` is what `format` found."""
        get = lambda part: self.tensors.read(self.names[f"{module}.{part}"])  # noqa: E731
        if not isinstance(format, WeightFormat):
            return Matrix(get("weight").astype(format, copy=False), None, format)
        if format == FP8:
            return Matrix(get("weight"), get("weight_scale_inv").astype(np.float32), FP8)
        codes = unpack_int32(get("weight_packed"))
        if f"{module}.weight_shape" in self.names and tuple(get("weight_shape")) != codes.shape:
            raise self.wrong(f"{module}.weight_shape", f"{get('weight_shape').tolist()}, the codes {list(codes.shape)}")
        return Matrix(codes, get("weight_scale").astype(BF16), format)

    def expect(self, name: str, shape: tuple[int, ...] | None, *dtypes: np.dtype) -> Any:
        """The entry of a tensor. UserError where it is missing, or has another shape or type."""
        if name not in self.names:
            raise UserError(f"tensor {name} is missing")
        entry = self.tensors.entries[self.names[name]]
        if shape is not None and entry.shape != shape:
            raise self.wrong(name, f"has shape {list(entry.shape)}, config.json asks for {list(shape)}")
        if dtypes and entry.dtype not in dtypes:
            raise self.wrong(name, f"has type {entry.dtype}, not {' or '.join(map(str, dtypes))}")
        return entry

    def wrong(self, name: str, why: str) -> UserError:
        return UserError(f"{self.tensors.entries[self.names[name]].file}: tensor {self.names[name]} {why}")


def plain_dtype(dtype: np.dtype, wrong) -> np.dtype:
    """The type in which plain values are kept: bfloat16 as it is, float16 and wider as float32."""
    if dtype == BF16:
        return BF16
    if dtype in (np.float16, np.float32, np.float64):
        return F32
    raise wrong(f"has type {dtype}, which is none of a weight")


def unpack_int32(packed: Int32[np.ndarray, "N K/8"]) -> UInt8[np.ndarray, "N K"]:
    """Codes 0..15 of words that hold eight, the first in the lowest bits (compressed-tensors `pack-quantized`)."""
    nibbles = packed.view(np.uint8)
    return np.stack([nibbles & 0xF, nibbles >> 4], axis=-1).reshape(packed.shape[0], -1)


def pack_int32(codes: UInt8[np.ndarray, "N K"]) -> Int32[np.ndarray, "N K/8"]:
    """The inverse of `unpack_int32`."""
    return np.ascontiguousarray(codes[:, ::2] | codes[:, 1::2] << 4).view(np.int32)
