"""Two processes of two devices each serve one model under jax.distributed: what comes out, and what becomes of one when
the other dies."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from jaxinfer.parallel.peer import GRACE
from tests.engine.conftest import assert_idle, serve
from tests.engine.lockstep_member import CONFIG, allocator_arrays, mixed

TOLERANCE = 1e-4  # of float32 logits of size 1 to 30: sums in another order
ROOT = Path(__file__).parents[2]
PATIENCE = 240  # seconds for a start on a busy machine


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    """Compiled programs, which the later pairs need not compile again."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture
def pair(tmp_path, cache):
    """Starts both processes, the leader first; whatever happens, none outlives the test."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    processes: list[subprocess.Popen] = []
    settings = {
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "1",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }

    def start(task: str) -> list[subprocess.Popen]:
        command = [sys.executable, "-m", "tests.engine.lockstep_member"]
        for index in ("0", "1"):
            arguments = [index, address, str(tmp_path), task]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            processes.append(
                subprocess.Popen([*command, *arguments], cwd=ROOT, env=os.environ | settings, **pipes)
            )
        return processes

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_two_processes_serve_what_one_does(pair, small_model, tmp_path):
    """Tokens, logits, reasons, and the allocator's arrays at the end, over a run with a preemption and a cancel."""
    processes = pair("mixed")
    one = serve(small_model, CONFIG)
    ids, done = mixed(one.engine)
    assert_idle(one.engine)
    for process in processes:
        assert process.wait(PATIENCE) == 0, process.stderr.read()
    leader, follower = (dict(np.load(tmp_path / f"{i}.npz")) for i in (0, 1))

    assert leader.pop("where").tolist() == [4, 2, False]
    assert leader.pop("compiled") == 1
    assert leader.pop("preemptions") == one.engine.counters.preemptions > 0
    assert leader.pop("reasons").tolist() == [c.finish_reason for c in done] == ["length"] * 2 + ["cancelled", "length"]
    assert leader.pop("tokens").tolist() == [t for c in done for t in c.tokens]
    assert leader.keys() == follower.keys()
    for name in leader:
        np.testing.assert_array_equal(leader[name], follower[name], name)
    for i in ids:
        np.testing.assert_allclose(leader[f"logits/{i}"], np.array(one.logits[i]), atol=TOLERANCE, rtol=0)
    for name, value in allocator_arrays(one.engine).items():
        np.testing.assert_array_equal(leader[f"allocator/{name}"], value, name)


@pytest.mark.parametrize("dead", [1, 0], ids=["follower", "leader"])
def test_who_is_killed_takes_the_other_along(pair, dead):
    """In the midst of serving. The leader says in one line what happened; a follower may be ended by jax instead."""
    processes = pair("endless")
    assert "serving\n" in processes[0].stdout, processes[0].stderr.read()  # gloo has lines of its own in front
    time.sleep(0.5)
    processes[dead].send_signal(signal.SIGKILL)
    begun = time.monotonic()
    _, errors = processes[1 - dead].communicate(timeout=GRACE + 20)
    assert processes[1 - dead].returncode not in (0, -signal.SIGKILL)
    assert time.monotonic() - begun < GRACE + 10
    if dead == 1:
        assert processes[0].returncode == 1
        said = [line for line in errors.splitlines() if "process 1 is gone" in line]
        assert len(said) == 1 and "Traceback" not in errors, errors


def test_a_process_that_sees_another_token_ends_both(pair):
    processes = pair("unlike")
    leader, follower = (process.communicate(timeout=PATIENCE)[1] for process in processes)
    assert [process.returncode for process in processes] == [1, 1]
    assert "came out otherwise in process 1 than in 0" in follower
    assert "process 1 has ended: step" in leader and "Traceback" not in leader
