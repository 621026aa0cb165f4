"""The environment of the tests: the CPU, seen by jax as 8 devices. Set here because jax reads it as it starts.

There is no compilation cache on disk: a compiled program that is read back can lack its memory analysis, and a test
that counts compilations would depend on the run before.
"""

import os

DEVICES = "--xla_force_host_platform_device_count"

if DEVICES not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {DEVICES}=8".strip()
os.environ.setdefault("JAX_ENABLE_COMPILATION_CACHE", "0")
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # JAX_PLATFORMS=cuda runs the tests on a GPU

import jax
import pytest
from hypothesis import settings

from jaxinfer.evaluation.faults import load

# Compilation makes a property's first example slow and says nothing about the property; pytest's timeout bounds it all.
settings.register_profile("jaxinfer", deadline=None, print_blob=True)
settings.load_profile("jaxinfer")


@pytest.fixture(scope="session", autouse=True)
def _eight_devices() -> None:
    """Stop early if something started jax before its environment was set."""
    if os.environ["JAX_PLATFORMS"] == "cpu" and DEVICES + "=8" in os.environ["XLA_FLAGS"]:
        assert jax.device_count() == 8


@pytest.fixture(scope="session")
def random_params():
    """Parameters of a configuration in float32, drawn without compiling anything."""
    return load.random_params
