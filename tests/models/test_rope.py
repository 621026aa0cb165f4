"""Rotary embedding against complex numbers in float64, YaRN against DeepSeek's formulas written out."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.config import ModelConfig, RopeConfig, YarnConfig, yarn_mscale
from jaxinfer.models.rope import inverse_frequencies, rotate

YARNS = [
    (64, 50_000.0, YarnConfig(factor=64.0, original_max_position=4096)),
    (64, 10_000.0, YarnConfig(factor=40.0, original_max_position=4096)),
    (128, 1e6, YarnConfig(factor=4.0, original_max_position=32_768, mscale=0.707, mscale_all_dim=0.5)),
    (16, 100.0, YarnConfig(factor=8.0, original_max_position=64, beta_fast=4.0, beta_slow=2.0)),
    (8, 10_000.0, YarnConfig(factor=2.0, original_max_position=16, beta_fast=1.0, beta_slow=1.0)),  # no ramp at all
]
turn = jax.jit(rotate, static_argnums=2)


def deepseek_yarn_frequencies(dim: int, base: float, yarn: YarnConfig) -> np.ndarray:
    """`precompute_freqs_cis` of DeepSeek-V3's published inference code, in float64."""

    def correction_dim(rotations):
        return dim * math.log(yarn.original_max_position / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(correction_dim(yarn.beta_fast)), 0)
    high = min(math.ceil(correction_dim(yarn.beta_slow)), dim - 1)
    if low == high:
        high += 0.001
    smooth = 1 - np.clip((np.arange(dim // 2) - low) / (high - low), 0, 1)
    frequencies = 1.0 / base ** (np.arange(0, dim, 2) / dim)
    return frequencies / yarn.factor * (1 - smooth) + frequencies * smooth


def by_complex_numbers(x: np.ndarray, positions: np.ndarray, frequencies: np.ndarray, interleaved: bool) -> np.ndarray:
    """Each pair is a complex number, turned by position * frequency radians."""
    x, half = x.astype(np.float64), x.shape[-1] // 2
    pairs = x[..., 0::2] + 1j * x[..., 1::2] if interleaved else x[..., :half] + 1j * x[..., half:]
    turned = pairs * np.exp(1j * positions[..., None, None] * frequencies)
    if interleaved:
        return np.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)
    return np.concatenate([turned.real, turned.imag], axis=-1)


def heads(seed: int, dim: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((2, 7, 3, dim)).astype(np.float32), rng.integers(0, 1000, (2, 7)).astype(np.int32)


# An angle of up to 1000 radians has a float32 error of up to 1000 * 2^-23 (the frequency's rounding and the product's),
# and no value is beyond 4.
TOLERANCE = 4 * 1000 * 2.0**-23


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dim", [2, 8, 64])
def test_rotate(dim, interleaved):
    x, positions = heads(0, dim)
    frequencies = 10_000.0 ** (-np.arange(0, dim, 2) / dim)
    found = turn(x, positions, RopeConfig(interleaved=interleaved))
    np.testing.assert_allclose(found, by_complex_numbers(x, positions, frequencies, interleaved), atol=TOLERANCE)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("fraction", [0.5, 0.25])
def test_partial_rotation_leaves_the_rest(fraction, interleaved):
    """The part that turns does so as a head of its own width would."""
    x, positions = heads(1, 32)
    turning = int(32 * fraction)
    found = np.asarray(turn(x, positions, RopeConfig(theta=1e6, fraction=fraction, interleaved=interleaved)))
    np.testing.assert_array_equal(found[..., turning:], x[..., turning:])
    alone = turn(x[..., :turning], positions, RopeConfig(theta=1e6, interleaved=interleaved))
    np.testing.assert_allclose(found[..., :turning], alone, atol=1e-6)
    frequencies = 1e6 ** (-np.arange(0, turning, 2) / turning)
    expected = by_complex_numbers(x[..., :turning], positions, frequencies, interleaved)
    np.testing.assert_allclose(found[..., :turning], expected, atol=TOLERANCE)


@pytest.mark.parametrize("interleaved", [True, False])
def test_products_depend_on_the_distance_alone(interleaved):
    (x, positions), config = heads(2, 16), RopeConfig(interleaved=interleaved)
    y = heads(3, 16)[0]
    product = lambda shift: jnp.sum(turn(x, positions + shift, config) * turn(y, positions * 0 + shift, config), -1)  # noqa: E731
    np.testing.assert_allclose(product(0), product(123), atol=16 * TOLERANCE)
    assert not np.allclose(product(0), jnp.sum(x * y, -1), atol=0.1)


def test_narrow_heads_are_turned_in_float32():
    x, positions = heads(4, 16)
    narrow = turn(jnp.asarray(x, jnp.bfloat16), positions, RopeConfig())
    assert narrow.dtype == jnp.bfloat16
    exact = turn(jnp.asarray(x, jnp.bfloat16).astype(jnp.float32), positions, RopeConfig())
    np.testing.assert_array_equal(np.asarray(narrow, np.float32), np.asarray(exact.astype(jnp.bfloat16), np.float32))


# ---- YaRN


@pytest.mark.parametrize(("dim", "theta", "yarn"), YARNS)
def test_yarn_frequencies(dim, theta, yarn):
    found = inverse_frequencies(RopeConfig(theta=theta, yarn=yarn), dim)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, deepseek_yarn_frequencies(dim, theta, yarn), rtol=1e-6)


@pytest.mark.parametrize(("dim", "theta", "yarn"), YARNS[:3])
def test_yarn_keeps_fast_pairs_and_slows_slow_ones(dim, theta, yarn):
    plain = inverse_frequencies(RopeConfig(theta=theta), dim)
    found = inverse_frequencies(RopeConfig(theta=theta, yarn=yarn), dim)
    turns = yarn.original_max_position * plain / (2 * math.pi)
    assert (turns > 2 * yarn.beta_fast).any() and (turns < yarn.beta_slow / 2).any()
    np.testing.assert_allclose(found[turns > 2 * yarn.beta_fast], plain[turns > 2 * yarn.beta_fast], rtol=1e-6)
    slow = turns < yarn.beta_slow / 2
    np.testing.assert_allclose(found[slow], plain[slow] / yarn.factor, rtol=1e-6)


def test_yarn_scales_the_rotated_part_by_the_ratio_of_its_mscales():
    dim, theta, yarn = YARNS[2]
    x, positions = heads(5, dim)
    gain = (0.1 * 0.707 * math.log(4) + 1) / (0.1 * 0.5 * math.log(4) + 1)
    frequencies = deepseek_yarn_frequencies(dim, theta, yarn)
    found = turn(x, positions, RopeConfig(theta=theta, yarn=yarn))
    np.testing.assert_allclose(found, gain * by_complex_numbers(x, positions, frequencies, False), atol=TOLERANCE)


@pytest.mark.parametrize(("factor", "mscale", "value"), [(1.0, 1.0, 1.0), (0.5, 1.0, 1.0), (40.0, 0.0, 1.0)])
def test_yarn_mscale_without_effect(factor, mscale, value):
    assert yarn_mscale(factor, mscale) == value


def test_softmax_scale():
    """MLA under YaRN multiplies by mscale squared; without it, and with grouped queries, it is 1/sqrt(width)."""
    kimi, deepseek, tiny = (ModelConfig.preset(name) for name in ("kimi-k2.6", "deepseek-v3", "tiny"))
    assert kimi.softmax_scale == pytest.approx((0.1 * math.log(64) + 1) ** 2 / math.sqrt(192))
    assert deepseek.softmax_scale == pytest.approx((0.1 * math.log(40) + 1) ** 2 / math.sqrt(192))
    assert tiny.softmax_scale == pytest.approx(1 / math.sqrt(48))
