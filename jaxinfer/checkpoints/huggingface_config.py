"""Hugging Face's config.json as a ModelConfig: the DeepSeek-V3 family, and models that nest one under `text_config`."""

from collections.abc import Callable, Mapping
from typing import Any

from jaxinfer.config import MLAConfig, ModelConfig, MoEConfig, RopeConfig, YarnConfig
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
    for field, expected in {
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "moe_layer_freq": 1,
        "topk_method": "noaux_tc",
    }.items():
        fields.require(field, expected)
    return ModelConfig(
        name=fields("model_type", str),
        vocab=fields("vocab_size"),
        hidden=fields("hidden_size"),
        layers=fields("num_hidden_layers"),
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
        moe=MoEConfig(
            experts=fields("n_routed_experts"),
            top_k=fields("num_experts_per_tok"),
            intermediate=fields("moe_intermediate_size"),
            shared_experts=fields("n_shared_experts"),
            groups=fields("n_group"),
            top_groups=fields("topk_group"),
            scaling=fields("routed_scaling_factor", float),
            renormalise=fields("norm_topk_prob", bool),
            score=fields("scoring_func", str),
        ),
        rope=RopeConfig(theta=fields("rope_theta", float), interleaved=True, yarn=_yarn(fields)),
        max_position=fields("max_position_embeddings"),
        rms_eps=fields("rms_norm_eps", float),
    )


def _yarn(fields: Fields) -> YarnConfig | None:
    if "rope_scaling" not in fields:
        return None
    yarn = fields.nested("rope_scaling")
    yarn.require("type", "yarn")
    yarn.require("rope_type", "yarn")
    return YarnConfig(
        factor=yarn("factor", float),
        original_max_position=yarn("original_max_position_embeddings"),
        **{name: yarn(name, float) for name in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim") if name in yarn},
    )


READERS: dict[str, Callable[[Fields], ModelConfig]] = {
    "deepseek_v3": _deepseek_v3,
    "kimi_k2": _deepseek_v3,
    "kimi_k25": _text,
}
