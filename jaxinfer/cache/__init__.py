"""The paged KV cache: `pages` (the pool), `allocator` (who owns which page), `integrity` (is it still so), `digest`
(are its bytes those that were written), `owners` (who had it before), `quarantine` (what becomes of one that failed),
`sharing` (pages that outlive their slot) and `prefix` (which texts they begin).
"""

from jaxinfer.cache import allocator, integrity, pages
from jaxinfer.cache.allocator import INVALID, AllocatorState, Grant

__all__ = ["INVALID", "AllocatorState", "Grant", "allocator", "integrity", "pages"]
