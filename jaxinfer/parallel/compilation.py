"""Compiled programs kept on disk between runs, so that only the first start on a machine compiles."""

import os
from pathlib import Path

import jax

MAX_BYTES = 512 << 20


def use_compilation_cache() -> None:
    """Keep compiled programs in `$XDG_CACHE_HOME/jaxinfer` (usually ~/.cache), at most MAX_BYTES of them, the least
    recently used dropped. A folder that jax has been told of (JAX_COMPILATION_CACHE_DIR) is used instead, and
    JAX_ENABLE_COMPILATION_CACHE=0 turns it off. Harmless where the folder can't be written."""
    if jax.config.values["jax_compilation_cache_dir"] or not jax.config.values["jax_enable_compilation_cache"]:
        return
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxinfer"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    if not os.access(folder, os.W_OK):
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_compilation_cache_max_size", MAX_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
