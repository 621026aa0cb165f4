"""A small random model, an engine that serves it, and plain logits to hold against what it serves."""

from dataclasses import dataclass, field

import jax
import numpy as np
import pytest

from jaxinfer.cache import integrity
from jaxinfer.checkpoints.model import Model
from jaxinfer.config import EngineConfig, Precision
from jaxinfer.engine import Completion, Engine, Event
from jaxinfer.evaluation.faults import load
from jaxinfer.models.decoder import forward

SMALL = load.CONFIG
FLOAT32 = Precision.parse("f32", "f32")
ENGINE = EngineConfig(
    precision=FLOAT32,
    page_size=4,
    num_pages=64,
    max_slots=4,
    max_context=64,
    decode_buckets=(4,),
    prefill_buckets=((2, 8),),
    max_queue=16,
)


@pytest.fixture(scope="session")
def small_model() -> Model:
    return load.random_model()


@dataclass
class Served:
    """An engine and the logits that it drew from, by request and place in the output."""

    engine: Engine
    logits: dict[int, list[np.ndarray]] = field(default_factory=dict)

    def run(self, *earlier: Event) -> dict[int, Completion]:
        """Serve until idle; the completions by request, those in `earlier` events too. Every page must have come
        back."""
        done = {e.request: e.completion for e in (*earlier, *self.engine.run()) if e.completion}
        assert_idle(self.engine)
        return done


def serve(model: Model, config: EngineConfig) -> Served:
    """An engine that records logits."""
    served = Served(None)  # type: ignore[arg-type]
    served.engine = Engine(model, config, lambda r, place, row: served.logits.setdefault(r, []).append(row.copy()))
    return served


@pytest.fixture(scope="session")
def served(small_model) -> Served:
    """One engine for many tests, idle between them."""
    return serve(small_model, ENGINE)


@pytest.fixture(scope="session")
def short_of_pages(small_model) -> Served:
    """An engine whose pool holds far less than its slots could use."""
    return serve(small_model, ENGINE.replace(num_pages=20))


def assert_idle(engine: Engine) -> None:
    """No request, no page held, and the host's counts agree with the device's."""
    state = engine.state.allocator
    assert integrity.check_invariants(state) == []
    assert int(state.free_count) == engine.config.num_pages == engine.scheduler.free_pages
    assert sorted(engine.scheduler.free_slots) == list(range(engine.config.max_slots))
    assert not engine.busy


def plain_logits(model: Model, params, tokens: list[int]) -> np.ndarray:
    """Teacher-forced logits [n, V] of one text by itself: no cache, no batch."""
    n = len(tokens)
    width = -(-n // 64) * 64  # few shapes to compile
    padded = np.zeros(width, np.int32)
    padded[:n] = tokens
    segments = (np.arange(width) < n).astype(np.int32)
    return np.asarray(_forward(model.config, params, padded[None], np.arange(width)[None], segments[None]))[0, :n]


_forward = jax.jit(lambda config, *args: forward(config, *args)[0], static_argnums=0)


def prompts(seed: int, lengths) -> list[list[int]]:
    """Random prompts of ordinary tokens."""
    rng = np.random.default_rng(seed)
    return [rng.integers(7, 1024, n).tolist() for n in lengths]
