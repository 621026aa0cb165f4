"""Scales leave the stated margin over what was seen, by layer and kind."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.checkpoints.calibration import MARGIN, calibrate
from jaxinfer.config import GQAConfig, ModelConfig, MoEConfig, RopeConfig
from jaxinfer.models.rope import rotate
from jaxinfer.quantization.formats import E4M3_MAX, KVFormat

CONFIG = ModelConfig(
    name="small",
    vocab=29,
    hidden=16,
    layers=2,
    dense_layers=1,
    dense_intermediate=24,
    attention=GQAConfig(heads=2, kv_heads=2, head_dim=8),
    moe=MoEConfig(experts=4, top_k=2, intermediate=8),
    rope=RopeConfig(),
    max_position=64,
)
TEXTS = [[3, 1, 4, 1, 5, 9, 2, 6], [27, 18, 28], [7]]


@pytest.fixture(scope="module")
def params(random_params):
    """The second layer's values are all zero."""
    params = random_params(CONFIG)
    values = params["sparse"]["attention"]["value"]
    values["weight"] = jnp.zeros_like(values["weight"])
    return params


@pytest.fixture(scope="module")
def scales(params):
    return calibrate(CONFIG, params, TEXTS)


def first_layer(params, text: list[int]) -> dict[str, np.ndarray]:
    """Keys and values of a text in the first layer, from their definition."""
    x = np.asarray(params["embedding"], np.float64)[text]
    block = params["dense"]
    norm = np.asarray(block["attention_norm"]["weight"], np.float64)[0]
    x = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + CONFIG.rms_eps) * norm
    key, value = (x @ np.asarray(block["attention"][kind]["weight"], np.float64)[0] for kind in ("key", "value"))
    heads = jnp.asarray(key, jnp.float32).reshape(1, len(text), 2, 8)
    return {"key": np.asarray(rotate(heads, jnp.arange(len(text))[None], CONFIG.rope)), "value": value}


def test_the_largest_entry_maps_to_the_margin(params, scales):
    assert scales.keys() == {"key", "value"}
    assert all(scale.shape == (CONFIG.layers,) and scale.dtype == jnp.float32 for scale in scales.values())
    seen = [first_layer(params, text) for text in TEXTS]
    for kind, scale in scales.items():
        peak = max(abs(entries[kind]).max() for entries in seen)
        assert peak / float(scale[0]) == pytest.approx(E4M3_MAX / MARGIN, rel=1e-5)


def test_what_was_seen_does_not_saturate_and_twice_that_just_fits(params, scales):
    format = KVFormat.parse("fp8_e4m3")
    entries = first_layer(params, TEXTS[0])["value"].astype(np.float32)
    for factor, bound in [(1.0, 2.0**-4), (MARGIN, 2.0**-4)]:
        back = np.asarray(format.decode(format.encode(factor * entries, scales["value"][0]), scales["value"][0]))
        error = abs(back - factor * entries)
        assert (error <= bound * abs(factor * entries) + 2.0**-10 * float(scales["value"][0])).all()


def test_each_text_counts_and_padding_does_not(params, scales):
    """The scales of all texts are the largest of each part by itself, in every layer."""
    alone = [calibrate(CONFIG, params, texts) for texts in (TEXTS[:1], TEXTS[1:])]
    for kind in scales:
        largest = np.max([np.asarray(one[kind]) for one in alone], axis=0)
        np.testing.assert_allclose(scales[kind], largest, rtol=1e-5)
    assert any(not np.allclose(one["key"], scales["key"], rtol=1e-3) for one in alone)


def test_entries_of_zero_get_a_scale_that_can_be_divided_by(scales):
    assert float(scales["value"][1]) == pytest.approx(MARGIN / E4M3_MAX)
    assert float(scales["key"][1]) != float(scales["key"][0])
