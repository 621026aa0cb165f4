"""Number formats of weights and key-value pages, and the tensors that carry them."""
