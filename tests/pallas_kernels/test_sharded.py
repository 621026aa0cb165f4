"""Kernels inside shard_map: 4-bit weights split over devices by inputs (with a sum) or by outputs give the whole's."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pallas_kernels.w4a16_matmul import w4a16_matmul
from pallas_kernels.w4a16_matmul.shapes import W4A16Case

SPLITS = {"inputs": (P(None, "x"), P(None, "x")), "outputs": (P(), P(None, None, "x"))}


@pytest.mark.parametrize("axis", SPLITS)
def test_four_devices_give_what_one_gives(axis):
    layer, x, words, scale = W4A16Case("sharded", 3, 512, 64, 64).operands(jax.random.key(0))
    whole = w4a16_matmul(x, words, scale, layer, implementation="reference")
    x_spec, weight_spec = SPLITS[axis]

    def part(x, words, scale):
        out = w4a16_matmul(x, words, scale, layer, implementation="interpret").astype(jnp.float32)
        return jax.lax.psum(out, "x") if axis == "inputs" else out

    mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
    specs = {"in_specs": (x_spec, weight_spec, weight_spec), "out_specs": P() if axis == "inputs" else P(None, "x")}
    found = jax.jit(partial(jax.shard_map, mesh=mesh, check_vma=False, **specs)(part))(x, words, scale)
    np.testing.assert_allclose(found, whole.astype(jnp.float32), atol=1e-2 * float(jnp.abs(whole).max()))
