"""Hugging Face's config.json as a ModelConfig: DeepSeek-V3, V3.2 and Kimi, GLM-4.5 and 5, Qwen, Mixtral, Llama, and
models that nest one of them under `text_config`."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from jaxinfer.config import (
    GQAConfig,
    IndexerConfig,
    Llama3Rope,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    RopeConfig,
    YarnConfig,
)
from jaxinfer.errors import UserError


class Fields:
    """The fields of a config.json, by name. A missing one, or one of a wrong kind, is a UserError that names it."""

    def __init__(self, values: Mapping[str, Any], where: str = ""):
        self.values, self.where = values, where

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def __call__(self, name: str, kind: type = int) -> Any:
        """The field `name` as an int, float, str or bool; a whole number may stand for a float and the reverse."""
        if name not in self:
            raise UserError(f"field {self.where}{name} is missing")
        value = self.values[name]
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if number and kind in (int, float) and kind(value) == value:
            return kind(value)
        if kind in (str, bool) and isinstance(value, kind):
            return value
        raise UserError(f"field {self.where}{name} is {value!r}, not of type {kind.__name__}")

    def get(self, name: str, default: Any, kind: type = int) -> Any:
        """The field `name`, or `default` where it is missing or null."""
        return self(name, kind) if name in self else default

    def nested(self, name: str) -> "Fields":
        """The object in the field `name`."""
        value = self.values.get(name)
        if not isinstance(value, Mapping):
            raise UserError(f"field {self.where}{name} is {'missing' if value is None else 'no object'}")
        return Fields(value, f"{self.where}{name}.")

    def require(self, name: str, expected: object) -> None:
        """UserError when the field is there with another value: something that the decoder does not do."""
        if name in self and self.values[name] != expected:
            raise UserError(f"field {self.where}{name} is {self.values[name]!r}; only {expected!r} is supported")


def model_config(values: Mapping[str, Any], name: str = "") -> ModelConfig:
    """The configuration that a config.json with these `values` describes, called `name` (by default its model type).

    UserError in one line for an unknown architecture, a missing field, or a variant that the decoder does not compute.
    """
    config = _read(Fields(values))
    return config.replace(name=name) if name else config


def _read(fields: Fields) -> ModelConfig:
    kind = fields("model_type", str)
    if kind not in READERS:
        raise UserError(f"unknown architecture {kind!r}; there are: {', '.join(sorted(READERS))}")
    return READERS[kind](fields)


def _text(fields: Fields) -> ModelConfig:
    """A model of text and pictures: the text part."""
    return _read(fields.nested("text_config"))


def _deepseek_v3(fields: Fields) -> ModelConfig:
    """DeepSeek-V3, R1 and Kimi K2: latent attention, dense layers first, then experts in every layer."""
    _require(fields, attention_bias=False, tie_word_embeddings=False, moe_layer_freq=1, topk_method="noaux_tc")
    return ModelConfig(
        **_frame(fields),
        dense_layers=fields("first_k_dense_replace"),
        dense_intermediate=fields("intermediate_size"),
        attention=MLAConfig(
            heads=fields("num_attention_heads"),
            q_lora=fields("q_lora_rank") if "q_lora_rank" in fields else None,
            kv_lora=fields("kv_lora_rank"),
            nope_dim=fields("qk_nope_head_dim"),
            rope_dim=fields("qk_rope_head_dim"),
            v_dim=fields("v_head_dim"),
        ),
        moe=_grouped_experts(fields, fields.get("scoring_func", "sigmoid", str)),
        rope=_rope(fields, interleaved=fields.get("rope_interleave", True, bool)),
    )


def _sparse(fields: Fields, interleaved: bool) -> ModelConfig:
    """DeepSeek-V3.2 and GLM-5: DeepSeek-V3 with an indexer. `interleaved`: how the family's indexers turn where the
    file does not say; `rope_interleave` says how attention does."""
    config = _deepseek_v3(fields)
    assert isinstance(config.attention, MLAConfig)
    indexer = IndexerConfig(
        heads=fields("index_n_heads"),
        head_dim=fields("index_head_dim"),
        top_k=fields("index_topk"),
        interleaved=fields.get("indexer_rope_interleave", interleaved, bool),
        pattern=_pattern(fields, config.layers),
    )
    return config.replace(attention=dataclasses.replace(config.attention, indexer=indexer))


def _pattern(fields: Fields, layers: int) -> str:
    """Which layers run an indexer: said of each, as letters, or as every so many from an offset on."""
    kinds = fields.values.get("indexer_types")
    if kinds is None:
        kinds = fields.values.get("index_topk_pattern")
    if kinds is not None:
        letters = {"full": "F", "shared": "S", "F": "F", "S": "S"}
        if not isinstance(kinds, list | str) or any(kind not in letters for kind in kinds):
            raise UserError(f"field {fields.where}indexer_types is {kinds!r}, not a list of 'full' and 'shared'")
        return "".join(letters[kind] for kind in kinds[:layers])
    every, offset = max(fields.get("index_topk_freq", 1), 1), fields.get("index_skip_topk_offset", 2)
    return "" if every == 1 else "".join("S" if max(i - offset + 1, 0) % every else "F" for i in range(layers))


def _glm4_moe(fields: Fields) -> ModelConfig:
    """GLM-4.5, 4.6 and 4.7: grouped-query attention that turns part of a head, DeepSeek-V3's experts."""
    _require(fields, tie_word_embeddings=False)
    return ModelConfig(
        **_frame(fields),
        dense_layers=fields("first_k_dense_replace"),
        dense_intermediate=fields("intermediate_size"),
        attention=_gqa(
            fields, qk_norm=fields.get("use_qk_norm", False, bool), bias=fields.get("attention_bias", False, bool)
        ),
        moe=_grouped_experts(fields, "sigmoid"),
        rope=_rope(fields, fraction=0.5),
    )


def _qwen3_moe(fields: Fields) -> ModelConfig:
    """Qwen3-MoE: experts in every layer, chosen by softmax."""
    _require(fields, attention_bias=False, decoder_sparse_step=1, mlp_only_layers=[], use_sliding_window=False)
    moe = MoEConfig(
        experts=fields("num_experts" if "num_experts" in fields else "num_local_experts"),
        top_k=fields("num_experts_per_tok"),
        intermediate=fields("moe_intermediate_size"),
        shared_experts=0,
        renormalise=fields("norm_topk_prob", bool),
        score="softmax",
    )
    return ModelConfig(
        **_frame(fields), **NO_DENSE, attention=_gqa(fields, qk_norm=True), moe=moe, rope=_rope(fields)
    )


def _mixtral(fields: Fields) -> ModelConfig:
    """Mixtral: experts in every layer. Its softmax over the chosen is a softmax over all, renormalised."""
    _require(fields, sliding_window=None)
    moe = MoEConfig(
        experts=fields("num_local_experts"),
        top_k=fields("num_experts_per_tok"),
        intermediate=fields("intermediate_size"),
        shared_experts=0,
        score="softmax",
    )
    return ModelConfig(**_frame(fields), **NO_DENSE, attention=_gqa(fields), moe=moe, rope=_rope(fields))


def _dense(fields: Fields, **attention: bool) -> ModelConfig:
    """Llama and those built like it: grouped-query attention and one MLP in every layer."""
    window = {"use_sliding_window": False} if "use_sliding_window" in fields else {"sliding_window": None}
    _require(fields, attention_bias=False, mlp_bias=False, **window)
    return ModelConfig(
        **_frame(fields),
        dense_layers=fields("num_hidden_layers"),
        dense_intermediate=fields("intermediate_size"),
        attention=_gqa(fields, **attention),
        moe=None,
        rope=_rope(fields),
    )


NO_DENSE: dict[str, Any] = {"dense_layers": 0, "dense_intermediate": 0}


def _require(fields: Fields, **expected: object) -> None:
    for name, value in {"hidden_act": "silu", **expected}.items():
        fields.require(name, value)


def _frame(fields: Fields) -> dict[str, Any]:
    """What every family says in the same words."""
    return {
        "name": fields("model_type", str),
        "vocab": fields("vocab_size"),
        "hidden": fields("hidden_size"),
        "layers": fields("num_hidden_layers"),
        "max_position": fields("max_position_embeddings"),
        "rms_eps": fields("rms_norm_eps", float),
        "tied": fields.get("tie_word_embeddings", False, bool),
    }


def _gqa(fields: Fields, qk_norm: bool = False, bias: bool = False) -> GQAConfig:
    heads = fields("num_attention_heads")
    return GQAConfig(
        heads=heads,
        kv_heads=fields.get("num_key_value_heads", heads),
        head_dim=fields.get("head_dim", fields("hidden_size") // heads),
        qk_norm=qk_norm,
        bias=bias,
    )


def _grouped_experts(fields: Fields, score: str) -> MoEConfig:
    """Routed and shared experts as DeepSeek-V3 names them."""
    return MoEConfig(
        experts=fields("n_routed_experts"),
        top_k=fields("num_experts_per_tok"),
        intermediate=fields("moe_intermediate_size"),
        shared_experts=fields("n_shared_experts"),
        groups=fields("n_group"),
        top_groups=fields("topk_group"),
        scaling=fields("routed_scaling_factor", float),
        renormalise=fields("norm_topk_prob", bool),
        score=score,
    )


def _rope(fields: Fields, fraction: float = 1.0, interleaved: bool = False) -> RopeConfig:
    """Older files have `rope_theta` and, for a longer context, `rope_scaling`; newer ones `rope_parameters` for all.
    `fraction` is the family's own where the file has no `partial_rotary_factor`."""
    where = next((name for name in ("rope_parameters", "rope_scaling") if name in fields), None)
    scaling = fields.nested(where) if where else Fields({})
    either = lambda name: scaling if name in scaling else fields  # noqa: E731
    kind = scaling.get("rope_type", scaling.get("type", "default", str), str)
    if kind not in ("default", "yarn", "llama3"):
        name = "rope_type" if "rope_type" in scaling else "type"
        raise UserError(f"field {scaling.where}{name} is {kind!r}; only 'yarn' and 'llama3' are supported")
    if where == "rope_scaling" and not {"type", "rope_type"} & scaling.values.keys():
        raise UserError("field rope_scaling.type is missing")
    return RopeConfig(
        theta=either("rope_theta")("rope_theta", float),
        fraction=either("partial_rotary_factor").get("partial_rotary_factor", fraction, float),
        interleaved=interleaved,
        yarn=_yarn(scaling) if kind == "yarn" else None,
        llama3=_llama3(scaling) if kind == "llama3" else None,
    )


def _yarn(scaling: Fields) -> YarnConfig:
    scaling.require("attention_factor", None)
    return YarnConfig(
        factor=scaling("factor", float),
        original_max_position=scaling("original_max_position_embeddings"),
        beta_fast=scaling.get("beta_fast", 32.0, float),
        beta_slow=scaling.get("beta_slow", 1.0, float),
        mscale=scaling.get("mscale", 1.0, float),
        mscale_all_dim=scaling.get("mscale_all_dim", 0.0, float),  # 0: the temperature is in the rotation alone
    )


def _llama3(scaling: Fields) -> Llama3Rope:
    return Llama3Rope(
        factor=scaling("factor", float),
        original_max_position=scaling("original_max_position_embeddings"),
        low=scaling("low_freq_factor", float),
        high=scaling("high_freq_factor", float),
    )


READERS: dict[str, Callable[[Fields], ModelConfig]] = {
    "deepseek_v3": _deepseek_v3,
    "deepseek_v32": functools.partial(_sparse, interleaved=False),
    "glm4_moe": _glm4_moe,
    "glm_moe_dsa": functools.partial(_sparse, interleaved=True),
    "kimi_k2": _deepseek_v3,
    "kimi_k25": _text,
    "llama": _dense,
    "mistral": _dense,
    "mixtral": _mixtral,
    "qwen2": functools.partial(_dense, bias=True),
    "qwen3": functools.partial(_dense, qk_norm=True),
    "qwen3_moe": _qwen3_moe,
}
