"""Local Hugging Face folders: config.json, safetensors with or without an index, tokenizer and chat template."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from jax.sharding import Mesh

from jaxinfer.checkpoints import kv_scales, loading, mapping
from jaxinfer.checkpoints.huggingface_config import model_config
from jaxinfer.checkpoints.tensors import INDEX, SafeTensors, read_json
from jaxinfer.checkpoints.watch import Watch
from jaxinfer.config import ModelConfig
from jaxinfer.errors import UserError
from jaxinfer.models.decoder import Params
from jaxinfer.quantization.formats import FP8_BLOCK, INT4_GROUPS

T = TypeVar("T")


def is_folder(folder: Path) -> bool:
    """Whether the folder is laid out as Hugging Face's are: by its weights, or, where those are missing, by what its
    config.json says."""
    if (folder / INDEX).is_file() or any(folder.glob("*.safetensors")):
        return True
    try:
        return '"model_type"' in (folder / "config.json").read_text()
    except (OSError, UnicodeDecodeError):
        return False


def read_config(folder: Path) -> tuple[ModelConfig, dict[str, Any]]:
    """The model and all of config.json. UserError where the decoder does not compute such a model, or its weights are
    quantised in a way that isn't read."""
    path = folder / "config.json"
    values = read_json(path)
    if not isinstance(values, dict):
        raise UserError(f"{path} is no object with fields")
    try:
        check_quantization(values)
        return model_config(values, folder.resolve().name), values
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def load(folder: Path, mesh: Mesh | None = None, watch: Watch | None = None) -> tuple[ModelConfig, Params]:
    """Configuration and parameters. UserError in one line that names the file and the tensor."""
    config, _ = read_config(folder)
    return config, _named(folder, lambda: loading.load(config, SafeTensors(folder), mesh, watch))


def load_kv_scales(folder: Path, watch: Watch | None = None) -> kv_scales.Scales | None:
    """The scales of FP8 pages that were published with the weights, if any. UserError where config.json says that there
    are some, or some layers have them, and one is missing."""
    config, values = read_config(folder)

    def find() -> kv_scales.Scales | None:
        tensors = SafeTensors(folder)
        names = mapping.plain_names(tensors.entries)
        return kv_scales.published(config, tensors, names, kv_scales.promises(values), watch or Watch())

    return _named(folder, find)


def _named(folder: Path, work: Callable[[], T]) -> T:
    """What `work` gives; its UserError says which folder it is about."""
    try:
        return work()
    except UserError as error:
        said = str(error)
        raise UserError(said if str(folder) in said else f"{folder}: {said}") from None


def check_quantization(values: Mapping[str, Any]) -> None:
    """UserError unless the weights are plain, FP8 in 128x128 blocks, or INT4 as compressed-tensors packs it."""
    text = values.get("text_config")
    said = values.get("quantization_config") or (text.get("quantization_config") if isinstance(text, Mapping) else None)
    if said is None:
        return
    if not isinstance(said, Mapping):
        raise UserError("field quantization_config is no object")
    kv_scales.promises(values)
    method = said.get("quant_method")
    if method == "fp8":
        blocks = [FP8_BLOCK, FP8_BLOCK]
        _expect(said, "quantization_config.", weight_block_size=blocks, fmt="e4m3", activation_scheme="dynamic")
    elif method == "compressed-tensors":
        if said.get("config_groups") or not said.get("kv_cache_scheme"):  # else only KV entries are quantised
            _expect(said, "quantization_config.", format="pack-quantized")
        for name, group in (said.get("config_groups") or {}).items():
            weights, where = group.get("weights") or {}, f"quantization_config.config_groups.{name}.weights."
            _expect(weights, where, num_bits=4, type="int", symmetric=True, strategy="group", actorder=None)
            if weights.get("group_size") not in INT4_GROUPS:
                raise UserError(f"field {where}group_size is {weights.get('group_size')!r}, not one of {INT4_GROUPS}")
    else:
        raise UserError(f"unknown quantisation method {method!r}; there are: compressed-tensors, fp8")


def _expect(values: Mapping[str, Any], where: str, **expected: object) -> None:
    for name, value in expected.items():
        if name in values and values[name] != value:
            raise UserError(f"field {where}{name} is {values[name]!r}; only {value!r} is supported")
