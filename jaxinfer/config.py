"""What a model is (`ModelConfig`), what it runs at (`Precision`) and how it is served (`EngineConfig`).

All are frozen dataclasses, hashable, and passed to jit as static arguments. Sizes come from the public configuration
files of the models; `ModelConfig.preset` names those that are built in.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Self

from jaxinfer.errors import UserError
from jaxinfer.quantization.formats import KVFormat, WeightFormat


@dataclass(frozen=True)
class YarnConfig:
    """YaRN context extension (Peng et al. 2023, arXiv:2309.00071), with DeepSeek's two mscale factors."""

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 1.0


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding. `fraction` is the share of a head's dimensions that rotate; `interleaved` pairs (0,1),(2,3)..."""

    theta: float = 10_000.0
    fraction: float = 1.0
    interleaved: bool = False
    yarn: YarnConfig | None = None


@dataclass(frozen=True)
class MLAConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1). `q_lora` None projects queries directly."""

    heads: int
    kv_lora: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    q_lora: int | None = None

    @property
    def qk_dim(self) -> int:
        return self.nope_dim + self.rope_dim

    @property
    def entries(self) -> dict[str, int]:
        """Kinds of cache entry and their width in values: one compressed latent, never per-head keys and values."""
        return {"latent": self.kv_lora + self.rope_dim}


@dataclass(frozen=True)
class GQAConfig:
    """Grouped-query attention (arXiv:2305.13245) with optional RMSNorm on queries and keys."""

    heads: int
    kv_heads: int
    head_dim: int
    qk_norm: bool = False

    @property
    def entries(self) -> dict[str, int]:
        width = self.kv_heads * self.head_dim
        return {"key": width, "value": width}


@dataclass(frozen=True)
class MoEConfig:
    """Routed and shared experts. The router follows DeepSeek-V3 (arXiv:2412.19437, section 2.1.2): scores in float32,
    selection by score plus correction bias within the best groups, weights from the unbiased score."""

    experts: int
    top_k: int
    intermediate: int
    shared_experts: int = 1
    groups: int = 1
    top_groups: int = 1
    scaling: float = 1.0
    renormalise: bool = True
    score: str = "sigmoid"


@dataclass(frozen=True)
class ModelConfig:
    """A decoder: embedding, `dense_layers` blocks with one MLP, the rest with experts, final norm, untied head."""

    name: str
    vocab: int
    hidden: int
    layers: int
    dense_layers: int
    dense_intermediate: int
    attention: MLAConfig | GQAConfig
    moe: MoEConfig | None
    rope: RopeConfig
    max_position: int
    rms_eps: float = 1e-6

    @classmethod
    def preset(cls, name: str) -> Self:
        """The built-in configuration called `name`; UserError names those there are."""
        if name not in PRESETS:
            raise UserError(f"unknown preset {name!r}; there are: {', '.join(sorted(PRESETS))}")
        return PRESETS[name]  # type: ignore[return-value]

    @property
    def moe_layers(self) -> int:
        return self.layers - self.dense_layers

    @property
    def softmax_scale(self) -> float:
        """Attention logit scale: 1/sqrt(d), times mscale squared under YaRN (DeepSeek-V3's published inference code)."""
        attention = self.attention
        width = attention.qk_dim if isinstance(attention, MLAConfig) else attention.head_dim
        yarn = self.rope.yarn
        mscale = yarn_mscale(yarn.factor, yarn.mscale_all_dim) if yarn and isinstance(attention, MLAConfig) else 1.0
        return mscale * mscale / math.sqrt(width)

    def replace(self, **changes) -> Self:
        return dataclasses.replace(self, **changes)

    def check_devices(self, devices: int) -> None:
        """Raise UserError unless every sharded axis divides over `devices` (tensor parallel)."""
        moe, attention = self.moe, self.attention
        sizes = {"attention heads": attention.heads, "vocabulary": self.vocab, "hidden size": self.hidden}
        if isinstance(attention, GQAConfig):
            sizes["key-value heads"] = attention.kv_heads
        if self.dense_layers:
            sizes["dense intermediate size"] = self.dense_intermediate
        if moe is not None:
            sizes["expert intermediate size"] = moe.intermediate
            sizes["experts"] = moe.experts
        for what, size in sizes.items():
            if size % devices:
                fits = [n for n in range(1, devices) if all(s % n == 0 for s in sizes.values())]
                raise UserError(
                    f"{devices} devices do not divide the {size} {what} of {self.name}; "
                    f"use one of {', '.join(map(str, fits))}"
                )


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's attention temperature for a context extended `factor` times."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


PRESETS: dict[str, ModelConfig] = {
    "tiny": ModelConfig(
        name="tiny",
        vocab=1024,
        hidden=256,
        layers=4,
        dense_layers=1,
        dense_intermediate=768,
        attention=MLAConfig(heads=8, q_lora=128, kv_lora=128, nope_dim=32, rope_dim=16, v_dim=32),
        moe=MoEConfig(experts=16, top_k=2, intermediate=128, shared_experts=1, scaling=1.0),
        rope=RopeConfig(theta=10_000.0, interleaved=True),
        max_position=1024,
    ),
    "kimi-k2.6": ModelConfig(
        name="kimi-k2.6",
        vocab=163_840,
        hidden=7168,
        layers=61,
        dense_layers=1,
        dense_intermediate=18_432,
        attention=MLAConfig(heads=64, q_lora=1536, kv_lora=512, nope_dim=128, rope_dim=64, v_dim=128),
        moe=MoEConfig(experts=384, top_k=8, intermediate=2048, shared_experts=1, scaling=2.827),
        rope=RopeConfig(theta=50_000.0, interleaved=True, yarn=YarnConfig(factor=64.0, original_max_position=4096)),
        max_position=262_144,
        rms_eps=1e-5,
    ),
    "deepseek-v3": ModelConfig(
        name="deepseek-v3",
        vocab=129_280,
        hidden=7168,
        layers=61,
        dense_layers=3,
        dense_intermediate=18_432,
        attention=MLAConfig(heads=128, q_lora=1536, kv_lora=512, nope_dim=128, rope_dim=64, v_dim=128),
        moe=MoEConfig(
            experts=256, top_k=8, intermediate=2048, shared_experts=1, groups=8, top_groups=4, scaling=2.5
        ),
        rope=RopeConfig(theta=10_000.0, interleaved=True, yarn=YarnConfig(factor=40.0, original_max_position=4096)),
        max_position=163_840,
    ),
}


@dataclass(frozen=True)
class Precision:
    """The number formats of one phase: how weights and key-value pages are kept."""

    weights: WeightFormat = WeightFormat.parse("bf16")
    kv: KVFormat = KVFormat.parse("bf16")

    @classmethod
    def parse(cls, weights: str = "bf16", kv: str = "bf16") -> Self:
        return cls(WeightFormat.parse(weights), KVFormat.parse(kv))

    def __str__(self) -> str:
        return f"weights {self.weights}, KV {self.kv}"


@dataclass(frozen=True)
class EngineConfig:
    """How a model is served. Sizes are in tokens unless the name says pages.

    `decode_buckets` are the batch sizes that decode is compiled for; `prefill_buckets` are (rows, chunk) pairs: so many
    prompts, so many tokens of each, in one prefill step.
    """

    precision: Precision = Precision()
    page_size: int = 16
    num_pages: int = 1088
    max_slots: int = 16
    max_context: int = 1024
    decode_buckets: tuple[int, ...] = (1, 4, 16)
    prefill_buckets: tuple[tuple[int, int], ...] = ((1, 32), (4, 32), (1, 256))
    max_queue: int = 4096
    verify: bool = True
    logprobs: int = 5
    devices: int = 1

    def __post_init__(self) -> None:
        for name in ("page_size", "num_pages", "max_slots", "max_context", "max_queue", "devices"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.max_slots > max(self.decode_buckets):
            raise UserError(f"max_slots {self.max_slots} exceeds the largest decode bucket {max(self.decode_buckets)}")

    @property
    def max_pages_per_slot(self) -> int:
        return -(-self.max_context // self.page_size)

    def replace(self, **changes) -> Self:
        return dataclasses.replace(self, **changes)


def config_to_dict(config: ModelConfig) -> dict:
    """`config` as plain JSON values."""
    return dataclasses.asdict(config)


def config_from_dict(values: dict) -> ModelConfig:
    """The inverse of `config_to_dict`. UserError where a field is missing, unknown or of a wrong kind."""
    try:
        values = dict(values)
        attention, rope, moe = dict(values.pop("attention")), dict(values.pop("rope")), values.pop("moe")
        yarn = rope.pop("yarn", None)
        return ModelConfig(
            attention=MLAConfig(**attention) if "kv_lora" in attention else GQAConfig(**attention),
            rope=RopeConfig(**rope, yarn=YarnConfig(**yarn) if yarn else None),
            moe=MoEConfig(**moe) if moe else None,
            **values,
        )
    except (TypeError, ValueError, KeyError) as error:
        raise UserError(f"not a model configuration: {error}") from None
