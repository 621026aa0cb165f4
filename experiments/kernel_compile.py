"""Compile every GPU kernel at every listed shape for an H200, on a machine without a GPU, and read what came out.

    JAX_PLATFORMS=cpu python -m experiments.kernel_compile                    # all of them, some minutes
    JAX_PLATFORMS=cpu python -m experiments.kernel_compile --only paged_mla   # those whose name holds the text

Needs the extra 'aot' (pip install 'jaxinfer[aot]'; no GPU). Writes kernels-compile.json, .md and .png to --out. A
kernel that spills registers, that lacks its type's tensor-core instruction or 16-byte loads fails the command (exit
code 1).

Columns: `issue_share` is the time to issue the main loop's instructions over the time to fetch its bytes at the
memory's full rate (`jaxinfer.planning.machine_code`; a dash where the loop was unrolled whole), `requested_over_floor`
what the programs read and write, entries read again and partial results included as if no cache kept them, over the
least possible, `floor_us` and `flops_us` the times of the least bytes and operations at an H200's data-sheet rates. All
of it is read or computed, nothing is measured.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from rich.progress import track

from jaxinfer.errors import UserError
from jaxinfer.evaluation.table import Table, check_writable, run_meta, write
from jaxinfer.planning import deviceless, machine_code
from jaxinfer.planning.machine_code import MachineCode
from pallas_kernels.bf16_matmul import shapes as bf16
from pallas_kernels.case import Case
from pallas_kernels.fp8_matmul import shapes as fp8
from pallas_kernels.paged_attention import shapes as attention
from pallas_kernels.w4a16_matmul import shapes as w4a16

CASES: tuple[Case, ...] = (*attention.LISTED, *w4a16.LISTED, *fp8.LISTED, *bf16.LISTED)
BYTES_PER_S = 4.8e12
FLOPS_PER_S = {"fp8": 1979e12}  # dense, by NVIDIA's data sheet
BF16_FLOPS_PER_S = 989e12
SHOWN = 8  # kinds of instruction


def compile_case(case: Case, mesh) -> MachineCode:
    """The machine code of the case's kernel; jax.errors.JaxRuntimeError if its registers spill."""
    structs = [deviceless.array(mesh, struct.shape, struct.dtype) for struct in case.structs()]
    call = partial(case.call, implementation="triton")
    program = deviceless.compile(call, *structs, mesh=mesh, keep_kernels=True, options=deviceless.NO_REMATERIALIZATION)
    return machine_code.read(program.kernels[case.kernel])


def faults(case: Case, code: MachineCode) -> list[str]:
    """What the kernel should contain and doesn't."""
    found = []
    if code.spill_bytes:
        found.append(f"{code.spill_bytes} bytes of spills")
    if not any(code.code.count(instruction) for instruction in case.tensor_core):
        found.append(f"none of the tensor-core instructions {', '.join(case.tensor_core)}")
    if not wide_loads(code):
        found.append("no 16-byte loads")
    return found


def wide_loads(code: MachineCode) -> int:
    """Loads of 16 bytes a thread from global memory, asynchronous copies or plain, in the whole kernel."""
    loads = [(kind, number) for kind, number in code.code.mix.items() if kind.startswith(("LDGSTS", "LDG"))]
    return sum(number for kind, number in loads if ".128" in kind)


def row(case: Case, code: MachineCode) -> dict[str, Any]:
    loop, floor = code.main_loop, case.floor()
    tensor = sum(code.code.count(instruction) for instruction in case.tensor_core)
    return {
        "name": f"{case.kernel}: {case.name}",
        "registers": code.registers,
        "shared_bytes": code.kernel.shared_bytes,
        "spill_bytes": code.spill_bytes,
        "threads": code.kernel.threads,
        "programs": code.kernel.grid[0] * code.kernel.grid[1] * code.kernel.grid[2],
        "programs_a_multiprocessor": code.programs_a_multiprocessor,
        "tensor_core_instructions": tensor,
        "wgmma_serialized": code.serialized,
        "loads_of_16_bytes": wide_loads(code),
        "loop_instructions": loop.instructions or None,
        "issue_share": loop.issue_share(case.turn_bytes(), code.kernel.threads) if loop.instructions else None,
        "loop_mix": ", ".join(f"{kind} {number}" for kind, number in loop.mix.most_common(SHOWN)) or None,
        "requested_over_floor": case.requested_bytes() / floor.bytes,
        "floor_us": floor.bytes / BYTES_PER_S * 1e6,
        "flops_us": floor.flops / FLOPS_PER_S.get(case.kernel, BF16_FLOPS_PER_S) * 1e6,
        "source": "compiled",
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="compile the kernels whose name holds this text")
    parser.add_argument("--out", default="experiments/results", help="folder for the table (default: %(default)s)")
    options = parser.parse_args(arguments)
    try:
        check_writable(options.out)
        mesh = deviceless.mesh()
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    cases = [case for case in CASES if options.only in f"{case.kernel}: {case.name}"]
    rows, failed = [], []
    for case in track(cases, description="Compiling for an H200"):
        try:
            code = compile_case(case, mesh)
        except Exception as error:  # noqa: BLE001 - one kernel's failure is a line of the report, not the end of it
            failed.append(f"{case.kernel}: {case.name}: {str(error).splitlines()[0][:160]}")
            continue
        rows.append(row(case, code))
        failed += [f"{case.kernel}: {case.name}: {fault}" for fault in faults(case, code)]
    notes = ["issue_share below 1: the memory sets the pace; above: the instructions do.", *failed]
    meta = run_meta(["python", "-m", "experiments.kernel_compile", *sys.argv[1:]], seed=0, samples=len(rows))
    table = Table("kernels-compile", rows, meta, "GPU kernels compiled for an H200 without a GPU", notes)
    paths = write(table, options.out)
    print(f"{len(rows)} kernels compiled, {len(failed)} faults: {paths['md']}")
    print("\n".join(failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
