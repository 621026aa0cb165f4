"""95% intervals for what the tables report: quality differences, proportions, ratios of timings.

Every comparison is paired: two runs answer the same examples, or take turns in one process, so that what they
share (a hard example, a busy machine) cancels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

CONFIDENCE = 0.95
Z = float(stats.norm.ppf((1 + CONFIDENCE) / 2))


@dataclass(frozen=True)
class Interval:
    """An estimate from `n` examples or rounds with its 95% interval; NaN limits say that none can be given."""

    estimate: float
    low: float
    high: float
    n: int

    def fields(self, name: str) -> dict[str, float | int]:
        """The form that a row of a table holds, the estimate under `name`."""
        return {name: self.estimate, "n": self.n, "ci_low": self.low, "ci_high": self.high}


def paired_difference(reference: ArrayLike, candidate: ArrayLike, *, span: float = 1.0) -> Interval:
    """Mean of `candidate - reference` over the same examples, in the unit of the scores.

    The interval is the adjusted Wald interval of Bonett & Price (2012, J. Educ. Behav. Stat. 37:479), which Fagerland,
    Lydersen & Laake (2014, Stat. Med. 33:2850) recommend for paired 0/1 data: Wald's interval after adding two invented
    examples, one that got better and one that got worse. For scores between 0 and 1 (a share of keys found) they change
    by the root mean square of the real changes and one of the full span, which is 1 for 0/1 data: the fewer changes
    were seen, the less is known about their size.

    Why not the paired bootstrap: with few changed examples, the usual case between two precisions, it covers far less
    than 95% (about 62% for n=20 when 5% get better and 2% worse), and without any it claims a width of zero. Here n
    identical pairs give +-1.96 sqrt(2) span / (n + 2), about +-0.03 for n=100: another hundred might well differ.

    Args:
      reference, candidate: scores [examples], equal lengths, the same examples in the same order.
      span: the most that the score of one example can change, 1 for scores from 0 to 1.

    Raises:
      ValueError: no examples, unequal lengths, a score that is not finite, or a change greater than `span`.
    """
    change = _scores(candidate, "candidate") - _scores(reference, "reference", like=candidate)
    largest = float(np.abs(change).max())
    if largest > span:
        raise ValueError(f"a score changes by {largest:g}, more than span={span:g}; give the span of the score")
    change[np.abs(change) < 1e-9 * span] = 0.0  # rounding of a mean is no change
    n, changed = len(change), np.count_nonzero(change)
    total = np.square(change).sum()
    invented = (total + span**2) / (changed + 1)
    centre = change.sum() / (n + 2)
    variance = (total + 2 * invented) / (n + 2) - centre**2
    half = Z * math.sqrt(variance / (n + 2))
    return Interval(float(change.mean()), float(max(centre - half, -span)), float(min(centre + half, span)), n)


def quality(
    scores: ArrayLike, reference: ArrayLike | None = None, *, span: float = 1.0
) -> dict[str, float | int | None]:
    """One task's entry of a row's `quality` field: {"score", "n", "diff", "ci_low", "ci_high"}.

    `scores` and `reference` are [examples]. The reference row itself, which has nothing to differ from, gives none
    and gets nulls.
    """
    values = _scores(scores, "scores")
    entry: dict[str, float | int | None] = {"score": float(values.mean()), "n": len(values)}
    if reference is None:
        return entry | {"diff": None, "ci_low": None, "ci_high": None}
    return entry | paired_difference(reference, scores, span=span).fields("diff")


def wilson_interval(successes: int, n: int) -> Interval:
    """A proportion with Wilson's score interval (1927, J. Am. Stat. Assoc. 22:209), with a width even at 0 and 1."""
    if not 0 <= successes <= n or n == 0:
        raise ValueError(f"{successes} successes of {n} is no proportion")
    share = successes / n
    centre = (share + Z**2 / (2 * n)) / (1 + Z**2 / n)
    half = Z / (1 + Z**2 / n) * math.sqrt(share * (1 - share) / n + Z**2 / (4 * n**2))
    # The limits at 0 and n are exactly 0 and 1; rounding alone would leave them a hair inside.
    return Interval(share, 0.0 if successes == 0 else centre - half, 1.0 if successes == n else centre + half, n)


def ratio_interval(a: ArrayLike, b: ArrayLike) -> Interval:
    """Median of `a / b` over paired rounds: how many times b's time a took (or b's rate, a had).

    The limits are order statistics of the ratios: the sign test turned round (Conover, Practical Nonparametric
    Statistics, section 3.2). Nothing is assumed of the timings' distribution, which has a long tail, and one
    disturbed round cannot move a limit far. Coverage is at least 95%; fewer than 6 rounds can't give that, and the
    limits are then NaN.

    Args:
      a, b: positive timings or rates [rounds], as `interleave` returns them.
    """
    top, bottom = _scores(a, "a"), _scores(b, "b", like=a)
    if (top <= 0).any() or (bottom <= 0).any():
        raise ValueError("a ratio needs positive timings")
    ratios = np.sort(top / bottom)
    n = len(ratios)
    # The largest k with P(Binomial(n, 1/2) < k) <= 2.5%: the k-th smallest and the k-th largest are the limits.
    k = int(stats.binom.ppf((1 - CONFIDENCE) / 2, n, 0.5))
    low, high = (ratios[k - 1], ratios[n - k]) if k > 0 else (math.nan, math.nan)
    return Interval(float(np.median(ratios)), float(low), float(high), n)


def distribution(values: ArrayLike) -> dict[str, float]:
    """The form of `ttft_ms` and its like: {"mean", "p50", "p90", "p95", "p99"} of values [requests], in their unit."""
    sample = _scores(values, "values")
    percentiles = {f"p{q}": float(np.percentile(sample, q)) for q in (50, 90, 95, 99)}
    return {"mean": float(sample.mean())} | percentiles


def interleave(
    runs: Mapping[str, Callable[[], float]],
    rounds: int,
    warmup: int = 1,
    after_run: Callable[[], None] = lambda: None,
) -> dict[str, NDArray[np.float64]]:
    """Run every callable once a round, in turn, and return what each measured, {name: [rounds]}.

    Each round starts one further along, and every second pass over the starts goes backwards (two runs: AB BA BA AB),
    so that neither drift nor a fixed predecessor favours one of them.

    Args:
      runs: callables that do the work, wait for it to end, and return what they measured, such as seconds.
      rounds: measured rounds.
      warmup: rounds before those, whose results are dropped: compilation and cold caches.
      after_run: called after every run, such as a progress bar's advance; (warmup + rounds) * len(runs) times.
    """
    if rounds < 1 or warmup < 0 or not runs:
        raise ValueError(f"nothing to measure: {len(runs)} runs, rounds={rounds}, warmup={warmup}")
    measured: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(-warmup, rounds):
        for name in turn_order(list(runs), turn):
            value = runs[name]()
            after_run()
            if turn >= 0:
                measured[name].append(value)
    return {name: np.asarray(values, np.float64) for name, values in measured.items()}


def turn_order(names: Sequence[str], turn: int) -> list[str]:
    """The order of round `turn`: rotated by one each round, reversed in every second cycle of rounds."""
    cycle, start = divmod(turn, len(names))
    rotated = [*names[start:], *names[:start]]
    return rotated[::-1] if cycle % 2 else rotated


def _scores(values: ArrayLike, name: str, like: ArrayLike | None = None) -> NDArray[np.float64]:
    """`values` as a float64 vector, or a ValueError that names them."""
    vector = np.asarray(values, np.float64)
    if vector.ndim != 1 or not len(vector):
        raise ValueError(f"{name} must be a non-empty vector, and has shape {vector.shape}")
    if not np.isfinite(vector).all():
        raise ValueError(f"{name} has a value that is not finite")
    if like is not None and len(vector) != len(np.asarray(like)):
        raise ValueError(f"{len(vector)} values cannot be paired with {len(np.asarray(like))}")
    return vector
