"""Every op: its kernel, interpreted, gives what its reference gives, at every small case of its `shapes`.

The operands that nothing may read (unallocated pages, slots past a length, padding rows and tokens) are NaN, so a
result that is finite shows that none was read.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.bf16_matmul import shapes as bf16
from pallas_kernels.fp8_matmul import shapes as fp8
from pallas_kernels.paged_attention import shapes as attention
from pallas_kernels.w4a16_matmul import shapes as w4a16

CASES = [*attention.SMALL, *w4a16.SMALL, *fp8.SMALL, *bf16.SMALL]
names = lambda case: f"{case.kernel} {case.name}"  # noqa: E731


@pytest.mark.parametrize("case", CASES, ids=names)
def test_the_interpreted_kernel_is_the_reference(case):
    operands = case.operands(jax.random.key(0))
    found, expected = (
        np.asarray(jax.jit(case.call, static_argnames="implementation")(*operands, implementation=name), np.float32)
        for name in ("interpret", "reference")
    )
    assert np.isfinite(expected).all()
    np.testing.assert_allclose(found, expected, rtol=0, atol=case.tolerance * max(np.abs(expected).max(), 1e-6))


@pytest.mark.parametrize("case", [attention.SMALL[0], w4a16.SMALL[0], fp8.SMALL[0], bf16.SMALL[0]], ids=names)
def test_auto_is_the_reference_on_the_cpu_and_other_names_are_refused(case):
    operands = case.operands(jax.random.key(1))
    found, expected = (case.call(*operands, implementation=name) for name in ("auto", "reference"))
    np.testing.assert_allclose(np.asarray(found, np.float32), np.asarray(expected, np.float32), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="use auto, reference, triton, interpret"):
        case.call(*operands, implementation="cuda")


@pytest.mark.parametrize("case", [*attention.LISTED, *w4a16.LISTED, *fp8.LISTED, *bf16.LISTED], ids=names)
def test_the_kernels_take_every_listed_case(case):
    structs = case.structs()
    out = jax.eval_shape(lambda *operands: case.call(*operands, implementation="triton"), *structs)
    assert out.shape[0] == structs[1].shape[0] and case.floor().bytes > 0 and case.turn_bytes() > 0


def test_a_layer_is_picked_by_its_index():
    case = w4a16.W4A16Case("layers", 3, 256, 128, layers=3)
    _, x, words, scale = case.operands(jax.random.key(2))
    found = [case.call(jnp.int32(i), x, words, scale, implementation="interpret") for i in range(3)]
    one = lambda i: (x, words[i : i + 1], scale[i : i + 1])  # noqa: E731
    alone = [case.call(jnp.int32(0), *one(i), implementation="interpret") for i in range(3)]
    for mine, other in zip(found, alone, strict=True):
        np.testing.assert_array_equal(np.asarray(mine, np.float32), np.asarray(other, np.float32))
    assert not (found[0] == found[1]).all()
