"""Which tensors of a Hugging Face checkpoint make each parameter of the decoder: one table for all families."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from jaxinfer.config import MLAConfig, ModelConfig


@dataclass(frozen=True)
class Rule:
    """`names`: what families call it; the first that the checkpoint has is meant. `{layer}` and `{expert}` stand for
    numbers. A `matrix` is named without the suffix that tells its format, lies as [outputs, inputs] and is turned;
    anything else is taken as it lies. `rows`: the outputs that are taken of it. `or_zero`: may be missing."""

    names: tuple[str, ...]
    matrix: bool = False
    rows: Callable[[ModelConfig], np.ndarray] | None = None
    or_zero: bool = False


def _matrix(*names: str, rows: Callable[[ModelConfig], np.ndarray] | None = None) -> Rule:
    return Rule(tuple(f"model.layers.{{layer}}.{name}" for name in names), matrix=True, rows=rows)


def _plain(*names: str, or_zero: bool = False) -> Rule:
    return Rule(tuple(f"model.layers.{{layer}}.{name}" for name in names), or_zero=or_zero)


def _expert(name: str, mixtral: str) -> Rule:
    return _matrix(f"mlp.experts.{{expert}}.{name}", f"block_sparse_moe.experts.{{expert}}.{mixtral}")


def _key_rows(config: ModelConfig) -> np.ndarray:
    """Of each head's outputs of `kv_b_proj`, those that make its keys."""
    mla = latent(config)
    return np.arange(mla.heads * (mla.nope_dim + mla.v_dim)).reshape(mla.heads, -1)[:, : mla.nope_dim].reshape(-1)


def _value_rows(config: ModelConfig) -> np.ndarray:
    mla = latent(config)
    return np.arange(mla.heads * (mla.nope_dim + mla.v_dim)).reshape(mla.heads, -1)[:, mla.nope_dim :].reshape(-1)


def latent(config: ModelConfig) -> MLAConfig:
    """The model's latent attention, which the parameter that asks is part of."""
    assert isinstance(config.attention, MLAConfig)
    return config.attention


RULES: dict[str, Rule] = {
    "embedding": Rule(("model.embed_tokens.weight",)),
    "head": Rule(("lm_head",), matrix=True),
    "norm/weight": Rule(("model.norm.weight",)),
    "attention_norm/weight": _plain("input_layernorm.weight"),
    "mlp_norm/weight": _plain("post_attention_layernorm.weight"),
    # latent attention
    "attention/query_down/weight": _matrix("self_attn.q_a_proj"),
    "attention/query_norm/weight": _plain("self_attn.q_a_layernorm.weight", "self_attn.q_norm.weight"),
    "attention/query_up/weight": _matrix("self_attn.q_b_proj", "self_attn.q_proj"),
    "attention/latent_down/weight": _matrix("self_attn.kv_a_proj_with_mqa"),
    "attention/latent_norm/weight": _plain("self_attn.kv_a_layernorm.weight"),
    "attention/key_up/weight": _matrix("self_attn.kv_b_proj", rows=_key_rows),
    "attention/value_up/weight": _matrix("self_attn.kv_b_proj", rows=_value_rows),
    # the indexer of sparse attention
    "indexer/query_up/weight": _matrix("self_attn.indexer.wq_b"),
    "indexer/key_down/weight": _matrix("self_attn.indexer.wk"),
    "indexer/key_norm/weight": _plain("self_attn.indexer.k_norm.weight"),
    "indexer/key_norm/bias": _plain("self_attn.indexer.k_norm.bias"),
    "indexer/head_weights": _matrix("self_attn.indexer.weights_proj"),
    # grouped-query attention
    "attention/query/weight": _matrix("self_attn.q_proj"),
    "attention/query/bias": _plain("self_attn.q_proj.bias"),
    "attention/key/weight": _matrix("self_attn.k_proj"),
    "attention/key/bias": _plain("self_attn.k_proj.bias"),
    "attention/key_norm/weight": _plain("self_attn.k_norm.weight"),
    "attention/value/weight": _matrix("self_attn.v_proj"),
    "attention/value/bias": _plain("self_attn.v_proj.bias"),
    "attention/output/weight": _matrix("self_attn.o_proj"),
    # MLP and experts
    "mlp/gate/weight": _matrix("mlp.gate_proj"),
    "mlp/up/weight": _matrix("mlp.up_proj"),
    "mlp/down/weight": _matrix("mlp.down_proj"),
    "mlp/router/weight": _matrix("mlp.gate", "block_sparse_moe.gate"),
    "mlp/router/bias": _plain("mlp.gate.e_score_correction_bias", or_zero=True),
    "mlp/gate": _expert("gate_proj", "w1"),
    "mlp/up": _expert("up_proj", "w3"),
    "mlp/down": _expert("down_proj", "w2"),
    "mlp/shared/gate/weight": _matrix("mlp.shared_experts.gate_proj"),
    "mlp/shared/up/weight": _matrix("mlp.shared_experts.up_proj"),
    "mlp/shared/down/weight": _matrix("mlp.shared_experts.down_proj"),
}
STACKS = ("dense", "sparse")


def rule_of(path: tuple[str, ...]) -> Rule:
    """The rule of the parameter at `path`, whichever stack of layers it is in."""
    return RULES["/".join(path[1:] if path[0] in STACKS else path)]


def layers_of(config: ModelConfig, path: tuple[str, ...]) -> tuple[int, ...]:
    """The model's layers that the parameter at `path` stacks; one that is not stacked counts as layer 0."""
    if path[0] not in STACKS:
        return (0,)
    dense = config.dense_layers
    layers = range(dense, config.layers) if path[0] == "sparse" else range(dense)
    if path[1] == "indexer":
        assert config.indexer
        return tuple(i for i in config.indexer.owners(config.layers) if i in layers)
    return tuple(layers)


WRAPPED = re.compile(r"^(?:language_model\.|model\.language_model\.(?=layers|embed_tokens|norm))")


def plain_names(names: Mapping[str, object]) -> dict[str, str]:
    """The name that the table knows of each tensor, to its name in the file: models of text and pictures keep the text
    part under a prefix of its own."""
    return {WRAPPED.sub(lambda m: "model." if m[0].startswith("model.") else "", name): name for name in names}


def is_draft(name: str, config: ModelConfig) -> bool:
    """Whether the tensor is of a layer beyond the model's own: one that predicts more than the next token."""
    match = re.match(r"model\.layers\.(\d+)\.", name)
    return match is not None and int(match[1]) >= config.layers


def is_derived(name: str, config: ModelConfig) -> bool:
    """Whether the tensor repeats what is known without it: rotary frequencies, the head of a tied model."""
    return name.endswith("rotary_emb.inv_freq") or (config.tied and name == "lm_head.weight")
