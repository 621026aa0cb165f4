"""The table of separation: what it measures is there, and one engine is held up where two workers are not by plan."""

import dataclasses
from types import SimpleNamespace

import numpy as np

from experiments import disaggregation
from experiments.ablation import Ablation, Effort
from jaxinfer.engine import Engine, Separated
from tests.engine.conftest import assert_idle, small_model  # noqa: F401


def test_rows_of_both_ways(small_model, monkeypatch):  # noqa: F811
    model = dataclasses.replace(small_model, config=small_model.config.replace(max_position=128))
    for name, value in {"CHATS": 2, "CHAT_OUTPUT": 12, "PROMPTS": 2, "PROMPT": 90}.items():
        monkeypatch.setattr(disaggregation, name, value)
    one, two = [], []
    keep = lambda made, engine: made.append(engine) or engine  # noqa: E731
    monkeypatch.setattr(disaggregation, "Engine", lambda *a: keep(one, Engine(*a)))
    monkeypatch.setattr(disaggregation, "Separated", SimpleNamespace(of=lambda *a: keep(two, Separated.of(*a))))
    table = disaggregation.disaggregation(Ablation(model, "test", Effort(examples=2, texts=1, rounds=2, steps=4)))
    measured = [row for row in table.rows if row["source"] == "measured"]
    assert [row["mode"] for row in measured] == ["aggregated", "separated"] and table.meta["devices_apart"]
    for row in measured:
        assert row["slowdown"]["ratio"] > 0 and row["output_tokens_per_s"] > 0
        assert all(row[f"{name}_ms"]["p50"] > 0 for name in ("itl", "itl_alone", "prompt_ttft"))
    modelled = {(r["model"], r["mode"]): r["slowdown"]["ratio"] for r in table.rows if r["source"] == "modelled"}
    assert len(modelled) == 4
    assert all(ratio == 1 if mode == "separated" else ratio > 2 for (_, mode), ratio in modelled.items())
    for engine in (one[0], two[0].prefill, two[0].decode):
        assert_idle(engine)


def test_prompts_arrive_after_the_chats_and_apart():
    arrivals = disaggregation.Beside(0.5)
    times = [arrivals.due(i, 0, 100.0) for i in range(disaggregation.CHATS + 3)]
    assert times[: disaggregation.CHATS] == [0.0] * disaggregation.CHATS
    np.testing.assert_allclose(times[disaggregation.CHATS :], [0.5, 1.0, 1.5])
    assert arrivals.due(disaggregation.CHATS, 0, 0.4) is None and arrivals.wait(disaggregation.CHATS, 0.4) > 0

