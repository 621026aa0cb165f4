"""What the compiled steps of Kimi K2.6 on 8 H200s take beyond their arguments: no copy of a layer, the pool in place.

Read from XLA's program and its memory plan, with the CUDA compiler and without a GPU; skipped where it is absent.
"""

import math
import re

import jax
import pytest

from jaxinfer.config import ModelConfig, Precision
from jaxinfer.parallel.sharding import param_shardings
from jaxinfer.planning import deviceless
from jaxinfer.planning.capacity import Capacity, abstract_params
from jaxinfer.planning.compiled import compile_step
from jaxinfer.planning.gpus import GPU
from jaxinfer.planning.model import PlannedModel
from jaxinfer.planning.report import engine_config

GPUS = 8
KIMI = ModelConfig.preset("kimi-k2.6")
# Kimi's layers, with a vocabulary and a batch so small that nothing but a weight or the pool is as large as a matrix.
FEW = KIMI.replace(layers=3, vocab=4096)
WIDTHS = {1: ("pred", "s8", "u8", "f8e4m3fn"), 2: ("s16", "u16", "bf16", "f16"), 4: ("s32", "u32", "f32")}
BYTES = {kind: width for width, kinds in WIDTHS.items() for kind in kinds}
NO_MEMORY = ("parameter", "get-tuple-element", "bitcast", "constant")

pytestmark = pytest.mark.skipif(deviceless.unavailable() is not None, reason=deviceless.unavailable() or "")


def results(hlo: str) -> list[tuple[str, str, int]]:
    """Operation, type and shape, and bytes of each array that the program makes: those inside a fusion it does not."""
    fused = set(re.findall(r"(?:calls|to_apply)=%([\w.\-]+)", hlo))
    found, inside = [], False
    for line in hlo.splitlines():
        if head := re.match(r"(?:ENTRY )?%([\w.\-]+) \(", line):
            inside = head[1] in fused
        elif not inside and (made := re.match(r"\s+(?:ROOT )?%\S+ = (\w+)\[([\d,]*)\]\S* ([\w\-]+)\(", line)):
            kind, sizes, operation = made.groups()
            size = BYTES.get(kind, 8) * math.prod(int(n) for n in sizes.split(",") if n)
            found += [(operation, f"{kind}[{sizes}]", size)] if operation not in NO_MEMORY else []
    return found


def smallest_matrix(model: ModelConfig, precision: Precision, mesh) -> int:
    """Bytes of the smallest matrix of a layer on one GPU."""
    params = abstract_params(model, precision.weights)
    leaves = zip(jax.tree.leaves(params), jax.tree.leaves(param_shardings(model, params, mesh)), strict=True)
    parts = [(math.prod(place.shard_shape(a.shape)[1:]) * a.dtype.itemsize, a) for a, place in leaves if a.ndim > 2]
    return min(size for size, a in parts if a.shape[-2] * a.shape[-1] > 2**14)


@pytest.mark.parametrize(
    ("weights", "kv", "prefill"),
    [("int4:g32", "fp8_e4m3", False), ("fp8_e4m3", "bf16", True), ("bf16", "bf16", False)],
    ids=["decode int4", "prefill fp8", "decode bf16"],
)
def test_no_layer_is_copied(monkeypatch, weights, kv, prefill):
    monkeypatch.setattr(deviceless, "SPILL_GATE", {})  # XLA's own sort of so few words spills
    precision, mesh = Precision.parse(weights, kv), deviceless.mesh(GPUS, "tp")
    capacity = Capacity(2 * 10**9, 10**9, sum(FEW.attention.entries.values()) * FEW.layers * precision.kv.itemsize)
    engine = engine_config(precision, capacity, GPUS, context=1024).replace(
        max_slots=1, decode_buckets=(1,), prefill_buckets=((1, 1),)
    )
    program = compile_step(FEW, engine, mesh, prefill)
    pool = f"[{FEW.layers},{engine.num_pages},{engine.page_size},{sum(FEW.attention.entries.values())}]"
    limit = smallest_matrix(FEW, precision, mesh)
    made = [entry for entry in results(program.hlo) if pool not in entry[1]]
    assert len(made) > 100 and 3e5 < limit < 2e6
    assert [entry for entry in made if entry[2] >= limit] == []


def test_the_decode_step_at_full_size():
    """64 rows of 61 layers in what 8 GPUs hold: 0.2 GB beside weights and pool, which is changed in place."""
    precision = Precision.parse("int4:g32", "fp8_e4m3")
    capacity = Capacity.of(PlannedModel.find("kimi-k2.6"), precision, GPU.find("h200"), GPUS)
    engine = engine_config(precision, capacity, GPUS, context=21_440)
    program = compile_step(KIMI, engine, deviceless.mesh(GPUS, "tp"), prefill=False)
    memory, pool = program.memory(), engine.num_pages * engine.page_size * capacity.per_token
    assert engine.max_slots == 64 and pool > 50e9
    assert memory["temp"] < 0.2e9
    assert pool <= memory["alias"] < pool + 2e6
    assert ".remat" not in program.hlo
