"""Compile for H200s that aren't there: XLA's CUDA compiler, given a description of the GPU, needs no driver and no GPU.

    mesh = deviceless.mesh(8, "tensor")
    program = deviceless.compile(step, *arguments, mesh=mesh, donate=(1,))
    program.memory()["temp"], program.hlo, program.kernels

`arguments` are `jax.ShapeDtypeStruct` with shardings on that mesh (`deviceless.array`). The compiler comes with the
extra `aot` (`pip install 'jaxinfer[aot]'`), and the process must run with JAX_PLATFORMS=cpu, or the CUDA plugin looks
for a driver. What is compiled so is what an H200 would run, except that matrix products of XLA's own get untuned
tiles: it proves memory, lowering and code, not speed.
"""

import contextlib
import math
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources, util
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer.errors import UserError

PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
INSTALL = "install the extra 'aot' (pip install 'jaxinfer[aot]'; it needs no GPU)"
SPILL_GATE = {"xla_gpu_fail_ptx_compilation_on_register_spilling": True}
# Above about 80% of the device's memory in arguments, XLA would recompute values for nothing.
NO_REMATERIALIZATION = {"xla_disable_hlo_passes": "rematerialization"}
# From jax 0.11 a dump leaves the kernels out unless their emitters are named.
DUMP_KERNELS = {"xla_dump_emitter_re": ".*"} if jax.__version_info__ >= (0, 11) else {}


@dataclass(frozen=True)
class Kernel:
    """A GPU kernel: its PTX, and the grid, the threads of a program and the shared memory that it is launched with."""

    ptx: str
    grid: tuple[int, ...]
    threads: int
    shared_bytes: int


@dataclass(frozen=True)
class Program:
    """A compiled program: `hlo` after all passes, each kernel (none unless asked for), and how long it took."""

    executable: jax.stages.Compiled
    kernels: dict[str, "Kernel"]
    lower_s: float
    compile_s: float

    @property
    def hlo(self) -> str:
        return self.executable.as_text() or ""

    def memory(self) -> dict[str, int]:
        """Bytes a GPU as XLA plans them: argument, output, alias, temp. CUDA's and NCCL's own are not in it."""
        analysis = self.executable.memory_analysis()
        return {kind: getattr(analysis, f"{kind}_size_in_bytes") for kind in ("argument", "output", "alias", "temp")}


def unavailable() -> str | None:
    """Why nothing can be compiled here, in one line, or None if it can."""
    if not any(_installed(plugin) for plugin in PLUGINS):
        return f"the CUDA compiler is not installed: {INSTALL}"
    if jax.config.values["jax_platforms"] != "cpu":
        return "set JAX_PLATFORMS=cpu before starting Python: otherwise the CUDA plugin looks for a driver"
    return None


def _installed(module: str) -> bool:
    with contextlib.suppress(ModuleNotFoundError):
        return util.find_spec(module) is not None
    return False


def mesh(devices: int = 1, axis: str = "tensor") -> Mesh:
    """`devices` absent H200s of one host along one axis. UserError where nothing can be compiled."""
    if reason := unavailable():
        raise UserError(reason)
    target = resources.files("jaxinfer.planning").joinpath("h200.txtpb").read_text()
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="h200", target_config=target, topology=f"1x1x{devices}"
    )
    return Mesh(np.array(topology.devices).reshape(-1), (axis,))


def array(mesh: Mesh, shape: Sequence[int], dtype: Any, spec: PartitionSpec | None = None) -> jax.ShapeDtypeStruct:
    """An argument that is only a shape, on every device of `mesh` unless `spec` splits it."""
    return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=NamedSharding(mesh, spec or PartitionSpec()))


def compile(
    function: Callable[..., Any],
    *arguments: Any,
    mesh: Mesh,
    donate: Sequence[int] = (),
    keep_kernels: bool = False,
    spill_gate: bool = True,
    options: dict[str, Any] | None = None,
) -> Program:
    """`function` (plain, or already jitted with its shardings and donation) compiled for the GPUs of `mesh`.

    With `spill_gate` a kernel whose registers spill to memory fails the compilation (jax.errors.JaxRuntimeError).
    `options` are further XLA options, such as NO_REMATERIALIZATION.
    """
    jitted: Any = function if hasattr(function, "trace") else jax.jit(function, donate_argnums=tuple(donate))
    settings = {**(SPILL_GATE if spill_gate else {}), **(options or {})}
    with tempfile.TemporaryDirectory() as folder:
        if keep_kernels:
            settings |= {"xla_dump_to": folder, **DUMP_KERNELS}
        start = time.perf_counter()
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # the Triton lowering asks it for the target
            lowered = jitted.trace(*arguments).lower(lowering_platforms=("cuda",))
        middle = time.perf_counter()
        executable = lowered.compile(compiler_options=settings)
        end = time.perf_counter()
        found = _read_kernels(Path(folder)) if keep_kernels else {}
    return Program(executable, found, middle - start, end - middle)


def _read_kernels(folder: Path) -> dict[str, Kernel]:
    """The kernels of XLA's dump by name; of those with one name, the last."""
    entry = re.compile(r"\.entry\s+([\w$]+)")
    launch = re.compile(r"\s([\w$]+) grid: \[([\d, ]+)\] threads: \[([\d, ]+)\]\s+shared_memory: (\d+)")
    texts = [path.read_text() for path in sorted(folder.glob("*.ptx"))]
    ptx = {name: text for text in texts for name in entry.findall(text)}
    numbers = lambda text: tuple(int(number) for number in text.split(","))  # noqa: E731
    return {
        name: Kernel(ptx[name], numbers(grid), math.prod(numbers(threads)), int(shared))
        for path in sorted(folder.glob("*thunk_sequence.txt"))
        for name, grid, threads, shared in launch.findall(path.read_text())
        if name in ptx
    }
