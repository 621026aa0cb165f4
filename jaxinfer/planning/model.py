"""PlannedModel: a model as capacity and rooflines see it, what the decoder does not compute included.

Planning counts bytes and operations, so it can describe more than the decoder runs: the indexer of sparse attention
and multi-token-prediction layers are here as sizes only.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import jax.numpy as jnp

from jaxinfer.checkpoints.huggingface_config import model_config
from jaxinfer.config import PRESETS, GQAConfig, MLAConfig, ModelConfig, MoEConfig, RopeConfig, config_from_dict
from jaxinfer.errors import UserError
from jaxinfer.models.parameter import ParameterSpec


@dataclass(frozen=True)
class Indexer:
    """The indexer of DeepSeek sparse attention: `layers` layers score every cached token with small keys, and attention
    then reads the `top_k` best ones; the other layers reuse the choice. Its weights and keys are on every GPU."""

    layers: int
    heads: int = 32
    key_dim: int = 128
    top_k: int = 2048

    def specs(self, config: ModelConfig, layers: int) -> dict[str, ParameterSpec]:
        """Weights of `layers` indexers. Published FP8 checkpoints keep the head weights and the norm in bf16."""
        assert isinstance(config.attention, MLAConfig) and config.attention.q_lora
        shapes = {
            "query_up": (config.attention.q_lora, self.heads * self.key_dim),
            "key_down": (config.hidden, self.key_dim),
            "head_weights": (config.hidden, self.heads),
            "key_norm": (2, self.key_dim),  # a LayerNorm: weight and bias
        }
        kinds = dict.fromkeys(shapes, "plain") | {"query_up": "linear", "key_down": "linear"}
        return {n: ParameterSpec((layers, *s), jnp.dtype(jnp.bfloat16), ("",) * 3, kinds[n]) for n, s in shapes.items()}


@dataclass(frozen=True)
class CacheEntry:
    """One kind of cache entry: `layers` layers keep `width` values a token, `gpu_width` of them on each GPU. A decode
    step reads at most `reads` tokens of a context (None: all)."""

    kind: str
    layers: int
    width: int
    gpu_width: int
    reads: int | None = None

    def tokens_read(self, context: int) -> int:
        return context if self.reads is None else min(context, self.reads)


@dataclass(frozen=True)
class PlannedModel:
    """A decoder and what comes on top: an indexer, and `draft_layers` multi-token-prediction layers (one sparse layer
    each, with a matrix that joins two hidden states), which checkpoints hold and serving loads only to draft."""

    config: ModelConfig
    indexer: Indexer | None = None
    draft_layers: int = 0

    @classmethod
    def find(cls, name: str) -> Self:
        """A preset, or a config.json (Hugging Face's or ours) or the folder that holds one. UserError otherwise."""
        if name in PLANNED:
            return PLANNED[name]  # type: ignore[return-value]
        if name in PRESETS:
            return cls(PRESETS[name])
        path = Path(name)
        path = path / "config.json" if path.is_dir() else path
        if not path.is_file():
            raise UserError(f"no model {name!r}: neither a config.json nor a preset ({', '.join(preset_names())})")
        return cls.of(read_config(path))

    @classmethod
    def of(cls, config: ModelConfig) -> Self:
        """`config` with its indexer counted apart."""
        if (found := config.indexer) is None:
            return cls(config)
        assert isinstance(config.attention, MLAConfig)
        indexer = Indexer(len(found.owners(config.layers)), found.heads, found.head_dim, found.top_k)
        return cls(config.replace(attention=replace(config.attention, indexer=None)), indexer)

    @property
    def name(self) -> str:
        return self.config.name

    def entries(self, devices: int) -> list[CacheEntry]:
        """What is cached of a token. A latent is replicated, since all heads share it; keys and values are split."""
        split = devices if isinstance(self.config.attention, GQAConfig) else 1
        reads = self.indexer.top_k if self.indexer else None
        entries = [
            CacheEntry(kind, self.config.layers, width, width // split, reads)
            for kind, width in self.config.attention.entries.items()
        ]
        if self.indexer:
            entries.append(CacheEntry("index_key", self.indexer.layers, self.indexer.key_dim, self.indexer.key_dim))
        return entries

    def draft_config(self) -> ModelConfig:
        """A decoder whose sparse layers have the sizes of the multi-token-prediction layers."""
        return self.config.replace(layers=self.draft_layers, dense_layers=0)


def preset_names() -> list[str]:
    return sorted({*PRESETS, *PLANNED})


def read_config(path: Path) -> ModelConfig:
    """The model that a config.json describes. UserError, with the path, where it can't be read or lacks something."""
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as JSON: {error}") from None
    try:
        if isinstance(values, dict) and "attention" not in values:
            return model_config(values)
        return config_from_dict(values)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


PLANNED: dict[str, PlannedModel] = {
    "glm-5.2": PlannedModel(
        ModelConfig(
            name="glm-5.2",
            vocab=154_880,
            hidden=6144,
            layers=78,
            dense_layers=3,
            dense_intermediate=12_288,
            attention=MLAConfig(heads=64, q_lora=2048, kv_lora=512, nope_dim=192, rope_dim=64, v_dim=256),
            moe=MoEConfig(experts=256, top_k=8, intermediate=2048, shared_experts=1, scaling=2.5),
            rope=RopeConfig(theta=8e6, interleaved=True),
            max_position=1_048_576,
            rms_eps=1e-5,
        ),
        indexer=Indexer(layers=21),
        draft_layers=1,
    ),
}
"""Models that can be planned but not yet run. GLM-5.2's indexer runs in layers 0, 1, 2, 6, 10 ... 74."""
