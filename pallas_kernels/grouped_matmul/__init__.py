"""Matrix products of a sorted token list with one matrix a group: the routed experts."""

from pallas_kernels.grouped_matmul.reference import grouped_matmul

__all__ = ["grouped_matmul"]
