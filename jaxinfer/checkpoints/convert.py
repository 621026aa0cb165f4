"""Conversion of a Hugging Face folder to another weight format, in the layouts that other engines read too: INT4 as
compressed-tensors packs it, FP8 in 128x128 blocks. Rounds to nearest.

One matrix is in memory at a time. Work goes on in a folder of its own, shard by shard, and takes its name when it is
whole; started again after a kill, it goes on at the shard that it was at.
"""

import functools
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jaxinfer.checkpoints import huggingface, loading, mapping
from jaxinfer.checkpoints.matrix import BF16, E4M3, F32, FP8, Format, Matrices, Matrix, pack_int32
from jaxinfer.checkpoints.tensors import INDEX, SafeTensors, read_json, write_header
from jaxinfer.checkpoints.watch import Watch
from jaxinfer.config import ModelConfig
from jaxinfer.errors import UserError
from jaxinfer.quantization.formats import FP8_BLOCK, WeightFormat
from jaxinfer.quantization.tensor import QuantizedTensor, check_group, quantize
from pallas_kernels.w4a16_matmul.layout import unpack

SHARD_BYTES = 4 << 30
CHUNK = 16 << 20
PLAN, REPORT = "conversion-plan.json", "conversion.json"
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
INT4_PLAIN = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]
"""Modules that an INT4 checkpoint leaves plain, as the published ones say it."""
OTHER_PARTS = ["re:.*vision.*", "re:.*visual.*", "re:.*mm_projector.*"]
Piece = tuple[str, np.dtype, tuple[int, ...]]
"""Name, type and shape of a tensor to be written."""


@dataclass(frozen=True)
class Item:
    """What is written together: a tensor as it is, or the parts of a matrix that is read as `stored`."""

    pieces: tuple[Piece, ...]
    module: str | None = None
    stored: Format | None = None
    target: Format | None = None

    @property
    def nbytes(self) -> int:
        return sum(int(np.prod(shape)) * dtype.itemsize for _, dtype, shape in self.pieces)


@dataclass(frozen=True)
class TensorError:
    """How far a converted matrix lies from what it was made of: largest difference, and root mean square relative to
    that of the matrix."""

    name: str
    max: float
    relative_rms: float


@dataclass(frozen=True)
class Report:
    """`bytes_before`: of the tensors that were read; `bytes_after`: of those that were written."""

    bytes_before: int
    bytes_after: int
    errors: list[TensorError]


def convert(
    source: Path, out: Path, format: WeightFormat, watch: Watch | None = None, shard_bytes: int = SHARD_BYTES
) -> Report:
    """Write the checkpoint in `source` to the new folder `out`, its matrices in `format`. UserError, before anything
    is written, where the checkpoint would not load, the format does not fit it, or the disk has not the room."""
    watch = watch or Watch()
    if out.exists():
        raise UserError(f"{out} exists; give another folder")
    config, values = huggingface.read_config(source)
    tensors = SafeTensors(source)
    matrices = Matrices(tensors, mapping.plain_names(tensors.entries))
    items = list(plan(config, matrices, format, watch))
    shards = list(cut(items, shard_bytes))
    partial = out.with_name(f"{out.name}.partial")
    begin(partial, {"source": describe(tensors), "format": str(format), "shards": [len(s) for s in shards]})
    check_room(partial, shards)
    watch.total(len(items))
    writer = Writer(matrices, config, watch)
    errors: list[TensorError] = []
    try:
        for index, shard in enumerate(shards):
            errors += writer.shard(partial / shard_name(index, len(shards)), shard)
        report = Report(sum(e.nbytes for e in tensors.entries.values()), sum(i.nbytes for i in items), errors)
        finish(partial, source, out, shards, new_config(values, format), report)
    except OSError as error:
        raise UserError(f"{partial}: {error.strerror or error}; the same command goes on from here") from None
    return report


# ---- what will be written


def plan(config: ModelConfig, matrices: Matrices, format: WeightFormat, watch: Watch) -> Iterator[Item]:
    """Every tensor of the new checkpoint, in the order of the old one."""
    if not format.quantized:
        raise UserError(f"checkpoints are converted to fp8_e4m3 or int4, not {format}")
    sources = loading.plan(config, matrices)
    loading.report_unused(config, matrices, sources, watch)
    found = {
        module: (stored, source.spec.kind)
        for source in jax.tree.leaves(sources)
        if source.rule.matrix
        for module, stored in source.stored.items()
    }
    owner = {part: module for module in found for part in matrices.parts(module)}
    done = set()
    for name in matrices.names:
        module = owner.get(name)
        if module is None:
            if not mapping.is_draft(name, config):
                yield _copy(matrices, [name])
        elif module not in done:
            done.add(module)
            yield _item(matrices, module, *found[module], format)


def _copy(matrices: Matrices, names: list[str]) -> Item:
    entries = [(matrices.names[name], matrices.tensors.entries[matrices.names[name]]) for name in names]
    return Item(tuple((name, entry.dtype, entry.shape) for name, entry in entries))


def _item(matrices: Matrices, module: str, stored: Format, kind: str, format: WeightFormat) -> Item:
    """What becomes of one matrix. The format's covers are converted, others that are quantised become plain."""
    target: Format = format if kind == "expert" or (kind == "linear" and format.dense) else BF16
    same = isinstance(stored, WeightFormat) and isinstance(target, WeightFormat)
    if (same and (stored.kind, stored.group) == (target.kind, target.group)) or not (  # type: ignore[union-attr]
        isinstance(stored, WeightFormat) or isinstance(target, WeightFormat)
    ):
        return _copy(matrices, matrices.parts(module))
    name = matrices.names[matrices.parts(module)[0]]
    base = name.removesuffix("_packed").removesuffix(".weight")
    entry = matrices.tensors.entries[name]
    outputs, inputs = entry.shape if not name.endswith("_packed") else (entry.shape[0], entry.shape[1] * 8)
    if isinstance(target, WeightFormat):
        check_group(inputs, target, base)
    return Item(_pieces(base, outputs, inputs, target), module, stored, target)


def _pieces(base: str, outputs: int, inputs: int, target: Format) -> tuple[Piece, ...]:
    if not isinstance(target, WeightFormat):
        return ((f"{base}.weight", target, (outputs, inputs)),)
    if target == FP8:
        blocks = (-(-outputs // FP8_BLOCK), -(-inputs // FP8_BLOCK))
        return (f"{base}.weight", E4M3, (outputs, inputs)), (f"{base}.weight_scale_inv", F32, blocks)
    return (
        (f"{base}.weight_packed", np.dtype(np.int32), (outputs, inputs // 8)),
        (f"{base}.weight_scale", BF16, (outputs, inputs // target.group)),
        (f"{base}.weight_shape", np.dtype(np.int32), (2,)),
    )


def cut(items: list[Item], shard_bytes: int) -> Iterator[list[Item]]:
    """Items in shards of at most so many bytes, or of one item."""
    shard: list[Item] = []
    for item in items:
        if shard and sum(i.nbytes for i in shard) + item.nbytes > shard_bytes:
            yield shard
            shard = []
        shard.append(item)
    yield shard


def new_config(values: Mapping[str, Any], format: WeightFormat) -> dict[str, Any]:
    """config.json of the new checkpoint: it says how weights are quantised, and has no layers for further tokens."""
    if format.kind == "int4":
        weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": format.group}
        said: dict[str, Any] = {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
            "ignore": ["lm_head", r"re:.*mlp\.gate$"] if format.dense else INT4_PLAIN,
        }
        if "text_config" in values:
            said["ignore"] = [*said["ignore"], *OTHER_PARTS]
    else:
        said = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
        said["weight_block_size"] = [FP8_BLOCK, FP8_BLOCK]
    if scheme := _kv_scheme(values):
        said["kv_cache_scheme"] = scheme  # the scales are copied, and must be found
    text = values.get("text_config")
    new = {k: v for k, v in values.items() if k != "quantization_config"}
    inner = new if text is None else dict(text)
    inner["quantization_config"] = said
    if inner.get("num_nextn_predict_layers"):
        inner["num_nextn_predict_layers"] = 0
    return new if text is None else {**new, "text_config": inner}


def _kv_scheme(values: Mapping[str, Any]) -> Any:
    """What config.json says of static scales of KV entries, which a conversion of weights leaves as they are."""
    old = values.get("quantization_config") or (values.get("text_config") or {}).get("quantization_config")
    return (old or {}).get("kv_cache_scheme")


# ---- the folder it grows in


def describe(tensors: SafeTensors) -> list[list[Any]]:
    """Enough to notice that a source is not the one that was begun with."""
    files = sorted({entry.file for entry in tensors.entries.values()})
    return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]


def begin(partial: Path, plan: dict[str, Any]) -> None:
    """Make the folder, or see that what is in it is the same conversion."""
    path = partial / PLAN
    if path.is_file():
        if read_json(path) != plan:
            raise UserError(f"{partial} holds the beginning of another conversion; remove it, or give another folder")
        return
    try:
        partial.mkdir(parents=True, exist_ok=True)
        write_json(path, plan)
    except OSError as error:
        raise UserError(f"can't write to {partial}: {error.strerror}") from None


def check_room(partial: Path, shards: list[list[Item]]) -> None:
    """UserError where the disk has no room for the shards that are still to be written."""
    there = [(partial / shard_name(i, len(shards))).is_file() for i in range(len(shards))]
    needed = sum(i.nbytes for shard, done in zip(shards, there, strict=True) if not done for i in shard)
    if needed > (free := shutil.disk_usage(partial).free):
        if not any(there):
            shutil.rmtree(partial)
        raise UserError(f"the new checkpoint needs {needed / 1e9:.1f} GB, the disk of {partial} has {free / 1e9:.1f}")


def finish(
    partial: Path, source: Path, out: Path, shards: list[list[Item]], config: dict[str, Any], report: Report
) -> None:
    """Write what stands beside the shards, the index last but for config.json, and give the folder its name."""
    for file in sorted(source.iterdir()):
        if file.is_file() and not file.name.endswith((*WEIGHTS, INDEX)) and file.name != "config.json":
            shutil.copyfile(file, partial / file.name)
    placed = {
        name: shard_name(i, len(shards)) for i, shard in enumerate(shards) for item in shard for name, *_ in item.pieces
    }
    index = {"metadata": {"total_size": report.bytes_after}, "weight_map": placed}
    for name, value in {REPORT: asdict(report), INDEX: index, "config.json": config}.items():
        write_json(partial / name, value)
    for file in [*partial.glob("*.errors.json"), partial / PLAN]:
        file.unlink(missing_ok=True)
    partial.rename(out)


def shard_name(index: int, count: int) -> str:
    return f"model-{index + 1:05}-of-{count:05}.safetensors"


def _replace(path: Path, fill: Callable[[BinaryIO], object]) -> None:
    """Write a file whole or not at all."""
    draft = path.with_name(f".{path.name}")
    with draft.open("wb") as file:
        fill(file)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def write_json(path: Path, value: Any) -> None:
    _replace(path, lambda file: file.write(json.dumps(value, indent=2).encode()))


# ---- one shard


class Writer:
    """Writes shards. What it found of errors stands beside each, so that a shard need not be made again for them."""

    def __init__(self, matrices: Matrices, config: ModelConfig, watch: Watch):
        self.matrices, self.config, self.watch = matrices, config, watch

    def shard(self, path: Path, items: list[Item]) -> list[TensorError]:
        """Write the shard unless it is there; the errors of its tensors."""
        beside = path.with_suffix(".errors.json")
        if not path.is_file():
            errors: list[TensorError] = []
            _replace(path, lambda file: self._fill(file, items, errors))
            write_json(beside, [asdict(error) for error in errors])
            return errors
        for _ in items:
            self.watch.advance()
        if beside.is_file():
            return [TensorError(**said) for said in read_json(beside)]
        path.unlink()  # it was killed between the two
        return self.shard(path, items)

    def _fill(self, file: BinaryIO, items: list[Item], errors: list[TensorError]) -> None:
        file.write(write_header({n: (d, s) for item in items for n, d, s in item.pieces}, {"format": "pt"}))
        for item in items:
            if item.module is None:
                for name, *_ in item.pieces:
                    self._copy(file, name)
            else:
                for part in self._converted(item, errors):
                    file.write(np.ascontiguousarray(part).view(np.uint8).data)
            self.watch.advance()

    def _copy(self, file: BinaryIO, name: str) -> None:
        entry = self.matrices.tensors.entries[name]
        with entry.file.open("rb") as source:
            source.seek(entry.offset)
            left = entry.nbytes
            while left:
                chunk = source.read(min(left, CHUNK))
                if not chunk:
                    raise UserError(f"{entry.file}: tensor {name} is cut short")
                file.write(chunk)
                left -= len(chunk)

    def _converted(self, item: Item, errors: list[TensorError]) -> list[np.ndarray]:
        """The parts of a matrix in its new format; its error is noted."""
        assert item.module is not None and item.stored is not None and item.target is not None
        values = self.matrices.read(item.module, item.stored).values()
        new = to_format(values, item.target)
        difference, size = new.values() - values, float(np.sqrt(np.square(values, dtype=np.float64).mean()))
        rms = float(np.sqrt(np.square(difference, dtype=np.float64).mean()))
        errors.append(TensorError(item.pieces[0][0], float(abs(difference).max()), rms / size if size else 0.0))
        if new.scale is None:
            return [new.data]
        if item.target == FP8:
            return [new.data, new.scale]
        return [pack_int32(new.data), new.scale, np.array(values.shape, np.int32)]


def to_format(values: Float[np.ndarray, "N K"], target: Format) -> Matrix:
    """The matrix in `target`, rounded to nearest."""
    if not isinstance(target, WeightFormat):
        return Matrix(values.astype(target), None, target)
    data, scale = _quantized(target)(values)
    return Matrix(np.asarray(data), np.asarray(scale), target)


@functools.cache
def _quantized(format: WeightFormat) -> Callable[[np.ndarray], tuple[jax.Array, jax.Array]]:
    def run(values):
        made = quantize(jnp.swapaxes(values, 0, 1), format)
        assert isinstance(made, QuantizedTensor)
        return (made.data, made.scale) if format == FP8 else (unpack(made.data).T, made.scale.T)

    return jax.jit(run)
