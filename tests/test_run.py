"""The command line: mistakes, help, and the commands as their users meet them, in a process of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxinfer import run as command_line

ROOT = Path(__file__).parent.parent


@pytest.fixture
def here(monkeypatch, tmp_path, capsys):
    """The same in this process, in an empty folder: (exit code, standard output, standard error) of some arguments."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # put back afterwards, whatever the command sets

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["run.py", *arguments])
        try:
            command_line.main()
            code = 0
        except SystemExit as ended:
            code = ended.code
        return code, *capsys.readouterr()

    return call


def run(*arguments: str, cwd: Path = ROOT, stdin: str = "") -> subprocess.CompletedProcess:
    """`python -m jaxinfer.run ARGUMENTS`, one device."""
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
        (["generate", "--prompt", "owl " * 1100], "exceed the context of 1024 tokens"),
        (["generate", "--prompt", "hi", "--devices", "3"], "3 devices do not divide"),
        (["generate", "--prompt", "hi", "--devices", "32"], "32 devices do not divide"),
        (["generate", "--prompt", "hi", "--devices", "0"], "'--devices'"),
        (["ablation", "--tables", "kv-cache,speed"], "unknown table 'speed'; there are: kv-cache, weights, integrity"),
        (["ablation", "--tables", ","], "no table was named"),
        (["ablation", "--out", "/proc/results"], "can't write to /proc/results"),
        (["plan", "--model", "kimi-k3"], "no model 'kimi-k3'"),
        (["plan", "--gpu", "h300"], "h300"),
        (["faults", "--level", "tags,none"], "unknown level 'none'; there are: off, tags, digest, digest-all"),
        (["faults", "--injections", "0"], "'--injections'"),
        (["bench", "--concurrency", "4", "--rate", "2"], "give either --concurrency (a closed loop) or --rate"),
        (["bench", "--concurrency", "0"], "concurrency must be at least 1, not 0"),
        (["bench", "--rate", "0"], "rate must be above 0 requests a second, not 0"),
        (["bench", "--requests", "0"], "requests must be at least 1, not 0"),
        (["bench", "--lengths", "zipf"], "unknown length mix 'zipf'; there are: fixed, random, sharegpt, agent"),
        (["bench", "--input", "0"], "input must be at least 1 token, not 0"),
        (["bench", "--kv-budget-mib", "0.01"], "--kv-budget-mib 0.01 is less than one page of 18,432 bytes in bf16"),
        (["bench", "--num-pages", "2"], "the longest request has 96 tokens, 2 pages hold 32; raise --num-pages"),
        (["bench", "--integrity", "none"], "integrity must be one of off, tags, digest"),
        (["bench", "--kv", "int8"], "unknown KV format 'int8'"),
        (["convert", "--model", "nowhere", "--to", "int4:g32", "--out", "x"], "nowhere has no config.json"),
        (["convert", "--model", "nowhere", "--to", "int3", "--out", "x"], "unknown weight format 'int3'"),
        (["frobnicate"], "No such command 'frobnicate'"),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(here, arguments, says, tmp_path):
    code, out, err = here(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1) and err.startswith("error: ") and says in err, err
    assert list(tmp_path.iterdir()) == []


def test_a_mistake_in_a_process_of_its_own(tmp_path):
    done = run("generate", "--prompt", "-", cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == "" and list(tmp_path.iterdir()) == []
    assert done.stderr == "error: no prompt was given on standard input; give at least one line\n"


@pytest.mark.parametrize("command", [[], ["generate"], ["ablation"], ["bench"], ["plan"], ["convert"], ["faults"]])
def test_help_shows_an_example(here, command):
    code, out, err = here(*command, "--help")
    assert code == 0 and err == "" and (not command or f"python -m jaxinfer.run {command[0]} --" in out)


def test_generate_reads_prompts_and_says_its_precision():
    texts = ["Tom has 3 owls.", "Where is Mia?"]
    options = ("--weights", "int4:g32", "--kv", "fp8_e4m3", "--max-tokens", "8", "--devices", "2")
    done = run("generate", "--prompt", "-", *options, stdin="\n".join(texts))
    assert done.returncode == 0, done.stderr
    assert "tiny: weights int4:g32, KV fp8_e4m3, 2 devices" in done.stderr
    assert all(text in done.stdout for text in texts) and len(done.stdout.splitlines()) >= 4


def test_bench_reports_a_load_and_writes_it(here, tmp_path):
    """More callers than the queue takes: some are refused, the others complete, and the row says all of it."""
    options = ("--concurrency", "6", "--requests", "12", "--slots", "2", "--max-queue", "2", "--input", "9")
    code, out, err = here("bench", *options, "--output", "4", "--kv", "fp8_e4m3", "--out", str(tmp_path / "new"))
    assert code == 0, err
    assert "tiny: weights bf16, KV fp8_e4m3, integrity tags, closed loop of 6" in err and "ttft_ms" in out
    table = json.loads((tmp_path / "new" / "bench.json").read_text())
    [row] = table["rows"]
    assert row["completed"] + row["refused"] == row["requests"] == 12 and row["refused"] > 0
    assert table["meta"]["command"].startswith("python -m jaxinfer.run bench --concurrency 6")


def test_an_ablation_writes_json_markdown_and_a_picture(here, tmp_path):
    code, _, err = here("ablation", "--tables", "capacity-kimi", "--out", str(tmp_path / "new"))
    assert code == 0, err
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == [f"capacity-kimi.{s}" for s in ("json", "md", "png")]
    table = json.loads((tmp_path / "new" / "capacity-kimi.json").read_text())
    assert set(table) == {"table", "rows", "meta"} and table["rows"]
    assert table["meta"]["command"].startswith("python -m jaxinfer.run ablation --tables capacity-kimi")


def test_the_ablation_tables_of_the_model_are_whole(here, tmp_path, monkeypatch):
    """All with next to nothing measured: every field is there, quality is paired, formats differ as they must."""
    from experiments import ablation, weights

    monkeypatch.setattr(ablation, "QUICK", ablation.Effort(examples=2, texts=1, rounds=2, steps=3))
    monkeypatch.setattr(weights, "FORMATS", ("bf16", "fp8_e4m3", "int4:g32+dense"))
    names = ("kv-cache", "weights", "integrity", "prefix-cache")
    code, out, err = here("ablation", "--tables", ",".join(names), "--out", str(tmp_path))
    assert code == 0, err
    found = {n: json.loads((tmp_path / f"{n}.json").read_text()) for n in names}
    kv = {row["kv_format"]: row for row in found["kv-cache"]["rows"]}
    assert kv["bf16"]["bytes_per_token"] == 2 * kv["fp8_e4m3"]["bytes_per_token"] == 1152
    assert kv["fp8_e4m3"]["tokens_in_budget"] == 2 * kv["bf16"]["tokens_in_budget"]
    assert kv["bf16"]["kl"] == 0 and 0 < kv["fp8_e4m3"]["kl"] < 0.1
    assert set(kv["fp8_e4m3"]["quality"]) == {"arithmetic", "choice", "tool_call", "code", "retrieval", "session"}
    assert all(entry["ci_low"] <= entry["diff"] <= entry["ci_high"] for entry in kv["fp8_e4m3"]["quality"].values())
    rows = {row["weight_format"]: row for row in found["weights"]["rows"]}
    ratios = [rows[name]["bytes_ratio"] for name in weights.FORMATS]
    assert 1 == ratios[0] > ratios[1] > ratios[2]
    assert all(0 < row["kl"] < 0.1 for name, row in rows.items() if name != "bf16")
    assert {row["level"] for row in found["integrity"]["rows"]} >= {"off", "tags"}
    assert out.count("measured on the CPU") == 4
    control, half, most = found["prefix-cache"]["rows"]
    assert control["hit_rate"] == 0 and half["hit_rate"] == 464 / 900 and most["hit_rate"] == 816 / 900
    assert most["ttft_ms"]["p50"] < most["ttft_cold_ms"]["p50"] and most["logit_difference"] < 0.2
