"""Parameters that carry logical axes: `parameter` makes one, `ParameterSpec` describes one without allocating it."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx


@dataclass(frozen=True)
class ParameterSpec:
    """Shape, type and logical axes (one name a dimension) of a parameter.

    `kind` says what a weight format may do with it: `linear` and `expert` matrices can be quantised, the `plain` rest
    (embedding, head, norms, router) stays as it is, `float32` is never narrowed.
    """

    shape: tuple[int, ...]
    dtype: jnp.dtype
    axes: tuple[str, ...]
    kind: str


def parameter(
    rngs: nnx.Rngs, dtype, axes: tuple[str, ...], shape: tuple[int, ...], init: str = "linear", kind: str = "plain"
) -> nnx.Param:
    """A parameter with logical `axes`.

    `init`: `linear` (normal, deviation 1/sqrt(inputs)), `embed` (normal, deviation 0.02), `ones`, `zeros`.
    """
    if len(axes) != len(shape):
        raise ValueError(f"{len(axes)} axes for a parameter of shape {shape}")
    dtype = jnp.float32 if kind == "float32" else dtype
    if init in ("ones", "zeros"):
        value = jnp.full(shape, float(init == "ones"), dtype)
    else:
        deviation = 0.02 if init == "embed" else 1.0 / math.sqrt(shape[-2])
        value = (jax.random.normal(rngs.params(), shape, jnp.float32) * deviation).astype(dtype)
    return nnx.Param(value, axes=axes, kind=kind)
