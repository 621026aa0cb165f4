"""Digests of pages: what they are, that steps keep them, what they see and what they can't."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.cache import INVALID, AllocatorState, allocator, digest
from jaxinfer.cache.digest import Digests
from jaxinfer.cache.kv import KVCache
from jaxinfer.quantization.formats import KVFormat

L, P, S, M, PAGE = 2, 12, 3, 4, 4
KINDS = {"key": 6, "value": 5}  # widths that do not fill whole words
FORMATS = ("f32", "bf16", "fp8_e4m3")


def scramble(x: int) -> int:
    """`allocator.scramble` in plain Python."""
    x ^= x >> 16
    x = x * 0x7FEB352D % 2**32
    x ^= x >> 15
    x = x * 0x846CA68B % 2**32
    return x ^ (x >> 16)


def by_hand(cache: KVCache, page: int, rows: int) -> int:
    """The definition, a word at a time."""
    total = 0
    for kind, name in enumerate(sorted(cache.entries)):
        pool = np.asarray(cache.entries[name])
        for layer in range(L):
            for offset in range(rows):
                stored = pool[layer, page, offset].tobytes()
                words = np.frombuffer(stored + bytes(-len(stored) % 4), "<u4").tolist()
                row = sum(scramble(word ^ scramble(place)) for place, word in enumerate(words)) % 2**32
                total += scramble(row ^ scramble((kind * L + layer) * PAGE + offset))
    return total % 2**32


@pytest.fixture(scope="module", params=FORMATS)
def cache(request) -> KVCache:
    """A pool of random values."""
    empty = KVCache.create(KINDS, L, P, PAGE, KVFormat.parse(request.param), {k: jnp.full(L, 0.5) for k in KINDS})
    rng = np.random.default_rng(0)
    fill = lambda pool: empty.format.encode(rng.standard_normal(pool.shape, np.float32), jnp.float32(0.5))  # noqa: E731
    return dataclasses.replace(empty, entries={kind: fill(pool) for kind, pool in empty.entries.items()})


of_pages, of_rows = jax.jit(digest.of_pages), jax.jit(digest.of_rows)


def change(cache: KVCache, kind: str, place: tuple, bit: int) -> KVCache:
    """One bit of one stored value turned."""
    pool = np.array(cache.entries[kind])
    raw = pool.view(f"u{pool.itemsize}")
    raw[place] ^= raw.dtype.type(1 << bit)
    return dataclasses.replace(cache, entries={**cache.entries, kind: jnp.asarray(pool)})


def test_it_is_what_the_definition_says(cache):
    pages, rows = np.arange(P, dtype=np.int32), np.arange(P, dtype=np.int32) % (PAGE + 1)
    found = np.asarray(of_pages(cache.entries, pages, rows)).tolist()
    assert found == [by_hand(cache, page, count) for page, count in zip(pages, rows, strict=True)]


def test_rows_add_up_to_pages(cache):
    page = np.full(PAGE, 7, np.int32)
    rows = np.asarray(of_rows(cache.entries, page, np.arange(PAGE, dtype=np.int32)), np.uint32)
    assert int(rows.sum(dtype=np.uint32)) == by_hand(cache, 7, PAGE)


def test_every_single_bit_counts(cache):
    """Each bit of each value of a page, in every layer and kind."""
    before = by_hand(cache, 3, PAGE)
    for kind, width in KINDS.items():
        for layer, offset, column in np.ndindex(L, PAGE, width):
            for bit in range(8 * cache.entries[kind].dtype.itemsize):
                damaged = change(cache, kind, (layer, 3, offset, column), bit)
                assert int(of_pages(damaged.entries, np.array([3]), np.array([PAGE]))[0]) != before


@pytest.mark.parametrize("axis", ["layers", "tokens", "values", "pages"])
def test_the_order_counts(cache, axis):
    """Two layers, tokens, values or pages exchanged."""
    pool = np.array(cache.entries["key"])
    one, other = {
        "layers": (np.s_[0, 3], np.s_[1, 3]),
        "tokens": (np.s_[0, 3, 0], np.s_[0, 3, 2]),
        "values": (np.s_[0, 3, 1, 0], np.s_[0, 3, 1, 5]),
        "pages": (np.s_[:, 3], np.s_[:, 4]),
    }[axis]
    kept = pool[one].copy()
    pool[one], pool[other] = pool[other], kept
    swapped = {**cache.entries, "key": jnp.asarray(pool)}
    assert int(of_pages(swapped, np.array([3]), np.array([PAGE]))[0]) != by_hand(cache, 3, PAGE)


def test_what_lies_past_the_rows_does_not_count(cache):
    damaged = change(cache, "key", (0, 3, 2, 1), 0)
    assert int(of_pages(damaged.entries, np.array([3]), np.array([2]))[0]) == by_hand(cache, 3, 2)


def test_random_damage_is_missed_once_in_two_to_the_32():
    """Of 200,000 pages with two random words changed none keeps its digest; a 16-bit digest would miss three."""
    rng = np.random.default_rng(1)
    words = rng.integers(0, 2**32, (200_000, 8), np.uint32)
    damaged = words.copy()
    damaged[:, 1] ^= np.uint32(1 << 31)  # the same high bit twice: what a sum of products is blind to
    damaged[:, 6] ^= np.uint32(1 << 31)
    before, after = (np.asarray(jax.jit(digest._of_words)(w)) for w in (words, damaged))
    assert not np.any(before == after)
    assert len(np.unique(before)) > 199_980  # as many as random numbers would be: the birthdays of 2^32


# ---- kept by steps


@partial(jax.jit, static_argnames=("most",))
def write(state: AllocatorState, cache: KVCache, digests: Digests, slots, counts, values, most: int):
    """Append `counts` tokens with the given `values`, as a step does."""
    before = state.lengths[slots]
    state, grant = allocator.append(state, slots, counts, max_new_pages=most)
    cache = cache.copy_pages(grant.copy_source, grant.copy_target, grant.copies)
    live = jnp.where(grant.granted, slots, INVALID)
    offset = jnp.arange(values.shape[1])
    positions = jnp.where(offset < counts[:, None], before[:, None] + offset, INVALID)
    pages, places = allocator.positions_to_pages(state, live, positions)

    @dataclasses.dataclass
    class Places:
        pages: jax.Array
        offsets: jax.Array

    for kind, width in KINDS.items():
        for layer in range(L):
            rows = values[..., :width] * (layer + 1)
            cache = cache.write(kind, jnp.int32(layer), Places(pages, places), rows)
    digests = digest.record(digests, cache, grant, pages, places)
    return state, cache, digest.rotate(digests, state, live)


verify, audit = jax.jit(digest.verify), jax.jit(digest.audit)


def start(sample: int = 1, format: str = "fp8_e4m3"):
    state = AllocatorState.create(P, S, M, PAGE)
    cache = KVCache.create(KINDS, L, P, PAGE, KVFormat.parse(format), {k: jnp.full(L, 0.5) for k in KINDS})
    return state, cache, Digests.create(cache, S, sample)


def run(books, counts, seed=0):
    values = np.random.default_rng(seed).standard_normal((S, M * PAGE, 8), np.float32)
    return write(*books, np.arange(S, dtype=np.int32), np.array(counts, np.int32), values, M)


def sound(books) -> bool:
    """The digest of every page that a slot holds is that of its bytes, the counts are those of its tokens."""
    state, cache, digests = books
    for slot in range(S):
        length = int(state.lengths[slot])
        for column in range(-(-length // PAGE)):
            page, rows = int(state.page_table[slot, column]), min(PAGE, length - column * PAGE)
            if int(digests.values[page]) != by_hand(cache, page, rows) or int(digests.rows[page]) != rows:
                return False
    return True


def test_partial_pages_chunks_and_steps_are_covered():
    books = start()
    for turn, counts in enumerate([(5, 0, 3), (1, 4, 1), (1, 1, 1), (6, 3, 1), (0, 1, 4)]):
        books = run(books, counts, turn)
        assert sound(books)
        assert np.asarray(verify(books[2], books[1], books[0], np.arange(S))).all()


def test_a_page_that_is_handed_out_again_starts_anew():
    books = run(start(), (5, 6, 7))
    state = jax.jit(allocator.release)(books[0], np.array([0, 2], np.int32))
    books = run((state, *books[1:]), (9, 1, 2), 1)
    assert sound(books)


def test_a_copy_takes_its_digest_along():
    books = run(start(), (6, 0, 0))
    state, _ = jax.jit(allocator.fork)(books[0], np.array([0], np.int32), np.array([1], np.int32))
    books = run((state, *books[1:]), (1, 1, 0), 1)
    assert int(books[0].page_table[0, 1]) != int(books[0].page_table[1, 1])
    assert sound(books)


def test_every_page_is_checked_within_the_stated_number_of_steps():
    """Whatever page is damaged and whenever, also while the slot grows."""
    for sample in (1, 2, 3):
        most = digest.steps_to_check(M, sample)
        for page_damaged in range(M):
            for wait in range(2 * M):
                books = run(start(sample), (PAGE * (page_damaged + 1), 1, 0))
                for turn in range(wait):
                    books = run(books, (int(books[0].lengths[0] < PAGE * M), 0, 0), turn)
                page = int(books[0].page_table[0, page_damaged])
                books = (books[0], change(books[1], "value", (1, page, 2, 3), 0), books[2])
                for step in range(1, most + 1):
                    good = np.asarray(verify(books[2], books[1], books[0], np.arange(S)))
                    assert good[1]
                    if not good[0]:
                        break
                    books = run(books, (int(books[0].lengths[0] < PAGE * M), 0, 0), step)
                assert not good[0] and step <= most


def test_an_audit_names_the_page():
    books = run(start(), (13, 9, 16))
    assert np.asarray(audit(books[2], books[1], books[0], jnp.int32(1))).all()
    page = int(books[0].page_table[1, 1])
    damaged = change(books[1], "key", (0, page, 3, 5), 2)
    assert np.asarray(audit(books[2], damaged, books[0], jnp.int32(1))).tolist() == [True, False, True, True]
    for other in (0, 2):
        assert np.asarray(audit(books[2], damaged, books[0], jnp.int32(other))).all()


@pytest.mark.parametrize("length", [0, 4, 5, 7, 8, 10, 12, 13, 16])
def test_any_other_length_is_seen_at_once(length):
    """Longer or shorter, within a page, by whole pages, to nothing."""
    state, cache, digests = run(start(), (9, 6, 0))
    state = dataclasses.replace(state, lengths=state.lengths.at[0].set(length))
    assert np.asarray(verify(digests, cache, state, np.arange(S))).tolist() == [False, True, True]


@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_scale_fails_every_slot(kind):
    state, cache, digests = run(start(), (9, 6, 0))
    scales = {**cache.scales, kind: cache.scales[kind].at[1].set(0.50000006)}
    damaged = dataclasses.replace(cache, scales=scales)
    assert not np.asarray(verify(digests, damaged, state, np.arange(S))).any()


def test_slots_that_do_not_exist_fail():
    state, cache, digests = run(start(), (9, 6, 0))
    assert np.asarray(verify(digests, cache, state, np.array([INVALID, 1, INVALID]))).tolist() == [False, True, False]


def test_pages_from_elsewhere_are_checked_by_the_digest_they_came_with(cache):
    """What a sender took over its pages is compared with what arrived, page by page, partly filled ones included."""
    pages, rows = np.array([2, 5, 9], np.int32), np.array([PAGE, PAGE, 3], np.int32)
    sent = of_pages(cache.entries, pages, rows)
    arrived = change(cache, "value", (1, 5, 0, 0), 7)
    check = jax.jit(digest.intact)
    assert np.asarray(check(cache.entries, pages, rows, sent)).all()
    assert np.asarray(check(arrived.entries, pages, rows, sent)).tolist() == [True, False, True]


def test_the_check_reads_its_pages_and_nothing_else():
    """The compiled check moves bytes in proportion to the sample, whatever the size of the pool."""

    def temporary(pages: int) -> int:
        cache = jax.eval_shape(lambda: KVCache.create(KINDS, L, pages, PAGE, KVFormat.parse("fp8_e4m3")))
        state = jax.eval_shape(lambda: AllocatorState.create(pages, S, M, PAGE))
        digests = jax.eval_shape(lambda c: Digests.create(c, S, 1), cache)
        compiled = jax.jit(digest.verify).lower(digests, cache, state, jax.ShapeDtypeStruct((S,), jnp.int32)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(64) == temporary(4096)
