"""Static scales of FP8 pages: one pass over sample texts, one scale for each layer and kind of entry."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.cache.kv import KVCache
from jaxinfer.config import ModelConfig
from jaxinfer.models.attention import PagedContext
from jaxinfer.models.decoder import Params, bind
from jaxinfer.quantization.formats import E4M3_MAX, KVFormat

MARGIN = 2.0
"""Headroom over the largest magnitude seen. E4M3 is a floating format: a factor of two costs no precision to values
that stay normal, and what lies beyond the margin saturates."""


def calibrate(config: ModelConfig, params: Params, texts: list[list[int]]) -> dict[str, jax.Array]:
    """Scales `[layers]` by kind such that MARGIN times the largest entry of `texts` (tokens) maps to 448."""
    width = max(map(len, texts))
    peaks = {kind: jnp.zeros(layers) for kind, layers in config.cache_layers.items()}

    @jax.jit
    def largest(tokens, count):
        cache = KVCache.create(config.attention.entries, config.cache_layers, 1, width, KVFormat.parse("f32"))
        context = PagedContext.one_text(width, count)
        _, cache = bind(config, params).paged(tokens[None], context, cache, jnp.float32)
        return {kind: jnp.abs(entry).max(axis=(1, 2, 3)) for kind, entry in cache.entries.items()}

    for text in texts:
        padded = np.zeros(width, np.int32)
        padded[: len(text)] = text
        peaks = jax.tree.map(jnp.maximum, peaks, largest(padded, jnp.int32(len(text))))
    return {kind: jnp.where(peak > 0, peak, 1.0) * MARGIN / E4M3_MAX for kind, peak in peaks.items()}
