"""Rotary position embedding, plain, YaRN and Llama 3.1, over all or part of a head."""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from jaxinfer.config import Llama3Rope, RopeConfig, YarnConfig, yarn_mscale


def inverse_frequencies(config: RopeConfig, dim: int) -> np.ndarray:
    """Radians a position for each of the `dim`/2 pairs, float32."""
    plain = config.theta ** -(np.arange(0, dim, 2, dtype=np.float64) / dim)
    if config.yarn is not None:
        plain = _yarn_frequencies(plain, config.yarn, config.theta, dim)
    elif config.llama3 is not None:
        plain = _llama3_frequencies(plain, config.llama3)
    return plain.astype(np.float32)


def _yarn_frequencies(plain: np.ndarray, yarn: YarnConfig, theta: float, dim: int) -> np.ndarray:
    """YaRN "by parts" (arXiv:2309.00071, section 3.2): pairs that turn often keep their frequency, pairs that turn
    less than once over the original context are slowed by `factor`, a linear ramp lies between."""

    def pair_that_turns(times: float) -> float:
        return dim * math.log(yarn.original_max_position / (times * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_that_turns(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(yarn.beta_slow)), dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 0.001), 0, 1)
    return plain * (1 - ramp) + plain / yarn.factor * ramp


def _llama3_frequencies(plain: np.ndarray, llama3: Llama3Rope) -> np.ndarray:
    """As Llama 3.1's published code has them."""
    turns = llama3.original_max_position * plain / (2 * math.pi)
    kept = np.clip((turns - llama3.low) / (llama3.high - llama3.low), 0, 1)
    return plain * kept + plain / llama3.factor * (1 - kept)


def rotate(x: Float[Array, "B T H R"], positions: Int32[Array, "B T"], config: RopeConfig) -> Float[Array, "B T H R"]:
    """`x` turned by its positions; only the first `fraction` of the last axis when that is below 1."""
    dim = int(x.shape[-1] * config.fraction)
    turned, rest = x[..., :dim].astype(jnp.float32), x[..., dim:]
    angles = positions[..., None, None].astype(jnp.float32) * inverse_frequencies(config, dim)
    yarn = config.yarn
    gain = yarn_mscale(yarn.factor, yarn.mscale) / yarn_mscale(yarn.factor, yarn.mscale_all_dim) if yarn else 1.0
    cos, sin = jnp.cos(angles) * gain, jnp.sin(angles) * gain
    if config.interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
        out = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1).reshape(turned.shape)
    else:
        first, second = jnp.split(turned, 2, axis=-1)
        out = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return jnp.concatenate([out.astype(x.dtype), rest], axis=-1)
