"""Scales of FP8 pages: published ones are read, calibrated ones kept beside the model, and none is missed in silence
(fault 12)."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.checkpoints import calibration, huggingface, kv_scales
from jaxinfer.checkpoints.model import EMBEDDED, Model
from jaxinfer.checkpoints.watch import Watch
from jaxinfer.errors import UserError
from tests.checkpoints import published
from tests.checkpoints.published import QWEN2, write

SCHEME = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
LAYERS = QWEN2["num_hidden_layers"]


def folder(tmp_path, scales: dict[str, float], scheme=SCHEME, shape=()):
    """A published checkpoint whose tensors include `scales`."""
    tensors = published.qwen2()
    for name, value in scales.items():
        tensors[f"model.layers.{name}"] = np.full(shape, value, np.float32)
    said = {"quantization_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": scheme}} if scheme else {}
    return write(tmp_path / "model", QWEN2 | said, tensors)


def all_scales() -> dict[str, float]:
    names = [(layer, kind) for layer in range(LAYERS) for kind in "kv"]
    return {f"{layer}.self_attn.{kind}_scale": 0.5 + layer + (kind == "v") / 4 for layer, kind in names}


def test_published_scales_are_those_of_the_pages(tmp_path):
    found = huggingface.load_kv_scales(folder(tmp_path, all_scales()))
    np.testing.assert_array_equal(found["key"], 0.5 + np.arange(LAYERS))
    np.testing.assert_array_equal(found["value"], 0.75 + np.arange(LAYERS))


def test_without_any_there_are_none(tmp_path):
    assert huggingface.load_kv_scales(folder(tmp_path, {}, scheme=None)) is None


@pytest.mark.parametrize(
    "change, scheme, says",
    [
        ({"1.self_attn.v_scale": None}, SCHEME, "layer 1 has no v_scale, and others have one"),
        (None, SCHEME, "layer 0 has no k_scale, and config.json says that KV pages have static scales"),
        ({"0.self_attn.k_scale": 0.0}, SCHEME, "is 0.0, no scale"),
        ({"0.self_attn.k_scale": float("nan")}, SCHEME, "is nan, no scale"),
        ({}, SCHEME | {"strategy": "channel"}, "kv_cache_scheme.strategy is 'channel'; only 'tensor' is supported"),
    ],
)
def test_what_is_promised_and_not_there_is_named(tmp_path, change, scheme, says):
    scales = {} if change is None else all_scales() | change
    where = folder(tmp_path, {k: v for k, v in scales.items() if v is not None}, scheme)
    with pytest.raises(UserError) as caught:
        huggingface.load_kv_scales(where, Watch())
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_of_calibrated_scales_goes_before_the_model_s_own(tmp_path):
    own = Model.load("tiny").kv_scales
    mine = {kind: 2 * scale for kind, scale in own.items()}
    file = tmp_path / "scales.json"
    kv_scales.save(file, mine, {"texts": "a.txt"})
    loaded = Model.load("tiny", scales=file).kv_scales
    np.testing.assert_allclose(loaded["latent"], mine["latent"], rtol=1e-6)
    assert json.loads(file.read_text())["texts"] == "a.txt"


@pytest.mark.parametrize(
    "said, says",
    [
        ({"scales": {"latent": [1.0]}}, "holds no scales of fp8_e4m3 pages; make it with: python -m jaxinfer.run cal"),
        ({"kv_format": "fp8_e4m3", "scales": {"key": [1.0] * 4}}, "has scales of key; the model keeps latent"),
        ({"kv_format": "fp8_e4m3", "scales": {"latent": [1.0]}}, "are not one for each of the model's 4 layers"),
        ({"kv_format": "fp8_e4m3", "scales": {"latent": [1.0, 1.0, -1.0, 1.0]}}, "in layer 2 is -1.0, no scale"),
    ],
)  # fmt: skip
def test_a_file_that_is_not_this_model_s_is_refused(tmp_path, said, says):
    file = tmp_path / "scales.json"
    file.write_text(json.dumps(said))
    with pytest.raises(UserError) as caught:
        Model.load("tiny", scales=file)
    assert says in str(caught.value)
    with pytest.raises(UserError, match="no file"):
        Model.load("tiny", scales=tmp_path / "none.json")


def test_calibrated_scales_leave_a_factor_of_two_above_the_largest_entry():
    model = Model.load("tiny")
    tokens = model.tokenizer.encode((EMBEDDED["tiny"] / "README.md").read_text())
    short, long = (
        calibration.calibrate(model.config, model.params, calibration.windows(tokens, model.tokenizer.bos_id, 32, n))
        for n in (1, 4)
    )
    assert jnp.all(long["latent"] >= short["latent"]) and jnp.all(short["latent"] > 0)
    with pytest.raises(UserError, match="the calibration text is empty"):
        calibration.windows([], None, 8, 2)
    assert calibration.windows(list(range(10)), 99, 4, 2) == [[99, 0, 1, 2], [99, 6, 7, 8]]
