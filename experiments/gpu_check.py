"""One command for a machine with one GPU: every kernel against its reference, then its speed against the GPU's own.

    python -m experiments.gpu_check                   # under 8 minutes, from a source tree, nothing to install but jax
    python -m experiments.gpu_check --dry-run         # on a CPU: small shapes, interpreted kernels, no speeds

1. Verifies every kernel at every small shape, and at every timed one, on fresh random inputs (--seed repeats a run),
   for at most half of --budget seconds.
2. Measures the ceilings: bytes a second of a copy, FLOPs a second of a bfloat16 matrix product.
3. Times the kernels with the GPU's own event records (CUPTI), each call on another layer so that its inputs are not in
   the cache, and in the same run what one would use otherwise: XLA's own code for the reference (dequantise, then
   multiply), bfloat16 products (cuBLAS through XLA), jax.nn.dot_product_attention, PyTorch's where it is installed.

Writes gpu-check.json, .md and .png to --out. Exit code 1 if a kernel's result is off, 2 if there is no GPU.
`of_bandwidth` is the least bytes of the call over its time as a share of the measured copy rate, `of_matmul` its FLOPs
as a share of the measured bfloat16 rate (an FP8 kernel may pass 1).
"""

import argparse
import dataclasses
import importlib
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs some of the memory

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.evaluation.table import Table, check_writable, run_meta, write
from pallas_kernels.bf16_matmul import shapes as bf16
from pallas_kernels.case import Case
from pallas_kernels.fp8_matmul import shapes as fp8
from pallas_kernels.fp8_matmul.shapes import FP8Case
from pallas_kernels.paged_attention import shapes as attention
from pallas_kernels.paged_attention.shapes import GQACase, MLACase
from pallas_kernels.w4a16_matmul import shapes as w4a16
from pallas_kernels.w4a16_matmul.shapes import W4A16Case

SMALL: tuple[Case, ...] = (*w4a16.SMALL, *fp8.SMALL, *bf16.SMALL, *attention.SMALL)
# The first of each op first, so that a budget that runs out leaves the further shapes of each.
MLA, GQA = ([case for case in attention.LISTED if case.kernel == name] for name in ("paged_mla", "paged_gqa"))
# In turns, so that a budget that runs out leaves some shapes of each op measured.
LISTED: tuple[Case, ...] = tuple(
    case for turn in zip_longest(MLA, reversed(w4a16.LISTED), GQA, fp8.LISTED) for case in turn if case is not None
)
DRY = (
    MLACase("dry run", (0, 20), 1, 2, 16, "uint8", 2, 32, 16),
    GQACase("dry run", (32, 32), 1, 4, 32, "uint8", 2, 2, 16),
    W4A16Case("dry run", 9, 64, 40, 64, counts=(3, 0, 5)),
    FP8Case("dry run", 3, 128, 128),
)
COLD_BYTES = 400e6  # of inputs that calls rotate through: several times an H200's 60 MB of cache
MOST_LAYERS = 24
REPEATS = 5
KEPT = ("name", "step", "error", "tolerance", "correct", "failure", "alternative_failed", "skipped")  # in a dry run
BUDGET_S = 430.0  # after which no further case is begun


@partial(jax.jit, static_argnames=("case", "implementation"))
def run_case(case: Case, operands, implementation: str) -> jax.Array:
    return case.call(*operands, implementation=implementation).astype(jnp.float32)


def error_of(case: Case, operands, implementation: str) -> tuple[float, bool]:
    """The largest error over the largest result, and whether it is within the case's tolerance and finite."""
    with jax.default_matmul_precision("highest"):  # a GPU would multiply the reference's float32 in TF32
        expected = run_case(case, operands, "reference")
    found = run_case(case, operands, implementation)
    largest = float(jnp.abs(expected).max())
    error = float(jnp.abs(found - expected).max()) / max(largest, 1e-6)
    return error, bool(np.isfinite(error)) and error <= case.tolerance


def device_ms(run: Callable, *operands) -> tuple[float, str]:
    """Median milliseconds of a call on the device and how they were taken: "cupti", or "wall" where it isn't there."""
    jitted = jax.jit(run)
    jax.block_until_ready(jitted(*operands))
    try:
        from jax.experimental.mosaic.gpu import profiler

        _, events = profiler.measure(jitted, iterations=REPEATS)(*operands)
        if events:
            return statistics.median(events), "cupti"
    except Exception as error:  # noqa: BLE001 - any failure of the profiler leaves the clock
        warnings.warn(f"no event records ({type(error).__name__}): timed by the clock", stacklevel=1)
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(jitted(*operands))
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times), "wall"


def ceilings(size: int) -> dict[str, float]:
    """Bytes and FLOPs a second of this machine, from a copy of `size`^2 * 32 bytes and a product of `size`."""
    x = jnp.zeros((size * size * 16,), jnp.uint16)
    copy_ms, _ = device_ms(lambda a: a + jnp.uint16(1), x)
    a, b = (jax.random.normal(key, (size, size), jnp.bfloat16) for key in jax.random.split(jax.random.key(0)))
    matmul_ms, _ = device_ms(lambda a, b: a @ b, a, b)
    return {"bytes_per_s": 2 * x.nbytes / copy_ms * 1e3, "flops_per_s": 2 * size**3 / matmul_ms * 1e3}


def cold(case: Case) -> Case:
    """The case with enough layers that a call on each of them rotates its inputs out of the cache."""
    layers = min(MOST_LAYERS, max(case.layers, int(-(-COLD_BYTES // case.floor().bytes))))  # type: ignore[attr-defined]
    return dataclasses.replace(case, layers=layers)  # type: ignore[call-arg]


def over_layers(call: Callable, layers: int) -> Callable:
    """`call` on each layer in turn, as one program."""

    def run(*operands):
        first = call(jnp.int32(0), *operands)
        return jax.lax.fori_loop(1, layers, lambda layer, _: call(layer, *operands), first)

    return run


def alternatives(case: Case, key: jax.Array, operands) -> Iterator[tuple[str, float]]:
    """What one would run otherwise, and its milliseconds a call."""
    layers = case.layers  # type: ignore[attr-defined]
    plain = partial(case.call, implementation="reference")
    few = min(layers, 2)
    yield "xla_ms", device_ms(over_layers(plain, few), *operands)[0] / few
    if isinstance(case, W4A16Case | FP8Case):
        few = min(layers, max(2, int(COLD_BYTES // (2 * case.inputs * case.outputs))), MOST_LAYERS)
        groups = (len(case.counts),) if case.counts else ()
        weights = jax.random.normal(key, (few, *groups, case.inputs, case.outputs), jnp.bfloat16)
        x = jnp.nan_to_num(operands[0])
        if case.counts:
            call = lambda layer, x, w, n: jax.lax.ragged_dot(x, w[layer], n)  # noqa: E731
            yield "bf16_ms", device_ms(over_layers(call, few), x, weights, operands[-1])[0] / few
        else:
            yield "bf16_ms", device_ms(over_layers(lambda layer, x, w: x @ w[layer], few), x, weights)[0] / few
    if isinstance(case, GQACase) and case.tokens == 1 and len(set(case.lengths)) == 1:
        yield from dense_attention(case, key)


def dense_attention(case: GQACase, key: jax.Array) -> Iterator[tuple[str, float]]:
    """Attention over bfloat16 keys and values that lie together without pages, by jax and by PyTorch."""
    batch, length = len(case.lengths), case.lengths[0]
    keys = jax.random.split(key, 3)
    entry = (batch, length, case.kv_heads, case.head)
    query = jax.random.normal(keys[0], (batch, 1, case.heads, case.head), jnp.bfloat16)
    k, v = (jax.random.normal(one, entry, jnp.bfloat16) for one in keys[1:])
    yield "jax_attention_ms", device_ms(jax.nn.dot_product_attention, query, k, v)[0]
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return
    if not torch.cuda.is_available():
        return
    query, k, v = (torch.randn(*a.shape, dtype=torch.bfloat16, device="cuda").transpose(1, 2) for a in (query, k, v))
    run = partial(torch.nn.functional.scaled_dot_product_attention, query, k, v, enable_gqa=True)
    yield "torch_attention_ms", torch_ms(torch, run)


def torch_ms(torch: Any, run: Callable) -> float:
    """Median milliseconds of a call by CUDA events."""
    times = []
    for turn in range(REPEATS + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        if turn >= 2:
            times.append(begin.elapsed_time(end))
    return statistics.median(times)


def verify(cases: Sequence[Case], key: jax.Array, implementation: str, until: float) -> Iterator[dict[str, Any]]:
    """A row a case: its error."""
    for index, case in enumerate(cases):
        with row_of(case, "verify", until) as row:
            if "skipped" not in row:
                operands = case.operands(jax.random.fold_in(key, index))
                row["error"], row["correct"] = error_of(case, operands, implementation)
                row["tolerance"] = case.tolerance
        yield row


def measure(cases: Sequence[Case], key: jax.Array, top: dict[str, float], implementation: str, until: float):
    """A row a case: the error at this shape, the time a call as shares of the ceilings, the alternatives' times."""
    for index, case in enumerate(cases):
        with row_of(case, "time", until) as row:
            if "skipped" not in row:
                fill(row, case, jax.random.fold_in(key, 1000 + index), top, implementation)
        yield row


def fill(row: dict[str, Any], case: Case, key: jax.Array, top: dict[str, float], implementation: str) -> None:
    row["error"], row["correct"] = error_of(case, case.operands(key), implementation)
    row["tolerance"] = case.tolerance
    case = case if implementation == "interpret" else cold(case)
    layers, floor = case.layers, case.floor()  # type: ignore[attr-defined]
    _, *operands = case.operands(key)
    call = partial(case.call, implementation=implementation)
    ms, row["timer"] = device_ms(over_layers(call, layers), *operands)
    seconds = ms / layers / 1e3
    row |= {"layers": layers, "ms": seconds * 1e3}
    row |= {"gb_per_s": floor.bytes / seconds / 1e9, "tflop_per_s": floor.flops / seconds / 1e12}
    row |= {"of_bandwidth": floor.bytes / seconds / top["bytes_per_s"]}
    row |= {"of_matmul": floor.flops / seconds / top["flops_per_s"]}
    try:
        row.update(alternatives(case, key, operands))
    except Exception as failure:  # noqa: BLE001 - what can't be compared with is left out, and says so
        row["alternative_failed"] = f"{type(failure).__name__}: {str(failure)[:120]}"


@contextmanager
def row_of(case: Case, step: str, until: float) -> Iterator[dict[str, Any]]:
    """A case's row, printed when it is full; an exception becomes part of it, since the other rows are worth having."""
    row: dict[str, Any] = {"name": f"{case.kernel}: {case.name}", "step": step}
    if time.perf_counter() > until:
        row["skipped"] = "out of time"
    try:
        yield row
    except Exception as failure:  # noqa: BLE001
        row |= {"correct": False, "failure": f"{type(failure).__name__}: {str(failure)[:200]}"}
    print("  " + ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="experiments/results", help="folder for the table (default: %(default)s)")
    parser.add_argument("--only", default="", help="the kernels whose name holds this text")
    parser.add_argument("--seed", type=int, default=None, help="of the inputs (default: another one each run)")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds after which no case is begun")
    parser.add_argument("--dry-run", action="store_true", help="on a CPU: small shapes, interpreted, no speeds")
    options = parser.parse_args(arguments)
    check_writable(options.out)
    if not options.dry_run and jax.default_backend() != "gpu":
        print("no GPU here: --dry-run tries the command on the CPU", file=sys.stderr)
        return 2
    start = time.perf_counter()
    seed = time.time_ns() % 2**31 if options.seed is None else options.seed
    key = jax.random.key(seed)
    wanted = lambda cases: [case for case in cases if options.only in f"{case.kernel}: {case.name}"]  # noqa: E731
    print(f"Verifying (seed {seed})")
    small, listed = (wanted(DRY), wanted(DRY)) if options.dry_run else (wanted(SMALL), wanted(LISTED))
    implementation = "interpret" if options.dry_run else "triton"
    rows = list(verify(small, key, implementation, start + options.budget / 2))
    top = ceilings(64 if options.dry_run else 8192)
    print("Timing")
    rows += measure(listed, key, top, implementation, start + options.budget)
    command = ["python", "-m", "experiments.gpu_check", *(sys.argv[1:] if arguments is None else arguments)]
    if options.dry_run:  # the CPU's speed says nothing about the kernels
        rows = [{field: value for field, value in row.items() if field in KEPT} for row in rows]
        top = {}
    meta = run_meta(command, seed=seed, samples=len(rows), ceilings=top, seconds=time.perf_counter() - start)
    table = Table("gpu-check", rows, meta, "GPU kernels against their references and the GPU's ceilings")
    paths = write(table, options.out)
    off = [row["name"] for row in rows if not row.get("correct", True)]
    print(f"{len(rows)} rows, {len(off)} off, {meta['seconds']:.0f} s: {paths['md']}", *off, sep="\n")
    return 1 if off else 0


if __name__ == "__main__":
    sys.exit(main())
