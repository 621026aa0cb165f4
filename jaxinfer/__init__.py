"""jaxinfer: a JAX inference engine for mixture-of-experts language models with long contexts."""
