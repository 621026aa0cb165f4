"""Runs small untrusted programs with their tests: a child process each, few builtins, hard limits.

This bounds mistakes of a small model, such as endless loops; it is no fence against a determined attacker.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Sequence

_HARNESS = r"""
import json, os, resource, select, signal, sys
ALLOWED = {name: getattr(__import__("builtins"), name) for name in (
    "abs all any bool chr dict divmod enumerate filter float int len list map max min ord pow range reversed "
    "round set sorted str sum tuple zip True False None Exception ValueError TypeError IndexError KeyError "
    "ZeroDivisionError StopIteration AssertionError").split()}

def child(program, limit_s):
    resource.setrlimit(resource.RLIMIT_CPU, (int(limit_s) + 1, int(limit_s) + 1))
    resource.setrlimit(resource.RLIMIT_AS, (512 << 20, 512 << 20))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    space = {"__builtins__": ALLOWED, "__name__": "program"}
    exec(compile(program, "program", "exec"), space)

def run(program, limit_s):
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        code = 1
        try:
            child(program, limit_s)
            code = 0
        except BaseException:
            pass
        finally:
            os._exit(code)
    os.close(write)
    # The pipe closes when the child ends: select waits for that, or for the limit.
    ended = select.select([read], [], [], limit_s)[0]
    if not ended:
        os.kill(pid, signal.SIGKILL)
    os.close(read)
    status = os.waitpid(pid, 0)[1]
    return bool(ended) and status == 0

job = json.load(sys.stdin)
print(json.dumps([run(program, job["limit_s"]) for program in job["programs"]]))
"""


def _is_plain(program: str) -> bool:
    """Whether `program` parses and has no import and no way to a private name."""
    if "__" in program:
        return False
    try:
        nodes = list(ast.walk(ast.parse(program)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return not any(
        isinstance(node, ast.Import | ast.ImportFrom)
        or (isinstance(node, ast.Attribute) and (node.attr.startswith("_") or node.attr.startswith("format")))
        for node in nodes
    )


def run_programs(programs: Sequence[str], limit_s: float = 1.0) -> list[bool]:
    """Whether each program runs to its end without an exception within `limit_s` seconds of wall time."""
    plain = [_is_plain(program) for program in programs]
    job = {"programs": [p for p, ok in zip(programs, plain, strict=True) if ok], "limit_s": limit_s}
    if not job["programs"]:
        return plain
    command = [sys.executable, "-I", "-S", "-c", _HARNESS]
    done = subprocess.run(
        command,
        input=json.dumps(job),
        capture_output=True,
        text=True,
        env={},
        timeout=30 + 2 * limit_s * len(programs),
        check=True,
    )
    passed = iter(json.loads(done.stdout))
    return [ok and next(passed) for ok in plain]
