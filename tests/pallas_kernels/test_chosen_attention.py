"""Attention over chosen positions against a loop in numpy, by the reference and by the interpreted kernel."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import chosen_mla_attention, mla_attention

PAGE, PAGES, LATENT, WIDTH, HEADS, CHOSEN = 16, 9, 16, 32, 2, 5
LENGTHS = (0, 1, PAGE - 1, PAGE, PAGE + 1)
SCALES = {"kv_scale": jnp.float32(0.7), "softmax_scale": 0.3}


@pytest.fixture(scope="module")
def operands():
    """Two queries a row at its end, over bf16 pages with NaN wherever no entry belongs; tables name no page beyond a
    row's length, or one that does not exist."""
    rng = np.random.default_rng(0)
    lengths = np.array(LENGTHS, np.int32)
    table = np.full((len(lengths), 3), -1, np.int32)
    table[1:, 0], table[4, 1], table[3, 1], table[2, 2] = (5, 2, 7, 1), 0, PAGES + 3, -7
    values = np.full((2, PAGES, PAGE, WIDTH), np.nan, np.float32)
    for row, n in enumerate(lengths):
        for place in range(n):
            values[1, table[row, place // PAGE], place % PAGE] = rng.standard_normal(WIDTH)
    pool = jnp.asarray(values, jnp.bfloat16).view(jnp.uint16)
    positions = lengths[:, None] - 2 + np.arange(2, dtype=np.int32)
    positions = np.where(positions < 0, -1, positions)
    query = rng.standard_normal((len(lengths), 2, HEADS, WIDTH)).astype(np.float32)
    query[positions < 0] = np.nan
    chosen = rng.integers(-3, 3 * PAGE, (*positions.shape, CHOSEN)).astype(np.int32)
    for place in np.ndindex(positions.shape):  # each position at most once, wanted ones among what does not exist
        inside = rng.permutation(positions[place] + 1)[: rng.integers(1, CHOSEN)]
        chosen[place] = rng.permutation(np.r_[inside, [2**31 - 1, -1, 40, 47, 3 * PAGE + 1]][:CHOSEN])
    return query, pool, jnp.int32(1), table, lengths, positions, chosen


def by_hand(query, pool, layer, table, lengths, positions, chosen):
    values = np.asarray(pool.view(jnp.bfloat16), np.float64)[int(layer)] * 0.7
    out = np.zeros((*query.shape[:3], LATENT))
    for b, t in np.ndindex(positions.shape):
        seen = [int(p) for p in chosen[b, t] if 0 <= p <= positions[b, t] and p < lengths[b]]
        if not seen:
            continue
        entries = np.stack([values[table[b, p // PAGE], p % PAGE] for p in seen])
        scores = 0.3 * query[b, t] @ entries.T
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out[b, t] = weights / weights.sum(-1, keepdims=True) @ entries[:, :LATENT]
    return out


@pytest.mark.parametrize("implementation, tolerance", [("reference", 1e-5), ("interpret", 2e-2)])
def test_only_what_is_chosen_and_exists_is_read(operands, implementation, tolerance):
    call = partial(chosen_mla_attention, latent=LATENT, softmax_scale=0.3, implementation=implementation)
    found = jax.jit(call)(*operands, kv_scale=SCALES["kv_scale"])
    expected = by_hand(*operands)
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(found, expected, atol=tolerance)


def test_more_queries_than_a_block_and_all_chosen_is_dense():
    """70 queries of one row, more than are gathered at a time, each choosing all that it sees, in any order."""
    rng, n = np.random.default_rng(1), 70
    pool = jnp.asarray(rng.standard_normal((1, 5, PAGE, WIDTH)), jnp.float32)
    table, positions = np.array([[3, 1, 0, 4, 2]], np.int32), np.arange(n, dtype=np.int32)[None]
    query = rng.standard_normal((1, n, HEADS, WIDTH)).astype(np.float32)
    chosen = np.broadcast_to(rng.permutation(n).astype(np.int32), (1, n, n))
    places = (query, pool, jnp.int32(0), table, np.array([n], np.int32), positions)
    sparse = chosen_mla_attention(*places, chosen, latent=LATENT, **SCALES, implementation="reference")
    dense = mla_attention(*places, latent=LATENT, **SCALES, implementation="reference")
    np.testing.assert_allclose(sparse, dense, atol=1e-5)
