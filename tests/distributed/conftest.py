"""The small random model as a checkpoint, and processes that serve it."""

import shutil
from pathlib import Path

import pytest

from jaxinfer.checkpoints import orbax
from jaxinfer.checkpoints.model import EMBEDDED
from jaxinfer.distributed.fleet import Fleet
from jaxinfer.distributed.layout import Layout, WorkerSpec, free_ports
from jaxinfer.distributed.router import Router
from tests.engine.conftest import small_model

__all__ = ["small_model"]  # a fixture of the engine's tests
FLOAT32 = {"weights": "f32", "kv": "f32"}
SHARED = {"page_size": 4, "max_context": 64, "transfer_tokens": 8, "pull_timeout_s": 3.0, "request_timeout_s": 60.0}


@pytest.fixture(scope="session")
def checkpoint(small_model, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    orbax.save(folder, small_model.config, small_model.params, small_model.kv_scales)
    shutil.copy(EMBEDDED["tiny"] / "tokenizer.json", folder)
    return folder


@pytest.fixture(scope="session")
def environment(tmp_path_factory) -> dict[str, str]:
    """One device a process; a cache of compiled programs that the workers share, so that a restarted one is quick."""
    cache = str(tmp_path_factory.mktemp("compiled"))
    return {"XLA_FLAGS": "", "JAX_ENABLE_COMPILATION_CACHE": "1", "XDG_CACHE_HOME": cache}


@pytest.fixture(scope="module")
def deployment(checkpoint, environment):
    """Two prefill workers and one decode worker, and the router in front."""
    ports = free_ports(3)
    roles = [("prefill", 16), ("prefill", 16), ("decode", 16)]  # a decode pool that runs out now and then
    specs = [
        WorkerSpec(role, port, num_pages=pages, max_slots=4, **FLOAT32)
        for (role, pages), port in zip(roles, ports, strict=True)
    ]
    layout = Layout(tuple(specs), model=str(checkpoint), **SHARED)
    with Fleet(layout, environment) as fleet:
        router = Router(layout, start_s=500)
        yield fleet, router
        router.close(stop=True)
