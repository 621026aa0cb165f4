"""Tasks with checkable answers and the scores computed from them."""
