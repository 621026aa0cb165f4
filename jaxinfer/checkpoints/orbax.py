"""Checkpoint folders: `config.json`, `tokenizer.json` and the arrays in `arrays/`, written by Orbax.

The arrays are `params` (the tree of `models.decoder.parameter_specs`) and `kv_scales` (kind to one scale a layer). A
folder is checked against its configuration before anything is read into memory.
"""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from jaxinfer.config import ModelConfig, config_from_dict, config_to_dict
from jaxinfer.errors import UserError
from jaxinfer.models.decoder import Params, parameter_specs
from jaxinfer.models.parameter import ParameterSpec


def save(folder: Path, config: ModelConfig, params: Params, kv_scales: dict[str, jax.Array]) -> None:
    """Write `config.json` and `arrays/` into `folder`. Old arrays stay until the new are whole."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays, unfinished = folder / "arrays", folder / "arrays.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(unfinished.resolve(), {"params": params, "kv_scales": kv_scales})
    shutil.rmtree(arrays, ignore_errors=True)
    unfinished.rename(arrays)
    (folder / "config.json").write_text(json.dumps(config_to_dict(config), indent=2) + "\n")


def read_config(folder: Path) -> ModelConfig:
    """The configuration of a checkpoint folder. UserError where it is not one."""
    path = folder / "config.json"
    try:
        return config_from_dict(json.loads(path.read_text()))
    except FileNotFoundError:
        raise UserError(f"{folder} is not a checkpoint: it has no config.json") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not JSON: {error}") from None
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def restore(folder: Path, config: ModelConfig) -> tuple[Params, dict[str, jax.Array]]:
    """Parameters and KV scales of a checkpoint. UserError that names the first tensor missing, extra or misshapen."""
    path = (folder / "arrays").resolve()
    if not path.is_dir():
        raise UserError(f"{folder} is not a checkpoint: it has no arrays folder")
    expected = _expected(config)
    try:
        with ocp.PyTreeCheckpointer() as checkpointer:
            _check(folder, checkpointer.metadata(path).item_metadata.tree, expected)
            place = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
            args = jax.tree.map(lambda a: ocp.ArrayRestoreArgs(sharding=place, dtype=a.dtype), expected)
            tree = checkpointer.restore(path, ocp.args.PyTreeRestore(expected, restore_args=args))
    except UserError:
        raise
    except Exception as error:  # whatever Orbax meets in a damaged folder, the user's remedy is the same
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{path} cannot be read: {reason[:200]}") from None
    return tree["params"], tree["kv_scales"]


def _expected(config: ModelConfig) -> dict:
    specs = parameter_specs(config, jnp.bfloat16)
    params = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), specs, is_leaf=lambda x: isinstance(x, ParameterSpec)
    )
    scales = {kind: jax.ShapeDtypeStruct((layers,), jnp.float32) for kind, layers in config.cache_layers.items()}
    return {"params": params, "kv_scales": scales}


def _check(folder: Path, found_tree, expected_tree) -> None:
    named = lambda tree: {  # noqa: E731
        "/".join(str(getattr(k, "key", k)) for k in path): tuple(leaf.shape)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
    found, expected = named(found_tree), named(expected_tree)
    for name in sorted(expected.keys() - found.keys()):
        raise UserError(f"{folder}: tensor {name} is missing")
    for name in sorted(found.keys() - expected.keys()):
        raise UserError(f"{folder}: tensor {name} is not part of the model that config.json describes")
    for name, shape in expected.items():
        if found[name] != shape:
            wrong, right = list(found[name]), list(shape)
            raise UserError(f"{folder}: tensor {name} has shape {wrong}, config.json asks for {right}")
