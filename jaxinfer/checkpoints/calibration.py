"""Static scales of FP8 pages: one pass over sample texts, one scale for each layer and kind of entry."""

from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.cache.kv import KVCache
from jaxinfer.config import ModelConfig
from jaxinfer.errors import UserError
from jaxinfer.models.attention import PagedContext
from jaxinfer.models.decoder import Params, bind
from jaxinfer.quantization.formats import E4M3_MAX, KVFormat

MARGIN = 2.0
"""Headroom over the largest magnitude seen. E4M3 is a floating format: a factor of two costs no precision to values
that stay normal, and what lies beyond the margin saturates."""

LIMIT = E4M3_MAX / MARGIN
"""What the largest entry seen is stored as."""


def read_text(path: Path) -> str:
    """The text in a file. UserError where it can't be read or isn't text."""
    try:
        return path.read_text()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not text in UTF-8") from None


def windows(tokens: list[int], begin: int | None, length: int, count: int) -> list[list[int]]:
    """At most `count` texts of at most `length` tokens, spread over all of `tokens`; each starts with `begin`, since
    the entries of a text's first token are unlike any other's. UserError where there is nothing to calibrate on."""
    if not tokens:
        raise UserError("the calibration text is empty; give some text like that to be served")
    head = [] if begin is None else [begin]
    step = length - len(head)
    starts = range(0, len(tokens), step)
    chosen = sorted({starts[i * len(starts) // count] for i in range(count)})
    return [[*head, *tokens[start : start + step]] for start in chosen]


def calibrate(
    config: ModelConfig, params: Params, texts: list[list[int]], advance: Callable[[], None] = lambda: None
) -> dict[str, jax.Array]:
    """Scales `[layers]` by kind such that MARGIN times the largest entry of `texts` (tokens) maps to 448. UserError
    where an entry is not finite."""
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
        advance()
    if not all(bool(jnp.isfinite(peak).all()) for peak in peaks.values()):
        raise UserError("the model's keys or values are not finite on the calibration text")
    return {kind: jnp.where(peak > 0, peak, 1.0) * MARGIN / E4M3_MAX for kind, peak in peaks.items()}
