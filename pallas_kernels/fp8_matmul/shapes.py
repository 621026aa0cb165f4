"""The FP8 products of the models that jaxinfer plans for, on one of eight GPUs, and small ones for tests."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.case import Case, Floor
from pallas_kernels.fp8_matmul.api import fp8_grouped_matmul, fp8_matmul, grouped_tuning, plain_tuning
from pallas_kernels.fp8_matmul.reference import BLOCK
from pallas_kernels.w4a16_matmul.shapes import routed


@dataclass(frozen=True)
class FP8Case(Case):
    """Rows times K inputs and N outputs; with `counts`, one matrix a count and rows sorted by it."""

    rows: int
    inputs: int
    outputs: int
    layers: int = 2
    counts: tuple[int, ...] = ()

    kernel = "fp8"
    tensor_core = ("QGMMA",)
    tolerance = 5e-3

    def operands(self, key):
        stack = (self.layers, len(self.counts)) if self.counts else (self.layers,)
        keys = jax.random.split(key, 3)
        # Without the exponent's highest bit e4m3 has no NaN and stays below 2.
        bits = jax.random.bits(keys[0], (*stack, self.outputs, self.inputs), jnp.uint8) & 0xBF
        weight = jax.lax.bitcast_convert_type(bits, jnp.float8_e4m3fn)
        steps = (*stack, -(-self.outputs // BLOCK), self.inputs // BLOCK)
        scale = jax.random.uniform(keys[1], steps, jnp.float32, 0.01, 0.02)
        x = jax.random.normal(keys[2], (self.rows, self.inputs), jnp.bfloat16)
        if not self.counts:
            return jnp.int32(self.layers - 1), x, weight, scale
        x = jnp.where(jnp.arange(self.rows)[:, None] < sum(self.counts), x, jnp.nan)
        return jnp.int32(self.layers - 1), x, weight, scale, jnp.asarray(self.counts, jnp.int32)

    def call(self, *operands, implementation):
        layer, x, weight, scale, *counts = operands
        op = fp8_grouped_matmul if counts else fp8_matmul
        return op(x, weight, scale, layer, *counts, implementation=implementation)

    def floor(self) -> Floor:
        used = sum(count > 0 for count in self.counts) if self.counts else 1
        rows = sum(self.counts) if self.counts else self.rows
        weights = used * self.inputs * self.outputs
        return Floor(weights + rows * (4 * self.inputs + 2 * self.outputs), 2 * rows * self.inputs * self.outputs)

    def requested_bytes(self) -> float:
        tuning = (
            grouped_tuning(self.rows, len(self.counts))
            if self.counts
            else plain_tuning(self.rows, self.inputs, self.outputs)
        )
        rows = sum(self.counts) if self.counts else self.rows
        weights = sum(-(-count // tuning.rows) for count in self.counts or (self.rows,)) * self.inputs * self.outputs
        activations = rows * self.inputs * (3 + -(-self.outputs // BLOCK))  # bfloat16 in, e4m3 out, e4m3 to each tile
        partial = 8 * rows * self.outputs * tuning.splits * (tuning.splits > 1)
        return weights + activations + 2 * rows * self.outputs + partial

    def turn_bytes(self) -> float:
        return BLOCK * BLOCK


LISTED = [
    *(FP8Case(f"4096x7168 M={rows}", rows, 7168, 4096) for rows in (1, 16, 64, 128, 4096)),
    FP8Case("GLM-5.2 output M=4096", 4096, 2048, 6144, 1),
    FP8Case("Kimi gate 64 tokens", 512, 7168, 256, 8, routed(64, 8, 384)),
    FP8Case("Kimi gate 8192 tokens", 65536, 7168, 256, 1, routed(8192, 8, 384)),
    FP8Case("Kimi down 8192 tokens", 65536, 256, 7168, 1, routed(8192, 8, 384)),
]
SMALL = [
    *(FP8Case(f"M={rows}", rows, 256, 128) for rows in (1, 16, 17, 130)),
    FP8Case("ragged", 3, 384, 200),
    FP8Case("some experts empty", 9, 256, 128, counts=(3, 0, 5, 1)),
    FP8Case("one expert takes all", 40, 128, 72, counts=(0, 40, 0)),
    FP8Case("rows beyond the last", 50, 256, 128, counts=(0, 40, 3)),
    FP8Case("no rows", 4, 256, 128, counts=(0, 0)),
]
