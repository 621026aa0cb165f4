"""Faults of the host: buffers it writes to too early, requests that leave at the wrong moment."""

import numpy as np

from jaxinfer.evaluation.faults.fault import Fault, harmless
from jaxinfer.evaluation.faults.scene import Scene


def buffer_overwritten(scene: Scene) -> bool:
    """What the next prefill and admission were given is overwritten as soon as the step is enqueued."""
    programs = scene.engine.programs
    for name in ("prefill", "admit"):
        program = getattr(programs, name)

        def once(*arguments, program=program, name=name):
            setattr(programs, name, program)
            given = [aligned(a) if isinstance(a, np.ndarray) else a for a in arguments]
            result = program(*given)
            for leaf in (a for a in given if isinstance(a, np.ndarray)):
                leaf[...] = scene.rng.integers(0, 4, leaf.shape).astype(leaf.dtype)
            return result

        setattr(programs, name, once)
    return True


def aligned(array: np.ndarray) -> np.ndarray:
    """A copy at a place in memory from which jax reads without a copy of its own."""
    raw = np.zeros(array.nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    copy = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def cancelled(scene: Scene) -> bool:
    """The victim is cancelled with steps in flight; others take its pages."""
    scene.engine.cancel(scene.victim.id)
    return True


HOST = (
    Fault("host buffer overwritten", "inputs of a step that is enqueued", buffer_overwritten, (8,), harmless()),
    Fault("cancelled", "a request leaves with steps in flight", cancelled, (9,), harmless()),
)
