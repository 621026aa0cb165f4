"""Engines for a load and the tables by concurrency: pages for a budget, and rows that say what the budget does."""

import pytest

from experiments import concurrency, phases
from experiments.ablation import Ablation, Effort
from jaxinfer.config import ModelConfig, Precision
from jaxinfer.errors import UserError
from jaxinfer.evaluation.load.bench import buckets, engine_config, pages_in
from jaxinfer.evaluation.load.lengths import Job
from tests.engine.conftest import assert_idle, small_model  # noqa: F401

TINY, BF16, FP8 = ModelConfig.preset("tiny"), Precision.parse("bf16", "bf16"), Precision.parse("bf16", "fp8_e4m3")
JOBS = [Job([1] * 60, 30), Job([1] * 5, 3)]


def test_a_budget_buys_twice_the_pages_in_fp8():
    assert [pages_in(3.375, TINY, precision, 16) for precision in (BF16, FP8)] == [192, 384]
    assert engine_config(TINY, JOBS, FP8, 64, budget_mib=3.375).num_pages == 384


def test_an_engine_for_the_jobs_and_no_more():
    config = engine_config(TINY, JOBS, BF16, 6)
    assert (config.max_context, config.num_pages, config.max_slots, config.decode_buckets) == (96, 36, 6, (1, 4, 6))
    assert all(tokens <= 96 for _, tokens in config.prefill_buckets)
    assert [buckets(n) for n in (1, 4, 64)] == [(1,), (1, 4), (1, 4, 16, 64)]


@pytest.mark.parametrize(
    "options, says",
    [
        ({"budget_mib": 0.017}, "--kv-budget-mib 0.017 is less than one page of 18,432 bytes in bf16; give at least"),
        ({"budget_mib": -1.0}, "--kv-budget-mib -1 is less than one page"),
        ({"budget_mib": 0.1}, "the longest request has 90 tokens, 5 pages hold 80; raise --kv-budget-mib, or lower"),
        ({"num_pages": 5}, "the longest request has 90 tokens, 5 pages hold 80; raise --num-pages, or lower --input"),
        ({"num_pages": 50, "budget_mib": 1.0}, "give either --num-pages or --kv-budget-mib, not both"),
    ],
)
def test_a_pool_that_cannot_be_is_named(options, says):
    with pytest.raises(UserError, match=says) as caught:
        engine_config(TINY, JOBS, BF16, 4, **options)
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def ablation(small_model) -> Ablation:  # noqa: F811
    return Ablation(small_model, "test", Effort(examples=2, texts=1, rounds=3, steps=20))


def test_under_one_budget_bf16_runs_out_and_fp8_carries_twice_as_many(ablation, monkeypatch):
    """64 + 20 tokens are 6 pages: 24 hold four requests in BF16, 48 hold eight in FP8."""
    monkeypatch.setattr(concurrency, "CONCURRENCIES", (1, 8))
    table = concurrency.concurrency(ablation)
    assert table.meta["num_pages"] == {"bf16": 24, "fp8_e4m3": 48}
    rows = {(r["kv_format"], r["concurrency"]): r for r in table.rows if r["source"] == "measured"}
    assert len(rows) == 4
    for row in rows.values():
        assert row["refused"] == 0 and row["output_tokens_per_s"] > 0
        assert all(set(row[f"{name}_ms"]) == {"mean", "p50", "p90", "p95", "p99"} for name in ("ttft", "itl", "e2e"))
    assert rows["bf16", 8]["decoding"]["peak"] <= 5 < 7 <= rows["fp8_e4m3", 8]["decoding"]["peak"]
    assert rows["bf16", 8]["waiting"]["mean"] > rows["fp8_e4m3", 8]["waiting"]["mean"]
    assert rows["bf16", 1]["kv_used"]["peak"] == pytest.approx(6 / 24) == 2 * rows["fp8_e4m3", 1]["kv_used"]["peak"]
    assert rows["bf16", 8]["output_ratio"] is None and rows["fp8_e4m3", 8]["output_ratio"]["ratio"] > 0
    for engine in ablation._engines.values():
        assert_idle(engine)


def test_the_modelled_rows_have_the_published_shape():
    for model in (concurrency.KIMI, concurrency.GLM):
        rows = {kv: {r["concurrency"]: r for r in concurrency.modelled(model, kv)} for kv in concurrency.FORMATS}
        assert rows["bf16"][32]["fits"] and not rows["bf16"][64]["fits"] and rows["fp8_e4m3"][64]["fits"]
        assert rows["bf16"][64]["decode_tokens_per_s"] == rows["bf16"][32]["decode_tokens_per_s"]
        rates = [row["decode_tokens_per_s"] for row in rows["fp8_e4m3"].values()]
        assert rates == sorted(rates) and {r["source"] for r in rows["bf16"].values()} == {"modelled"}
        paper = rows["fp8_e4m3"][64]["paper"]
        assert paper is None if model is concurrency.GLM else rates[-1] > paper["decode_tokens_per_s"] == 2192


def test_weights_by_concurrency_times_the_phases_apart(ablation, monkeypatch):
    monkeypatch.setattr(phases, "CONCURRENCIES", (3,))
    table = phases.weights_concurrency(ablation)
    measured = [row for row in table.rows if row["source"] == "measured"]
    assert [row["weight_format"] for row in measured] == ["fp8_e4m3", "int4:g32"] and len(table.rows) == 6
    for row in measured:
        assert row["concurrency"] == 3 and row["prefill_tokens_per_s"] > 0 and row["decode_tokens_per_s"] > 0
        assert (row["decode_ratio"] is None) == (row["weight_format"] == "fp8_e4m3")
    for engine in ablation._engines.values():
        assert_idle(engine)


def test_the_modelled_rows_say_what_bytes_allow_of_the_published_speeds():
    rows = {(r["weight_format"], r["concurrency"]): r for r in phases.modelled(phases.GLM)}
    one = rows["int4:g32", 1]
    assert one["prefill_ratio"] < 1 and one["decode_ratio"] < one["paper"]["decode_ratio"] == 1.55
    assert rows["int4:g32", 64]["decode_ratio"] > 1 and rows["int4:g32", 64]["paper"] is None
    assert all(row["paper"] is None for row in phases.modelled(phases.KIMI))
