"""How a step's kernels run: which implementation, and on which mesh their operands are split.

XLA splits over devices what it computes itself, and can't split a kernel: each call is wrapped in `shard_map`, by the
table that places the arrays. The setting holds while a step is traced, so model code passes nothing on.
"""

import contextvars
import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxinfer.errors import UserError
from jaxinfer.parallel.rules import RULES
from pallas_kernels.implementation import IMPLEMENTATIONS


@dataclass(frozen=True)
class Kernels:
    """`implementation`: `reference`, plain jnp that XLA compiles; `triton`, the kernels, for GPUs; `interpret`, the
    kernels run by an interpreter anywhere, to test them."""

    implementation: str = "reference"
    mesh: Mesh | None = None

    @classmethod
    def choose(cls, name: str, mesh: Mesh | None) -> "Kernels":
        """`auto` is `triton` on a GPU and `reference` elsewhere. UserError for an unknown name."""
        if name not in IMPLEMENTATIONS:
            raise UserError(f"unknown kernels {name!r}; use {', '.join(IMPLEMENTATIONS)}")
        auto = "triton" if jax.default_backend() == "gpu" else "reference"
        return cls(auto if name == "auto" else name, mesh)

    @property
    def used(self) -> bool:
        """Whether kernels run at all."""
        return self.implementation != "reference"

    def axis(self, logical: str, *sizes: int) -> str | None:
        """The mesh axis that `logical` is split over: none where it does not divide all of `sizes`, which keeps such
        arrays whole on every device."""
        name = RULES.get(logical)
        if self.mesh is None or name is None or any(size % self.mesh.shape[name] for size in sizes):
            return None
        return name

    def split(self, call: Callable, operands: tuple[P, ...], result: P, over: str | None = None) -> Callable:
        """`call` on each device with its part of the operands; `over`: the mesh axis along which results are summed,
        in float32. The reference is left to XLA to split."""
        call = functools.partial(call, implementation=self.implementation)
        if not self.used or self.mesh is None or self.mesh.size == 1:
            return call

        def part(*arrays):
            out = call(*arrays)
            return out if over is None else jax.lax.psum(out.astype(jnp.float32), over).astype(out.dtype)

        return jax.shard_map(part, mesh=self.mesh, in_specs=operands, out_specs=result, check_vma=False)

    def traced(self, step: Callable) -> Callable:
        """`step` with this setting while it is traced."""

        @functools.wraps(step)
        def run(*operands):
            token = _current.set(self)
            try:
                return step(*operands)
            finally:
                _current.reset(token)

        return run


_current: contextvars.ContextVar[Kernels] = contextvars.ContextVar("kernels", default=Kernels())  # noqa: B039


def current() -> Kernels:
    """The setting of the step that is being traced."""
    return _current.get()
