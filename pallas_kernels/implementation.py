"""Which implementation of an op runs: the reference in jnp, or its Triton kernel, compiled or interpreted."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax

IMPLEMENTATIONS = ("auto", "reference", "triton", "interpret")
LIMIT = 2**31  # elements from which Pallas' 32-bit offsets read as negative
WIDE = 2**32  # bytes beyond which it takes 64-bit offsets


def run(
    implementation: str, reference: Callable, kernel: Callable[..., Any], *operands: jax.Array, problem: str | None
):
    """Run one implementation on `operands`.

    "reference": `reference(*operands)`. "triton": `kernel(*operands, interpret=False)`, for CUDA GPUs. "interpret": the
    same kernel by Pallas' interpreter, on any platform. "auto": the kernel where the program is lowered for CUDA, the
    reference elsewhere, with no branch left in the program.

    `problem` says in one line why the kernel can't take these operands, or is None. ValueError with that line where the
    kernel is asked for, by name or by the platform; elsewhere the reference takes them.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"no implementation {implementation!r}; use {', '.join(IMPLEMENTATIONS)}")
    if implementation == "reference":
        return reference(*operands)
    if problem and (implementation != "auto" or jax.default_backend() == "gpu"):
        raise ValueError(problem)
    if implementation == "auto":
        if problem:
            return reference(*operands)
        return jax.lax.platform_dependent(*operands, cuda=partial(kernel, interpret=False), default=reference)
    return kernel(*operands, interpret=implementation == "interpret")


def not_addressable(name: str, array: jax.Array) -> str | None:
    """Triton kernels get 32-bit element offsets up to 4 GiB, and those from 2^31 on would read as negative ones: so
    one-byte arrays between 2 and 4 GiB are refused (see `_compute_offsets_from_indices` in Pallas' Triton lowering)."""
    if array.size > LIMIT and array.size * array.dtype.itemsize <= WIDE:
        return f"{name} of {array.size / 2**30:.2f} GiB in one-byte elements: kernels address up to 2 GiB or over 4 GiB"
    return None


def first_problem(*problems: str | None) -> str | None:
    """The first that is one."""
    return next((problem for problem in problems if problem), None)
