"""Causal attention over paged key-value entries, in prefill chunks and decode: latent (MLA) and grouped-query (GQA)."""

from pallas_kernels.paged_attention.api import gqa_attention, mla_attention
from pallas_kernels.paged_attention.chosen import chosen_mla_attention

__all__ = ["chosen_mla_attention", "gqa_attention", "mla_attention"]
