"""Tables: what goes in comes out, as JSON, Markdown, terminal text and a picture, whole or not at all."""

import dataclasses
import io
import json
import os
import stat
import subprocess
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import rich.console

from jaxinfer.errors import UserError
from jaxinfer.evaluation import table as tables
from jaxinfer.evaluation.table import Table, check_writable, git_state, run_meta, to_markdown, to_rich, write

ROWS = [
    {
        "kv_format": "bf16",
        "bytes_per_token": np.int64(1152),
        "quality": {"code": {"score": 0.95, "n": 40, "diff": None, "ci_low": None, "ci_high": None}},
        "itl_ms": {"mean": 2.0, "p50": 1.5, "p90": 3.0, "p95": 4.0, "p99": 9.0},
        "paper": None,
        "source": "measured",
    },
    {
        "kv_format": "fp8_e4m3",
        "bytes_per_token": 576,
        "quality": {"code": {"score": 0.925, "n": 40, "diff": -0.025, "ci_low": -0.1, "ci_high": 0.05}},
        "itl_ms": {"mean": 2.5, "p50": 1.75, "p90": 3.0, "p95": 4.0, "p99": float("nan")},
        "paper": {"ratio": 2.0},
        "source": "measured",
    },
]


@pytest.fixture
def table() -> Table:
    meta = run_meta(["python", "-m", "x", "--tables", "a b"], seed=3, samples=40, precision={"decode": "bf16"})
    return Table("kv-cache", ROWS, meta, "A title", ["A note | with a bar."])


def test_json_keeps_rows_meta_and_digits(table):
    text = table.to_json()
    document = json.loads(text)
    assert set(document) == {"table", "rows", "meta"} and document["table"] == "kv-cache"
    assert document["rows"][0]["bytes_per_token"] == 1152 and document["rows"][1]["itl_ms"]["p99"] is None
    assert "NaN" not in text and document["meta"]["command"] == "python -m x --tables 'a b'"
    again = Table.from_json(text)
    assert again == table and again.to_json() == text


def test_meta_says_what_it_takes_to_repeat_a_run(table):
    meta = table.meta
    assert {"command", "commit", "dirty", "device", "host", "versions", "date", "seed", "samples"} <= set(meta)
    assert meta["seed"] == 3 and meta["samples"] == 40 and meta["versions"]["jax"] != "unknown"


def test_markdown_has_a_cell_for_every_leaf(table):
    text = to_markdown(table)
    header, align, first, second = [line for line in text.splitlines() if line.startswith("|")]
    assert "| kv_format | bytes_per_token | quality: code |" in header and "paper: ratio" in header
    assert header.count("|") == align.count("|") == first.count("|") == second.count("|")
    assert "0.95, n=40" in first and "0.925, -0.025 [-0.100, 0.050], n=40" in second
    assert "1.75" in second and "2 rows measured on" in text and r"A note | with a bar." in text


def test_the_terminal_shows_what_is_shared_once(table):
    console = rich.console.Console(file=io.StringIO(), width=160)
    console.print(to_rich(table))
    shown = console.file.getvalue()
    assert "fp8_e4m3" in shown and "A title" in shown and shown.count("measured on") == 1


def test_the_terminal_shows_only_the_columns_there_is_room_for(table):
    narrow = dataclasses.replace(table, shown=("kv_format", "quality: code"))
    assert [column.header for column in to_rich(narrow).columns] == ["kv_format", "quality: code"]
    assert to_markdown(narrow) == to_markdown(table) and narrow.to_json() == table.to_json()


def test_write_leaves_three_whole_files(table, tmp_path):
    paths = write(table, tmp_path / "new" / "folder")
    found = sorted(p.name for p in (tmp_path / "new" / "folder").iterdir())
    assert found == [f"kv-cache.{kind}" for kind in ("json", "md", "png")]
    assert Table.from_json(paths["json"].read_text()) == table
    assert paths["png"].read_bytes().startswith(b"\x89PNG") and paths["png"].stat().st_size > 5000


def test_a_drawing_that_fails_loses_no_numbers_and_leaves_no_old_picture(table, tmp_path):
    write(table, tmp_path)

    def fails(figure, table):
        raise RuntimeError("no picture")

    broken = Table(table.name, ROWS[:1], table.meta, draw=fails)
    with pytest.raises(RuntimeError):
        write(broken, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["kv-cache.json", "kv-cache.md"]
    assert len(json.loads((tmp_path / "kv-cache.json").read_text())["rows"]) == 1


@pytest.mark.parametrize("place", ["file/below", "/proc/nothing"])
def test_a_folder_that_cannot_be_written_is_named(place, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="can't write to .*; give another --out folder") as caught:
        check_writable(tmp_path / place)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_named(tmp_path):
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    with pytest.raises(UserError):
        check_writable(tmp_path)


@pytest.mark.parametrize("name", ["", "a/b", "../a", "a b", ".hidden"])
def test_a_name_that_is_no_file_name_is_refused(name):
    with pytest.raises(ValueError):
        Table(name, [], {})


def test_a_source_is_one_of_three():
    with pytest.raises(ValueError, match="measured, compiled, modelled"):
        Table("t", [{"source": "guessed"}], {})


def test_arrays_become_numbers_and_anything_else_is_refused():
    rows = Table("t", [{"a": jnp.arange(2), "b": np.float32(0.5), "c": (1, float("inf")), "d": Path("x")}], {}).rows
    assert rows == [{"a": [0, 1], "b": 0.5, "c": [1, None], "d": "x"}]
    with pytest.raises(TypeError, match="can't hold a set"):
        Table("t", [{"a": {1}}], {})


def test_git_state_tells_a_changed_tree_from_a_clean_one(tmp_path):
    def git(*words):
        who = ["-c", "user.name=n", "-c", "user.email=e@e"]
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True)

    module = tmp_path / "jaxinfer" / "module.py"
    module.parent.mkdir()
    module.write_text("a = 1\n")
    assert git_state(module) == {"commit": "unknown", "dirty": None}
    git("init")
    git("add", ".")
    git("commit", "-m", "one")
    clean = git_state(module)
    assert len(clean["commit"]) == 40 and clean["dirty"] is False
    module.write_text("a = 2\n")
    assert git_state(module) == {**clean, "dirty": True}


def test_digits_are_four_significant_ones():
    cases = {0.123456: "0.1235", 12345.6: "12,346", 1234567: "1,234,567", None: "–", True: "yes", "x": "x"}
    assert {tables.digits(value) for value in cases} == set(cases.values())
    for value, text in cases.items():
        assert tables.digits(value) == text
