"""Where a model's scales of FP8 pages are kept: `kv_scales.json` in its folder (beside a GGUF file, under the file's
own name), or the tensors `k_scale` and `v_scale` of a published checkpoint.

In both, an entry is stored as `x / scale`. A file that was calibrated here goes before what was published.
"""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxinfer.checkpoints.tensors import Tensors, read_json
from jaxinfer.checkpoints.watch import Watch
from jaxinfer.config import GQAConfig, ModelConfig
from jaxinfer.errors import UserError

FILE = "kv_scales.json"
Scales = dict[str, Float[Array, " layers"]]
PUBLISHED = re.compile(r"model\.layers\.(\d+)\.self_attn\.(?:attn\.|[kv]_proj\.)?([kv])_scale$")
"""What compressed-tensors and vLLM call a layer's scale of keys or values."""
KINDS = {"k": "key", "v": "value"}


def place(model: Path) -> Path:
    """The file of scales of a model's folder or GGUF file."""
    return model.with_suffix(f".{FILE}") if model.suffix == ".gguf" else model / FILE


def save(path: Path, scales: Mapping[str, jax.Array], about: Mapping[str, Any]) -> None:
    """Write the file whole or not at all; `about` says how the scales were found. UserError where it can't be."""
    said = {"kv_format": "fp8_e4m3", "scales": {k: np.asarray(v).tolist() for k, v in scales.items()}, **about}
    draft = path.with_name(f".{path.name}")
    try:
        draft.write_text(json.dumps(said, indent=1) + "\n")
        draft.replace(path)
    except OSError as error:
        raise UserError(f"can't write to {path}: {error.strerror}") from None


def read(path: Path, config: ModelConfig) -> Scales:
    """Scales `[layers]` by kind. UserError where the file lacks some, or has some that this model hasn't."""
    said = read_json(path)
    scales = said.get("scales") if isinstance(said, dict) else None
    if not isinstance(scales, dict) or said.get("kv_format") != "fp8_e4m3":
        raise UserError(f"{path} holds no scales of fp8_e4m3 pages; make it with: python -m jaxinfer.run calibrate")
    if scales.keys() != config.attention.entries.keys():
        raise UserError(f"{path} has scales of {_names(scales)}; the model keeps {_names(config.attention.entries)}")
    for kind, values in scales.items():
        layers = config.cache_layers[kind]
        if not isinstance(values, list) or len(values) != layers:
            raise UserError(f"{path}: the scales of {kind} are not one for each of the model's {layers} layers")
        for layer, value in enumerate(values):
            _check(value, f"{path}: the scale of {kind} in layer {layer}")
    return {kind: jnp.array(values, jnp.float32) for kind, values in scales.items()}


def published(
    config: ModelConfig, tensors: Tensors, names: Mapping[str, str], promised: bool, watch: Watch
) -> Scales | None:
    """The scales among a checkpoint's tensors, or None where it has none. `names`: those the table knows, to the
    file's; `promised`: whether config.json says that there are some. UserError where one is missing or none can be
    (a tensor that is no scale)."""
    found = {(KINDS[m[2]], int(m[1])): name for name in names if (m := PUBLISHED.match(name))}
    found = {place: name for place, name in found.items() if place[1] < config.layers}
    if not isinstance(config.attention, GQAConfig):
        if found or promised:
            watch.note("published scales of keys and values are not those of latents; FP8 pages have scale 1")
        return None
    if not found and not promised:
        return None
    scales: dict[str, list[float]] = {}
    for kind in config.attention.entries:
        for layer in range(config.layers):
            if (kind, layer) not in found:
                why = "others have one" if found else "config.json says that KV pages have static scales"
                raise UserError(f"layer {layer} has no {kind[0]}_scale, and {why}")
            scales.setdefault(kind, []).append(_one(tensors, names[found[kind, layer]]))
    return {kind: jnp.array(values, jnp.float32) for kind, values in scales.items()}


def is_published(name: str) -> bool:
    """Whether the tensor is a scale of keys or values."""
    return PUBLISHED.match(name) is not None


def promises(values: Mapping[str, Any]) -> bool:
    """Whether config.json says that the checkpoint has static scales of KV entries. UserError where they are of another
    kind than one e4m3 scale a layer."""
    text = values.get("text_config")
    said = values.get("quantization_config") or (text.get("quantization_config") if isinstance(text, Mapping) else None)
    scheme = said.get("kv_cache_scheme") if isinstance(said, Mapping) else None
    if scheme is None:
        return False
    expected = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor"}
    for name, value in expected.items():
        if not isinstance(scheme, Mapping) or scheme.get(name, value) != value:
            found = scheme.get(name) if isinstance(scheme, Mapping) else scheme
            where = f"quantization_config.kv_cache_scheme.{name}"
            raise UserError(f"field {where} is {found!r}; only {value!r} is supported")
    return not scheme.get("dynamic", False)


def _one(tensors: Tensors, name: str) -> float:
    entry = tensors.entries[name]
    if math.prod(entry.shape) != 1:
        shape = list(entry.shape)
        raise UserError(f"{entry.file}: tensor {name} has shape {shape}; only one scale a layer is supported")
    value = float(tensors.read(name).astype(np.float32).reshape(()))
    _check(value, f"{entry.file}: tensor {name}")
    return value


def _check(value: Any, what: str) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not (math.isfinite(value) and np.float32(value) > 0):
        raise UserError(f"{what} is {value!r}, no scale")


def _names(kinds) -> str:
    return ", ".join(sorted(map(str, kinds))) or "nothing"
