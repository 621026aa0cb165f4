"""The products with 16-bit weights of the models that jaxinfer plans for, on one of eight GPUs, and small ones for
tests."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.bf16_matmul.api import (
    bf16_grouped_matmul,
    bf16_heads_matmul,
    bf16_matmul,
    fp8_heads_matmul,
    grouped_tuning,
    heads_tuning,
)
from pallas_kernels.bf16_matmul.triton import CHUNK
from pallas_kernels.case import Case, Floor
from pallas_kernels.fp8_matmul.reference import BLOCK
from pallas_kernels.w4a16_matmul.shapes import routed


@dataclass(frozen=True)
class BF16Case(Case):
    """Rows times K inputs and N outputs. With `counts`, one matrix a count and rows sorted by it; with `heads`, one a
    head, of whose matrices the outputs lie apart if `transposed`; with `fp8` those are e4m3. `result`: the type of the
    product."""

    rows: int
    inputs: int
    outputs: int
    layers: int = 2
    counts: tuple[int, ...] = ()
    heads: int = 1
    transposed: bool = False
    fp8: bool = False
    result: str = "bfloat16"

    kernel = "w16a16"  # PTX keeps bf16 for a type
    tensor_core = ("HGMMA",)
    tolerance = 1e-2

    def operands(self, key):
        keys = jax.random.split(key, 2)
        whole, across = (self.outputs, self.inputs) if self.transposed else (self.inputs, self.outputs)
        stack = (self.layers, len(self.counts)) if self.counts else (self.layers,)
        weight = jax.random.normal(keys[0], (*stack, whole, self.heads * across), jnp.bfloat16)
        x = jax.random.normal(keys[1], (self.rows, *(self.heads,) * (self.heads > 1), self.inputs), jnp.bfloat16)
        if self.fp8:
            stored, blocks = self.heads * across, (-(-self.heads * across // BLOCK), -(-whole // BLOCK))
            data = weight.reshape(self.layers, stored, whole).astype(jnp.float8_e4m3fn)
            scale = jax.random.uniform(keys[0], (self.layers, *blocks), jnp.float32, 0.5, 2.0)
            return jnp.int32(self.layers - 1), x, data, scale
        if not self.counts:
            return jnp.int32(self.layers - 1), x, weight
        x = jnp.where(jnp.arange(self.rows)[:, None] < sum(self.counts), x, jnp.nan)
        return jnp.int32(self.layers - 1), x, weight, jnp.asarray(self.counts, jnp.int32)

    def call(self, *operands, implementation):
        layer, x, weight, *rest = operands
        if self.counts:
            return bf16_grouped_matmul(x, weight, layer, *rest, implementation=implementation)
        if self.heads > 1:
            op: Callable = fp8_heads_matmul if self.fp8 else bf16_heads_matmul
            return op(x, weight, *rest, layer, transposed=self.transposed, implementation=implementation)
        return bf16_matmul(x, weight, layer, dtype=jnp.dtype(self.result), implementation=implementation)

    def _groups(self) -> tuple[int, ...]:
        """Rows of each product."""
        return self.counts or (self.rows,) * self.heads

    def floor(self) -> Floor:
        used, rows = sum(count > 0 for count in self._groups()), sum(self._groups())
        weights, result = self._itemsize() * used * self.inputs * self.outputs, jnp.dtype(self.result).itemsize
        values = rows * (2 * self.inputs + result * self.outputs)
        return Floor(weights + values, 2 * rows * self.inputs * self.outputs)

    def _tuning(self):
        if self.counts:
            return grouped_tuning(self.rows, len(self.counts), self.outputs)
        return heads_tuning(self.rows, self.heads, self.inputs, self.outputs)

    def requested_bytes(self) -> float:
        tuning, rows = self._tuning(), sum(self._groups())
        blocks = sum(-(-count // tuning.rows) for count in self._groups())
        weights = self._itemsize() * blocks * self.inputs * self.outputs
        activations = 2 * rows * self.inputs * -(-self.outputs // tuning.columns)
        partial = 8 * rows * self.outputs * tuning.splits * (tuning.splits > 1)
        return weights + activations + jnp.dtype(self.result).itemsize * rows * self.outputs + partial

    def turn_bytes(self) -> float:
        return self._itemsize() * self._tuning().columns * CHUNK

    def _itemsize(self) -> int:
        return 1 if self.fp8 else 2


LISTED = [
    *(BF16Case(f"4096x7168 M={rows}", rows, 7168, 4096) for rows in (1, 4, 16, 32, 64, 128, 4096)),
    BF16Case("Kimi query down M=64", 64, 7168, 1536, 4),
    BF16Case("Kimi query up M=64", 64, 1536, 1536, 16),
    BF16Case("Kimi latent down M=64", 64, 7168, 576, 8),
    BF16Case("Kimi output M=64", 64, 1024, 7168, 4),
    BF16Case("Kimi router M=64", 64, 7168, 384, 8, result="float32"),
    BF16Case("Kimi shared gate M=64", 64, 7168, 256, 16),
    BF16Case("Kimi shared down M=64", 64, 256, 7168, 16),
    BF16Case("Kimi absorbed keys M=64", 64, 128, 512, 16, heads=8, transposed=True),
    BF16Case("Kimi values M=64", 64, 512, 128, 16, heads=8),
    BF16Case("Kimi values M=2048", 2048, 512, 128, 16, heads=8),
    *(
        BF16Case(f"Kimi {name} e4m3 M={rows}", rows, *shape, 16, heads=8, transposed=shape == (128, 512), fp8=True)
        for rows in (64, 2048)
        for name, shape in (("absorbed keys", (128, 512)), ("values", (512, 128)))
    ),
    BF16Case("Qwen3-30B gate 64 tokens", 512, 2048, 96, 4, routed(64, 8, 128)),
    BF16Case("Qwen3-30B down 64 tokens", 512, 96, 2048, 4, routed(64, 8, 128)),
]
SMALL = [
    *(BF16Case(f"M={rows}", rows, 256, 128) for rows in (1, 16, 17, 130)),
    BF16Case("ragged", 3, 100, 40),
    BF16Case("split", 2, 1024, 136, result="float32"),
    BF16Case("heads", 5, 40, 72, heads=3),
    BF16Case("heads, transposed", 17, 128, 40, heads=3, transposed=True),
    BF16Case("e4m3 heads", 5, 256, 64, heads=3, fp8=True),
    BF16Case("e4m3 heads, transposed", 17, 192, 72, heads=3, transposed=True, fp8=True),
    BF16Case("some experts empty", 9, 256, 128, counts=(3, 0, 5, 1)),
    BF16Case("one expert takes all", 40, 192, 72, counts=(0, 40, 0)),
    BF16Case("rows beyond the last", 50, 256, 128, counts=(0, 40, 3)),
    BF16Case("no rows", 4, 256, 128, counts=(0, 0)),
]
