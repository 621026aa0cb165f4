"""What a benchmark drives: one engine, two workers in this process, or the workers of a layout."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxinfer.checkpoints.model import Model
from jaxinfer.config import EngineConfig, PhasePrecision, Precision
from jaxinfer.distributed.fleet import Fleet
from jaxinfer.distributed.layout import LOCAL_PAIR, Layout
from jaxinfer.distributed.router import Router
from jaxinfer.engine import Engine, Separated
from jaxinfer.evaluation.load.bench import Load, engine_config
from jaxinfer.evaluation.load.driver import Served
from jaxinfer.evaluation.load.lengths import Job


class Opened(NamedTuple):
    """Something to drive, the jobs for it, what decode runs at, and what its table must say of it."""

    engine: Served
    jobs: list[Job]
    config: EngineConfig
    about: dict[str, Any]


@contextlib.contextmanager
def engine_of(
    name: str, load: Load, formats: dict[str, Any], pool: dict[str, Any], options: dict[str, Any]
) -> Iterator[Opened]:
    """An engine of this process for exactly this load, or with phases in `formats` two workers."""
    phases: PhasePrecision | None = formats["phases"]
    model = Model.load(name, options["devices"])
    jobs = load.mix.jobs(load.requests, model.config.vocab, model.config.max_position, load.seed)
    precision = Precision.parse(formats["weight_format"], formats["kv_format"])
    slots = pool["slots"] or load.slots
    config = engine_config(model.config, jobs, precision, slots, pool["num_pages"], pool["budget_mib"], **options)
    engine: Engine | Separated = Separated.of(model, config, phases) if phases else Engine(model, config)
    about = {"model": model.config.name, "compute_dtype": str(np.dtype(model.compute_dtype))}
    yield Opened(engine, jobs, config, about)


@contextlib.contextmanager
def layout_of(name: str, load: Load) -> Iterator[Opened]:
    """A router over the workers of a layout file, which run already, or over a local pair that is started and ended
    here."""
    with contextlib.ExitStack() as stack:
        if name == LOCAL_PAIR:
            layout = Layout.local_pair()
            stack.enter_context(Fleet(layout))
        else:
            layout = Layout.read(Path(name))
        router = Router(layout)
        stack.callback(router.close)
        room = min(layout.max_context, router.model_config.max_position)
        jobs = load.mix.jobs(load.requests, router.model_config.vocab, room, load.seed)
        config = layout.engine_config(layout.of_role("decode")[0])
        about = {"model": router.model_config.name, "layout": name, "workers": [str(w) for w in layout.workers]}
        yield Opened(router, jobs, config, {**about, "jax_here": jax.__version__})
