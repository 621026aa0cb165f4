"""Sampling: masks against a slow numpy form, draws against their distribution, and a seed that alone decides."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxinfer.sampling import SamplingState, keep_mask, log_probabilities, sample

VOCAB = 40
sample_jit = jax.jit(sample)
mask_jit = jax.jit(keep_mask)
logprobs_jit = jax.jit(log_probabilities, static_argnums=3)


def rows(count: int, **fields) -> SamplingState:
    """Settings for `count` rows: temperature 1, no limits, seeds 0, 1, ..., none emitted; `fields` replace them."""
    defaults = {"temperature": 1.0, "top_p": 1.0, "seeds": np.arange(count)}
    state = SamplingState.create(count)
    as_rows = lambda name, value: jnp.broadcast_to(jnp.asarray(value), count).astype(getattr(state, name).dtype)  # noqa: E731
    return dataclasses.replace(state, **{name: as_rows(name, value) for name, value in (defaults | fields).items()})


def logits(count: int, seed: int = 0, vocab: int = VOCAB) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((count, vocab)) * 2).astype(np.float32)


def softmax(x: np.ndarray) -> np.ndarray:
    x = np.exp(x.astype(np.float64) - x.max())
    return x / x.sum()


def slow_mask(row: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Tokens in order of likelihood: the first k, of those the fewest that reach p, of those the ones above min_p."""
    order = sorted(range(len(row)), key=lambda token: (-row[token], token))
    order = order[:top_k] if top_k > 0 else order
    share = softmax(row[order])
    kept, total = [], 0.0
    for token, p in zip(order, share, strict=True):
        if kept and total >= top_p:
            break
        total += p
        if p >= min_p * share[0]:
            kept.append(token)
    return np.isin(np.arange(len(row)), kept)


# ---- masks


@pytest.mark.parametrize("only", ["top_k", "top_p", "min_p", "all"])
def test_keep_mask(only):
    rng, count = np.random.default_rng(1), 300
    use = lambda name: only in (name, "all")  # noqa: E731
    top_k = rng.integers(-1, VOCAB + 5, count) if use("top_k") else np.zeros(count, int)
    top_p = (rng.uniform(0, 1, count) if use("top_p") else np.ones(count)).astype(np.float32)
    min_p = (rng.uniform(0, 1, count) ** 3 if use("min_p") else np.zeros(count)).astype(np.float32)
    x = logits(count)
    found = np.asarray(mask_jit(x, top_k, top_p, min_p))
    expected = np.array([slow_mask(*row) for row in zip(x, top_k, top_p, min_p, strict=True)])
    assert 1 < expected.sum(axis=1).mean() < VOCAB
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p", "kept"),
    [
        (0, 1.0, 0.0, [0, 1, 2, 3]), (-1, 1.0, 0.0, [0, 1, 2, 3]), (2, 1.0, 0.0, [1, 3]), (99, 1.0, 0.0, [0, 1, 2, 3]),
        (0, 0.0, 0.0, [1]), (0, 0.49, 0.0, [1]), (0, 0.51, 0.0, [1, 3]), (0, 0.79, 0.0, [1, 3]),
        (0, 0.81, 0.0, [0, 1, 3]),
        (0, 1.0, 1.0, [1]), (0, 1.0, 0.5, [1, 3]), (0, 1.0, 0.3, [0, 1, 3]), (1, 0.0, 1.0, [1]),
        # Of the two likeliest, 5/8 and 3/8, one reaches 0.6 of their sum.
        (2, 0.6, 0.0, [1]), (2, 0.7, 0.0, [1, 3]),
    ],
)  # fmt: skip
def test_keep_mask_by_hand(top_k, top_p, min_p, kept):
    x = jnp.log(jnp.array([[0.16, 0.5, 0.04, 0.3]]))
    mask = keep_mask(x, jnp.array([top_k]), jnp.array([top_p]), jnp.array([min_p]))
    assert np.flatnonzero(mask[0]).tolist() == kept


def test_ties_at_the_limit_are_broken_by_token():
    x = jnp.zeros((1, 6))
    assert np.flatnonzero(keep_mask(x, jnp.array([3]), jnp.array([1.0]), jnp.array([0.0]))[0]).tolist() == [0, 1, 2]
    assert np.flatnonzero(keep_mask(x, jnp.array([0]), jnp.array([0.4]), jnp.array([0.0]))[0]).tolist() == [0, 1, 2]


def test_top_p_of_one_keeps_even_what_rounding_loses():
    """The sum in float32 is 1 from the first token on."""
    x = jnp.concatenate([jnp.zeros(1), jnp.full(50, -30.0)])[None]
    assert np.asarray(mask_jit(x, jnp.array([0]), jnp.array([1.0]), jnp.array([0.0]))).all()


# ---- greedy


def test_temperature_zero_is_greedy_whatever_else_is_asked():
    x = logits(8)
    for settings in ({}, {"top_k": 5, "top_p": 0.3, "min_p": 0.1}):
        found = sample_jit(x, rows(8, temperature=0.0, **settings))
        assert found.dtype == jnp.int32
        np.testing.assert_array_equal(found, x.argmax(axis=1))


def test_greedy_takes_the_first_of_equals():
    x = np.zeros((1, VOCAB), np.float32)
    x[0, [7, 30]] = 3.0
    assert sample_jit(x, rows(1, temperature=0.0)).tolist() == [7]


def test_greedy_rows_stay_greedy_beside_drawing_ones():
    x = logits(512)
    temperature = np.where(np.arange(512) % 2, 1.5, 0.0)
    found = np.asarray(sample_jit(x, rows(512, temperature=temperature)))
    np.testing.assert_array_equal(found[::2], x.argmax(axis=1)[::2])
    assert (found[1::2] != x.argmax(axis=1)[1::2]).mean() > 0.3


@pytest.mark.parametrize("settings", [{"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}, {"temperature": 1e-5}])
def test_limits_that_leave_one_token_are_greedy(settings):
    x = logits(64)
    np.testing.assert_array_equal(sample_jit(x, rows(64, **settings)), x.argmax(axis=1))


# ---- draws


@pytest.mark.parametrize(
    ("settings", "limits"),
    [
        ({}, (0, 1.0, 0.0)),
        ({"temperature": 0.5}, (0, 1.0, 0.0)),
        ({"temperature": 2.0}, (0, 1.0, 0.0)),
        ({"top_k": 4}, (4, 1.0, 0.0)),
        ({"top_p": 0.8, "temperature": 1.3}, (0, 0.8, 0.0)),
        ({"min_p": 0.02, "top_k": 7}, (7, 1.0, 0.02)),
    ],
)
@pytest.mark.parametrize("varies", ["seeds", "emitted"])
def test_draws_follow_the_distribution(settings, limits, varies):
    """Chi-square over 8192 draws, by seed or along the tokens of one request. Limits apply after the temperature."""
    count, vocab = 8192, 12
    row = logits(1, seed=3, vocab=vocab)[0] / 2
    choices = {"seeds": np.arange(count)} if varies == "seeds" else {"seeds": 7, "emitted": np.arange(count)}
    found = np.asarray(sample_jit(np.tile(row, (count, 1)), rows(count, **choices, **settings)))
    scaled = row / np.float32(settings.get("temperature", 1.0))
    kept = slow_mask(scaled, *limits)
    expected = softmax(np.where(kept, scaled, -np.inf)) * count
    observed = np.bincount(found, minlength=vocab)
    assert not observed[~kept].any() and kept.sum() > 2
    # Tokens that are expected less than 5 times count as one.
    rare = kept & (expected < 5)
    cells = [(observed[kept & ~rare], expected[kept & ~rare])]
    if rare.any():
        cells.append(([observed[rare].sum()], [expected[rare].sum()]))
    observed, expected = (np.concatenate(parts) for parts in zip(*cells, strict=True))
    assert stats.chisquare(observed, expected).pvalue > 1e-3


def test_seeds_and_steps_give_independent_draws():
    """Seed s at step t and seed t at step s, neighbours in either: none follows from another."""
    count = 4096
    x = np.zeros((count, 16), np.float32)
    seed, step = np.arange(count) // 64, np.arange(count) % 64
    found = np.asarray(sample_jit(x, rows(count, seeds=seed, emitted=step))).reshape(64, 64)
    for one, other in [(found, found.T), (found[1:], found[:-1]), (found[:, 1:], found[:, :-1])]:
        same = (one == other)[~np.eye(*one.shape, dtype=bool)]
        assert abs(same.mean() - 1 / 16) < 4 * np.sqrt(1 / 16 / same.size) * 1.5


def test_a_draw_depends_on_seed_and_step_alone():
    """Not on its place in the batch, on what else is in it, nor on how large the batch is."""
    settings = {"temperature": 0.9, "top_k": 20, "top_p": 0.95, "min_p": 0.01}
    own, seeds, steps = logits(4, seed=5), np.array([0, 123, 2**31, 2**32 - 1]), np.array([0, 1, 500, 9])
    alone = [
        int(sample_jit(own[i : i + 1], rows(1, seeds=seeds[i : i + 1], emitted=steps[i : i + 1], **settings))[0])
        for i in range(4)
    ]
    rng = np.random.default_rng(6)
    for _ in range(5):
        places = rng.permutation(16)[:4]
        x = logits(16, seed=int(rng.integers(1000)))
        fields = {name: np.full(16, value) for name, value in settings.items()}
        fields |= {"seeds": rng.integers(0, 2**32, 16), "emitted": rng.integers(0, 99, 16)}
        fields["temperature"] = rng.choice([0.0, 0.5, 2.0], 16)
        x[places] = own
        for name, value in {**settings, "seeds": seeds, "emitted": steps}.items():
            fields[name][places] = value
        assert np.asarray(sample_jit(x, rows(16, **fields)))[places].tolist() == alone


def test_other_seeds_and_later_tokens_are_other_draws():
    x = np.zeros((256, VOCAB), np.float32)
    by_seed = np.asarray(sample_jit(x, rows(256)))
    by_step = np.asarray(sample_jit(x, rows(256, seeds=0, emitted=np.arange(256))))
    assert len(set(by_seed.tolist())) > VOCAB / 2 and len(set(by_step.tolist())) > VOCAB / 2
    np.testing.assert_array_equal(by_seed, sample_jit(x, rows(256)))


# ---- log-probabilities


def test_log_probabilities():
    """Of the model as it is: neither temperature nor limits enter."""
    x, tokens = logits(6), np.array([0, 5, 39, 7, 7, 20])
    found = logprobs_jit(x, tokens, jnp.array([0, 0, 3, 0, 0, 1]), 4)
    expected = np.log([softmax(row) for row in x])
    np.testing.assert_allclose(found.chosen, expected[np.arange(6), tokens], rtol=1e-5)
    order = np.argsort(-expected, axis=1)[:, :4]
    np.testing.assert_array_equal(found.top_tokens, order)
    np.testing.assert_allclose(found.top, np.take_along_axis(expected, order, axis=1), rtol=1e-5)
    assert found.top_tokens.dtype == jnp.int32


def test_log_probabilities_nobody_wants_are_zeros():
    found = logprobs_jit(logits(6), np.zeros(6, int), jnp.zeros(6, jnp.int32), 4)
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(found))
    assert [leaf.shape for leaf in (found.chosen, found.top_tokens, found.top)] == [(6,), (6, 4), (6, 4)]


def test_no_two_leaves_of_a_fresh_state_share_memory():
    """A state is donated, and a buffer can be given away once."""
    leaves = jax.tree.leaves(SamplingState.create(4))
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)
    assert all(leaf.shape == (4,) for leaf in leaves)
