"""The real steps, sharded and compiled for GPUs that are not there: what XLA plans to take of each one's memory.

Nothing is allocated: parameters and state are shapes with the shardings that the engine gives them.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxinfer import steps
from jaxinfer.config import EngineConfig, ModelConfig
from jaxinfer.engine import programs
from jaxinfer.parallel.kernels import Kernels
from jaxinfer.parallel.sharding import param_shardings, replicated
from jaxinfer.planning import deviceless
from jaxinfer.planning.capacity import abstract_params


def compile_step(model: ModelConfig, engine: EngineConfig, mesh: Mesh, prefill: bool) -> deviceless.Program:
    """The largest decode bucket of `engine`, or its first prefill bucket, compiled for the GPUs of `mesh`.

    UserError where the compiler is missing; jax.errors.JaxRuntimeError where XLA fails.
    """
    create = functools.partial(programs.create_state, model, engine, None)
    shapes = jax.eval_shape(create)
    places = programs.state_shardings(model, shapes, mesh)
    params = abstract_params(model, engine.precision.weights)
    step = steps.prefill_step if prefill else steps.decode_step
    step = programs.checked(step, engine.integrity, model, jnp.bfloat16, engine.logprobs)
    jitted = jax.jit(Kernels("triton", mesh).traced(step), donate_argnums=1, out_shardings=(places, replicated(mesh)))
    return deviceless.compile(
        jitted,
        _placed(params, param_shardings(model, params, mesh)),
        _placed(shapes, places),
        *_placed(_inputs(engine, prefill), replicated(mesh)),
        mesh=mesh,
        options=deviceless.NO_REMATERIALIZATION,
    )


def _inputs(engine: EngineConfig, prefill: bool) -> list[jax.ShapeDtypeStruct]:
    """What a step takes after the state: of decode, slots; of prefill, tokens, counts and `last` too."""
    rows, tokens = engine.prefill_buckets[0] if prefill else (max(engine.decode_buckets), 0)
    slots, flags = jax.ShapeDtypeStruct((rows,), jnp.int32), jax.ShapeDtypeStruct((rows,), bool)
    chunk = [jax.ShapeDtypeStruct((rows, tokens), jnp.int32), slots, flags] if prefill else []
    return [slots, *chunk]


def _placed(shapes: Any, shardings: Any) -> Any:
    """`shapes` with `shardings`: a tree of the same form, or one for all."""
    if isinstance(shardings, jax.sharding.Sharding):
        shardings = jax.tree.map(lambda _: shardings, shapes)
    return jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), shapes, shardings)
