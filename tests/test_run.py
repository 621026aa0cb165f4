"""The command line as its users meet it: in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(*arguments: str, cwd: Path = ROOT, stdin: str = "") -> subprocess.CompletedProcess:
    """`python -m jaxinfer.run ARGUMENTS`, one device, no compilation cache."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {"PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    command = [sys.executable, "-m", "jaxinfer.run", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, input=stdin, timeout=500)


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["generate"], "'--prompt'"),
        (["generate", "--prompt", "hi", "--model", "nope"], "no model 'nope'"),
        (["generate", "--prompt", "hi", "--kv", "int8"], "unknown KV format 'int8'; use f32, bf16, fp8_e4m3"),
        (["generate", "--prompt", "hi", "--weights", "int4:g48"], "unknown weight format 'int4:g48'"),
        (["generate", "--prompt", "hi", "--max-tokens", "0"], "max_tokens must be at least 1, not 0"),
        (["generate", "--prompt", "hi", "--max-tokens", "-4"], "max_tokens must be at least 1, not -4"),
        (["generate", "--prompt", " "], "the prompt is empty"),
        (["generate", "--prompt", "-"], "no prompt was given on standard input"),
        (["generate", "--prompt", "owl " * 1100], "exceed the context of 1024 tokens"),
        (["generate", "--prompt", "hi", "--devices", "3"], "3 devices do not divide"),
        (["generate", "--prompt", "hi", "--devices", "32"], "32 devices do not divide"),
        (["generate", "--prompt", "hi", "--devices", "0"], "'--devices'"),
        (["ablation", "--tables", "kv-cache,speed"], "unknown table 'speed'; there are: kv-cache, weights, integrity"),
        (["ablation", "--tables", ","], "no table was named"),
        (["ablation", "--out", "/proc/results"], "can't write to /proc/results"),
        (["plan", "--model", "kimi-k3"], "no model 'kimi-k3'"),
        (["plan", "--gpu", "h300"], "h300"),
        (["frobnicate"], "No such command 'frobnicate'"),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(arguments, says, tmp_path):
    done = run(*arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert done.stdout == "" and done.stderr.count("\n") == 1 and done.stderr.startswith("error: ")
    assert says in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [[], ["generate"], ["ablation"], ["plan"]])
def test_help_shows_an_example(command):
    done = run(*command, "--help")
    assert done.returncode == 0 and done.stderr == ""
    assert not command or f"python -m jaxinfer.run {command[0]} --" in done.stdout


def test_generate_reads_prompts_and_says_its_precision():
    texts = ["Tom has 3 owls.", "Where is Mia?"]
    options = ("--weights", "int4:g32", "--kv", "fp8_e4m3", "--max-tokens", "8", "--devices", "2")
    done = run("generate", "--prompt", "-", *options, stdin="\n".join(texts))
    assert done.returncode == 0, done.stderr
    assert "tiny: weights int4:g32, KV fp8_e4m3, 2 devices" in done.stderr
    assert all(text in done.stdout for text in texts) and len(done.stdout.splitlines()) >= 4


def test_an_ablation_writes_json_markdown_and_a_picture(tmp_path):
    done = run("ablation", "--tables", "capacity-kimi", "--out", str(tmp_path / "new"))
    assert done.returncode == 0, done.stderr
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == [f"capacity-kimi.{s}" for s in ("json", "md", "png")]
    table = json.loads((tmp_path / "new" / "capacity-kimi.json").read_text())
    assert set(table) == {"table", "rows", "meta"} and table["rows"]
    assert table["meta"]["command"].startswith("python -m jaxinfer.run ablation --tables capacity-kimi")
