"""Configurations: the presets hold the published sizes, and what cannot be is refused in one line."""

import dataclasses
import json
import re

import pytest

from jaxinfer.config import (
    PRESETS,
    EngineConfig,
    GQAConfig,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    Precision,
    RopeConfig,
    config_from_dict,
    config_to_dict,
)
from jaxinfer.errors import UserError

TINY = ModelConfig.preset("tiny")
GQA = TINY.replace(
    name="grouped", attention=GQAConfig(heads=8, kv_heads=4, head_dim=16, qk_norm=True), rope=RopeConfig(fraction=0.5)
)


def refuses(message: str):
    """One line of UserError that says so."""
    return pytest.raises(UserError, match=rf"\A[^\n]*{re.escape(message)}[^\n]*\Z")


# ---- presets


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("kimi-k2.6", (7168, 61, 1, 64, 1536, 512, 128, 64, 128, 384, 8, 1, 1, 1, 2.827, 2048, 18432, 163840, 262144)),
        ("deepseek-v3", (7168, 61, 3, 128, 1536, 512, 128, 64, 128, 256, 8, 1, 8, 4, 2.5, 2048, 18432, 129280, 163840)),
    ],
)
def test_presets_are_the_published_models(name, facts):
    c = ModelConfig.preset(name)
    a, m = c.attention, c.moe
    assert facts == (
        c.hidden, c.layers, c.dense_layers, a.heads, a.q_lora, a.kv_lora, a.nope_dim, a.rope_dim, a.v_dim, m.experts,
        m.top_k, m.shared_experts, m.groups, m.top_groups, m.scaling, m.intermediate, c.dense_intermediate, c.vocab,
        c.max_position,
    )  # fmt: skip
    assert (m.score, m.renormalise, c.moe_layers) == ("sigmoid", True, c.layers - c.dense_layers)
    theta, factor, eps = {"kimi-k2.6": (5e4, 64, 1e-5), "deepseek-v3": (1e4, 40, 1e-6)}[name]
    yarn = c.rope.yarn
    assert (c.rope.theta, yarn.factor, c.rms_eps, yarn.original_max_position) == (theta, factor, eps, 4096)
    assert (yarn.beta_fast, yarn.beta_slow, yarn.mscale, yarn.mscale_all_dim) == (32, 1, 1, 1)


def test_a_latent_is_all_that_mla_caches():
    assert ModelConfig.preset("kimi-k2.6").attention.entries == {"latent": 576}
    assert GQA.attention.entries == {"key": 64, "value": 64}


def test_an_unknown_preset_is_refused_with_those_there_are():
    with refuses("unknown preset 'kimi'; there are: deepseek-v3, kimi-k2.6, tiny"):
        ModelConfig.preset("kimi")


# ---- models that cannot be


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab": 0}, "vocab must be at least 1, not 0"),
        ({"layers": -1}, "layers must be at least 1, not -1"),
        ({"dense_layers": 5}, "5 dense layers of 4"),
        ({"dense_intermediate": 0}, "dense layers need a dense_intermediate"),
        ({"moe": None}, "3 layers have neither experts nor an MLP; give moe, or dense_layers 4"),
        ({"attention": GQAConfig(8, 3, 16)}, "8 heads do not share 3 key-value heads evenly"),
        ({"attention": GQAConfig(8, 0, 16)}, "attention.kv_heads must be at least 1, not 0"),
        ({"attention": MLAConfig(8, 16, 8, rope_dim=5, v_dim=8)}, "5 of 5 dimensions"),
        ({"attention": GQAConfig(8, 4, 10), "rope": RopeConfig(fraction=0.5)}, "5 of 10 dimensions"),
        ({"rope": RopeConfig(fraction=1.5)}, "24 of 16 dimensions"),
        ({"moe": MoEConfig(16, 2, 8, groups=3)}, "16 experts do not make 3 equal groups"),
        ({"moe": MoEConfig(16, 2, 8, groups=4, top_groups=5)}, "4 equal groups of which 5 are chosen"),
        ({"moe": MoEConfig(16, 17, 8)}, "a token goes to 17 experts, and has 16 to choose from"),
        ({"moe": MoEConfig(16, 5, 8, groups=4, top_groups=1)}, "a token goes to 5 experts, and has 4 to choose from"),
        ({"moe": MoEConfig(16, 2, 8, shared_experts=-1)}, "moe.shared_experts must be at least 0, not -1"),
        ({"moe": MoEConfig(16, 2, 8, score="relu")}, "unknown router score 'relu'; use sigmoid or softmax"),
    ],
)
def test_contradictions_are_refused(changes, message):
    with refuses(message) as caught:
        TINY.replace(**changes)
    assert "model tiny: " in str(caught.value)


def test_a_model_without_experts_and_one_without_dense_layers_can_be():
    assert TINY.replace(moe=None, dense_layers=4).moe_layers == 0
    assert TINY.replace(dense_layers=0, dense_intermediate=0).moe_layers == 4


# ---- devices


def test_check_devices():
    for devices in (1, 2, 4, 8):
        TINY.check_devices(devices)
    ModelConfig.preset("kimi-k2.6").check_devices(64)


@pytest.mark.parametrize(
    ("config", "devices", "message"),
    [
        (TINY, 3, "3 devices do not divide the 8 attention heads of tiny; use one of 1, 2"),
        (TINY, 16, "16 devices do not divide the 8 attention heads of tiny; use one of 1, 2, 4, 8"),
        (GQA, 8, "8 devices do not divide the 4 key-value heads of grouped; use one of 1, 2, 4"),
        (TINY.replace(vocab=1001), 8, "the 1001 vocabulary of tiny; use one of 1"),
        (TINY.replace(dense_intermediate=12), 8, "the 12 dense intermediate size of tiny; use one of 1, 2, 4"),
        (TINY.replace(moe=MoEConfig(16, 2, 6)), 4, "the 6 expert intermediate size of tiny; use one of 1, 2"),
        (TINY.replace(moe=MoEConfig(4, 2, 8)), 8, "8 devices do not divide the 4 experts of tiny; use one of 1, 2, 4"),
    ],
)
def test_check_devices_names_what_does_not_divide_and_what_would_do(config, devices, message):
    with refuses(message):
        config.check_devices(devices)


# ---- dictionaries


@pytest.mark.parametrize("config", [*PRESETS.values(), GQA, TINY.replace(moe=None, dense_layers=4)])
def test_dictionaries_round_trip_through_json(config):
    assert config_from_dict(json.loads(json.dumps(config_to_dict(config)))) == config
    assert config_from_dict(config_to_dict(config)) == config and hash(config) == hash(config.replace())


def changed(path: str, value=..., config: ModelConfig = TINY) -> dict:
    """The dictionary of `config` with one field set, or left out."""
    values = config_to_dict(config)
    *parents, name = path.split(".")
    node = values
    for parent in parents:
        node = node[parent]
    if value is ...:
        del node[name]
    else:
        node[name] = value
    return values


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (None, "not an object"),
        ([], "not an object"),
        ("tiny", "not an object"),
        ({}, "field name is missing"),
        (changed("hidden"), "field hidden is missing"),
        (changed("attention"), "field attention is missing"),
        (changed("attention.kv_lora"), "field attention.kv_lora is missing"),
        (changed("moe.top_k"), "field moe.top_k is missing"),
        (changed("hiden", 256), "unknown field hiden"),
        (changed("moe.expertz", 4), "unknown field moe.expertz"),
        (changed("rope.yarn", {"factor": 2.0, "original_max_position": 8, "g": 1}), "unknown field rope.yarn.g"),
        (changed("hidden", "256"), "field hidden cannot be '256'"),
        (changed("hidden", 256.0), "field hidden cannot be 256.0"),
        (changed("hidden", None), "field hidden cannot be None"),
        (changed("layers", True), "field layers cannot be True"),
        (changed("attention", 3), "field attention cannot be 3"),
        (changed("moe.renormalise", 1), "field moe.renormalise cannot be 1"),
        (changed("attention.heads", [8]), "field attention.heads cannot be [8]"),
        (changed("rope.yarn", 3.0), "field rope.yarn cannot be 3.0"),
        (changed("layers", 0), "layers must be at least 1, not 0"),
    ],
)
def test_a_dictionary_that_is_no_model_is_refused_by_field(values, message):
    with refuses(message) as caught:
        config_from_dict(values)
    assert str(caught.value).startswith("not a model configuration: ")


def test_defaults_may_be_left_out_and_whole_numbers_may_stand_for_real_ones():
    values = changed("rms_eps")
    del values["rope"]["yarn"]
    values["moe"]["scaling"] = 1
    found = config_from_dict(values)
    assert found == TINY and type(found.moe.scaling) is float


# ---- precision and serving


def test_precision_says_what_it_is():
    precision = Precision.parse("int4:g64+dense", "fp8_e4m3")
    assert str(precision) == "weights int4:g64+dense, KV fp8_e4m3"
    assert precision == Precision.parse("int4:g64+dense", "fp8_e4m3") != Precision()
    assert Precision() == Precision.parse("bf16", "bf16") == Precision.parse()
    for bad in [("int3", "bf16"), ("bf16", "int4:g32")]:
        with refuses("format"):
            Precision.parse(*bad)


@pytest.mark.parametrize("field", ["page_size", "num_pages", "max_slots", "max_context", "max_queue", "devices"])
@pytest.mark.parametrize("value", [0, -3])
def test_engine_sizes_are_at_least_one(field, value):
    with refuses(f"{field} must be at least 1, not {value}"):
        EngineConfig(**{field: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_slots": 17}, "max_slots 17 exceeds the largest decode bucket 16"),
        ({"decode_buckets": ()}, "decode_buckets must be sizes of at least 1, not ()"),
        ({"decode_buckets": (0, 16)}, "decode_buckets must be sizes of at least 1, not (0, 16)"),
        ({"prefill_buckets": ()}, "prefill_buckets must be sizes of at least 1, not ()"),
        ({"prefill_buckets": ((1, 0),)}, "prefill_buckets must be sizes of at least 1, not ((1, 0),)"),
        ({"logprobs": -1}, "logprobs must be at least 0, not -1"),
    ],
)
def test_engine_settings_that_cannot_be(changes, message):
    with refuses(message):
        EngineConfig(**changes)
    with refuses(message):
        EngineConfig().replace(**changes)


@pytest.mark.parametrize(("context", "page", "pages"), [(1, 16, 1), (16, 16, 1), (17, 16, 2), (1024, 16, 64)])
def test_max_pages_per_slot(context, page, pages):
    assert EngineConfig(max_context=context, page_size=page).max_pages_per_slot == pages


def test_configurations_are_frozen_and_hashable():
    for config in (TINY, EngineConfig(), Precision()):
        assert hash(config) == hash(dataclasses.replace(config))
        with pytest.raises(dataclasses.FrozenInstanceError):
            config.name = "other"
