"""The one table from logical axes of arrays to axes of the device mesh; axes that are not named are replicated."""

RULES = {"heads": "tp", "kv_heads": "tp", "mlp": "tp", "expert_mlp": "tp", "vocab": "tp"}
