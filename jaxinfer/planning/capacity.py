"""What a model takes of each GPU's memory: weights in a number format, and what is left for the key-value cache.

The weights are those that the engine would place: `parameter_specs` quantised without allocating, under the sharding
rules of `jaxinfer.parallel`, so that matrices which those replicate count in full on every GPU.
"""

import functools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import cast

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from jaxinfer.checkpoints.model import quantize_params
from jaxinfer.config import ModelConfig, Precision
from jaxinfer.models.decoder import Params, parameter_specs
from jaxinfer.models.parameter import ParameterSpec
from jaxinfer.parallel.sharding import param_shardings
from jaxinfer.planning.gpus import GPU
from jaxinfer.planning.model import PlannedModel
from jaxinfer.quantization.formats import KVFormat, WeightFormat
from jaxinfer.quantization.tensor import QuantizedTensor, quantize

USABLE = 0.9
"""Share of a GPU's memory for weights and cache; the rest is for activations, the CUDA context, NCCL and libraries.

SGLang reserves 14.5 of an H200's 140.4 GiB for those by default (server_args.py at TP 8: 512 MiB, 1.5 MiB a token of an
8,192-token chunk, 2 MiB a row of 512 captured rows, 1 GiB for the ranks), which leaves 0.897.
"""
PARTS = (
    *("embedding", "head", "attention", "dense MLP", "routed experts", "shared experts", "router", "norms"),
    *("indexer", "draft layers"),
)


@dataclass(frozen=True)
class Weight:
    """One parameter tensor: how it is kept (`f32`, `bf16`, or the weight format), how many values and bytes (scales
    included) it has, in all and on each GPU."""

    part: str
    format: str
    parameters: int
    bytes: int
    gpu_parameters: int
    gpu_bytes: int


def abstract_params(config: ModelConfig, format: WeightFormat) -> Params:
    """The parameters in `format` as shapes only. UserError where a group size does not divide a matrix."""
    specs = parameter_specs(config)
    plain = jax.tree.map(_shape, specs, is_leaf=_is_spec)
    return jax.eval_shape(lambda params: quantize_params(config, params, format), plain)


def weights(model: PlannedModel, format: WeightFormat, devices: int, draft: bool = False) -> list[Weight]:
    """Every tensor of `model` in `format` on `devices` GPUs. `draft`: the multi-token-prediction layers too.

    UserError when `devices` do not divide the model.
    """
    return list(_weights(model, format, devices, draft))


@functools.lru_cache
def _weights(model: PlannedModel, format: WeightFormat, devices: int, draft: bool) -> tuple[Weight, ...]:
    found = list(_decoder(model.config, format, devices))
    if model.indexer:
        found += _replicated("indexer", model.indexer.specs(model.config, model.indexer.layers), format)
    if draft and model.draft_layers:
        found += _draft(model, format, devices)
    return tuple(found)


def _decoder(config: ModelConfig, format: WeightFormat, devices: int) -> Iterator[Weight]:
    config.check_devices(devices)
    params = abstract_params(config, format)
    mesh = cast(Mesh, AbstractMesh((devices,), ("tp",)))  # shardings without devices
    places = param_shardings(config, params, mesh)
    specs = jax.tree_util.tree_leaves_with_path(parameter_specs(config), is_leaf=_is_spec)
    stored = (jax.tree.leaves(tree, is_leaf=_is_quantized) for tree in (params, places))
    for (path, spec), weight, place in zip(specs, *stored, strict=True):
        parts = list(zip(jax.tree.leaves(weight), jax.tree.leaves(place), strict=True))
        local = [p.shard_shape(a.shape) for a, p in parts]
        packed = 2 if _is_quantized(weight) and weight.format.kind == "int4" else 1
        yield Weight(
            part=part_of([str(key.key) for key in path], spec),
            format=_format(weight),
            parameters=math.prod(spec.shape),
            bytes=sum(a.size * a.dtype.itemsize for a, _ in parts),
            gpu_parameters=math.prod(local[0]) * packed,
            gpu_bytes=sum(math.prod(s) * a.dtype.itemsize for s, (a, _) in zip(local, parts, strict=True)),
        )


def _draft(model: PlannedModel, format: WeightFormat, devices: int) -> Iterator[Weight]:
    """A sparse layer, its indexer, and the plain matrix that joins two hidden states; embedding and head are shared."""
    config = model.draft_config()
    for weight in _decoder(config, format, devices):
        if weight.part not in ("embedding", "head"):
            yield replace(weight, part="draft layers")
    join = ParameterSpec((config.layers, 2 * config.hidden, config.hidden), jnp.dtype(jnp.bfloat16), ("",) * 3, "plain")
    yield from _replicated("draft layers", {"join": join}, format)
    if model.indexer:
        yield from _replicated("draft layers", model.indexer.specs(model.config, model.draft_layers), format)


def _replicated(part: str, specs: dict[str, ParameterSpec], format: WeightFormat) -> Iterator[Weight]:
    """Tensors that the decoder does not have, whole on every GPU."""
    for spec in specs.values():
        covered = format.quantized and format.dense and spec.kind == "linear"
        stored = jax.eval_shape(lambda w, f=format: quantize(w, f), _shape(spec)) if covered else _shape(spec)
        size = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(stored))
        values = math.prod(spec.shape)
        yield Weight(part, _format(stored), values, size, values, size)


def part_of(path: list[str], spec: ParameterSpec) -> str:
    """The part of PARTS that the parameter at `path` of the decoder belongs to."""
    if path[0] in ("embedding", "head"):
        return path[0]
    if any("norm" in name for name in path):
        return "norms"
    if "attention" in path:
        return "attention"
    if "router" in path:
        return "router"
    if "shared" in path:
        return "shared experts"
    return "routed experts" if spec.kind == "expert" else "dense MLP"


def total(found: Iterable[Weight], field: str = "gpu_bytes") -> int:
    """The sum of `field` over weights."""
    return sum(getattr(weight, field) for weight in found)


def kv_bytes_per_token(model: PlannedModel, kv: KVFormat) -> int:
    """Bytes that one token takes over all layers, as the pool counts them (each entry once)."""
    return sum(entry.layers * entry.width for entry in model.entries(1)) * kv.itemsize


def kv_gpu_bytes_per_token(model: PlannedModel, kv: KVFormat, devices: int) -> int:
    """Bytes that one token takes on each GPU: a replicated entry counts in full."""
    return sum(entry.layers * entry.gpu_width for entry in model.entries(devices)) * kv.itemsize


@dataclass(frozen=True)
class Capacity:
    """Bytes of one GPU: `usable` for weights and cache, `weights`, and `per_token` for each cached token."""

    usable: int
    weights: int
    per_token: int

    @classmethod
    def of(cls, model: PlannedModel, precision: Precision, gpu: GPU, devices: int, share: float = USABLE) -> "Capacity":
        """Of `model` at `precision` on `devices` GPUs, of whose memory `share` is usable."""
        return cls(
            int(gpu.memory * share),
            total(weights(model, precision.weights, devices)),
            kv_gpu_bytes_per_token(model, precision.kv, devices),
        )

    @property
    def free(self) -> int:
        """Bytes left for the cache; 0 when the weights do not fit."""
        return max(0, self.usable - self.weights)

    @property
    def tokens(self) -> int:
        return self.free // self.per_token

    def concurrency(self, context: int) -> int:
        """Requests of `context` tokens that fit at once."""
        return self.tokens // context


def _format(weight: jax.ShapeDtypeStruct | QuantizedTensor) -> str:
    if isinstance(weight, QuantizedTensor):
        return str(weight.format)
    return "f32" if weight.dtype == jnp.float32 else "bf16"


def _shape(spec: ParameterSpec) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(spec.shape, spec.dtype)


def _is_spec(x: object) -> bool:
    return isinstance(x, ParameterSpec)


def _is_quantized(x: object) -> bool:
    return isinstance(x, QuantizedTensor)
