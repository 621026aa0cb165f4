"""The layout of 4-bit weights: what `pack` makes, against its description, and that every split of it is a layout."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.w4a16_matmul.layout import by_plane, dequantize, pack, unpack

RNG = np.random.default_rng(0)


def codes(*shape: int) -> np.ndarray:
    return RNG.integers(0, 16, shape).astype(np.uint8)


def test_each_code_is_where_the_description_says():
    given = codes(2, 96, 5)
    words = np.asarray(pack(jnp.asarray(given)))
    assert words.shape == (2, 3, 40) and words.dtype == np.uint16
    for k in range(96):
        for n in range(5):
            word = words[:, k // 32, n * 8 + k % 8]
            np.testing.assert_array_equal(word >> (4 * (k % 32 // 8)) & 0xF, given[:, k, n])
    np.testing.assert_array_equal(unpack(jnp.asarray(words)), given)


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("devices", [2, 4, 8])
def test_a_part_of_the_words_is_that_part_of_the_matrix(group, devices):
    given, scale = codes(256 * 8, 24), RNG.uniform(0.5, 1.5, (256 * 8 // group, 24))
    words, steps = pack(jnp.asarray(given)), jnp.asarray(scale, jnp.float32)
    matrix = dequantize(words, steps, group)
    np.testing.assert_allclose(matrix, (given.astype(int) - 8) * scale.repeat(group, 0), rtol=1e-6)
    for part in range(devices):
        take = lambda a, axis: np.split(np.asarray(a), devices, axis)[part]  # noqa: B023, E731
        np.testing.assert_array_equal(dequantize(take(words, 0), take(steps, 0), group), take(matrix, 0))
        np.testing.assert_array_equal(dequantize(take(words, 1), take(steps, 1), group), take(matrix, 1))


def test_by_plane_is_the_order_of_the_planes():
    x = jnp.arange(300.0)[None]
    found = np.asarray(by_plane(x))[0]
    assert found.shape == (512,)
    for chunk, plane, block, word in np.ndindex(2, 4, 8, 8):
        k = chunk * 256 + block * 32 + plane * 8 + word
        assert found[chunk * 256 + plane * 64 + block * 8 + word] == (k if k < 300 else 0)
