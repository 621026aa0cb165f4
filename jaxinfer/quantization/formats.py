"""The names of number formats: `bf16`, `fp8_e4m3`, `int4:g32` ... parsed once, then compared as values.

E4M3 has no infinity: a cast of anything that rounds above 448 gives NaN, so every cast goes through `to_e4m3`.
"""

from dataclasses import dataclass
from typing import Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from jaxinfer.errors import UserError

E4M3_MAX = 448.0
FP8_BLOCK = 128
INT4_GROUPS = (32, 64, 128)


def to_e4m3(x: Float[Array, "..."]) -> Shaped[Array, "..."]:
    """`x` rounded to e4m3, saturating at +-448. NaN stays NaN."""
    return jnp.clip(x.astype(jnp.float32), -E4M3_MAX, E4M3_MAX).astype(jnp.float8_e4m3fn)


@dataclass(frozen=True)
class WeightFormat:
    """How weight matrices are kept.

    `f32`, `bf16`: plain. `fp8_e4m3`: every linear layer, float32 scales over 128x128 blocks (the DeepSeek-V3 layout).
    `int4:gN`: the routed experts only, symmetric, bf16 scales over groups of N inputs, everything else bf16 (the layout
    of the published INT4 checkpoints); `int4:gN+dense` takes the other linear layers too.
    """

    kind: str
    group: int = 0
    dense: bool = True

    @classmethod
    def parse(cls, text: str) -> Self:
        if text in ("f32", "bf16", "fp8_e4m3"):
            return cls(text)
        base, plus, scope = text.partition("+")
        kind, _, group = base.partition(":g")
        if kind == "int4" and group in map(str, INT4_GROUPS) and (scope == "dense" if plus else True):
            return cls("int4", int(group), bool(plus))
        raise UserError(f"unknown weight format {text!r}; use {', '.join(cls.names())} (int4 formats also with +dense)")

    @staticmethod
    def names() -> list[str]:
        return ["f32", "bf16", "fp8_e4m3", *(f"int4:g{g}" for g in INT4_GROUPS)]

    @property
    def quantized(self) -> bool:
        return self.kind in ("fp8_e4m3", "int4")

    def stored_axes(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """The order in which a quantised matrix with `axes` (..., inputs, outputs) is kept: FP8 the other way round."""
        return (*axes[:-2], axes[-1], axes[-2]) if self.kind == "fp8_e4m3" else axes

    @property
    def dtype(self):
        """Type of the parameters that this format leaves plain."""
        return jnp.float32 if self.kind == "f32" else jnp.bfloat16

    def __str__(self) -> str:
        return f"int4:g{self.group}{'+dense' * self.dense}" if self.kind == "int4" else self.kind


@dataclass(frozen=True)
class KVFormat:
    """How key-value entries are kept in pages. FP8 is stored as bytes with one static scale a layer and entry kind."""

    kind: str

    @classmethod
    def parse(cls, text: str) -> Self:
        if text not in cls.names():
            raise UserError(f"unknown KV format {text!r}; use {', '.join(cls.names())}")
        return cls(text)

    @staticmethod
    def names() -> list[str]:
        return ["f32", "bf16", "fp8_e4m3"]

    @property
    def dtype(self):
        """Storage type: the bits of bf16 and e4m3 as integers, since XLA on the CPU scatters into narrow float arrays
        by converting the whole array."""
        return {"f32": jnp.float32, "bf16": jnp.uint16, "fp8_e4m3": jnp.uint8}[self.kind]

    @property
    def scaled(self) -> bool:
        """Whether values are stored divided by a scale."""
        return self.kind == "fp8_e4m3"

    @property
    def itemsize(self) -> int:
        return jnp.dtype(self.dtype).itemsize

    def encode(self, x: Float[Array, "... width"], scale: Float[Array, ""]) -> Shaped[Array, "... width"]:
        """Values to storage; FP8 keeps x / scale, saturating."""
        if self.kind == "f32":
            return x.astype(jnp.float32)
        narrow = to_e4m3(x.astype(jnp.float32) / scale) if self.scaled else x.astype(jnp.bfloat16)
        return jax.lax.bitcast_convert_type(narrow, self.dtype)

    def decode(self, stored: Shaped[Array, "... width"], scale: Float[Array, ""]) -> Float[Array, "... width"]:
        """Storage to float32 values."""
        if self.kind == "f32":
            return stored
        narrow = jnp.float8_e4m3fn if self.scaled else jnp.bfloat16
        wide = jax.lax.bitcast_convert_type(stored, narrow).astype(jnp.float32)
        return wide * scale if self.scaled else wide

    def __str__(self) -> str:
        return self.kind
