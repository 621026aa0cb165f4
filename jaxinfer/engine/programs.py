"""The compiled steps of one model on one mesh: jitted with shardings and donation, before the first request."""

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxinfer import steps
from jaxinfer.cache import INVALID, AllocatorState
from jaxinfer.cache.kv import KVCache
from jaxinfer.config import EngineConfig, ModelConfig
from jaxinfer.models.decoder import Params
from jaxinfer.parallel.sharding import cache_sharding, param_shardings, replicated
from jaxinfer.sampling import SamplingState
from jaxinfer.steps import ServingState


class Programs:
    """`admit`, `release`, `verify`, `decode` and `prefill` as callables, for the shapes that `config` lists."""

    def __init__(self, model: ModelConfig, params: Params, kv_scales, config: EngineConfig, mesh: Mesh, dtype):
        self.config = config
        self.mesh = mesh
        self.params = jax.device_put(params, param_shardings(model, params, mesh))
        state = jax.eval_shape(functools.partial(create_state, model, config, None))
        self.shardings = state_shardings(model, state, mesh)
        self._create = jax.jit(functools.partial(create_state, model, config), out_shardings=self.shardings)
        self._kv_scales = kv_scales
        here, everywhere = self.shardings, replicated(mesh)
        self.admit = jax.jit(steps.admit_step, donate_argnums=0, out_shardings=here)
        self.release = jax.jit(steps.release_step, donate_argnums=0, out_shardings=here)
        self.verify = jax.jit(steps.verify_step, out_shardings=everywhere)
        self.always = {n: jax.device_put(jnp.ones(n, bool), everywhere) for n in self._batches()}
        # The named functions keep their names in profiles.
        make = lambda step: jax.jit(  # noqa: E731
            functools.partial(step, model, dtype, config.logprobs), donate_argnums=1, out_shardings=(here, everywhere)
        )
        self.decode, self.prefill = make(steps.decode_step), make(steps.prefill_step)

    def _batches(self) -> set[int]:
        return {*self.config.decode_buckets, *(rows for rows, _ in self.config.prefill_buckets)}

    def create_state(self) -> ServingState:
        """A fresh state: no pages owned, nothing cached."""
        return self._create(self._kv_scales)

    def compile(self) -> None:
        """Compile every program and run it once on a state of its own, without effect. Two at a time: XLA compiles
        outside the interpreter's lock."""
        # A tiny serial start makes the shared constants; then every program goes its own way.
        jobs: list[Callable[[], None]] = [self._warm_admission]
        jobs += [functools.partial(self._warm_decode, n) for n in self.config.decode_buckets]
        jobs += [functools.partial(self._warm_prefill, *shape) for shape in self.config.prefill_buckets]
        with ThreadPoolExecutor(2) as pool:
            for future in [pool.submit(job) for job in jobs]:
                future.result()

    def _warm_admission(self) -> None:
        slots = np.full(self.config.max_slots, INVALID, np.int32)
        rows = SamplingState.create(self.config.max_slots)
        state = self.admit(self.create_state(), slots, jax.tree.map(np.asarray, rows))
        jax.block_until_ready(self.release(state, slots))

    def _warm_decode(self, batch: int) -> None:
        slots = jax.device_put(np.full(batch, INVALID, np.int32), replicated(self.mesh))
        state = self.create_state()
        jax.block_until_ready(self.decode(self.params, state, slots, self._check(state, slots)))

    def _warm_prefill(self, rows: int, tokens: int) -> None:
        slots = np.full(rows, INVALID, np.int32)
        state = self.create_state()
        chunk = (np.zeros((rows, tokens), np.int32), np.zeros(rows, np.int32), np.zeros(rows, bool))
        jax.block_until_ready(self.prefill(self.params, state, slots, *chunk, self._check(state, slots)))

    def _check(self, state: ServingState, slots) -> jax.Array:
        """The verdict on `slots`, a separate program whose result gates the step on the device."""
        return self.verify(state, slots) if self.config.verify else self.always[len(slots)]

    check = _check


def create_state(model: ModelConfig, config: EngineConfig, kv_scales) -> ServingState:
    cache = KVCache.create(
        model.attention.entries, model.layers, config.num_pages, config.page_size, config.precision.kv, kv_scales
    )
    pages = AllocatorState.create(config.num_pages, config.max_slots, config.max_pages_per_slot, config.page_size)
    return ServingState(cache, pages, SamplingState.create(config.max_slots))


def state_shardings(model: ModelConfig, state: ServingState, mesh: Mesh) -> ServingState:
    everywhere = jax.tree.map(lambda _: replicated(mesh), state)
    entries = {kind: cache_sharding(model, mesh) for kind in state.cache.entries}
    cache = KVCache(entries, everywhere.cache.scales, state.cache.format)  # type: ignore[arg-type]
    return ServingState(cache, everywhere.allocator, everywhere.sampling)
