"""config.json files: the fields that matter, as the published files have them."""

import json

import pytest

from jaxinfer.checkpoints.huggingface_config import model_config
from jaxinfer.config import PRESETS, config_from_dict, config_to_dict
from jaxinfer.errors import UserError

DEEPSEEK_R1 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
KIMI_K2 = DEEPSEEK_R1 | {
    "model_type": "kimi_k2",
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131072,
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "rope_scaling": DEEPSEEK_R1["rope_scaling"] | {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0},
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "topk_group": 1,
    "vocab_size": 163840,
}
KIMI_K26 = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "vision_config": {"hidden_size": 1152},
    "text_config": KIMI_K2
    | {
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-05,
        "rope_scaling": DEEPSEEK_R1["rope_scaling"] | {"factor": 64.0},
    },
}


def test_deepseek_is_the_preset():
    assert model_config(DEEPSEEK_R1, "deepseek-v3") == PRESETS["deepseek-v3"]


def test_kimi_with_a_nested_text_model_is_the_preset():
    assert model_config(KIMI_K26, "kimi-k2.6") == PRESETS["kimi-k2.6"]


def test_the_first_kimi_k2_differs_from_the_preset_in_its_context_only():
    config, preset = model_config(KIMI_K2), PRESETS["kimi-k2.6"]
    assert config.rope.yarn is not None and config.rope.yarn.factor == 32
    assert config.replace(
        name=preset.name, rope=preset.rope, max_position=preset.max_position, rms_eps=preset.rms_eps
    ) == (preset)


def test_the_name_is_the_model_type_unless_given():
    assert model_config(DEEPSEEK_R1).name == "deepseek_v3"
    assert model_config(KIMI_K26).name == "kimi_k2"


def test_plain_rope_and_plain_queries():
    config = model_config({k: v for k, v in DEEPSEEK_R1.items() if k != "rope_scaling"} | {"q_lora_rank": None})
    assert config.rope.yarn is None and config.attention.q_lora is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "unknown architecture 'gpt2'; there are: deepseek_v3, deepseek_v32, glm4_moe, "),
        ({"model_type": "glm_moe_dsa"}, "field index_n_heads is missing"),
        ({"model_type": None}, "field model_type is missing"),
        ({"hidden_size": None}, "field hidden_size is missing"),
        ({"hidden_size": "7168"}, "field hidden_size is '7168', not of type int"),
        ({"hidden_size": 7168.5}, "field hidden_size is 7168.5, not of type int"),
        ({"hidden_size": True}, "field hidden_size is True, not of type int"),
        ({"num_hidden_layers": 0}, "layers must be at least 1, not 0"),
        ({"norm_topk_prob": 1}, "field norm_topk_prob is 1, not of type bool"),
        ({"hidden_act": "gelu"}, "field hidden_act is 'gelu'; only 'silu' is supported"),
        ({"tie_word_embeddings": True}, "field tie_word_embeddings is True; only False is supported"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "field rope_scaling.type is 'linear'"),
        ({"rope_scaling": {"type": "yarn"}}, "field rope_scaling.factor is missing"),
        ({"rope_scaling": 2}, "field rope_scaling is no object"),
        ({"model_type": "kimi_k25"}, "field text_config is missing"),
        (
            {"model_type": "kimi_k25", "text_config": {"model_type": "kimi_k2"}},
            "field text_config.vocab_size is missing",
        ),
    ],
)
def test_bad_files_are_one_line(change, message):
    with pytest.raises(UserError) as error:
        model_config(DEEPSEEK_R1 | change)
    assert message in str(error.value) and "\n" not in str(error.value)


INDEXER = {"index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048}


@pytest.mark.parametrize(
    "said",
    [
        {"index_topk_freq": 4, "index_skip_topk_offset": 3},
        {"indexer_types": ["full" if i in (0, 1, *range(2, 78, 4)) else "shared" for i in range(78)]},
    ],
)
def test_layers_that_share_a_choice(said):
    """GLM-5.2 as published: 21 of 78 layers choose."""
    family = {"model_type": "glm_moe_dsa", "num_hidden_layers": 78, "first_k_dense_replace": 3}
    config = model_config(DEEPSEEK_R1 | INDEXER | family | said)
    assert config.indexer.owners(78) == (0, 1, *range(2, 78, 4))
    assert config.indexer.interleaved and config.cache_layers == {"latent": 78, "index": 21}
    assert config_from_dict(json.loads(json.dumps(config_to_dict(config)))) == config
