"""The tables of `plan`: what a model takes of so many GPUs, and how fast they could run it at best."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxinfer.config import EngineConfig, Precision
from jaxinfer.errors import UserError
from jaxinfer.evaluation.table import Table, run_meta
from jaxinfer.planning import deviceless
from jaxinfer.planning.capacity import PARTS, USABLE, Capacity, kv_bytes_per_token, total, weights
from jaxinfer.planning.compiled import compile_step
from jaxinfer.planning.gpus import GPU
from jaxinfer.planning.model import PlannedModel
from jaxinfer.planning.roofline import Floor, decode_floor, prefill_floor

Phases = Mapping[str, Precision]
PAGE_SIZE = 64
CHUNK = 2048  # tokens of the prefill step that is compiled
MOST_ROWS = 64  # of the decode step that is compiled


def plan(
    model: str,
    devices: int,
    gpu: str,
    prefill_weights: str,
    prefill_kv: str,
    decode_weights: str,
    decode_kv: str,
    context: int,
    compile: bool,
) -> list[Table]:
    """What `devices` GPUs of kind `gpu` do with `model` (a preset, or a config.json or its folder), in each phase.

    Prefill and decode each have `devices` GPUs of their own. `context` is the tokens of a request. With `compile` the
    last table has what XLA plans for the real steps; the process must then run with JAX_PLATFORMS=cpu.

    UserError in one line for whatever cannot be planned.

    >>> plan("kimi-k2.6", 8, "h200", "fp8_e4m3", "bf16", "int4:g32", "fp8_e4m3", 21_440, compile=False)
    """
    described, kind = PlannedModel.find(model), GPU.find(gpu)
    phases = {
        "prefill": Precision.parse(prefill_weights, prefill_kv),
        "decode": Precision.parse(decode_weights, decode_kv),
    }
    check(described, devices, context)
    capacities = {name: Capacity.of(described, p, kind, devices) for name, p in phases.items()}
    if compile:
        check_compilable(described, kind, phases, capacities, context)
    options = {
        "model": model,
        "devices": devices,
        "gpu": gpu,
        "prefill-weights": prefill_weights,
        "prefill-kv": prefill_kv,
        "decode-weights": decode_weights,
        "decode-kv": decode_kv,
        "context": context,
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    command = ["python", "-m", "jaxinfer.run", "plan", *words, *["--compile"] * compile]
    settings = {"model": described.name, "gpu": kind.name, "devices": devices, "context": context, "usable": USABLE}
    meta = run_meta(command, seed=0, samples=0, precision={n: str(p) for n, p in phases.items()}, **settings)
    tables = [
        weight_table(described, phases, devices, meta),
        capacity_table(described, phases, capacities, context, meta),
        decode_table(described, phases["decode"], kind, devices, capacities["decode"], context, meta),
        prefill_table(described, phases["prefill"], kind, devices, context, meta),
    ]
    if compile:
        tables.append(compile_table(described, phases, capacities, devices, context, meta))
    return tables


def check(model: PlannedModel, devices: int, context: int) -> None:
    """UserError for a number of devices or a context that cannot be."""
    if devices < 1:
        raise UserError(f"devices must be at least 1, not {devices}")
    if not 1 <= context <= model.config.max_position:
        most = model.config.max_position
        raise UserError(f"context must be from 1 to {most}, the most that {model.name} takes, not {context}")
    model.config.check_devices(devices)


def check_compilable(
    model: PlannedModel, gpu: GPU, phases: Phases, capacities: Mapping[str, Capacity], context: int
) -> None:
    """UserError where the steps cannot be compiled or would have no room for one request."""
    if reason := deviceless.unavailable():
        raise UserError(reason)
    if gpu.name != "h200":
        raise UserError(f"--compile knows the h200 only, not the {gpu.name}")
    if model.indexer:
        raise UserError(f"{model.name} has sparse attention, which the decoder does not run; leave out --compile")
    for phase, capacity in capacities.items():
        if not capacity.concurrency(context):
            raise UserError(
                f"{phase} ({phases[phase]}) leaves room for {capacity.tokens} tokens a GPU, fewer than one request of "
                f"{context}; use more devices, narrower formats or a shorter context"
            )


def weight_table(model: PlannedModel, phases: Phases, devices: int, meta: Mapping[str, Any]) -> Table:
    """Bytes of each part of the weights, in all and on one GPU, in each phase's format."""
    rows = []
    for phase, precision in phases.items():
        found = weights(model, precision.weights, devices)
        for part in (*PARTS, "total"):
            of_part = [weight for weight in found if part in (weight.part, "total")]
            if of_part:
                sums = {f: total(of_part, f) for f in ("parameters", "bytes", "gpu_bytes")}
                kept = max(of_part, key=lambda weight: weight.bytes).format if part != "total" else precision.weights
                rows.append({"phase": phase, "name": part, "weight_format": str(kept), **sums})
    title = f"{model.name}: weights on {devices} GPUs"
    return _table("plan-weights", title, rows, meta, _beyond(model))


def capacity_table(
    model: PlannedModel, phases: Phases, capacities: Mapping[str, Capacity], context: int, meta: Mapping[str, Any]
) -> Table:
    """Memory of one GPU in each phase, the tokens that fit, and the requests of `context` tokens."""
    rows = [
        {
            "phase": phase,
            "weight_format": str(phases[phase].weights),
            "kv_format": str(phases[phase].kv),
            "usable_bytes": capacity.usable,
            "gpu_bytes": capacity.weights,
            "kv_budget_bytes": capacity.free,
            "bytes_per_token": kv_bytes_per_token(model, phases[phase].kv),
            "gpu_bytes_per_token": capacity.per_token,
            "tokens_in_budget": capacity.tokens,
            "concurrency": capacity.concurrency(context),
        }
        for phase, capacity in capacities.items()
    ]
    notes = [
        f"gpu_bytes are the weights of one GPU; {USABLE:.0%} of its memory is usable for weights and cache.",
        f"concurrency counts requests of {context:,} tokens that fit at once.",
    ]
    return _table("plan-capacity", f"{model.name}: memory of one GPU", rows, meta, notes)


def decode_table(
    model: PlannedModel,
    precision: Precision,
    gpu: GPU,
    devices: int,
    capacity: Capacity,
    context: int,
    meta: Mapping[str, Any],
) -> Table:
    """The least time of a decode step at each batch that fits, every request at `context` tokens."""
    most = capacity.concurrency(context)
    rows = []
    for batch in batches(most):
        floor = decode_floor(model, precision, gpu, devices, batch, context)
        rows.append({"concurrency": batch, **_floor(floor), "decode_tokens_per_s": floor.tokens_per_s})
    notes = [f"A floor on {gpu.name}s: what bytes, operations and links allow at best, with even routing of tokens."]
    if not most:
        notes.append("Not even one request fits: a batch of 1 is shown for its time alone.")
    return _table("plan-decode", f"{model.name}: decode floor at {context:,} tokens", rows, meta, notes)


def prefill_table(
    model: PlannedModel, precision: Precision, gpu: GPU, devices: int, context: int, meta: Mapping[str, Any]
) -> Table:
    """The least time to prefill prompts of some lengths up to `context`, each in one pass."""
    rows = []
    for tokens in dict.fromkeys(min(context, length) for length in (1024, 8192, 65_536, context)):
        floor = prefill_floor(model, precision, gpu, devices, tokens)
        rows.append({"name": f"{tokens:,} tokens", **_floor(floor), "prefill_tokens_per_s": floor.tokens_per_s})
    return _table("plan-prefill", f"{model.name}: prefill floor of one prompt", rows, meta, [])


def compile_table(
    model: PlannedModel,
    phases: Phases,
    capacities: Mapping[str, Capacity],
    devices: int,
    context: int,
    meta: Mapping[str, Any],
) -> Table:
    """XLA's bytes a GPU for the real steps beside the arithmetic: arguments are weights, pool and some bookkeeping."""
    mesh = deviceless.mesh(devices, "tp")
    rows = []
    for phase, precision in phases.items():
        capacity = capacities[phase]
        engine = engine_config(precision, capacity, devices, context)
        program = compile_step(model.config, engine, mesh, prefill=phase == "prefill")
        memory, pool = program.memory(), engine.num_pages * engine.page_size * capacity.per_token
        rows.append(
            {
                "phase": phase,
                "weight_format": str(precision.weights),
                "kv_format": str(precision.kv),
                "rows": engine.prefill_buckets[0][0] if phase == "prefill" else engine.max_slots,
                "tokens_a_row": engine.prefill_buckets[0][1] if phase == "prefill" else 1,
                **{f"{kind}_bytes": memory[kind] for kind in ("argument", "alias", "temp")},
                "modelled_weight_bytes": capacity.weights,
                "modelled_pool_bytes": pool,
                "unexplained_argument_bytes": memory["argument"] - capacity.weights - pool,
                "gpu_bytes": memory["argument"] + memory["temp"] + memory["output"] - memory["alias"],
                "lower_s": program.lower_s,
                "compile_s": program.compile_s,
            }
        )
    notes = [
        "Bytes of one GPU as XLA plans them, without the CUDA context, NCCL and libraries; gpu_bytes is their sum.",
        "The arguments beyond weights and pool are page tables, tags, sampling state and the step's inputs.",
    ]
    return _table("plan-compiled", f"{model.name}: the compiled steps", rows, meta, notes, source="compiled")


def engine_config(precision: Precision, capacity: Capacity, devices: int, context: int) -> EngineConfig:
    """An engine whose pool fills the budget, with as many slots as fit, at most MOST_ROWS."""
    slots = min(MOST_ROWS, capacity.concurrency(context))
    return EngineConfig(
        precision=precision,
        page_size=PAGE_SIZE,
        num_pages=max(1, capacity.tokens // PAGE_SIZE),
        max_slots=slots,
        max_context=context,
        decode_buckets=(slots,),
        prefill_buckets=((1, min(CHUNK, context)),),
        devices=devices,
    )


def batches(most: int) -> list[int]:
    """Powers of two below `most`, then `most` itself; 1 when nothing fits."""
    return [*(2**i for i in range(max(most - 1, 0).bit_length()) if 2**i < most), max(most, 1)]


def _floor(floor: Floor) -> dict[str, Any]:
    """The columns of a floor, all of one GPU."""
    milliseconds = {f"{kind}_ms": seconds * 1e3 for kind, seconds in floor.times.items()}
    return {
        "weights_read_gb": floor.weight_bytes / 1e9,
        "kv_moved_gb": floor.kv_bytes / 1e9,
        "tflop": (floor.fp8_flops + floor.bf16_flops) / 1e12,
        **milliseconds,
        "floor_ms": floor.seconds * 1e3,
        "bound": floor.bound,
    }


def _beyond(model: PlannedModel) -> list[str]:
    """What a reader must know of a model that the decoder runs only in part."""
    notes = []
    if model.indexer:
        notes.append("The indexer is counted as its published sizes; the decoder does not run sparse attention.")
    if model.draft_layers:
        notes.append("Multi-token-prediction layers are in the checkpoint but not loaded, and not counted here.")
    return notes


def _table(
    name: str,
    title: str,
    rows: Iterable[Mapping[str, Any]],
    meta: Mapping[str, Any],
    notes: Sequence[str],
    source: str = "modelled",
) -> Table:
    return Table(name, [{**row, "paper": None, "source": source} for row in rows], meta, title, notes)
