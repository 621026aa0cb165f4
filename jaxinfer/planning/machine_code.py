"""What an H200 would execute of a kernel: registers, spills, the instructions of its inner loop, read without a GPU.

NVIDIA's assembler (ptxas) turns the PTX of `deviceless` into machine code and its disassembler (nvdisasm) shows it;
both come with the extra `aot`. `Loop.issue_share` compares two times of one turn of the loop: that of issuing its
instructions (four a cycle and multiprocessor) and that of fetching its bytes at the memory's full rate. Below about 0.8
the memory sets the pace; above 1 the instructions do. It is a reading of the program, not a measurement.
"""

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

from jaxinfer.errors import UserError
from jaxinfer.planning.deviceless import INSTALL, Kernel

ISSUE_PER_CYCLE = 4
BYTES_PER_CYCLE = 4.8e12 / 132 / 1.98e9  # an H200's memory rate, a multiprocessor's share, at its highest clock
REGISTERS, SHARED_BYTES, THREADS, BLOCKS = 65_536, 233_472, 2048, 32  # of a multiprocessor
RESERVED_SHARED = 1024  # bytes a block that CUDA keeps
DETAILED = ("HGMMA", "QGMMA", "HMMA", "LDS", "STS", "LDG", "STG", "LDSM", "LDGSTS")


@dataclass(frozen=True)
class Loop:
    """Instructions of a stretch of code, by kind."""

    mix: Counter[str]

    @property
    def instructions(self) -> int:
        return self.mix.total()

    def count(self, prefix: str) -> int:
        return sum(number for kind, number in self.mix.items() if kind.startswith(prefix))

    def issue_share(self, bytes_a_turn: float, threads: int) -> float:
        """Time to issue one turn of a program's `threads` over the time to fetch its bytes."""
        return (self.instructions * threads / 32 / ISSUE_PER_CYCLE) / (bytes_a_turn / BYTES_PER_CYCLE)


@dataclass(frozen=True)
class MachineCode:
    """A kernel after assembly: all of its code, and its innermost loops, of which `main_loop` is the longest.

    `serialized`: the assembler says that it put wgmma instructions one after the other.
    """

    kernel: Kernel
    registers: int
    spill_bytes: int
    serialized: bool
    code: Loop
    loops: tuple[Loop, ...]

    @property
    def main_loop(self) -> Loop:
        return max(self.loops, key=lambda loop: loop.instructions, default=Loop(Counter()))

    @property
    def programs_a_multiprocessor(self) -> int:
        """How many blocks fit at once, by registers (given out by 8 a thread), shared memory and threads."""
        threads = self.kernel.threads
        registers = -(-self.registers // 8) * 8 * threads
        shared = self.kernel.shared_bytes + RESERVED_SHARED
        return min(REGISTERS // registers, SHARED_BYTES // shared, THREADS // threads, BLOCKS)


def read(kernel: Kernel) -> MachineCode:
    """Assemble and disassemble. UserError without the tools, subprocess.CalledProcessError if they fail."""
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(kernel.ptx)
        log = _call("ptxas", "-v", "-arch=sm_90a", "-o", str(binary), str(source))
        listing = _call("nvdisasm", "-c", str(binary))
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    registers = max(int(number) for number in re.findall(r"Used (\d+) registers", log))
    spilled = sum(int(number) for pair in spills for number in pair)
    code, loops = _parse(listing)
    return MachineCode(kernel, registers, spilled, "wgmma.mma_async instructions are serialized" in log, code, loops)


def _call(tool: str, *arguments: str) -> str:
    done = subprocess.run([_tool(tool), *arguments], capture_output=True, text=True, check=True, timeout=300)
    return done.stdout + done.stderr


@cache
def _tool(name: str) -> str:
    """The path of a CUDA tool in NVIDIA's Python packages."""
    for package in ("nvidia-cuda-nvcc", "nvidia-cuda-nvdisasm", "nvidia-cuda-nvcc-cu12"):
        try:
            files = metadata.files(package) or []
        except metadata.PackageNotFoundError:
            continue
        for file in files:
            if file.name == name:
                return str(file.locate())
    raise UserError(f"{name} is not installed: {INSTALL}")


def _parse(listing: str) -> tuple[Loop, tuple[Loop, ...]]:
    """All code, and the innermost loops: backward branches that hold no other one."""
    code: list[str] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if label := re.match(r"\s*(\.L_x?_?\w+):", line):
            labels[label[1]] = len(code)
        elif instruction := re.match(r"\s*/\*[0-9a-f]+\*/\s+(.*?);", line):
            code.append(re.sub(r"^@!?U?P\w+\s+", "", instruction[1].strip()))
    spans = []
    for place, text in enumerate(code):
        target = re.search(r"BRA.*?`?\(?(\.L_x?_?\w+)", text)
        if target and labels.get(target[1], place) < place:
            spans.append((labels[target[1]], place))
    inner = [a for a in spans if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in spans)]
    loop = lambda start, end: Loop(Counter(map(_kind, code[start:end])))  # noqa: E731
    return loop(0, len(code)), tuple(loop(start, end + 1) for start, end in inner)


def _kind(instruction: str) -> str:
    """`HGMMA.64x16x16.F32` or `IADD3`: the operation, with its shape or width where that says something."""
    parts = instruction.split()[0].split(".")
    return ".".join(parts[:5]) if parts[0] in DETAILED else parts[0]
