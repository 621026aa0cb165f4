"""Intervals cover the truth as often as they say, and interleaved runs take fair turns."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.evaluation import statistics as s

SIMULATIONS = 1000


def coverage(interval_of, truth):
    """The share of seeded simulations whose interval holds `truth`."""
    rng = np.random.default_rng(0)
    intervals = [interval_of(rng) for _ in range(SIMULATIONS)]
    return np.mean([i.low <= truth <= i.high for i in intervals])


def correlated_scores(rng, n, better, worse):
    """0/1 scores [n] of two runs that agree but for `better` and `worse`, the shares that only one of them solves."""
    kind = rng.choice(4, n, p=[better, worse, 0.7 * (1 - better - worse), 0.3 * (1 - better - worse)])
    return np.isin(kind, [1, 2]).astype(float), np.isin(kind, [0, 2]).astype(float)


# Few changed examples make the interval wide rather than wrong, so its coverage is bounded from above only where
# enough of them change.
@pytest.mark.parametrize(
    ("n", "better", "worse", "most"),
    [
        (20, 0.05, 0.02, 1.0),
        (20, 0.3, 0.1, 0.98),
        (50, 0.1, 0.1, 0.98),
        (50, 0.0, 0.1, 1.0),
        (100, 0.2, 0.1, 0.975),
        (200, 0.02, 0.05, 0.985),
        (200, 0.3, 0.2, 0.975),
    ],
)
def test_paired_difference_covers_the_true_difference(n, better, worse, most):
    def simulate(rng):
        return s.paired_difference(*correlated_scores(rng, n, better, worse))

    assert 0.93 <= coverage(simulate, better - worse) <= most


@pytest.mark.parametrize(("n", "most"), [(20, 1.0), (50, 0.995), (200, 0.98)])
def test_paired_difference_covers_for_graded_scores(n, most):
    def simulate(rng):
        reference = rng.uniform(0.3, 0.7, n)
        return s.paired_difference(reference, reference + rng.normal(0.02, 0.05, n))

    assert 0.93 <= coverage(simulate, 0.02) <= most


# Two changes in 20 examples are such a case: over 20,000 simulations they cover 99.97%, against 95.5% at n=50 and 94.3%
# at n=200.
@pytest.mark.parametrize(("n", "most"), [(20, 1.0), (50, 0.98), (200, 0.97)])
def test_paired_difference_covers_for_graded_scores_that_seldom_change(n, most):
    def simulate(rng):
        loss = rng.choice([0.25, 0.5, 0.75, 1.0], n)
        return s.paired_difference(np.ones(n), 1 - np.where(rng.random(n) < 0.1, loss, 0.0))

    assert 0.93 <= coverage(simulate, -0.0625) <= most


def test_a_tiny_change_does_not_pretend_to_certainty():
    """Rounding changes nothing, and one real but tiny change of a hundred narrows the interval a little."""
    same = s.paired_difference(np.full(100, 0.3), np.full(100, 0.1 + 0.2))
    assert same == s.paired_difference(np.zeros(100), np.zeros(100))
    touched = s.paired_difference(np.zeros(100), np.eye(100)[0] * 0.001)
    assert 0.5 * same.high < touched.high < same.high


def test_paired_difference_uses_the_pairing():
    rng = np.random.default_rng(0)
    reference, candidate = correlated_scores(rng, 200, 0.03, 0.03)
    paired = s.paired_difference(reference, candidate)
    shuffled = s.paired_difference(reference, rng.permutation(candidate))
    assert paired.high - paired.low < 0.6 * (shuffled.high - shuffled.low)


@pytest.mark.parametrize("n", [20, 50, 200])
def test_identical_runs_have_an_honest_width(n):
    """The rule of three's scale: n unchanged examples don't exclude that one in n changes."""
    same = s.paired_difference(np.ones(n), np.ones(n))
    assert same.estimate == 0 and same.low == -same.high
    assert 1 / n < same.high < 3 / n


def test_paired_difference_has_the_published_form():
    """Bonett & Price's formula by hand: 2 got worse and 1 better of 10, so 3 and 2 of 12."""
    reference, candidate = [1, 1, 0, 1, 1, 1, 1, 0, 0, 1], [0, 0, 1, 1, 1, 1, 1, 0, 0, 1]
    centre, half = -1 / 12, 1.959964 * math.sqrt((5 / 12 - (1 / 12) ** 2) / 12)
    found = s.paired_difference(reference, candidate)
    assert found.estimate == pytest.approx(-0.1)
    assert (found.low, found.high) == pytest.approx((centre - half, centre + half), abs=1e-6)


scores = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=60)


@given(scores)
def test_paired_difference_holds_its_estimate_and_turns_round_with_the_runs(pairs):
    reference, candidate = np.array(pairs).T
    forth, back = s.paired_difference(reference, candidate), s.paired_difference(candidate, reference)
    assert -1 <= forth.low <= forth.estimate <= forth.high <= 1
    assert forth.low < forth.high
    assert (back.low, back.high) == pytest.approx((-forth.high, -forth.low), abs=1e-12)


@pytest.mark.parametrize(
    ("reference", "candidate", "message"),
    [
        ([], [], "non-empty"),
        ([1, 0], [1], "can't|cannot be paired"),
        ([0.0], [math.nan], "not finite"),
        ([0.0], [2.0], "span"),
        ([[0.0]], [[1.0]], "shape"),
    ],
)
def test_paired_difference_refuses(reference, candidate, message):
    with pytest.raises(ValueError, match=message):
        s.paired_difference(reference, candidate)


def test_span_scales_the_interval():
    small = s.paired_difference([0, 0, 1], [0, 1, 1])
    large = s.paired_difference([0, 0, 100], [0, 100, 100], span=100)
    assert (large.low, large.high) == pytest.approx((100 * small.low, 100 * small.high))


def test_quality_has_the_fields_of_a_row():
    reference = s.quality([1, 1, 0, 1])
    assert reference == {"score": 0.75, "n": 4, "diff": None, "ci_low": None, "ci_high": None}
    other = s.quality([1, 0, 0, 1], [1, 1, 0, 1])
    assert (other["score"], other["diff"], other["n"]) == (0.5, -0.25, 4)
    assert other["ci_low"] < -0.25 < other["ci_high"]


def test_wilson_interval_matches_published_values():
    """81 of 263, and 0 of 20: the first examples of Newcombe (1998, Stat. Med. 17:857), table I, method 3."""
    assert s.wilson_interval(81, 263).low == pytest.approx(0.2553, abs=5e-5)
    assert s.wilson_interval(81, 263).high == pytest.approx(0.3662, abs=5e-5)
    assert s.wilson_interval(0, 20).low == 0
    assert s.wilson_interval(0, 20).high == pytest.approx(0.1611, abs=5e-5)
    assert s.wilson_interval(20, 20).high == 1


@pytest.mark.parametrize(("successes", "n"), [(0, 0), (3, 2), (-1, 2)])
def test_wilson_interval_refuses(successes, n):
    with pytest.raises(ValueError, match="proportion"):
        s.wilson_interval(successes, n)


@pytest.mark.parametrize(("n", "share"), [(20, 0.5), (50, 0.9), (200, 0.3)])
def test_wilson_interval_covers(n, share):
    found = coverage(lambda rng: s.wilson_interval(int(rng.binomial(n, share)), n), share)
    assert 0.93 <= found <= 0.98


def drifting_pair(rng, n, ratio):
    """Timings [n] of two runs on a machine whose speed drifts and that is now and then disturbed; their true ratio."""
    machine = np.exp(np.cumsum(rng.normal(0, 0.2, n)))
    noise = np.exp(rng.normal(0, 0.02, (2, n))) * np.where(rng.random((2, n)) < 0.05, 3.0, 1.0)
    return ratio * machine * noise[0], machine * noise[1]


@pytest.mark.parametrize("n", [6, 10, 30, 101])
def test_ratio_interval_covers_the_true_ratio(n):
    assert 0.94 <= coverage(lambda rng: s.ratio_interval(*drifting_pair(rng, n, 1.55)), 1.55) <= 0.995


def test_ratio_interval_recovers_a_ratio_in_spite_of_drift():
    found = s.ratio_interval(*drifting_pair(np.random.default_rng(0), 40, 1.55))
    assert found.low < found.estimate < found.high
    assert found.estimate == pytest.approx(1.55, rel=0.02)
    assert found.high - found.low < 0.1


def test_ratio_interval_of_six_rounds_is_their_range_and_of_five_is_none():
    assert s.ratio_interval([6, 5, 4, 3, 2, 1], [1] * 6) == s.Interval(3.5, 1, 6, 6)
    few = s.ratio_interval([5, 4, 3, 2, 1], [1] * 5)
    assert few.estimate == 3 and math.isnan(few.low) and math.isnan(few.high)


@pytest.mark.parametrize(("a", "b"), [([0.0], [1.0]), ([1.0], [-1.0]), ([1.0, 2.0], [1.0])])
def test_ratio_interval_refuses(a, b):
    with pytest.raises(ValueError, match="positive|paired"):
        s.ratio_interval(a, b)


def test_interval_fields_are_named():
    assert s.Interval(1.5, 1.4, 1.6, 9).fields("ratio") == {"ratio": 1.5, "n": 9, "ci_low": 1.4, "ci_high": 1.6}


def test_distribution():
    assert s.distribution(np.arange(101.0)) == {"mean": 50, "p50": 50, "p90": 90, "p95": 95, "p99": 99}


def test_interleave_pairs_what_ran_in_the_same_round():
    clock = iter(range(1000))
    measured = s.interleave({name: lambda: next(clock) for name in "abc"}, rounds=6, warmup=2)
    # A run's n-th value falls in round n, whatever its place in the round; the two warm-up rounds used 0 to 5.
    for values in measured.values():
        assert (values // 3).tolist() == [2, 3, 4, 5, 6, 7]
    assert sorted(np.concatenate(list(measured.values()))) == list(range(6, 24))


@given(st.integers(1, 5))
def test_interleave_gives_everyone_every_place_equally_often(runs):
    order: list[int] = []
    calls = {name: lambda name=name: order.append(name) or 1.0 for name in range(runs)}
    s.interleave(calls, rounds=2 * runs, warmup=0)
    rounds = np.reshape(order, (2 * runs, runs))
    for place in rounds.T:
        assert sorted(place) == sorted(list(range(runs)) * 2)
    # Each pair of runs is met in both orders equally often, so that no run always follows the same one.
    for first in range(runs):
        for second in range(first):
            assert np.sum([list(r).index(first) < list(r).index(second) for r in rounds]) == runs


def test_interleave_cancels_drift_that_one_after_the_other_would_not():
    clock = iter(np.linspace(1.0, 2.0, 80))
    runs = {"slow": lambda: 1.2 * next(clock), "fast": lambda: next(clock)}
    measured = s.interleave(runs, rounds=40, warmup=0)
    assert s.ratio_interval(measured["slow"], measured["fast"]).estimate == pytest.approx(1.2, rel=0.005)


def test_interleave_tells_of_every_run():
    ticks: list[None] = []
    s.interleave({"a": lambda: 1.0, "b": lambda: 1.0}, 3, 1, lambda: ticks.append(None))
    assert len(ticks) == 8


@pytest.mark.parametrize(("runs", "rounds", "warmup"), [({}, 1, 0), ({"a": float}, 0, 0), ({"a": float}, 1, -1)])
def test_interleave_refuses(runs, rounds, warmup):
    with pytest.raises(ValueError, match="nothing to measure"):
        s.interleave(runs, rounds, warmup)
