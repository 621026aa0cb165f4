"""Quantised weights are within their stated error, and every product with them is that of what they stand for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.errors import UserError
from jaxinfer.quantization.formats import INT4_GROUPS, WeightFormat
from jaxinfer.quantization.tensor import (
    QuantizedTensor,
    check_group,
    dequantize,
    grouped_matmul,
    matmul,
    quantize,
    take,
)

QUANTIZED = ["fp8_e4m3", *(f"int4:g{group}" for group in INT4_GROUPS)]
FORMATS = ["f32", "bf16", *QUANTIZED]
LAYERS, EXPERTS, INPUTS, OUTPUTS = 2, 5, 256, 136  # two groups of 128 inputs, and a block of 8 columns left over
make = jax.jit(quantize, static_argnums=1)


def weights(seed: int, *shape: int) -> np.ndarray:
    """Normal values whose size differs from column to column and from one run of 32 rows to the next by up to 2^8, so
    that a scale in the wrong place shows."""
    rng = np.random.default_rng(seed)
    *stack, rows, columns = shape
    size = 2.0 ** rng.integers(-4, 5, (*stack, rows // 32, 1, columns))
    size = np.broadcast_to(size, (*stack, rows // 32, 32, columns)).reshape(shape)
    return (rng.standard_normal(shape) * size).astype(np.float32)


def by_hand(tensor: QuantizedTensor) -> np.ndarray:
    """What the bytes stand for, in float64, from the layout that `QuantizedTensor` states."""
    scale = np.asarray(tensor.scale).astype(np.float64)
    rows, columns = tensor.shape[-2:]
    if tensor.format.kind == "int4":
        data = np.asarray(tensor.data).astype(int).reshape(*tensor.shape[:-2], rows // 32, columns, 8)
        codes = np.empty(tensor.shape)
        for row in range(rows):
            block, within = divmod(row, 32)
            codes[..., row, :] = data[..., block, :, within % 8] // 16 ** (within // 8) % 16 - 8
        return codes * scale.repeat(tensor.format.group, axis=-2)
    spread = scale.repeat(128, axis=-2)[..., :columns, :].repeat(128, axis=-1)[..., :rows]
    return (np.asarray(tensor.data).astype(np.float64) * spread).swapaxes(-1, -2)


def largest_in_blocks(w: np.ndarray) -> np.ndarray:
    """The largest magnitude of each value's 128x128 block."""
    out = np.empty(w.shape)
    for i in range(0, w.shape[0], 128):
        for j in range(0, w.shape[1], 128):
            out[i : i + 128, j : j + 128] = abs(w[i : i + 128, j : j + 128]).max()
    return out


# ---- round trips


@pytest.mark.parametrize("group", INT4_GROUPS)
def test_int4_error_is_at_most_half_a_step(group):
    w = weights(0, INPUTS, OUTPUTS)
    tensor = make(w, WeightFormat.parse(f"int4:g{group}"))
    assert tensor.data.shape == (INPUTS // 32, OUTPUTS * 8) and tensor.data.dtype == jnp.uint16
    assert tensor.scale.shape == (INPUTS // group, OUTPUTS) and tensor.scale.dtype == jnp.bfloat16
    assert tensor.shape == w.shape
    scale = np.asarray(tensor.scale).astype(np.float64)
    largest = abs(w).reshape(-1, group, OUTPUTS).max(axis=1)
    assert (abs(scale / (largest / 7.5) - 1) <= 2.0**-8).all()
    step = scale.repeat(group, axis=0)
    error = abs(by_hand(tensor) - w) / step
    inside = w < 7.5 * step * (1 - 1e-6)
    assert error[inside].max() <= 0.5 + 1e-6  # the division is done in float32
    assert error.max() <= 0.5 + 7.5 * 2.0**-8
    assert error.max() > 0.5, "no scale was rounded down, so this says nothing about the top"


@pytest.mark.parametrize(("rows", "columns"), [(INPUTS, OUTPUTS), (96, 300), (128, 128), (1, 129)])
def test_fp8_error_is_at_most_half_a_bit(rows, columns):
    """Also where blocks are cut off at the edges."""
    w = np.resize(weights(1, 32 * -(-rows // 32), columns), (rows, columns))
    tensor = make(w, WeightFormat.parse("fp8_e4m3"))
    assert tensor.data.shape == (columns, rows) and tensor.data.dtype == jnp.float8_e4m3fn
    assert tensor.scale.shape == (-(-columns // 128), -(-rows // 128)) and tensor.scale.dtype == jnp.float32
    assert tensor.shape == (rows, columns)
    scale = largest_in_blocks(w) / 448
    error = abs(by_hand(tensor) - w)
    # A little more: the scale is divided out and multiplied in again in float32.
    assert (error <= np.maximum(abs(w) * (2.0**-4 + 2.0**-21), scale * 2.0**-10 * (1 + 2.0**-20))).all()
    assert (error / abs(w)).max() > 2.0**-5


@pytest.mark.parametrize("name", QUANTIZED)
def test_dequantize_is_the_stated_layout(name):
    """Faults 15 and 16: a scale for each group, at every group size."""
    tensor = make(weights(2, LAYERS, INPUTS, OUTPUTS), WeightFormat.parse(name))
    np.testing.assert_allclose(np.asarray(tensor.dequantize()), by_hand(tensor), rtol=2.0**-23)
    narrow = np.asarray(tensor.dequantize(jnp.bfloat16)).astype(np.float64)
    np.testing.assert_allclose(narrow, by_hand(tensor), rtol=2.0**-8)


@pytest.mark.parametrize("name", QUANTIZED)
def test_zeros_stay_zeros(name):
    w = weights(4, INPUTS, OUTPUTS)
    w[:128, :128] = 0
    tensor = make(w, WeightFormat.parse(name))
    assert not np.asarray(tensor.dequantize())[:128, :128].any()
    assert np.isfinite(np.asarray(tensor.dequantize())).all()
    assert not np.asarray(make(np.zeros((256, 8), np.float32), WeightFormat.parse(name)).dequantize()).any()


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_large_group_does_not_coarsen_its_neighbours(name):
    w = weights(5, INPUTS, OUTPUTS)
    loud = w.copy()
    loud[:128, :128] *= 1000
    quiet, beside = (np.asarray(make(x, WeightFormat.parse(name)).dequantize()) for x in (w, loud))
    np.testing.assert_array_equal(quiet[128:], beside[128:])
    np.testing.assert_array_equal(quiet[:, 128:], beside[:, 128:])


def test_plain_formats_are_arrays():
    w = weights(6, INPUTS, OUTPUTS)
    np.testing.assert_array_equal(make(w, WeightFormat.parse("f32")), w)
    narrow = make(w, WeightFormat.parse("bf16"))
    assert narrow.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(narrow, np.float64), w, rtol=2.0**-8)


@pytest.mark.parametrize("group", INT4_GROUPS)
def test_a_group_that_does_not_divide_is_refused(group):
    format = WeightFormat.parse(f"int4:g{group}")
    with pytest.raises(UserError, match=rf"group size {group} does not divide the {group + 16} inputs of a matrix"):
        quantize(jnp.zeros((group + 16, 4)), format)
    with pytest.raises(UserError, match="of sparse/mlp/down"):
        check_group(group // 2, format, "sparse/mlp/down")
    check_group(group * 3, format)
    check_group(5, WeightFormat.parse("fp8_e4m3"))


# ---- products


@pytest.fixture(scope="module", params=FORMATS)
def stack(request):
    """Weights of some layers and experts, and what they stand for in float64."""
    weight = make(weights(7, LAYERS, EXPERTS, INPUTS, OUTPUTS), WeightFormat.parse(request.param))
    meaning = by_hand(weight) if isinstance(weight, QuantizedTensor) else np.asarray(weight).astype(np.float64)
    return weight, meaning


def close(found, x: np.ndarray, matrix: np.ndarray) -> None:
    """Within the error bound of a float32 sum of `inputs` products (Higham 2002, eq. 3.5)."""
    bound = (INPUTS + 2) * 2.0**-24 * (abs(x).astype(np.float64) @ abs(matrix))
    assert (abs(np.asarray(found, np.float64) - x.astype(np.float64) @ matrix) <= bound).all()


def test_take_is_one_layer_or_one_expert(stack):
    weight, meaning = stack
    for index in [(1,), (0, 3), (jnp.int32(1), jnp.int32(4))]:
        part = take(weight, *index)
        np.testing.assert_allclose(np.asarray(dequantize(part)), meaning[index], rtol=2.0**-23)
        assert part.shape == meaning[index].shape


def test_a_stack_is_quantised_layer_by_layer(stack):
    weight, _ = stack
    if isinstance(weight, QuantizedTensor):
        alone = make(weights(7, LAYERS, EXPERTS, INPUTS, OUTPUTS)[1, 2], weight.format)
        jax.tree.map(np.testing.assert_array_equal, take(weight, 1, 2), alone)


def test_matmul(stack):
    weight, meaning = stack
    x = np.random.default_rng(8).standard_normal((3, 2, INPUTS)).astype(np.float32)
    layers = take(weight, slice(None), 0)
    for layer in range(LAYERS):
        found = jax.jit(matmul)(x, layers, jnp.int32(layer))
        assert found.shape == (3, 2, OUTPUTS) and found.dtype == jnp.float32
        close(found, x, meaning[layer, 0])


def test_matmul_keeps_the_type_of_its_rows(stack):
    weight, meaning = stack
    x = jnp.asarray(np.random.default_rng(9).standard_normal((4, INPUTS)), jnp.bfloat16)
    found = jax.jit(matmul)(x, take(weight, slice(None), 0), jnp.int32(1))
    assert found.dtype == jnp.bfloat16
    # The matrix and the result are rounded to bf16, 2^-8 each.
    wide = np.asarray(x, np.float64)
    bound = 2.0**-7 * (abs(wide) @ abs(meaning[1, 0]))
    assert (abs(np.asarray(found, np.float64) - wide @ meaning[1, 0]) <= bound).all()


@pytest.mark.parametrize(
    "counts", [(4, 4, 4, 4, 4), (20, 0, 0, 0, 0), (0, 0, 0, 0, 20), (0, 7, 0, 13, 0), (1, 0, 2, 0, 3), (0,) * 5]
)
def test_grouped_matmul(stack, counts):
    """Any distribution over experts; rows of no expert give zeros, whatever is in them."""
    weight, meaning = stack
    x = np.random.default_rng(10).standard_normal((20, INPUTS)).astype(np.float32)
    used = sum(counts)
    x[used:] = np.nan
    found = np.asarray(grouped(x, weight, jnp.int32(1), jnp.array(counts, jnp.int32)))
    first = 0
    for expert, count in enumerate(counts):
        close(found[first : first + count], x[first : first + count], meaning[1, expert])
        first += count
    assert not found[used:].any()


grouped = jax.jit(grouped_matmul)


@pytest.mark.parametrize("name", QUANTIZED)
def test_the_scale_is_not_ignored(name):
    """Fault 12: twice the scale is twice the product, for each group by itself."""
    tensor = make(weights(11, 1, INPUTS, OUTPUTS), WeightFormat.parse(name))
    x = np.random.default_rng(11).standard_normal((2, INPUTS)).astype(np.float32)
    last = np.index_exp[..., -1] if name == "fp8_e4m3" else np.index_exp[:, -1]
    doubled = QuantizedTensor(tensor.data, tensor.scale.at[last].multiply(2), tensor.format)
    rows = 128 if name == "fp8_e4m3" else tensor.format.group
    more = matmul(x, doubled, 0) - matmul(x, tensor, 0)
    only_last = np.where(np.arange(INPUTS) < INPUTS - rows, 0, x)
    np.testing.assert_allclose(more, matmul(only_last, tensor, 0), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "bits"), [("fp8_e4m3", 8 + 32 / 128**2), ("int4:g32", 4.5), ("int4:g64", 4.25), ("int4:g128", 4.125)]
)
def test_bytes(name, bits):
    tensor = make(weights(12, EXPERTS, 256, 256), WeightFormat.parse(name))
    assert tensor.nbytes == EXPERTS * 256 * 256 * bits / 8


def test_a_quantised_tensor_is_a_pytree(stack):
    """Its format is part of the structure, so that jit compiles once for each."""
    weight, _ = stack
    leaves, tree = jax.tree.flatten(weight)
    assert len(leaves) == (2 if isinstance(weight, QuantizedTensor) else 1)
    again = jax.tree.unflatten(tree, leaves)
    assert again is weight or again.format == weight.format
