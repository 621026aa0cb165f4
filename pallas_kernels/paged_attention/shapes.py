"""The paged attention of the models that jaxinfer plans for, on one of eight GPUs, and small ones for tests."""

from abc import abstractmethod
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.case import Case, Floor
from pallas_kernels.paged_attention import blocks
from pallas_kernels.paged_attention.api import gqa_attention, gqa_tuning, mla_attention, mla_tuning

NAN = {"uint8": 0x7F, "uint16": 0x7FC0}
SCALE = 0.7  # of the entries: an ignored one shows


@dataclass(frozen=True)
class AttentionCase(Case):
    """Sequences of `lengths`, the last `tokens` of each as queries. `stored`: uint8 (e4m3) or uint16 (bfloat16)."""

    lengths: tuple[int, ...]
    tokens: int
    heads: int
    page_size: int
    stored: str
    layers: int

    tensor_core = ("HMMA", "HGMMA")

    @property
    def tolerance(self) -> float:
        """Queries and softmax weights are rounded to float16 (2^-11) or bfloat16 (2^-8)."""
        return 1e-3 if self.stored == "uint8" else 4e-3

    @property
    def itemsize(self) -> int:
        return jnp.dtype(self.stored).itemsize

    @property
    def seen(self) -> int:
        """Pairs of a query token and an entry that it sees."""
        return sum(sum(range(max(n - self.tokens, 0) + 1, n + 1)) for n in self.lengths)

    def _pages(self, key):
        """Page table, lengths, positions, and which slots of the pool hold entries; page 0 never does."""
        lengths = jnp.asarray(self.lengths, jnp.int32)
        most = -(-max(max(self.lengths), 1) // self.page_size)
        pages = len(self.lengths) * most + 2
        table = jax.random.permutation(key, pages - 1)[: pages - 2].reshape(len(self.lengths), most) + 1
        inside = jnp.arange(most * self.page_size) < lengths[:, None]
        held = jnp.zeros((pages, self.page_size), bool)
        held = held.at[table.reshape(-1)].set(inside.reshape(-1, self.page_size))
        table = jnp.where(jnp.arange(most) * self.page_size < lengths[:, None], table, -1).astype(jnp.int32)
        first = jnp.maximum(lengths - self.tokens, 0)[:, None] + jnp.arange(self.tokens)
        return table, lengths, jnp.where(first < lengths[:, None], first, -1).astype(jnp.int32), held

    def _pool(self, key, held, width: int):
        """Entries below 2, NaN wherever none belongs."""
        shape = (self.layers, *held.shape, width)
        if self.stored == "uint8":
            bits = jax.random.bits(key, shape, jnp.uint8) & jnp.uint8(0xBF)
        else:
            bits = jax.lax.bitcast_convert_type(jax.random.normal(key, shape, jnp.bfloat16), jnp.uint16)
        return jnp.where(held[..., None], bits, jnp.asarray(NAN[self.stored], bits.dtype))

    def _query(self, key, positions, width: int):
        query = jax.random.normal(key, (*positions.shape, self.heads, width), jnp.bfloat16)
        return jnp.where(positions[..., None, None] >= 0, query, jnp.nan)

    def _again_bytes(self, rows: int, kv_heads: int, height: int, width: int) -> float:
        """Entries that further blocks of rows read (their causal part counted whole), and partial results both ways."""
        entries = sum(self.lengths) * self._entry_bytes() * (-(-rows // height) - 1)
        count = len(self.lengths) * kv_heads * -(-rows // height)
        if count >= 2 * blocks.PIECES:
            return entries
        tiles = sum(-(-n // 64) for n in self.lengths) * kv_heads * -(-rows // height)
        return entries + 8 * (min(rows, height) * width + 2 * height) * min(count + blocks.PIECES, tiles)

    @abstractmethod
    def _entry_bytes(self) -> int:
        """Bytes of a token's entry, all its key-value heads."""


@dataclass(frozen=True)
class MLACase(AttentionCase):
    latent: int = 512
    rope: int = 64

    kernel = "paged_mla"

    def operands(self, key):
        keys = jax.random.split(key, 3)
        table, lengths, positions, held = self._pages(keys[0])
        width = self.latent + self.rope
        pool, query = self._pool(keys[1], held, width), self._query(keys[2], positions, width)
        return jnp.int32(self.layers - 1), query, pool, table, lengths, positions, jnp.float32(SCALE)

    def call(self, *operands, implementation):
        layer, query, pool, table, lengths, positions, scale = operands
        given = {"latent": self.latent, "kv_scale": scale, "softmax_scale": 0.1, "implementation": implementation}
        return mla_attention(query, pool, layer, table, lengths, positions, **given)

    def _entry_bytes(self) -> int:
        return (self.latent + self.rope) * self.itemsize

    def floor(self) -> Floor:
        width, queries = self.latent + self.rope, len(self.lengths) * self.tokens * self.heads
        moved = sum(self.lengths) * self._entry_bytes() + queries * (2 * width + 4 * self.latent)
        return Floor(moved, 2 * self.heads * self.seen * (width + self.latent))

    def requested_bytes(self) -> float:
        rows = self.tokens * self.heads
        height = mla_tuning(rows, jnp.dtype(self.stored)).rows
        return self.floor().bytes + self._again_bytes(rows, 1, height, self.latent)

    def turn_bytes(self) -> float:
        tile = mla_tuning(self.tokens * self.heads, jnp.dtype(self.stored)).tile
        return tile * (self.latent + self.rope) * self.itemsize


@dataclass(frozen=True)
class GQACase(AttentionCase):
    kv_heads: int = 1
    head: int = 128
    per_token: bool = False

    kernel = "paged_gqa"

    def operands(self, key):
        keys = jax.random.split(key, 6)
        table, lengths, positions, held = self._pages(keys[0])
        pools = [self._pool(k, held, self.kv_heads * self.head) for k in keys[1:3]]
        scales = [jnp.float32(SCALE), jnp.float32(1.3)]
        if self.per_token:
            shape = (self.layers, *held.shape, self.kv_heads)
            scales = [jnp.where(held[..., None], jax.random.uniform(k, shape) + 0.5, jnp.nan) for k in keys[3:5]]
        query = self._query(keys[5], positions, self.head)
        return jnp.int32(self.layers - 1), query, *pools, table, lengths, positions, *scales

    def call(self, *operands, implementation):
        layer, query, keys, values, table, lengths, positions, key_scale, value_scale = operands
        given = {"key_scale": key_scale, "value_scale": value_scale, "softmax_scale": 0.1}
        given |= {"implementation": implementation}
        return gqa_attention(query, keys, values, layer, table, lengths, positions, **given)

    def _entry_bytes(self) -> int:
        return 2 * self.kv_heads * (self.head * self.itemsize + 4 * self.per_token)

    def floor(self) -> Floor:
        queries = len(self.lengths) * self.tokens * self.heads
        moved = sum(self.lengths) * self._entry_bytes() + queries * self.head * 6
        return Floor(moved, 4 * self.heads * self.seen * self.head)

    def _tuning(self):
        return gqa_tuning(self.tokens * self.heads // self.kv_heads, self.head, jnp.dtype(self.stored))

    def requested_bytes(self) -> float:
        rows = self.tokens * self.heads // self.kv_heads
        return self.floor().bytes + self._again_bytes(rows, self.kv_heads, self._tuning().rows, self.head)

    def turn_bytes(self) -> float:
        return self._tuning().tile * 2 * (self.head * self.itemsize + 4 * self.per_token)


MIXED = (8192, 1, 131072, 0, 4096, 63, 64, 65) + (8192,) * 24
LISTED: list[AttentionCase] = [
    *(MLACase(f"Kimi decode {h} heads {s}", (8192,) * 64, 1, h, 64, s, 16) for s in NAN for h in (8, 16, 64, 128)),
    *(MLACase(f"Kimi decode pages of {p} {s}", (8192,) * 64, 1, 8, p, s, 16) for s in NAN for p in (16, 32)),
    *(MLACase(f"Kimi decode lengths from 0 to 131072 {s}", MIXED, 1, 8, 64, s, 4) for s in NAN),
    *(MLACase(f"Kimi prefill 2 x 1024 of 8192 {s}", (8192,) * 2, 1024, 8, 64, s, 8) for s in NAN),
    *(GQACase(f"GLM-4.5 decode {s}", (8192,) * 64, 1, 12, 64, s, 8) for s in NAN),
    *(GQACase(f"groups of {g} {s}", (8192,) * 64, 1, g, 64, s, 8) for s in NAN for g in (1, 16, 32)),
    *(GQACase(f"GLM-4.5 decode pages of {p} {s}", (8192,) * 64, 1, 12, p, s, 8) for s in NAN for p in (16, 32)),
    GQACase("scales an entry", (8192,) * 64, 1, 12, 64, "uint8", 8, per_token=True),
    *(GQACase(f"Qwen3-30B whole, decode {s}", (8192,) * 16, 1, 32, 64, s, 4, 4) for s in NAN),
    *(GQACase(f"heads of 64 {s}", (8192,) * 16, 1, 32, 64, s, 8, 4, 64) for s in NAN),
    *(GQACase(f"GLM-4.5 prefill 4 x 1024 of 8192 {s}", (8192,) * 4, 1024, 12, 64, s, 8) for s in NAN),
]
EDGES = {size: (0, 1, size - 1, size, size + 1, 3 * size + 5) for size in (16, 32, 64)}
SMALL: list[AttentionCase] = [
    *(MLACase(f"mla pages of {p} {s}", EDGES[p], 1, 8, p, s, 2, 64, 16) for s in NAN for p in EDGES),
    *(MLACase(f"mla {h} heads", (0, 5, 70), 1, h, 32, "uint8", 2, 32, 16) for h in (1, 40, 128)),
    *(MLACase(f"mla chunk {s}", (0, 5, 17, 40), 9, 8, 16, s, 2, 32, 16) for s in NAN),
    *(GQACase(f"gqa pages of {p} {s}", EDGES[p], 1, 8, p, s, 2, 2, 32) for s in NAN for p in EDGES),
    *(GQACase(f"gqa groups of {g}", (0, 5, 70), 1, g, 32, "uint8", 2, 1, 32) for g in (1, 12, 40)),
    *(GQACase(f"gqa chunk {s}", (0, 5, 17, 150), 24, 12, 16, s, 2, 2, 64) for s in NAN),
    *(GQACase(f"gqa scales an entry {s}", (0, 16, 37), 2, 6, 16, s, 2, 2, 16, True) for s in NAN),
]
