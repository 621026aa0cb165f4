"""The compiled steps of one model on one mesh: jitted with shardings and donation, before the first request.

Prefill and decode have their check in front of them in one program: nothing can come between the two.
"""

import dataclasses
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxinfer import steps
from jaxinfer.cache import INVALID, AllocatorState
from jaxinfer.cache.digest import Digests
from jaxinfer.cache.kv import KVCache
from jaxinfer.cache.owners import Owners
from jaxinfer.config import EngineConfig, ModelConfig
from jaxinfer.models.decoder import Params
from jaxinfer.parallel.kernels import Kernels
from jaxinfer.parallel.multihost import wait_for_all
from jaxinfer.parallel.sharding import cache_sharding, param_shardings, replicated, spread
from jaxinfer.sampling import SamplingState
from jaxinfer.steps import ServingState


class Programs:
    """`admit`, `release`, `decode`, `prefill`, for what failed `audit` and `quarantine`, for the prefix cache `keep`,
    `adopt` and `drop`, as callables for the shapes that `config` lists; `export` in a prefill worker, `claim` and
    `insert` in a decode worker. `verify` is the check by itself, for measurements; it compiles when first called."""

    def __init__(self, model: ModelConfig, params: Params, kv_scales, config: EngineConfig, mesh: Mesh, dtype):
        self.config = config
        self.mesh = mesh
        self.params = spread(params, param_shardings(model, params, mesh))
        state = jax.eval_shape(functools.partial(create_state, model, config, None))
        self.shardings = state_shardings(model, state, mesh)
        self._create = jax.jit(functools.partial(create_state, model, config), out_shardings=self.shardings)
        # Of a whole state only the scales are kept: XLA makes nothing else.
        self._create_scales = jax.jit(
            lambda scales: create_state(model, config, scales).cache.scales, out_shardings=self.shardings.cache.scales
        )
        here, everywhere = self.shardings, replicated(mesh)
        self._kv_scales = spread(kv_scales, dict.fromkeys(kv_scales, everywhere))
        self.admit = on_copies(jax.jit(steps.admit_step, donate_argnums=0, out_shardings=here))
        self.release = on_copies(jax.jit(steps.release_step, donate_argnums=0, out_shardings=here))
        self.verify = jax.jit(steps.verify_step, out_shardings=everywhere)
        self.audit = jax.jit(steps.audit_step, out_shardings=everywhere)
        self._quarantine = jax.jit(steps.quarantine_step, donate_argnums=0, out_shardings=(here, everywhere))
        self.keep = jax.jit(steps.keep_step, donate_argnums=0, out_shardings=(here, everywhere))
        self.adopt = on_copies(jax.jit(steps.adopt_step, donate_argnums=0, out_shardings=(here, everywhere)))
        self.drop = on_copies(jax.jit(steps.drop_step, donate_argnums=0, out_shardings=here))
        setting = Kernels.choose(config.kernels, mesh)
        make = lambda step: jax.jit(  # noqa: E731
            setting.traced(checked(step, config.integrity, model, dtype, config.logprobs)),
            donate_argnums=1,
            out_shardings=(here, everywhere),
        )
        self.decode, self.prefill = make(steps.decode_step), on_copies(make(steps.prefill_step))
        self.block_shardings = block_shardings(model, mesh)
        export = functools.partial(steps.export_step, config.handover, config.transfer_tokens)
        # Over several processes a block is whole in each, so that one can offer it.
        whole = everywhere if jax.process_count() > 1 else self.block_shardings
        self._export = jax.jit(export, out_shardings=whole)
        self.claim = on_copies(jax.jit(steps.claim_step, out_shardings=everywhere))
        self.insert = on_copies(jax.jit(steps.insert_step, donate_argnums=0, out_shardings=(here, everywhere)))

    def create_state(self) -> ServingState:
        """A fresh state: no pages owned, nothing cached."""
        return self._create(self._kv_scales)

    def compile(self) -> None:
        """Compile every program and run it once on a state of its own, without effect. Two at a time: XLA compiles
        outside the interpreter's lock. One at a time over several processes, which must come to each collective in the
        same order."""
        # A tiny serial start makes the shared constants; then every program goes its own way.
        jobs: list[Callable[[], None]] = [self._warm_admission]
        jobs += [self._warm_prefixes] if self.config.prefix_cache else []
        if self.config.role != "prefill":
            jobs += [functools.partial(self._warm_decode, n) for n in self.config.decode_buckets]
        if self.config.role != "decode":
            jobs += [functools.partial(self._warm_prefill, *shape) for shape in self.config.prefill_buckets]
        jobs += {"both": [], "prefill": [self._warm_export], "decode": [self._warm_insert]}[self.config.role]
        with ThreadPoolExecutor(2 if jax.process_count() == 1 else 1) as pool:
            for future in [pool.submit(job) for job in jobs]:
                future.result()

    def _warm_admission(self) -> None:
        slots = np.full(self.config.max_slots, INVALID, np.int32)
        rows = SamplingState.create(self.config.max_slots)
        state = self.admit(self.create_state(), slots, jax.tree.map(np.asarray, rows), slots)
        state, _ = self.quarantine(self.release(state, slots), slots, np.zeros(self.config.num_pages, bool))
        jax.block_until_ready(self.audit(state, np.int32(0)))

    def _warm_prefixes(self) -> None:
        none = np.full(self.config.max_pages_per_slot, INVALID, np.int32)
        tags = np.zeros(none.shape, np.uint32)
        state, _ = self.keep(self.create_state(), np.int32(INVALID), np.int32(0))
        state, _ = self.adopt(state, np.int32(INVALID), none, tags)
        jax.block_until_ready(self.drop(state, none, tags))

    def _warm_decode(self, batch: int) -> None:
        slots = spread(np.full(batch, INVALID, np.int32), replicated(self.mesh))
        self._run_together(self.decode, self.params, self.create_state(), slots)

    def _warm_prefill(self, rows: int, tokens: int) -> None:
        slots = np.full(rows, INVALID, np.int32)
        chunk = (np.zeros((rows, tokens), np.int32), np.zeros(rows, np.int32), np.zeros(rows, bool))
        self._run_together(self.prefill, self.params, self.create_state(), slots, *chunk)

    def _run_together(self, program, *arguments) -> None:
        """Run a program with collectives for the first time: once every process has loaded and compiled what it takes,
        because a collective does not wait long for who comes late (gloo: 30 s)."""
        if jax.process_count() > 1:
            program.lower(*arguments).compile()
            wait_for_all()
        jax.block_until_ready(program(*arguments))

    def _warm_export(self) -> None:
        jax.block_until_ready(self.export(self.create_state(), 0, 0))

    def _warm_insert(self) -> None:
        state = self.create_state()
        slots, none = np.full(1, INVALID, np.int32), np.int32(0)
        tags = self.claim(state, slots)
        block = spread(jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), self.block), self.block_shardings)
        jax.block_until_ready(self.insert(state, slots, tags, none, none, block))

    @property
    def block(self) -> steps.Block:
        """Shapes and types of a block between workers: as decode's pages keep it."""
        cache, tokens = jax.eval_shape(self._create, self._kv_scales).cache, self.config.transfer_tokens
        format = self.config.handover if self.config.role == "prefill" else self.config.precision.kv
        entries = {
            kind: jax.ShapeDtypeStruct((pool.shape[0], tokens, pool.shape[3]), format.dtype)
            for kind, pool in cache.entries.items()
        }
        return steps.Block(entries, jax.ShapeDtypeStruct((), np.uint32), jax.ShapeDtypeStruct((), np.bool_))  # type: ignore[arg-type]

    def export(self, state: ServingState, slot: int, start: int) -> steps.Block:
        """`export_step` for the tokens of a slot from `start` on."""
        return self._export(state, np.int32(slot), np.int32(start), self._kv_scales)

    def quarantine(self, state: ServingState, slots: np.ndarray, kept: np.ndarray) -> tuple[ServingState, jax.Array]:
        """`quarantine_step`, with the scales of the checkpoint."""
        return self._quarantine(state, slots, self._create_scales(self._kv_scales), kept)


def on_copies(program: Callable) -> Callable:
    """`program` on copies of its host arrays that nobody else has. On the CPU jax may read a numpy array where it lies,
    and only when the step runs: whoever wrote to it after the call would change the step (fault 8)."""

    def copied(argument):
        if isinstance(argument, SamplingState):
            return jax.tree.map(copied, argument)
        return argument.copy() if isinstance(argument, np.ndarray) else argument

    def run(*arguments):
        return program(*map(copied, arguments))

    run.lower = getattr(program, "lower", None)  # type: ignore[attr-defined]
    return run


def checked(step: Callable, level: str, *static) -> Callable:
    """`step` behind its check: `(params, state, slots, *inputs)` -> what `step` returns. At the level `off` every slot
    passes."""

    def run(params: Params, state: ServingState, slots, *inputs):
        verified = steps.verify_step(state, slots) if level != "off" else slots >= 0
        return step(*static, params, state, slots, *inputs, verified)

    run.__name__ = step.__name__  # the name in profiles
    return run


def create_state(model: ModelConfig, config: EngineConfig, kv_scales) -> ServingState:
    cache = KVCache.create(
        model.attention.entries, model.cache_layers, config.num_pages, config.page_size, config.precision.kv, kv_scales
    )
    pages = AllocatorState.create(config.num_pages, config.max_slots, config.max_pages_per_slot, config.page_size)
    owners = Owners.create(config.num_pages, config.max_slots) if config.integrity != "off" else None
    digests = Digests.create(cache, config.max_slots, config.digest_pages) if config.integrity == "digest" else None
    return ServingState(cache, pages, SamplingState.create(config.max_slots), owners, digests)


def block_shardings(model: ModelConfig, mesh: Mesh) -> steps.Block:
    """Blocks are split over devices as the pages are."""
    *_, width = cache_sharding(model, mesh).spec or (None,)
    rows = NamedSharding(mesh, P(None, None, width))
    return steps.Block(dict.fromkeys(model.attention.entries, rows), replicated(mesh), replicated(mesh))  # type: ignore[arg-type]


def state_shardings(model: ModelConfig, state: ServingState, mesh: Mesh) -> ServingState:
    """Pages are split as `cache_sharding` says; everything else is small and replicated."""
    everywhere = jax.tree.map(lambda _: replicated(mesh), state)
    entries = {kind: cache_sharding(model, mesh) for kind in state.cache.entries}
    return dataclasses.replace(everywhere, cache=dataclasses.replace(everywhere.cache, entries=entries))
