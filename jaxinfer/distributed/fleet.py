"""The workers of a layout that run on this host, as processes: started together, ended together."""

import dataclasses
import functools
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from jaxinfer.distributed.layout import Layout, WorkerSpec, check_ports

END_S = 10.0  # how long a worker has to end by itself


class Fleet:
    """Starts every local worker of `layout`, all its processes; a context that leaves none behind.

    UserError, before any has started, where a port is in use.
    """

    def __init__(self, layout: Layout, environment: dict[str, str] | None = None):
        self.layout = layout
        self._local = [w for w in layout.workers if w.local]
        check_ports(self._local)
        self._folder = tempfile.TemporaryDirectory(prefix="jaxinfer-")
        self._file = Path(self._folder.name) / "layout.toml"
        self._file.write_text(to_toml(layout))
        self._environment = {**os.environ, **(environment or {})}
        self.processes = [self._start(worker) for worker in self._local]

    def _start(self, worker: WorkerSpec) -> list[subprocess.Popen]:
        index = self.layout.of_role(worker.role).index(worker)
        command = [sys.executable, "-m", "jaxinfer.run", "worker", "--role", worker.role, "--layout", str(self._file)]
        command += ["--index", str(index), "--process"]
        start = functools.partial(subprocess.Popen, env=self._environment, stdout=subprocess.DEVNULL)
        return [start([*command, str(process)]) for process in range(worker.processes)]

    def kill(self, index: int, process: int | None = None) -> None:
        """End a worker, or one of its processes, without a word to it."""
        for each in self.processes[index] if process is None else [self.processes[index][process]]:
            each.kill()
            each.wait()

    def restart(self, index: int) -> None:
        """Start a worker that has ended anew, in its place."""
        assert all(process.poll() is not None for process in self.processes[index])
        self.processes[index] = self._start(self._local[index])

    def ended(self) -> list[WorkerSpec]:
        """Workers of which a process has ended."""
        workers = zip(self._local, self.processes, strict=True)
        return [worker for worker, own in workers if any(process.poll() is not None for process in own)]

    def close(self) -> None:
        processes = list(itertools.chain(*self.processes))
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in processes:
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def to_toml(layout: Layout) -> str:
    """A layout as the file that `Layout.read` reads."""
    shared = {k: v for k, v in dataclasses.asdict(layout).items() if k != "workers"}
    tables = [_lines(shared), *("[[worker]]\n" + _lines(dataclasses.asdict(w)) for w in layout.workers)]
    return "\n".join(tables)


def _lines(values: dict[str, Any]) -> str:
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items())
