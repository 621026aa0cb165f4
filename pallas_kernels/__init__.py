"""Operations of the decoder with more than one implementation: one folder an op, imports jax and nothing of jaxinfer."""
