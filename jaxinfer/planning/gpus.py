"""GPU: the ceilings of one GPU, against which floors are worked out."""

from dataclasses import dataclass
from typing import Self

from jaxinfer.errors import UserError


@dataclass(frozen=True)
class GPU:
    """What one GPU has: memory in bytes, HBM bandwidth in bytes/s, dense tensor-core FLOP/s, NVLink in bytes/s one way.

    Memory and bandwidth are what the driver reports, as XLA's target descriptions record it (openxla/xla,
    xla/backends/gpu/target_config/specs); FLOP/s and NVLink are NVIDIA's data sheets, without sparsity, NVLink halved
    since the sheets add both directions. A GPU without FP8 tensor cores multiplies FP8 at its bf16 rate.
    """

    name: str
    memory: int
    bandwidth: float
    bf16_flops: float
    fp8_flops: float
    link: float

    @classmethod
    def find(cls, name: str) -> Self:
        """The GPU called `name`, in any case. UserError names those there are."""
        if name.lower() not in GPUS:
            raise UserError(f"unknown GPU {name!r}; there are: {', '.join(sorted(GPUS))}")
        return GPUS[name.lower()]  # type: ignore[return-value]

    def flops(self, fp8: bool) -> float:
        """FLOP/s of a matrix product whose operands are e4m3 (`fp8`), or expanded to bf16."""
        return self.fp8_flops if fp8 else self.bf16_flops


GPUS: dict[str, GPU] = {
    "a100": GPU("a100", 85_100_068_864, 2.039e12, 312e12, 312e12, 300e9),
    "h100": GPU("h100", 84_942_979_072, 3.352e12, 989e12, 1979e12, 450e9),
    "h200": GPU("h200", 150_754_820_096, 4.8e12, 989e12, 1979e12, 450e9),
    "b200": GPU("b200", 191_514_411_008, 7.672e12, 2250e12, 4500e12, 900e9),
}
"""The 80 GB SXM form of A100 and H100, and the SXM forms of H200 and B200."""
