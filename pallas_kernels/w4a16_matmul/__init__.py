"""Matrix products of 16-bit activations with 4-bit weights (W4A16), plain and grouped by expert."""

from pallas_kernels.w4a16_matmul.api import w4a16_grouped_matmul, w4a16_matmul
from pallas_kernels.w4a16_matmul.layout import dequantize, pack, unpack

__all__ = ["dequantize", "pack", "unpack", "w4a16_grouped_matmul", "w4a16_matmul"]
