"""RMSNorm against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxinfer.models.norm import RMSNorm

WIDTH, EPS = 24, 1e-3  # an eps large enough to show


@pytest.fixture(scope="module")
def norm():
    norm = RMSNorm(3, WIDTH, EPS, nnx.Rngs(0), jnp.float32)
    np.testing.assert_array_equal(norm.weight.get_value(), np.ones((3, WIDTH)))
    norm.weight.set_value(jnp.asarray(np.random.default_rng(0).uniform(0.5, 2, (3, WIDTH)), jnp.float32))
    return norm


def expected(x, weight):
    x = np.asarray(x, np.float64)
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + EPS) * np.asarray(weight, np.float64)


@pytest.mark.parametrize("layer", range(3))
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e4])
def test_rms_norm(norm, layer, size):
    x = (np.random.default_rng(1).standard_normal((2, 5, WIDTH)) * size).astype(np.float32)
    found = norm(x, jnp.int32(layer))
    np.testing.assert_allclose(found, expected(x, norm.weight.get_value()[layer]), rtol=1e-5)


def test_zeros_give_zeros(norm):
    assert not np.asarray(norm(jnp.zeros((1, WIDTH)), jnp.int32(0))).any()


def test_narrow_values_are_normalised_in_float32(norm):
    """A square of 300 is beyond what bf16 can add up to three digits; only the result is rounded."""
    x = jnp.asarray(np.random.default_rng(2).standard_normal((64, WIDTH)) * 300, jnp.bfloat16)
    found = jax.jit(lambda x: norm(x, jnp.int32(1)))(x)
    assert found.dtype == jnp.bfloat16
    exact = expected(x, norm.weight.get_value()[1])
    np.testing.assert_allclose(np.asarray(found, np.float64), exact, rtol=2.0**-8 + 1e-5)
