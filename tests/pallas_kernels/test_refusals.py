"""What a kernel doesn't support it names, with what it does; the reference takes over only where no kernel is meant."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.fp8_matmul import fp8_matmul
from pallas_kernels.implementation import first_problem, not_addressable
from pallas_kernels.paged_attention import gqa_attention, mla_attention
from pallas_kernels.w4a16_matmul import w4a16_matmul
from pallas_kernels.w4a16_matmul.layout import pack

struct = jax.ShapeDtypeStruct
INT = struct((), jnp.int32)


def shape_of(function, *structs, **settings):
    return jax.eval_shape(partial(function, **settings), *structs)


def mla(dtype=jnp.uint8, page_size=16, latent=32, rope=16, pages=4, implementation="interpret"):
    width = latent + rope
    pool, query = struct((2, pages, page_size, width), dtype), struct((1, 1, 2, width), jnp.bfloat16)
    settings = {"latent": latent, "softmax_scale": 1.0, "kv_scale": jnp.float32(1), "implementation": implementation}
    run = partial(mla_attention, **settings)
    table, row = struct((1, 4), jnp.int32), struct((1,), jnp.int32)
    return shape_of(run, query, pool, INT, table, row, struct((1, 1), jnp.int32))


def gqa(head=32, dtype=jnp.uint8, implementation="interpret"):
    pool = struct((2, 4, 16, 2 * head), dtype)
    query, table, row = struct((1, 1, 4, head), jnp.bfloat16), struct((1, 4), jnp.int32), struct((1,), jnp.int32)
    scales = {"key_scale": jnp.float32(1), "value_scale": jnp.float32(1), "softmax_scale": 1.0}
    run = partial(gqa_attention, **scales, implementation=implementation)
    return shape_of(run, query, pool, pool, INT, table, row, struct((1, 1), jnp.int32))


def w4a16(group=32, dtype=jnp.bfloat16, inputs=256, implementation="interpret"):
    words, scale = struct((2, inputs // 32, 8 * 8), jnp.uint16), struct((2, inputs // group, 8), jnp.bfloat16)
    return shape_of(w4a16_matmul, struct((4, inputs), dtype), words, scale, INT, implementation=implementation)


def fp8(dtype=jnp.float8_e4m3fn, inputs=128, outputs=64, layers=1, implementation="interpret"):
    weight = struct((layers, outputs, inputs), dtype)
    scale = struct((layers, -(-outputs // 128), inputs // 128), jnp.float32)
    return shape_of(fp8_matmul, struct((4, inputs), jnp.bfloat16), weight, scale, INT, implementation=implementation)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (partial(mla, dtype=jnp.float32), r"pool is float32: the attention kernels read uint8 .* and uint16"),
        (partial(mla, page_size=8), r"pages of 8 tokens: the attention kernels read \(16, 32, 64\)"),
        (partial(mla, latent=48), r"widths \(48, 16\) .* powers of two from 16"),
        (partial(gqa, head=96), r"widths \(96,\) .* powers of two from 16"),
        (partial(gqa, dtype=jnp.int8), r"the key pool is int8"),
        (partial(mla, pages=2**31 // (2 * 16 * 48) + 1), r"the pool of 2\.00 GiB .* up to 2 GiB or over 4 GiB"),
        (partial(w4a16, group=16), r"groups of 16 inputs: the W4A16 kernel takes \(32, 64, 128\)"),
        (partial(w4a16, dtype=jnp.float32), r"activations in float32: the W4A16 kernel takes bfloat16 and float16"),
        (partial(fp8, dtype=jnp.float8_e5m2), r"weights in float8_e5m2: the FP8 kernel takes float8_e4m3fn"),
        (partial(fp8, inputs=2**14, outputs=2**14, layers=9), r"the weights of 2\.25 GiB"),
    ],
)
def test_the_kernel_says_what_it_takes(call, message):
    for implementation in ("interpret", "triton"):
        with pytest.raises(ValueError, match=message):
            call(implementation=implementation)
    assert call(implementation="auto") == call(implementation="reference")  # on the CPU no kernel is meant


def test_on_a_gpu_auto_refuses_too(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(ValueError, match="groups of 16"):
        w4a16(group=16, implementation="auto")


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((4, 100), (1, 3, 64), (1, 3, 8)), r"words are \[\.\.\., K/32, N\*8\]"),
        (((4, 64), (1, 2, 64), (1, 2, 7)), r"scale \[\.\.\., K/group, N\]"),
        (((4, 64), (1, 3, 64), (1, 2, 8)), r"words \(1, 3, 64\)"),
    ],
)
def test_shapes_that_do_not_fit_each_other(shapes, message):
    x, words, scale = shapes
    given = struct(x, jnp.bfloat16), struct(words, jnp.uint16), struct(scale, jnp.bfloat16)
    with pytest.raises(ValueError, match=message):
        shape_of(w4a16_matmul, *given, INT)


def test_pack_wants_whole_blocks():
    with pytest.raises(ValueError, match="48 inputs: 4-bit weights come in blocks of 32"):
        pack(jnp.zeros((48, 4), jnp.uint8))


@pytest.mark.parametrize(
    ("size", "itemsize", "refused"),
    [(2**31, 1, False), (2**31 + 1, 1, True), (2**32, 1, True), (2**32 + 1, 1, False), (2**31 + 1, 2, False)],
)
def test_one_byte_arrays_between_2_and_4_gib_are_not_addressable(size, itemsize, refused):
    array = struct((size,), {1: jnp.uint8, 2: jnp.uint16}[itemsize])
    assert (not_addressable("it", array) is not None) == refused
    assert first_problem(None, "second", "third") == "second" and first_problem(None, None) is None
