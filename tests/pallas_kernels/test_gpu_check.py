"""The GPU check's dry run on the CPU goes through every step, and its table claims no speed."""

import dataclasses
import json

import jax
import pytest

from experiments import gpu_check


@pytest.mark.filterwarnings("ignore:no event records")
def test_dry_run(tmp_path, capsys):
    assert gpu_check.main(["--dry-run", "--seed", "1", "--out", str(tmp_path)]) == 0
    table = json.loads((tmp_path / "gpu-check.json").read_text())
    rows = table["rows"]
    assert [row["step"] for row in rows] == ["verify"] * len(gpu_check.DRY) + ["time"] * len(gpu_check.DRY)
    assert all(row["correct"] and row["error"] <= row["tolerance"] for row in rows)
    assert not any("alternative_failed" in row or "ms" in row or "gb_per_s" in row for row in rows)
    assert table["meta"]["seed"] == 1 and table["meta"]["ceilings"] == {}
    assert "alternative" not in capsys.readouterr().out


def test_without_a_gpu_it_says_so(tmp_path, capsys):
    assert gpu_check.main(["--out", str(tmp_path)]) == 2
    assert "--dry-run" in capsys.readouterr().err


def test_a_wrong_kernel_is_found(monkeypatch):
    case = dataclasses.replace(gpu_check.DRY[2], name="wrong")
    right = type(case).call

    def wrong(self, *operands, implementation):
        return right(self, *operands, implementation=implementation) * (1.1 if implementation == "interpret" else 1.0)

    monkeypatch.setattr(type(case), "call", wrong)
    [row] = gpu_check.verify([case], jax.random.key(0), "interpret", float("inf"))
    assert not row["correct"] and row["error"] > row["tolerance"]
