"""Flax NNX modules of the decoder. Calls are pure: no module changes its state, precision is a property of the leaves.

Dimension letters: B rows of a batch, T tokens of a row, N = B*T tokens, D hidden, H heads, C latent width, L layers,
E experts, K experts a token, F intermediate width, V vocabulary, M pages of a slot, S cached tokens.
"""
