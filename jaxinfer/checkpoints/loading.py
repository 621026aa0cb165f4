"""Parameters from a checkpoint's tensors, through the table of names in `mapping`.

First everything is planned from the headers: the format of each parameter, its place on the devices, what is missing,
misshapen or left over. Then parameters are filled one layer at a time, so that the host holds little more than one
layer's tensors of one kind.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jaxinfer.checkpoints import kv_scales, mapping
from jaxinfer.checkpoints.matrix import F32, FP8, Format, Matrices, Matrix, plain_dtype, takes_blocks
from jaxinfer.checkpoints.tensors import Tensors
from jaxinfer.checkpoints.watch import Watch
from jaxinfer.config import ModelConfig
from jaxinfer.errors import UserError
from jaxinfer.models.decoder import Params, parameter_specs
from jaxinfer.models.parameter import ParameterSpec
from jaxinfer.parallel.sharding import param_shardings, spread
from jaxinfer.quantization.formats import WeightFormat
from jaxinfer.quantization.tensor import quantize

is_spec = lambda x: isinstance(x, ParameterSpec)  # noqa: E731


@dataclass(frozen=True)
class Source:
    """Where a parameter comes from: for each layer the names of its tensors or modules (one an expert), None where
    zeros stand for what is not there; how each is stored; and how the parameter will be kept."""

    spec: ParameterSpec
    rule: mapping.Rule
    layers: tuple[tuple[str, ...] | None, ...]
    stored: dict[str, Format]
    format: Format

    @property
    def stacked(self) -> bool:
        return self.spec.axes[0] == "layers"

    @property
    def abstract(self):
        """The parameter as it will be, without its values."""
        format = self.format
        if isinstance(format, WeightFormat):
            return jax.eval_shape(lambda: quantize(jnp.zeros(self.spec.shape), format))
        return jax.ShapeDtypeStruct(self.spec.shape, format)


def load(config: ModelConfig, tensors: Tensors, mesh: Mesh | None = None, watch: Watch | None = None) -> Params:
    """The parameters, on the first device or split over `mesh`. Quantised matrices stay as they are wherever the layout
    allows. UserError that names the first tensor missing, misshapen or left over, before anything is read."""
    watch = watch or Watch()
    matrices = Matrices(tensors, mapping.plain_names(tensors.entries))
    sources = plan(config, matrices)
    report_unused(config, matrices, sources, watch)
    abstract = jax.tree.map(lambda s: s.abstract, sources)
    single = SingleDeviceSharding(jax.local_devices()[0])
    places = param_shardings(config, abstract, mesh) if mesh else jax.tree.map(lambda _: single, abstract)
    watch.total(sum(len(s.layers) for s in jax.tree.leaves(sources)))
    return jax.tree.map(functools.partial(fill, config, matrices, watch), sources, abstract, places)


def plan(config: ModelConfig, matrices: Matrices) -> Params:
    """The Source of every parameter."""

    def source(path, spec: ParameterSpec) -> Source:
        names = tuple(key.key for key in path)
        return _source(config, matrices, names, spec)

    return jax.tree_util.tree_map_with_path(source, parameter_specs(config), is_leaf=is_spec)


def _source(config: ModelConfig, matrices: Matrices, path: tuple[str, ...], spec: ParameterSpec) -> Source:
    rule = mapping.rule_of(path)
    experts = spec.shape[1] if spec.kind == "expert" else 1
    there = lambda name: name in matrices if rule.matrix else name in matrices.names  # noqa: E731
    spell = lambda name, layer: tuple(name.format(layer=layer, expert=e) for e in range(experts))  # noqa: E731
    layers: list[tuple[str, ...] | None] = []
    for layer in mapping.layers_of(config, path):
        options = [spell(name, layer) for name in rule.names]
        names = next((option for option in options if any(map(there, option))), None)
        if names is None and not rule.or_zero:
            names = options[0]
        if missing := next((n for n in names or () if not there(n)), None):
            raise UserError(f"tensor {missing}{'.weight' * rule.matrix} is missing")
        layers.append(names)
    stored = {name: _stored(config, matrices, rule, spec, name) for names in layers for name in names or ()}
    return Source(spec, rule, tuple(layers), stored, _kept(config, rule, spec, set(stored.values())))


def _stored(config: ModelConfig, matrices: Matrices, rule: mapping.Rule, spec: ParameterSpec, name: str) -> Format:
    """How one tensor or matrix is stored, its shape checked."""
    if not rule.matrix:
        shape = spec.shape[1:] if spec.axes[0] == "layers" else spec.shape
        return plain_dtype(matrices.expect(name, shape).dtype, lambda why: matrices.wrong(name, why))
    inputs, outputs = spec.shape[-2:]
    if rule.rows is not None:
        mla = mapping.latent(config)
        outputs = mla.heads * (mla.nope_dim + mla.v_dim)
    return matrices.format(name, outputs, inputs)


def _kept(config: ModelConfig, rule: mapping.Rule, spec: ParameterSpec, stored: set[Format]) -> Format:
    """How a parameter is kept whose parts are stored so: as they are if they agree, otherwise in float32, which holds
    all of them exactly."""
    if spec.kind == "float32" or len(stored) != 1:
        return F32
    (format,) = stored
    if isinstance(format, WeightFormat) and spec.kind == "plain":
        return F32
    if format == FP8 and rule.rows is not None and not takes_blocks(rule.rows(config)):
        return F32
    return format


def report_unused(config: ModelConfig, matrices: Matrices, sources: Params, watch: Watch) -> None:
    """Say which tensors are not read. UserError for one that has no business in such a model."""
    used: set[str] = set()
    for source in jax.tree.leaves(sources):
        for name in source.stored:
            used.update(matrices.parts(name) if source.rule.matrix else [name])
    known = lambda name: name in used or mapping.is_derived(name, config) or kv_scales.is_published(name)  # noqa: E731
    left = [name for name in matrices.names if not known(name)]
    drafts = [name for name in left if mapping.is_draft(name, config)]
    nested = any(name != original for name, original in matrices.names.items())
    others = [n for n in left if nested and n == matrices.names[n]]
    for name in left:
        if name not in {*drafts, *others}:
            raise matrices.wrong(name, "is not part of the model that config.json describes")
    if drafts:
        watch.note(f"{len(drafts)} tensors of layers that predict further tokens (MTP) are skipped")
    if others:
        watch.note(f"{len(others)} tensors of other parts than the text model are skipped")


# ---- reading


def fill(config: ModelConfig, matrices: Matrices, watch: Watch, source: Source, abstract, place):
    """One parameter, filled layer by layer. `abstract` and `place` have its structure: an array, or a
    QuantizedTensor's parts."""
    shapes, structure = jax.tree.flatten(abstract)
    places = jax.tree.leaves(place)
    arrays = [Stack(shape, p) for shape, p in zip(shapes, places, strict=True)]
    for index, parts in enumerate(_layers(config, matrices, source)):
        for stack, part in zip(arrays, parts, strict=True):
            stack.store(index if source.stacked else None, part)
        watch.advance()
    return jax.tree.unflatten(structure, [stack.array() for stack in arrays])


def _layers(config: ModelConfig, matrices: Matrices, source: Source) -> Iterator[list[np.ndarray]]:
    """The parts of each layer of a parameter, experts stacked."""
    for names in source.layers:
        if names is None:
            yield [np.zeros(source.spec.shape[1:], np.float32)]
        elif not source.rule.matrix:
            yield [matrices.tensors.read(matrices.names[names[0]])]
        else:
            read = functools.partial(_matrix_parts, config, matrices, source)
            yield read(names[0]) if source.spec.kind != "expert" else _stacked(read, names)


def _matrix_parts(config: ModelConfig, matrices: Matrices, source: Source, name: str) -> list[np.ndarray]:
    matrix = matrices.read(name, source.stored[name])
    if source.format != matrix.format:
        assert isinstance(source.format, np.dtype)
        matrix = Matrix(matrix.values().astype(source.format), None, source.format)
    if source.rule.rows is not None:
        matrix = matrix.take(source.rule.rows(config))
    return matrix.turned()


def _stacked(read: Callable[[str], list[np.ndarray]], names: tuple[str, ...]) -> list[np.ndarray]:
    """The parts of each expert in one array a part."""
    first = read(names[0])
    stacks = [np.empty((len(names), *part.shape), part.dtype) for part in first]
    for index, name in enumerate(names):
        for stack, part in zip(stacks, read(name) if index else first, strict=True):
            stack[index] = part
    return stacks


class Stack:
    """An array on its devices that is filled a layer at a time, in place, as unsigned integers of the same width until
    it is done. On a single CPU the host's memory is the device's, and nothing need be compiled to write to it."""

    def __init__(self, shape: jax.ShapeDtypeStruct, place: Sharding):
        self.dtype, self.place = jnp.dtype(shape.dtype), place
        self.bits = np.dtype(f"uint{8 * self.dtype.itemsize}")
        self.host = isinstance(place, SingleDeviceSharding) and jax.default_backend() == "cpu"
        self.whole: Any = (
            np.zeros(shape.shape, self.bits) if self.host else jnp.zeros(shape.shape, self.bits, device=place)
        )

    def store(self, layer: int | None, part: np.ndarray) -> None:
        """Put one layer, or all there is."""
        bits = np.ascontiguousarray(part.astype(self.dtype, copy=False)).view(self.bits)
        if self.host:
            self.whole[... if layer is None else layer] = bits
            return
        if layer is None:
            self.whole = spread(bits, self.place)
            return
        place = self.place
        if isinstance(place, NamedSharding):
            place = NamedSharding(place.mesh, PartitionSpec(*place.spec[1:]))
        self.whole = _store(self.whole, spread(bits, place), layer)

    def array(self) -> jax.Array:
        """What was stored. The stack is used up."""
        return jax.device_put(self.whole.view(self.dtype), self.place) if self.host else _view(self.whole, self.dtype)


@functools.partial(jax.jit, donate_argnums=0)
def _store(whole, part, layer):
    return jax.lax.dynamic_update_index_in_dim(whole, part, layer, 0)


@functools.partial(jax.jit, static_argnums=1, donate_argnums=0)
def _view(bits, dtype):
    return jax.lax.bitcast_convert_type(bits, dtype)
