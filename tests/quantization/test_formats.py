"""Names are parsed once and exactly; every cast to e4m3 saturates; pages give back what was stored."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.errors import UserError
from jaxinfer.quantization.formats import KVFormat, WeightFormat, to_e4m3

E4M3 = np.arange(256, dtype=np.uint8).view(jnp.float8_e4m3fn).astype(np.float64)
"""What each byte stands for: two of them are NaN, there is no infinity."""


def one(value: float) -> float:
    return float(to_e4m3(jnp.float32(value)).astype(jnp.float32))


# ---- e4m3


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        (0.0, 0.0), (1.0, 1.0), (448.0, 448.0), (-448.0, -448.0), (449.0, 448.0), (465.0, 448.0), (-1e30, -448.0),
        (math.inf, 448.0), (-math.inf, -448.0), (2.0**-9, 2.0**-9), (2.0**-10, 0.0), (1.1 * 2.0**-10, 2.0**-9),
        (17.0, 16.0), (19.0, 20.0),
    ],
)  # fmt: skip
def test_to_e4m3(value, stored):
    """Beyond 448 it saturates, where the bare cast gives NaN; halfway it rounds to even."""
    assert one(value) == stored
    assert one(-value) == -stored


def test_nan_stays_nan_and_the_bare_cast_does_not_saturate():
    assert math.isnan(one(math.nan))
    assert math.isnan(float(jnp.float32(465).astype(jnp.float8_e4m3fn)))


def test_to_e4m3_takes_the_nearest_value():
    """All magnitudes from below the smallest subnormal number to beyond the largest."""
    rng = np.random.default_rng(0)
    x = (rng.choice([-1, 1], 5000) * 2.0 ** rng.uniform(-11, 10, 5000)).astype(np.float32)
    values = np.unique(E4M3[~np.isnan(E4M3)])
    nearest = np.abs(x.astype(np.float64)[:, None] - values).min(axis=1)
    np.testing.assert_array_equal(np.abs(np.asarray(to_e4m3(x), np.float64) - x), nearest)


# ---- weight formats


@pytest.mark.parametrize(
    ("text", "kind", "group", "dense", "quantized"),
    [
        ("f32", "f32", 0, True, False), ("bf16", "bf16", 0, True, False), ("fp8_e4m3", "fp8_e4m3", 0, True, True),
        ("int4:g32", "int4", 32, False, True), ("int4:g64", "int4", 64, False, True),
        ("int4:g128", "int4", 128, False, True), ("int4:g64+dense", "int4", 64, True, True),
    ],
)  # fmt: skip
def test_parse_weight_format(text, kind, group, dense, quantized):
    format = WeightFormat.parse(text)
    assert (format.kind, format.group, format.dense, format.quantized) == (kind, group, dense, quantized)
    assert str(format) == text
    assert WeightFormat.parse(str(format)) == format and len({format, WeightFormat.parse(text)}) == 1
    assert format.dtype == (jnp.float32 if kind == "f32" else jnp.bfloat16)


@pytest.mark.parametrize(
    "text",
    ["", "int4", "int4:", "int4:g", "int4:g16", "int4:g032", "int4:g32+", "int4:g32+all", "int4:32", "int8", "BF16",
     "bf16+dense", "fp8", "fp8_e4m3:g32", " bf16", "int4:g32 "],
)  # fmt: skip
def test_bad_weight_formats_are_refused_with_those_there_are(text):
    with pytest.raises(UserError, match="unknown weight format") as caught:
        WeightFormat.parse(text)
    assert all(name in str(caught.value) for name in WeightFormat.names()) and "\n" not in str(caught.value)


def test_every_listed_name_parses():
    assert [str(WeightFormat.parse(name)) for name in WeightFormat.names()] == WeightFormat.names()
    assert [str(KVFormat.parse(name)) for name in KVFormat.names()] == KVFormat.names()


# ---- KV formats


@pytest.mark.parametrize(
    ("name", "dtype", "size"), [("f32", "float32", 4), ("bf16", "uint16", 2), ("fp8_e4m3", "uint8", 1)]
)
def test_storage_of_kv_formats(name, dtype, size):
    format = KVFormat.parse(name)
    assert jnp.dtype(format.dtype).name == dtype and format.itemsize == size
    assert format.encode(jnp.ones((2, 3)), jnp.float32(1)).dtype == format.dtype


@pytest.mark.parametrize("text", ["", "fp8", "bf16 ", "int4:g32", "int8"])
def test_bad_kv_formats_are_refused_with_those_there_are(text):
    with pytest.raises(UserError, match="unknown KV format .*f32, bf16, fp8_e4m3$"):
        KVFormat.parse(text)


@pytest.mark.parametrize(("name", "scale"), [*itertools.product(KVFormat.names(), [1.0, 0.03, 7.0])])
def test_kv_round_trip(name, scale):
    """Nothing is lost in f32, half of the last bit in bf16 (2^-8) and in e4m3 (2^-4, at least 2^-10 of the scale). The
    scale is that of e4m3 alone."""
    format, rng = KVFormat.parse(name), np.random.default_rng(1)
    x = (rng.choice([-1, 1], 4000) * 2.0 ** rng.uniform(-14, 8, 4000) * scale).astype(np.float32)
    back = np.asarray(format.decode(format.encode(x, jnp.float32(scale)), jnp.float32(scale)))
    assert back.dtype == np.float32
    bound = {"f32": 0 * x, "bf16": 2.0**-8 * abs(x), "fp8_e4m3": np.maximum(2.0**-4 * abs(x), 2.0**-10 * scale)}[name]
    # The scale is divided out and multiplied in again in float32.
    assert (abs(back.astype(np.float64) - x) <= bound + 2.0**-22 * abs(x) * (name == "fp8_e4m3")).all()
    if name != "f32":
        assert np.max(abs(back - x) / bound) > 0.9, "the bound is not the true one"


def test_a_kv_scale_changes_what_is_read_and_where_it_saturates():
    """Fault 12: a scale that is ignored on either side would show."""
    format = KVFormat.parse("fp8_e4m3")
    x = jnp.array([1000.0, -3000.0, jnp.inf, 0.0])
    read = lambda write_scale, read_scale: format.decode(format.encode(x, write_scale), read_scale).tolist()  # noqa: E731
    assert read(1.0, 1.0) == [448, -448, 448, 0]
    assert read(4.0, 4.0) == [1024, -1792, 1792, 0]
    assert read(4.0, 1.0) == [256, -448, 448, 0]
    assert np.isnan(format.decode(format.encode(jnp.float32(jnp.nan), 4.0), 4.0))


@pytest.mark.parametrize("name", ["bf16", "fp8_e4m3"])
def test_every_bit_pattern_survives_a_round_trip(name):
    """Reading and storing again changes no byte, so that pages can be moved between pools of one format."""
    format = KVFormat.parse(name)
    stored = np.arange(2 ** (8 * format.itemsize)).astype(format.dtype)
    values = jax.jit(format.decode)(stored, jnp.float32(1))
    finite = np.isfinite(values)
    again = np.asarray(jax.jit(format.encode)(values, jnp.float32(1)))
    tiny = abs(np.asarray(values)) < np.finfo(np.float32).tiny  # subnormal in float32: flushed to zero on some devices
    np.testing.assert_array_equal(again[finite & ~tiny], stored[finite & ~tiny])
