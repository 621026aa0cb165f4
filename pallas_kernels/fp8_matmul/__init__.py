"""Matrix products in block-scaled FP8, plain and grouped by expert."""

from pallas_kernels.fp8_matmul.api import fp8_grouped_matmul, fp8_matmul

__all__ = ["fp8_grouped_matmul", "fp8_matmul"]
