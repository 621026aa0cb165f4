"""The W4A16 products of the models that jaxinfer plans for, on one of eight GPUs, and small ones for tests."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.case import Case, Floor
from pallas_kernels.w4a16_matmul.api import grouped_tuning, plain_tuning, w4a16_grouped_matmul, w4a16_matmul
from pallas_kernels.w4a16_matmul.layout import BLOCK, CHUNK, WORDS


@dataclass(frozen=True)
class W4A16Case(Case):
    """Rows times K inputs and N outputs; with `counts`, one matrix a count and rows sorted by it."""

    rows: int
    inputs: int
    outputs: int
    group: int = 32
    layers: int = 2
    counts: tuple[int, ...] = ()

    kernel = "w4a16"
    tensor_core = ("HGMMA", "HMMA")
    tolerance = 1e-2

    def operands(self, key):
        stack = (self.layers, len(self.counts)) if self.counts else (self.layers,)
        keys = jax.random.split(key, 4)
        words = jax.random.bits(keys[0], (*stack, self.inputs // BLOCK, self.outputs * WORDS), jnp.uint16)
        steps = (*stack, self.inputs // self.group, self.outputs)
        scale = jax.random.uniform(keys[1], steps, jnp.float32, 0.01, 0.02).astype(jnp.bfloat16)
        x = jax.random.normal(keys[2], (self.rows, self.inputs), jnp.bfloat16)
        if not self.counts:
            return jnp.int32(self.layers - 1), x, words, scale
        x = jnp.where(jnp.arange(self.rows)[:, None] < sum(self.counts), x, jnp.nan)
        return jnp.int32(self.layers - 1), x, words, scale, jnp.asarray(self.counts, jnp.int32)

    def call(self, *operands, implementation):
        layer, x, words, scale, *counts = operands
        op = w4a16_grouped_matmul if counts else w4a16_matmul
        return op(x, words, scale, layer, *counts, implementation=implementation)

    def floor(self) -> Floor:
        used = sum(count > 0 for count in self.counts) if self.counts else 1
        rows = sum(self.counts) if self.counts else self.rows
        weights = used * self.inputs * self.outputs * (0.5 + 2 / self.group)
        return Floor(weights + 2 * rows * (self.inputs + self.outputs), 2 * rows * self.inputs * self.outputs)

    def _tuning(self):
        if self.counts:
            return grouped_tuning(self.rows, len(self.counts), self.outputs)
        return plain_tuning(self.rows, self.inputs, self.outputs)

    def requested_bytes(self) -> float:
        tuning, rows = self._tuning(), sum(self.counts) if self.counts else self.rows
        blocks = sum(-(-count // tuning.rows) for count in self.counts or (self.rows,))
        weights = blocks * self.inputs * self.outputs * (0.5 + 2 / self.group)
        activations = 2 * rows * self.inputs * -(-self.outputs // tuning.columns)
        partial = 8 * rows * self.outputs * tuning.splits * (tuning.splits > 1)
        return weights + activations + 2 * rows * self.outputs + partial

    def turn_bytes(self) -> float:
        return self._tuning().columns * CHUNK * (0.5 + 2 / self.group)


def routed(tokens: int, chosen: int, experts: int) -> tuple[int, ...]:
    """Counts of an even routing: every expert has its share, the first ones the rest."""
    share, rest = divmod(tokens * chosen, experts)
    return tuple(share + (expert < rest) for expert in range(experts))


LISTED = [
    *(W4A16Case(f"4096x7168 g32 M={rows}", rows, 7168, 4096) for rows in (1, 4, 16, 32, 64, 128, 4096)),
    *(W4A16Case(f"4096x7168 g{group} M=16", 16, 7168, 4096, group) for group in (64, 128)),
    W4A16Case("GLM-4.5 down M=16", 16, 1536, 5120, 128),
    W4A16Case("Kimi gate 64 tokens", 512, 7168, 256, 32, 4, routed(64, 8, 384)),
    W4A16Case("Kimi down 64 tokens", 512, 256, 7168, 32, 4, routed(64, 8, 384)),
    W4A16Case("Kimi gate, experts split", 64, 7168, 2048, 32, 2, routed(8, 8, 48)),
    W4A16Case("Kimi gate 1 token", 8, 7168, 256, 32, 4, routed(1, 8, 384)),
    W4A16Case("Kimi gate 8192 tokens", 65536, 7168, 256, 32, 1, routed(8192, 8, 384)),
    W4A16Case("GLM-4.5 gate 64 tokens", 512, 5120, 192, 128, 4, routed(64, 8, 160)),
    W4A16Case("Qwen3-30B down 64 tokens", 512, 96, 2048, 32, 8, routed(64, 8, 128)),
]
SMALL = [
    *(W4A16Case(f"M={rows}", rows, 256, 128) for rows in (1, 16, 17, 130)),
    *(W4A16Case(f"g{group}", 5, 512, 128, group) for group in (64, 128)),
    W4A16Case("ragged", 3, 96, 40),
    W4A16Case("split", 2, 1024, 136),
    W4A16Case("some experts empty", 9, 256, 128, counts=(3, 0, 5, 1)),
    W4A16Case("one expert takes all", 40, 192, 72, 64, counts=(0, 40, 0)),
    W4A16Case("rows beyond the last", 50, 256, 128, 128, counts=(0, 40, 3)),
    W4A16Case("no rows", 4, 256, 128, counts=(0, 0)),
]
