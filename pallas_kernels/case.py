"""A case: one call of an op at given shapes, which its tests, the compile table and the benchmarks share."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import jax


@dataclass(frozen=True)
class Floor:
    """What a call can't do without: bytes to and from memory, and floating-point operations."""

    bytes: float
    flops: float


@dataclass(frozen=True)
class Case(ABC):
    """`kernel` is the name its GPU kernel is launched under, `tolerance` the largest error of a result over the largest
    result, `tensor_core` the instruction that its products compile to."""

    name: str
    kernel: ClassVar[str]
    tensor_core: ClassVar[tuple[str, ...]]

    @property
    @abstractmethod
    def tolerance(self) -> float: ...

    @abstractmethod
    def operands(self, key: jax.Array) -> tuple[jax.Array, ...]:
        """Random operands of a call, those that nothing may read filled with NaN. The first is the layer index."""

    @abstractmethod
    def call(self, *operands: Any, implementation: str) -> jax.Array: ...

    @abstractmethod
    def floor(self) -> Floor: ...

    @abstractmethod
    def requested_bytes(self) -> float:
        """Bytes that the kernel's programs ask for and write in all: the floor's, what several programs read again
        and partial results both ways, much of which a GPU's cache serves."""

    @abstractmethod
    def turn_bytes(self) -> float:
        """Bytes from memory of one turn of a program's inner loop."""

    def structs(self) -> tuple[Any, ...]:
        """The operands' shapes and types."""
        return jax.eval_shape(self.operands, jax.random.key(0))
