"""The pool: what is written is read, what does not exist is neither, and nothing copies the pool."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.cache import allocator, pages
from jaxinfer.cache.allocator import INVALID, AllocatorState
from jaxinfer.cache.pages import storage_dtype

L, P, PAGE, W = 3, 6, 4, 2
NOWHERE = [INVALID, -P, P, 2**31 - 1, -(2**31)]
FLOATS = [jnp.float32, jnp.float16, jnp.bfloat16, jnp.float8_e4m3fn]

write = jax.jit(pages.write)
copy = jax.jit(pages.copy)
gather = jax.jit(pages.gather, static_argnames="dtype")


def ints(*values: int) -> jax.Array:
    return jnp.array(values, jnp.int32)


def numbered() -> jax.Array:
    """A pool in which every element differs and none is zero."""
    return jnp.arange(1, L * P * PAGE * W + 1, dtype=jnp.float32).reshape(L, P, PAGE, W)


# ---- create


def test_create_makes_one_array_a_kind():
    pool = pages.create({"latent": (L, 6), "scale": (2, 1)}, P, PAGE, {"latent": jnp.uint8, "scale": jnp.float32})
    assert {kind: (array.shape, array.dtype.name) for kind, array in pool.items()} == {
        "latent": ((L, P, PAGE, 6), "uint8"),
        "scale": ((2, P, PAGE, 1), "float32"),
    }
    assert not any(array.any() for array in pool.values())
    assert pages.create({"k": (1, 1)}, 1, 1, jnp.bfloat16)["k"].dtype == jnp.bfloat16


@pytest.mark.parametrize("sizes", [((0, 2), P, PAGE), ((L, 0), P, PAGE), ((L, 2), 0, PAGE), ((L, 2), P, 0)])
def test_create_refuses_empty_sizes(sizes):
    with pytest.raises(ValueError, match="latent: sizes"):
        pages.create({"latent": sizes[0]}, *sizes[1:], jnp.float32)


def test_create_refuses_a_kind_without_a_type():
    with pytest.raises(KeyError, match="scale"):
        pages.create({"latent": (L, 6), "scale": (L, 1)}, P, PAGE, {"latent": jnp.uint8})


@pytest.mark.parametrize(
    ("dtype", "stored"),
    [
        (jnp.bfloat16, "uint16"), (jnp.float8_e4m3fn, "uint8"), (jnp.float8_e5m2, "uint8"),
        (jnp.float32, "float32"), (jnp.float16, "float16"), (jnp.uint8, "uint8"), (jnp.int8, "int8"),
    ],
)  # fmt: skip
def test_storage_dtype(dtype, stored):
    assert storage_dtype(dtype).name == stored


# ---- write and gather


@pytest.mark.parametrize("dtype", FLOATS)
def test_what_is_written_is_read(dtype):
    """Bit for bit, NaN and -0 included, whether the pool keeps the type or its bits."""
    rows = jnp.array([[1.5, -0.0], [jnp.nan, 448.0], [-3.0, 2.0**-9]], dtype)
    for stored in {jnp.dtype(dtype), storage_dtype(dtype)}:
        pool = pages.create({"k": (L, W)}, P, PAGE, stored)["k"]
        pool = write(pool, 1, ints(4, 0, 4), ints(3, 0, 1), rows)
        assert pool.dtype == stored
        read = gather(pool, 1, ints(0, 4)[None], dtype=dtype)
        assert read.shape == (1, 2 * PAGE, W) and read.dtype == dtype
        expected = np.zeros((2 * PAGE, W), dtype)
        expected[[PAGE + 3, 0, PAGE + 1]] = np.asarray(rows)
        assert np.asarray(read[0]).tobytes() == expected.tobytes()
        for layer in (0, 2):
            assert not np.asarray(gather(pool, layer, jnp.arange(P)[None], dtype=dtype)).any()


@pytest.mark.parametrize("nowhere", NOWHERE)
def test_a_write_to_nowhere_is_dropped(nowhere):
    pool = numbered()
    rows = jnp.full((1, W), -1.0)
    for layer, page, offset in [(1, nowhere, 1), (1, 2, nowhere), (nowhere, 2, 1), (1, 2, PAGE), (L, 2, 1)]:
        np.testing.assert_array_equal(write(pool, layer, ints(page), ints(offset), rows), pool)
    mixed = write(pool, 1, ints(nowhere, 2), ints(1, 3), jnp.full((2, W), -1.0))
    np.testing.assert_array_equal(mixed, pool.at[1, 2, 3].set(-1.0))


@pytest.mark.parametrize(
    ("stored", "rows"),
    [
        (jnp.uint8, jnp.float32),
        (jnp.uint8, jnp.bfloat16),
        (jnp.uint8, jnp.int8),
        (jnp.float32, jnp.bfloat16),
        (jnp.bfloat16, jnp.float32),
    ],
)
def test_nothing_is_converted_silently(stored, rows):
    pool = pages.create({"k": (L, W)}, P, PAGE, stored)["k"]
    with pytest.raises(TypeError, match="convert or quantise"):
        pages.write(pool, 0, ints(0), ints(0), jnp.zeros((1, W), rows))
    with pytest.raises(TypeError, match="does not hold the bits"):
        pages.gather(pool, 0, ints(0)[None], dtype=rows)


def test_gather_is_in_the_order_of_the_table():
    pool = numbered()
    found = gather(pool, 2, jnp.array([[3, 1], [0, 3]]))
    for slot, held in enumerate([(3, 1), (0, 3)]):
        np.testing.assert_array_equal(found[slot], np.concatenate([pool[2, page] for page in held]))


@pytest.mark.parametrize("nowhere", NOWHERE)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_page_that_does_not_exist_reads_as_zeros(nowhere, dtype):
    """Fault 13, this side of it: no clamping onto a neighbour, even if all of the pool is NaN."""
    for stored in {jnp.dtype(dtype), storage_dtype(dtype)}:
        poison = jnp.full((L, P, PAGE, W), jnp.nan, dtype)
        pool = poison if stored == dtype else jax.lax.bitcast_convert_type(poison, stored)
        found = np.asarray(gather(pool, 1, ints(nowhere, 2)[None], dtype=dtype)[0].astype(jnp.float32))
        assert not found[:PAGE].any() and np.isnan(found[PAGE:]).all()


def test_gather_with_lengths_hides_what_a_former_owner_left():
    """Fault 13: 0 x NaN is NaN, so a mask that multiplies needs zeros from the length on."""
    pool = jnp.full((L, P, PAGE, W), jnp.nan)
    pool = write(pool, 0, ints(2, 2), ints(0, 1), jnp.ones((2, W)))
    found = np.asarray(gather(pool, 0, ints(2, INVALID)[None].repeat(3, axis=0), ints(2, 0, 5)))
    assert np.isfinite(found[:2]).all()
    assert found[:2].sum(axis=(1, 2)).tolist() == [2 * W, 0.0]
    assert np.isnan(found[2, 2:PAGE]).all() and not found[2, PAGE:].any()


# ---- copy


@pytest.mark.parametrize("count", range(4))
def test_copy_moves_the_first_pages_of_every_kind_and_layer(count):
    pool = {"k": numbered(), "scale": -numbered()[:1, :, :, :1]}
    copied = copy(pool, ints(1, 1, 4), ints(0, 5, 2), count)
    for kind in pool:
        expected = np.array(pool[kind])
        for source, target in [(1, 0), (1, 5), (4, 2)][:count]:
            expected[:, target] = expected[:, source]
        np.testing.assert_array_equal(copied[kind], expected)


@pytest.mark.parametrize("nowhere", NOWHERE)
def test_copy_skips_what_does_not_exist(nowhere):
    pool = {"k": numbered()}
    for source, target in [(nowhere, 2), (2, nowhere), (nowhere, nowhere)]:
        np.testing.assert_array_equal(copy(pool, ints(source), ints(target), 1)["k"], pool["k"])
    both = copy(pool, ints(nowhere, 3), ints(2, 4), 99)["k"]
    np.testing.assert_array_equal(both, pool["k"].at[:, 4].set(pool["k"][:, 3]))


# ---- with the allocator


@jax.jit
def prefill(state, pool, rows):
    """Slot 0 filled with rows, and shared with slot 1."""
    state, _ = allocator.allocate(state, ints(0), jnp.array([rows.shape[0]]))
    page, offset = allocator.positions_to_pages(state, ints(0), jnp.arange(rows.shape[0])[None])
    pool = pages.write(pool, 0, page[0], offset[0], rows[:, None])
    return allocator.fork(state, ints(0), ints(1))[0], pool


@jax.jit
def step(state, pool, slots, marks):
    """One decode step: room for a token in each slot, the copies, the write."""
    state, grant = allocator.append(state, slots, jnp.ones_like(slots), max_new_pages=1)
    pool = pages.copy({"k": pool}, grant.copy_source, grant.copy_target, grant.copies)["k"]
    page, offset = allocator.positions_to_pages(state, slots, state.lengths[slots][:, None] - 1)
    page = jnp.where(grant.granted, page[:, 0], INVALID)
    return state, pages.write(pool, 0, page, offset[:, 0], marks[:, None]), grant


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_forks_write_apart_and_the_last_holder_in_place(order):
    """Copy on write, seen from the contents: a common past, then each its own, in as few pages."""
    past = jnp.arange(1.0, PAGE + 3)
    pool = pages.create({"k": (1, 1)}, P, PAGE, jnp.float32)["k"]
    state, pool = prefill(AllocatorState.create(P, 2, 3, PAGE), pool, past)
    state, pool, first = step(state, pool, ints(order[0]), jnp.array([100.0]))
    assert int(first.copies) == 1
    np.testing.assert_array_equal(
        gather(pool, 0, state.page_table, state.lengths)[order[1], :, 0], [*past, *[0] * (2 * PAGE - 2)]
    )
    state, pool, second = step(state, pool, ints(order[1]), jnp.array([200.0]))
    assert int(second.copies) == 0
    found = np.asarray(gather(pool, 0, state.page_table, state.lengths))[:, : PAGE + 3, 0]
    np.testing.assert_array_equal(found[order[0]], [*past, 100.0])
    np.testing.assert_array_equal(found[order[1]], [*past, 200.0])
    assert int(state.free_count) == P - 3


# ---- in place


def every_layer(pool, page, offset, rows):
    """Writes in a scan over the layers with the pool in the carry, as a decode step does."""
    layers = jnp.arange(pool.shape[0])
    return jax.lax.scan(lambda pool, layer: (pages.write(pool, layer, page, offset, rows), None), pool, layers)[0]


def some_pages(pool, source, target, count):
    return pages.copy({"k": pool}, source, target, count)["k"]


def memory(function, num_pages: int, stored, *arguments):
    """(temporary bytes, bytes updated in place, bytes of the pool) of the compiled program."""
    pool = jax.ShapeDtypeStruct((4, num_pages, 16, 64), stored)
    analysis = jax.jit(function, donate_argnums=0).lower(pool, *arguments).compile().memory_analysis()
    return analysis.temp_size_in_bytes, analysis.alias_size_in_bytes, pool.size * pool.dtype.itemsize


@pytest.mark.parametrize("dtype", [jnp.uint8, *FLOATS])
@pytest.mark.parametrize("operation", ["write", "copy"])
def test_the_pool_is_updated_in_place(operation, dtype):
    """Temporary memory does not grow with the pool, and the pool's own buffer is the result's."""
    index, scalar = jax.ShapeDtypeStruct((16,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    function, arguments = {
        "write": (every_layer, (index, index, jax.ShapeDtypeStruct((16, 64), dtype))),
        "copy": (some_pages, (index, index, scalar)),
    }[operation]
    small, large = (memory(function, size, storage_dtype(dtype), *arguments) for size in (8, 512))
    assert small[0] == large[0] < 64 * 1024
    assert large[1] == large[2]


def test_gather_does_not_copy_a_layer():
    """With a traced layer index the temporary memory is far below a layer, 1 MiB."""
    pool = jax.ShapeDtypeStruct((4, 1024, 16, 64), jnp.uint8)
    table, layer = jax.ShapeDtypeStruct((4, 8), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    analysis = jax.jit(pages.gather).lower(pool, layer, table).compile().memory_analysis()
    assert analysis.temp_size_in_bytes < 64 * 1024
