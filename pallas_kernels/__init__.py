"""Operations of the decoder with several implementations: one folder an op, imports jax and nothing of jaxinfer."""
