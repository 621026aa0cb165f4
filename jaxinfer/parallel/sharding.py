"""One mesh axis, `tp`, and one table from logical axes to it. Every array's place follows from its axes."""

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxinfer.config import GQAConfig, ModelConfig
from jaxinfer.errors import UserError
from jaxinfer.models.decoder import Params, parameter_specs
from jaxinfer.models.parameter import ParameterSpec
from jaxinfer.parallel.rules import RULES
from jaxinfer.quantization.tensor import QuantizedTensor


def make_mesh(devices: int, first: int = 0) -> Mesh:
    """A mesh of `devices` devices, the same number from each process, counted from its number `first`. UserError when
    there are fewer."""
    there = [jax.local_devices(process) for process in range(jax.process_count())]
    each, rest = divmod(devices, len(there))
    if rest:
        raise UserError(f"{devices} devices do not come in equal parts from {len(there)} processes")
    if (needed := first + each) > min(map(len, there)):
        raise UserError(
            f"{needed * len(there)} devices asked for, {sum(map(len, there))} there; on the CPU, set the number before "
            f"the first use of jax: --devices {needed * len(there)} on the command line, or "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={needed}"
        )
    return Mesh(np.array([device for own in there for device in own[first:needed]]), ("tp",))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, P())


def spread(tree, shardings):
    """`tree`, or its only leaf, on the devices of `shardings`. Over several processes each puts what it has on its own
    devices: all must have the same. `jax.device_put` would compare them first, with a collective for every array."""

    def put(array, sharding):
        if sharding.is_fully_addressable or not getattr(array, "is_fully_addressable", True):
            return jax.device_put(array, sharding)
        return jax.make_array_from_callback(array.shape, sharding, np.asarray(array).__getitem__)

    return jax.tree.map(put, tree, shardings)


def param_shardings(config: ModelConfig, params: Params, mesh: Mesh) -> Params:
    """The sharding of every leaf of `params`, the parts of quantised tensors included."""
    specs = parameter_specs(config)
    is_weight = lambda x: isinstance(x, (ParameterSpec, QuantizedTensor))  # noqa: E731

    def place(spec: ParameterSpec, weight):
        if isinstance(weight, QuantizedTensor):
            axes = weight.format.stored_axes(spec.axes)
            data, scale = (_sharding(part.shape, axes, mesh) for part in (weight.data, weight.scale))
            return QuantizedTensor(data, scale, weight.format)  # type: ignore[arg-type]
        return _sharding(weight.shape, spec.axes, mesh)

    return jax.tree.map(place, specs, params, is_leaf=is_weight)


def _sharding(shape: tuple[int, ...], axes: tuple[str, ...], mesh: Mesh) -> NamedSharding:
    """Scales have fewer rows than their weights: an axis that does not divide is replicated."""
    names = [RULES.get(axis) for axis in axes]
    fits = [name if name and size % mesh.shape[name] == 0 else None for name, size in zip(names, shape, strict=True)]
    return NamedSharding(mesh, P(*fits))


def cache_sharding(config: ModelConfig, mesh: Mesh) -> NamedSharding:
    """Pages: the latent of MLA is shared by all heads and replicated; keys and values are split by head."""
    split = isinstance(config.attention, GQAConfig)
    return NamedSharding(mesh, P(None, None, None, "tp") if split else P())
