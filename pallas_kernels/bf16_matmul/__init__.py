"""Matrix products of 16-bit activations and weights, read from a stack: plain, grouped by expert, and head by head."""

from pallas_kernels.bf16_matmul.api import bf16_grouped_matmul, bf16_heads_matmul, bf16_matmul, fp8_heads_matmul, takes

__all__ = ["bf16_grouped_matmul", "bf16_heads_matmul", "bf16_matmul", "fp8_heads_matmul", "takes"]
