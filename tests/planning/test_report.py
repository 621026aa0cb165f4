"""`plan` as a whole: its tables, its errors, and the compiled steps beside the arithmetic."""

import json

import pytest

from jaxinfer.config import PRESETS, Precision, config_to_dict
from jaxinfer.errors import UserError
from jaxinfer.evaluation.table import Table, to_markdown
from jaxinfer.planning import deviceless
from jaxinfer.planning.capacity import Capacity
from jaxinfer.planning.compiled import compile_step
from jaxinfer.planning.gpus import GPU
from jaxinfer.planning.model import PlannedModel
from jaxinfer.planning.report import batches, engine_config, plan

ARGUMENTS = {
    "model": "kimi-k2.6",
    "devices": 8,
    "gpu": "h200",
    "prefill_weights": "fp8_e4m3",
    "prefill_kv": "bf16",
    "decode_weights": "int4:g32",
    "decode_kv": "fp8_e4m3",
    "context": 21_440,
    "compile": False,
}
needs_compiler = pytest.mark.skipif(deviceless.unavailable() is not None, reason=deviceless.unavailable() or "")


def tables(**changes) -> dict[str, Table]:
    return {table.name: table for table in plan(**ARGUMENTS | changes)}


@pytest.mark.parametrize("model", ["kimi-k2.6", "glm-5.2"])
def test_tables_hold_together(model):
    found = tables(model=model)
    assert list(found) == ["plan-weights", "plan-capacity", "plan-decode", "plan-prefill"]
    for table in found.values():
        assert all({"paper", "source"} <= row.keys() and row["source"] == "modelled" for row in table.rows)
        assert Table.from_json(table.to_json()).rows == table.rows and to_markdown(table)
    for capacity in found["plan-capacity"].rows:
        parts = [row for row in found["plan-weights"].rows if row["phase"] == capacity["phase"]]
        whole = next(row for row in parts if row["name"] == "total")
        for field in ("parameters", "bytes", "gpu_bytes"):
            assert sum(row[field] for row in parts) == 2 * whole[field]
        assert whole["gpu_bytes"] == capacity["gpu_bytes"]
        assert capacity["tokens_in_budget"] == capacity["kv_budget_bytes"] // capacity["gpu_bytes_per_token"]
    rows = found["plan-decode"].rows
    assert rows[-1]["concurrency"] == found["plan-capacity"].rows[1]["concurrency"]
    floors, speeds = [r["floor_ms"] for r in rows], [r["decode_tokens_per_s"] for r in rows]
    assert floors == sorted(floors) and speeds == sorted(speeds)


def test_a_model_that_does_not_fit_is_a_plan_all_the_same():
    found = tables(devices=1)
    assert [row["tokens_in_budget"] for row in found["plan-capacity"].rows] == [0, 0]
    assert "fits" in found["plan-decode"].notes[-1]


def test_batches():
    assert [batches(n) for n in (0, 1, 2, 3, 64, 78)] == [
        [1],
        [1],
        [1, 2],
        [1, 2, 3],
        [1, 2, 4, 8, 16, 32, 64],
        [1, 2, 4, 8, 16, 32, 64, 78],
    ]


def test_a_config_file_or_its_folder(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config_to_dict(PRESETS["tiny"])))
    assert PlannedModel.find(str(path)) == PlannedModel.find(str(tmp_path)) == PlannedModel.find("tiny")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model": "kimi"},
            "no model 'kimi': neither a config.json nor a preset (deepseek-v3, glm-5.2, kimi-k2.6, tiny)",
        ),
        ({"gpu": "h20"}, "unknown GPU 'h20'"),
        ({"devices": 0}, "devices must be at least 1, not 0"),
        ({"devices": 7}, "7 devices do not divide the 64 attention heads"),
        ({"context": 0}, "context must be from 1 to 262144"),
        ({"context": 262_145}, "not 262145"),
        ({"decode_weights": "int8"}, "unknown weight format 'int8'"),
        ({"prefill_kv": "int4"}, "unknown KV format 'int4'"),
    ],
)
def test_bad_arguments_are_one_line(changes, message):
    with pytest.raises(UserError) as error:
        plan(**ARGUMENTS | changes)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model_type": "bert"}', '{"attention": {}}', "\x00"])
def test_bad_config_files_are_named(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(UserError, match="config.json") as error:
        plan(**ARGUMENTS | {"model": str(path)})
    assert "\n" not in str(error.value)


def test_compile_without_a_compiler_says_what_to_install(monkeypatch):
    monkeypatch.setattr(deviceless, "PLUGINS", ("no_such_plugin",))
    with pytest.raises(UserError, match=r"jaxinfer\[aot\]"):
        plan(**ARGUMENTS | {"compile": True})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpu": "h100"}, "knows the h200 only"),
        ({"model": "glm-5.2"}, "sparse attention"),
        ({"devices": 1}, "leaves room for 0 tokens a GPU"),
    ],
)
def test_what_cannot_be_compiled_is_one_line(monkeypatch, changes, message):
    monkeypatch.setattr(deviceless, "unavailable", lambda: None)
    with pytest.raises(UserError, match=message):
        plan(**ARGUMENTS | {"compile": True} | changes)


@needs_compiler
@pytest.mark.parametrize("prefill", [False, True])
def test_compiled_arguments_are_the_arithmetic(prefill):
    """What XLA counts is weights and pool, and page tables and the like; the pool is changed in place."""
    model, precision = PlannedModel.find("tiny"), Precision.parse("int4:g32", "fp8_e4m3")
    whole = Capacity.of(model, precision, GPU.find("h200"), 8)
    capacity = Capacity(whole.weights + 10**9, whole.weights, whole.per_token)
    engine = engine_config(precision, capacity, 8, context=256)
    memory = compile_step(model.config, engine, deviceless.mesh(8, "tp"), prefill).memory()
    pool = engine.num_pages * engine.page_size * capacity.per_token
    assert 0 <= memory["argument"] - capacity.weights - pool < 2e6
    assert pool <= memory["alias"] < pool + 2e6
