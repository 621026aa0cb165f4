"""Load: mixes and arrivals repeat by seed and are what they say; the driver measures what a clock of its own says."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from jaxinfer.engine import Event
from jaxinfer.errors import UserError
from jaxinfer.evaluation.load.arrivals import ClosedLoop, Poisson
from jaxinfer.evaluation.load.bench import Load, bench, bench_table
from jaxinfer.evaluation.load.driver import drive
from jaxinfer.evaluation.load.lengths import DEFAULTS, Job, Mix
from jaxinfer.evaluation.load.measures import Series, latencies
from jaxinfer.evaluation.table import write
from tests.engine.conftest import ENGINE, assert_idle, serve, small_model  # noqa: F401

# ---- lengths


@pytest.mark.parametrize("kind", DEFAULTS)
def test_a_mix_repeats_and_fits(kind):
    mix = Mix.of(kind)
    jobs, again, other = (mix.jobs(50, 1000, 300, seed) for seed in (3, 3, 4))
    assert jobs == again != other
    assert all(len(j.prompt) >= 1 and j.output >= 1 and len(j.prompt) + j.output <= 300 for j in jobs)
    assert {t for j in jobs for t in j.prompt} <= set(range(1000))
    assert all(j.params.ignore_eos and j.params.max_tokens == j.output for j in jobs)


def test_lengths_are_those_asked_for():
    assert {(len(j.prompt), j.output) for j in Mix("fixed", 70, 9).jobs(20, 9, 1000, 0)} == {(70, 9)}
    even = Mix("random", 60, 10).jobs(3000, 9, 1000, 0)
    assert {len(j.prompt) for j in even} == set(range(30, 91)) and {j.output for j in even} == set(range(5, 16))
    chat = Mix.of("sharegpt").jobs(20_000, 9, 10**6, 0)
    inputs, outputs = np.array([len(j.prompt) for j in chat]), np.array([j.output for j in chat])
    np.testing.assert_allclose([inputs.mean(), outputs.mean()], [215, 198], rtol=0.05)
    # The median of a log-normal is its mean over exp(spread^2 / 2): a long tail of questions, a shorter one of answers.
    np.testing.assert_allclose([np.median(inputs), np.median(outputs)], [104.7, 132.1], rtol=0.05)


def test_agents_share_a_prefix_and_their_sessions_grow():
    jobs = Mix("agent", 100, 10).jobs(12, 1000, 10**4, 0)
    assert {tuple(j.prompt[:100]) for j in jobs} == {tuple(jobs[0].prompt[:100])}
    assert [len(j.prompt) for j in jobs] == [100 + 20 * turn for turn in (1, 2, 3, 4) for _ in range(3)]
    for first, last in zip(jobs[:3], jobs[9:], strict=True):
        assert last.prompt[:120] == first.prompt
    assert jobs[0].prompt != jobs[1].prompt


def test_what_does_not_fit_is_cut_and_keeps_a_quarter_for_the_answer():
    assert [(len(j.prompt), j.output) for j in Mix("fixed", 500, 500).jobs(1, 9, 100, 0)] == [(75, 25)]
    assert [(len(j.prompt), j.output) for j in Mix("fixed", 500, 5).jobs(1, 9, 100, 0)] == [(95, 5)]
    assert [(len(j.prompt), j.output) for j in Mix("fixed", 20, 500).jobs(1, 9, 100, 0)] == [(20, 80)]


@pytest.mark.parametrize(
    "make, says",
    [
        (lambda: Mix.of("zipf"), "unknown length mix 'zipf'; there are: fixed, random, sharegpt, agent"),
        (lambda: Mix("fixed", 0, 3), "input must be at least 1"),
        (lambda: Mix("fixed", 3, 0), "output must be at least 1"),
        (lambda: ClosedLoop(0), "concurrency must be at least 1"),
        (lambda: Poisson(0.0, 3), "rate must be above 0"),
        (lambda: Poisson(float("inf"), 3), "rate must be above 0"),
    ],
)
def test_mistakes_are_named(make, says):
    with pytest.raises(UserError, match=says):
        make()


# ---- arrivals


def test_poisson_arrivals_repeat_and_have_the_rate_and_the_spread_of_one():
    process = Poisson(50.0, 20_000, seed=1)
    np.testing.assert_array_equal(process.times, Poisson(50.0, 20_000, seed=1).times)
    gaps = np.diff(process.times)
    assert process.times[0] == 0 and (gaps >= 0).all()
    np.testing.assert_allclose([gaps.mean(), gaps.std()], [0.02, 0.02], rtol=0.03)
    counts = Counter(process.times.astype(int))
    np.testing.assert_allclose(np.var(list(counts.values())), 50, rtol=0.25)  # as its mean


# ---- the driver, on an engine that is all arithmetic


class Clockwork:
    """Serves up to `slots` requests, one token each a step of 10 ms; a request's first step is its prefill."""

    def __init__(self, slots: int, queue: int = 10**6):
        self.slots, self.queue, self.now = slots, queue, 0.0
        self.counters = SimpleNamespace(preemptions=0, prefix_hit_tokens=0, prefix_prompt_tokens=0)
        self.waiting: list[list[int]] = []
        self.running: list[list[int]] = []
        self.submitted: list[float] = []

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0 and not self.busy
        self.now += seconds

    def submit(self, prompt, params) -> int:
        if len(self.waiting) >= self.queue:
            raise UserError("the queue is full")
        self.submitted.append(self.now)
        self.waiting.append([len(self.submitted) - 1, params.max_tokens, 0])
        return len(self.submitted) - 1

    def cancel(self, request: int) -> None:
        self.waiting = [r for r in self.waiting if r[0] != request]
        self.running = [r for r in self.running if r[0] != request]

    def kv_used(self) -> float:
        return len(self.running) / self.slots

    def step(self) -> list[Event]:
        self.now += 0.01
        while self.waiting and len(self.running) < self.slots:
            self.running.append(self.waiting.pop(0))
        events = []
        for request in list(self.running):
            request[2] += 1
            given = request[2] - 1
            if given:
                ended = SimpleNamespace(finish_reason="length") if given == request[1] else None
                events.append(Event(request[0], "", (5,), ended))  # type: ignore[arg-type]
                if ended:
                    self.running.remove(request)
        return events


def run(engine: Clockwork, jobs: list[Job], arrivals, **options):
    return drive(engine, jobs, arrivals, clock=engine.clock, sleep=engine.sleep, **options)


def test_a_closed_loop_measured_by_hand():
    """Two callers, four requests of 5 tokens: a prefill and five steps each, two rounds of 60 ms."""
    engine, ends = Clockwork(slots=8), []
    result = run(engine, [Job([1, 2, 3], 5)] * 4, ClosedLoop(2), after_end=lambda: ends.append(engine.now))
    assert np.round(engine.submitted, 6).tolist() == [0, 0, 0.06, 0.06] and len(ends) == 4
    fields = result.fields()
    assert (fields["requests"], fields["completed"], fields["refused"], result.peak_concurrency) == (4, 4, 0, 2)
    rates = [fields[f"{kind}_per_s"] for kind in ("requests", "input_tokens", "output_tokens", "total_tokens")]
    np.testing.assert_allclose(rates, [4 / 0.12, 12 / 0.12, 20 / 0.12, 32 / 0.12])
    for name, milliseconds in (("ttft_ms", 20), ("tpot_ms", 10), ("itl_ms", 10), ("e2e_ms", 60)):
        assert set(fields[name]) == {"mean", "p50", "p90", "p95", "p99"}
        np.testing.assert_allclose(list(fields[name].values()), milliseconds)
    assert fields["decoding"]["peak"] == 2 and fields["kv_used"]["peak"] == 0.25


def test_more_callers_than_slots_queue_and_their_waiting_counts():
    result = run(Clockwork(slots=1), [Job([1], 1)] * 3, ClosedLoop(3))
    np.testing.assert_allclose([t.ttft for t in result.traces], [0.02, 0.04, 0.06])
    assert result.peak_concurrency == 3 and result.decoding.peak == 1
    assert result.waiting.peak == 3  # while the first is in its prefill
    assert latencies(result.traces)["tpot_ms"] is None and latencies(result.traces)["itl_ms"] is None


def test_in_an_open_loop_a_request_arrives_when_it_was_due_not_when_it_was_taken():
    arrivals = Poisson(1.0, 3)
    object.__setattr__(arrivals, "times", np.array([0.0, 0.005, 5.0]))
    result = run(Clockwork(slots=8), [Job([1], 1)] * 3, arrivals)
    np.testing.assert_allclose([t.arrived for t in result.traces], [0, 0.005, 5.0])
    np.testing.assert_allclose([t.ttft for t in result.traces], [0.02, 0.025, 0.02])
    assert result.seconds == pytest.approx(5.02)


@pytest.mark.parametrize("arrivals", [ClosedLoop(6), Poisson(1e6, 12)])
def test_refused_requests_are_counted_and_none_is_lost(arrivals):
    engine = Clockwork(slots=1, queue=2)
    result = run(engine, [Job([1], 2)] * 12, arrivals)
    fields = result.fields()
    assert fields["refused"] > 0 and fields["completed"] + fields["refused"] == fields["requests"] == 12
    assert fields["completed"] == len(engine.submitted) and not engine.busy


def test_a_caller_turned_away_asks_again_only_after_a_step():
    """Six callers at a queue for two: the first two wait, four are turned away, and after each step as many again."""
    engine = Clockwork(slots=1, queue=2)
    result = run(engine, [Job([1], 2)] * 12, ClosedLoop(6))
    assert result.completed and engine.submitted[:3] == [0, 0, 0.01]


def test_an_interrupted_run_leaves_the_engine_idle():
    engine = Clockwork(slots=4)

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(engine, [Job([1], 1), *[Job([1], 50)] * 7], ClosedLoop(4), after_end=stop)
    assert not engine.busy


def test_a_series_stays_small_and_forgets_neither_mean_nor_peak():
    series, rng = Series(most=20), np.random.default_rng(0)
    times, values = np.cumsum(rng.random(5000)), rng.random(5000)
    for second, value in zip(times, values, strict=True):
        series.add(second, value)
        assert len(series.points) <= 20
    assert len(series.points) >= 10 and series.peak == values.max()
    np.testing.assert_allclose(series.mean, np.average(values[:-1], weights=np.diff(times)))
    gaps = np.diff([second for second, _ in series.points])
    assert gaps.max() < 3 * gaps.min() and set(series.points) <= set(zip(times, values, strict=True))


# ---- and on the real one


@pytest.fixture(scope="module")
def small(small_model):  # noqa: F811
    return serve(small_model, ENGINE.replace(num_pages=20, max_queue=6)).engine


def test_the_engine_under_load_gives_every_token_and_says_what_it_held(small):
    jobs = Mix("random", 20, 12).jobs(24, 1024, 64, 0)
    result = drive(small, jobs, ClosedLoop(4))
    assert [len(t.tokens) for t in result.traces] == [j.output for j in jobs] and result.refused == 0
    assert result.preemptions > 0 and 0.5 < result.kv_used.peak <= 1 and result.decoding.peak <= 4
    assert all(t.arrived <= t.tokens[0] <= t.tokens[-1] <= t.ended for t in result.traces)
    assert_idle(small)
    assert small.kv_used() == 0


def test_the_engine_turns_away_what_its_queue_cannot_hold(small):
    result = drive(small, Mix("fixed", 20, 12).jobs(40, 1024, 64, 0), Poisson(1e6, 40))
    assert result.refused > 0 and len(result.completed) + result.refused == 40
    assert_idle(small)


def test_the_table_of_a_run(small, tmp_path):
    load, ends = Load(Mix("random", 20, 8), 12, concurrency=3), []
    jobs = load.mix.jobs(12, 1024, 64, 0)
    result = bench(small, jobs, load, lambda: ends.append(1))
    table = bench_table(result, load, small.config, {"seed": 0})
    [row] = table.rows
    assert row["arrivals"] == "closed loop of 3" and row["lengths"] == "random, 20 + 8" and len(ends) == 12
    given = sum(job.output for job in jobs)
    assert row["completed"] == 12 and row["output_tokens_per_s"] * row["seconds"] == pytest.approx(given)
    over_time = table.meta["over_time"]["kv_used"]
    assert len(row["kv_over_time"]) == 32 and over_time[-1] == 0
    assert 0 < row["kv_used"]["peak"] == pytest.approx(max(over_time), abs=1e-3)
    assert {path.suffix for path in write(table, tmp_path).values()} == {".json", ".md", ".png"}
