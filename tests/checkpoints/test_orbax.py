"""A checkpoint comes back as it was saved; a folder that is none is refused in one line that names what is wrong."""

import gc
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.checkpoints import orbax
from jaxinfer.config import GQAConfig, MLAConfig, ModelConfig, MoEConfig, RopeConfig, YarnConfig
from jaxinfer.errors import UserError

CONFIG = ModelConfig(
    name="small",
    vocab=31,
    hidden=16,
    layers=3,
    dense_layers=1,
    dense_intermediate=24,
    attention=MLAConfig(2, kv_lora=8, nope_dim=4, rope_dim=2, v_dim=6, q_lora=8),
    moe=MoEConfig(experts=4, top_k=2, intermediate=8, scaling=2.5),
    rope=RopeConfig(interleaved=True, yarn=YarnConfig(factor=4.0, original_max_position=16)),
    max_position=64,
)


def tensors(config: ModelConfig, random_params):
    """Parameters as they are trained, in float32, and a scale for each layer and kind."""
    scales = {kind: jnp.arange(1.0, config.layers + 1) / 7 for kind in config.attention.entries}
    return random_params(config), scales


@pytest.fixture(scope="module")
def saved(tmp_path_factory, random_params):
    folder = tmp_path_factory.mktemp("checkpoint") / "small"
    orbax.save(folder, CONFIG, *tensors(CONFIG, random_params))
    return folder


@pytest.fixture
def copy(saved, tmp_path):
    """A copy to be damaged."""
    return shutil.copytree(saved, tmp_path / "copy")


def refused(folder, *words: str) -> None:
    """Reading `folder` is one line of UserError with all `words`."""
    with pytest.raises(UserError) as caught:
        orbax.restore(folder, orbax.read_config(folder))
    message = str(caught.value)
    assert "\n" not in message and len(message) < 500
    assert all(word in message for word in (str(folder), *words)), message


# ---- round trips


def check_round_trip(folder, config, params, scales):
    assert orbax.read_config(folder) == config
    found, found_scales = orbax.restore(folder, config)

    def kept(value, original):
        """bfloat16, but for what is never narrowed."""
        assert isinstance(value, jax.Array) and value.dtype in (jnp.bfloat16, jnp.float32)
        expected = np.asarray(original).astype(value.dtype)
        np.testing.assert_array_equal(np.asarray(value), expected)

    jax.tree.map(kept, found, params)
    assert found["embedding"].dtype == jnp.bfloat16
    jax.tree.map(np.testing.assert_array_equal, found_scales, scales)
    return found


def test_round_trip(saved, random_params):
    found = check_round_trip(saved, CONFIG, *tensors(CONFIG, random_params))
    assert found["sparse"]["mlp"]["router"]["bias"].dtype == jnp.float32
    assert sorted(path.name for path in saved.iterdir()) == ["arrays", "config.json"]


def test_round_trip_of_another_kind_of_model_over_the_first(copy, random_params):
    """Saving replaces what was there."""
    config = CONFIG.replace(
        name="other", layers=2, dense_layers=2, moe=None, attention=GQAConfig(4, 2, 4, qk_norm=True), rope=RopeConfig()
    )
    params, scales = tensors(config, random_params)
    params = jax.tree.map(lambda a: a.astype(jnp.bfloat16), params)
    orbax.save(copy, config, params, scales)
    check_round_trip(copy, config, params, scales)


# ---- tensors that do not fit


def without(tree: dict, *path: str) -> dict:
    name, *rest = path
    return {k: without(v, *rest) if k == name else v for k, v in tree.items() if k != name or rest}


def test_a_missing_tensor_is_named(tmp_path, random_params):
    params, scales = tensors(CONFIG, random_params)
    orbax.save(tmp_path / "a", CONFIG, without(params, "sparse", "mlp", "router", "bias"), scales)
    refused(tmp_path / "a", "tensor params/sparse/mlp/router/bias is missing")
    orbax.save(tmp_path / "a", CONFIG, params, {})
    refused(tmp_path / "a", "tensor kv_scales/latent is missing")


def test_an_extra_tensor_is_named(tmp_path, random_params):
    params, scales = tensors(CONFIG, random_params)
    orbax.save(tmp_path / "a", CONFIG, params | {"indexer": {"weight": jnp.ones(3)}}, scales)
    refused(tmp_path / "a", "tensor params/indexer/weight is not part of the model")


def edit(folder, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab": 32}, ("tensor params/embedding has shape [31, 16]", "[32, 16]")),
        ({"layers": 4}, ("tensor kv_scales/latent has shape [3]", "[4]")),
        ({"dense_intermediate": 25}, ("tensor params/dense/mlp/down/weight has shape [1, 24, 16]", "[1, 25, 16]")),
    ],
)
def test_a_tensor_of_another_shape_is_named(copy, changes, words):
    edit(copy, **changes)
    refused(copy, *words)


def test_a_configuration_with_other_tensors_is_refused(copy):
    edit(copy, dense_layers=0)
    refused(copy, "tensor params/dense/", "is not part of the model")


# ---- folders


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is not JSON"),
        ("{", "is not JSON"),
        ("\xff\xfe", "is not JSON"),
        ("null", "not an object"),
        ("[1]", "not an object"),
        ("{}", "field name is missing"),
    ],
)
def test_a_bad_config_file_is_named(copy, text, words):
    (copy / "config.json").write_bytes(text.encode("latin-1"))
    refused(copy, "config.json", words)


def test_unknown_and_missing_fields_are_named(copy):
    edit(copy, hiden=3)
    refused(copy, "config.json", "unknown field hiden")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k not in ("hiden", "hidden")}))
    refused(copy, "config.json", "field hidden is missing")


def test_a_folder_without_its_parts_is_none(copy, tmp_path):
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "empty", tmp_path / "nowhere"):
        refused(folder, "is not a checkpoint: it has no config.json")
    shutil.rmtree(copy / "arrays")
    refused(copy, "is not a checkpoint: it has no arrays folder")
    (copy / "arrays").mkdir()
    refused(copy, "arrays cannot be read")
    (copy / "config.json").unlink()
    (copy / "config.json").mkdir()
    refused(copy, "config.json cannot be read")


def data_files(folder):
    """All that hold tensors: which of them the manifest refers to differs from one save to the next."""
    return [path for path in (folder / "arrays").rglob("d/*") if path.is_file()]


def lose(folder):
    for path in data_files(folder):
        path.unlink()


def cut(folder):
    for path in data_files(folder):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def scribble(folder):
    for path in data_files(folder):
        data = bytearray(path.read_bytes())
        data[len(data) // 4 : len(data) // 2] = bytes(len(data) // 2 - len(data) // 4)
        path.write_bytes(data)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # futures that the failed read left
@pytest.mark.parametrize(
    "damage",
    [
        lose,
        cut,
        scribble,
        lambda folder: (folder / "arrays" / "_METADATA").unlink(),
        lambda folder: (folder / "arrays" / "_METADATA").write_text("{"),
        lambda folder: (folder / "arrays" / "manifest.ocdbt").write_bytes(b""),
    ],
    ids=["file gone", "file cut", "file overwritten", "no metadata", "bad metadata", "empty manifest"],
)
def test_a_damaged_folder_is_refused(copy, damage):
    damage(copy)
    refused(copy)
    gc.collect()
