"""What a model is (`ModelConfig`), what it runs at (`Precision`) and how it is served (`EngineConfig`).

All are frozen dataclasses, hashable, and passed to jit as static arguments. Sizes come from the public configuration
files of the models; `ModelConfig.preset` names those that are built in.
"""

import dataclasses
import math
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

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
class Llama3Rope:
    """Llama 3.1's context extension: pairs that turn fewer than `low` times over the original context are slowed by
    `factor`, those that turn more than `high` times are kept, between them the two are mixed."""

    factor: float
    original_max_position: int
    low: float
    high: float


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding. `fraction` is the share of a head's dimensions that rotate; `interleaved` pairs (0, 1), (2, 3)
    and so on, otherwise the first half pairs with the second. At most one of `yarn` and `llama3` extends the
    context."""

    theta: float = 10_000.0
    fraction: float = 1.0
    interleaved: bool = False
    yarn: YarnConfig | None = None
    llama3: Llama3Rope | None = None


@dataclass(frozen=True)
class IndexerConfig:
    """Sparse attention (DSA, DeepSeek-V3.2): `heads` small queries score every cached token by one small key, and
    attention reads the `top_k` best. `pattern` has a letter a layer: F chooses for itself, S shares the choice of the
    last F before it; empty, all choose. `interleaved` as in `RopeConfig`, of the first `rope_dim` of MLA's dimensions:
    GLM's indexers turn as its attention does, DeepSeek's do not."""

    heads: int
    head_dim: int
    top_k: int
    interleaved: bool = False
    pattern: str = ""

    def owners(self, layers: int) -> tuple[int, ...]:
        """The layers, of the first `layers`, that choose for themselves."""
        return tuple(i for i, kind in enumerate(self.pattern or "F" * layers) if kind == "F")


@dataclass(frozen=True)
class MLAConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1). `q_lora` None: queries are projected
    directly."""

    heads: int
    kv_lora: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    q_lora: int | None = None
    indexer: IndexerConfig | None = None

    @property
    def qk_dim(self) -> int:
        return self.nope_dim + self.rope_dim

    @property
    def entries(self) -> dict[str, int]:
        """Kinds of cache entry and their width in values: one compressed latent, never per-head keys and values, and
        the key of an indexer."""
        index = {"index": self.indexer.head_dim} if self.indexer else {}
        return {"latent": self.kv_lora + self.rope_dim, **index}


@dataclass(frozen=True)
class GQAConfig:
    """Grouped-query attention (arXiv:2305.13245) with optional RMSNorm on queries and keys, and optional biases on the
    projections to queries, keys and values."""

    heads: int
    kv_heads: int
    head_dim: int
    qk_norm: bool = False
    bias: bool = False

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
    """A decoder: embedding, `dense_layers` blocks with one MLP, the rest with experts, final norm, head. `tied`: the
    head is the embedding."""

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
    tied: bool = False

    def __post_init__(self) -> None:
        """UserError where the sizes contradict each other."""
        if wrong := next(self._contradictions(), None):
            raise UserError(f"model {self.name}: {wrong}")

    def _contradictions(self) -> Iterator[str]:
        attention, moe = self.attention, self.moe
        indexer = self.indexer
        parts: dict[str, Any] = {"": self, "attention.": attention, **({"moe.": moe} if moe else {})}
        parts |= {"attention.indexer.": indexer} if indexer else {}
        sizes = {f"{where}{name}": size for where, part in parts.items() for name, size in vars(part).items()}
        for name, size in sizes.items():
            least = 0 if name in ("dense_layers", "dense_intermediate", "moe.shared_experts") else 1
            if type(size) is int and size < least:
                yield f"{name} must be at least {least}, not {size}"
        if self.dense_layers > self.layers:
            yield f"{self.dense_layers} dense layers of {self.layers}"
        if self.dense_layers and not self.dense_intermediate:
            yield "dense layers need a dense_intermediate"
        if self.moe_layers and moe is None:
            yield f"{self.moe_layers} layers have neither experts nor an MLP; give moe, or dense_layers {self.layers}"
        if isinstance(attention, GQAConfig) and attention.heads % attention.kv_heads:
            yield f"{attention.heads} heads do not share {attention.kv_heads} key-value heads evenly"
        head = attention.rope_dim if isinstance(attention, MLAConfig) else attention.head_dim
        turning = int(head * self.rope.fraction)
        if turning % 2 or not 0 < turning <= head:
            yield f"rope turns pairs: {turning} of {head} dimensions is not an even number of them"
        if indexer is not None:
            yield from self._indexer_contradictions(indexer)
        if moe is None:
            return
        if moe.experts % moe.groups or moe.top_groups > moe.groups:
            yield f"{moe.experts} experts do not make {moe.groups} equal groups of which {moe.top_groups} are chosen"
        if moe.top_k > (reach := moe.experts // moe.groups * moe.top_groups):
            yield f"a token goes to {moe.top_k} experts, and has {reach} to choose from"
        if moe.score not in ("sigmoid", "softmax"):
            yield f"unknown router score {moe.score!r}; use sigmoid or softmax"

    def _indexer_contradictions(self, indexer: IndexerConfig) -> Iterator[str]:
        assert isinstance(self.attention, MLAConfig)
        if not self.attention.q_lora:
            yield "an indexer makes its queries of the queries' latent; give q_lora"
        if self.attention.rope_dim > indexer.head_dim:
            yield f"rope turns {self.attention.rope_dim} of an indexer's {indexer.head_dim} dimensions"
        if indexer.pattern and (len(indexer.pattern) != self.layers or indexer.pattern.strip("FS")):
            yield f"the indexer's pattern has not one F or S for each of {self.layers} layers: {indexer.pattern!r}"
        if indexer.pattern.startswith("S"):
            yield "the first layer has no choice to share; the indexer's pattern must begin with F"

    @classmethod
    def preset(cls, name: str) -> Self:
        """The built-in configuration called `name`; UserError names those there are."""
        if name not in PRESETS:
            raise UserError(f"unknown preset {name!r}; there are: {', '.join(sorted(PRESETS))}")
        return PRESETS[name]  # type: ignore[return-value]

    @property
    def moe_layers(self) -> int:
        return self.layers - self.dense_layers

    def kv_bytes_per_token(self, format: KVFormat) -> int:
        """Bytes that one token takes in pages of `format`, over all layers."""
        values = sum(width * self.cache_layers[kind] for kind, width in self.attention.entries.items())
        return values * format.itemsize

    @property
    def indexer(self) -> IndexerConfig | None:
        """The indexer of sparse attention, if there is one."""
        return self.attention.indexer if isinstance(self.attention, MLAConfig) else None

    @property
    def cache_layers(self) -> dict[str, int]:
        """Layers that keep each kind of cache entry: all, but of index keys only those that choose for themselves."""
        index = {"index": len(self.indexer.owners(self.layers))} if self.indexer else {}
        return dict.fromkeys(self.attention.entries, self.layers) | index

    @property
    def softmax_scale(self) -> float:
        """Attention logit scale: 1/sqrt(d), times mscale squared under YaRN with MLA (DeepSeek-V3's published code)."""
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
        sizes = {"attention heads": attention.heads, "vocabulary": self.vocab}
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
class PhasePrecision:
    """The number formats of prefill and of decode, where each has weights and pages of its own. The default is what
    was published for Kimi K2.x on H200: FP8 weights and BF16 KV in prefill, INT4 weights and FP8 KV in decode."""

    prefill: Precision = Precision.parse("fp8_e4m3", "bf16")
    decode: Precision = Precision.parse("int4:g32", "fp8_e4m3")

    def __str__(self) -> str:
        return f"prefill: {self.prefill}; decode: {self.decode}"


ROLES = ("both", "prefill", "decode")
LEVELS = ("off", "tags", "digest")
ON_MISMATCH = ("abort", "recompute")


@dataclass(frozen=True)
class EngineConfig:
    """How a model is served. Sizes are in tokens unless the name says pages.

    `decode_buckets` are the batch sizes that decode is compiled for; `prefill_buckets` are (rows, chunk) pairs: so many
    prompts, so many tokens of each, in one prefill step.

    `integrity` is how pages are checked before every read (`docs/integrity.md`): `off`; `tags`, that each still is the
    slot's; `digest`, also that the stored bytes are those that were written, `digest_pages` of each slot's pages a step
    in rotation. `on_mismatch` is what becomes of a request whose pages fail: `abort`, or `recompute` once.

    `prefix_cache`: pages of prompts and answers are kept after their request while there is room, and given to requests
    that begin with the same tokens (`engine.prefix`).

    `kernels` is what reads pages and packed weights: `auto`, the kernels on a GPU and plain jnp elsewhere; `interpret`,
    the kernels run by an interpreter, anywhere (`parallel.kernels`).

    `role` says which phases run here. A `prefill` worker hands the KV of each prompt over in the format `handover`, and
    a `decode` worker takes it, `transfer_tokens` at a time. `devices` are counted from `first_device`.
    """

    precision: Precision = Precision()
    page_size: int = 16
    num_pages: int = 1088
    max_slots: int = 16
    max_context: int = 1024
    decode_buckets: tuple[int, ...] = (1, 16)
    prefill_buckets: tuple[tuple[int, int], ...] = ((4, 32), (1, 256))
    max_queue: int = 4096
    integrity: str = "tags"
    digest_pages: int = 1
    on_mismatch: str = "abort"
    prefix_cache: bool = False
    logprobs: int = 5
    devices: int = 1
    first_device: int = 0
    kernels: str = "auto"
    role: str = "both"
    handover: KVFormat = KVFormat.parse("fp8_e4m3")
    transfer_tokens: int = 128

    def __post_init__(self) -> None:
        counts = ("page_size", "num_pages", "max_slots", "max_context", "max_queue", "digest_pages", "devices")
        for name in (*counts, "transfer_tokens"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name, choices in (("integrity", LEVELS), ("on_mismatch", ON_MISMATCH), ("role", ROLES)):
            if getattr(self, name) not in choices:
                raise UserError(f"{name} must be one of {', '.join(choices)}, not {getattr(self, name)!r}")
        for name in ("decode_buckets", "prefill_buckets"):
            sizes = np.asarray(getattr(self, name))
            if not sizes.size or sizes.min() < 1:
                raise UserError(f"{name} must be sizes of at least 1, not {getattr(self, name)}")
        for name in ("logprobs", "first_device"):
            if getattr(self, name) < 0:
                raise UserError(f"{name} must be at least 0, not {getattr(self, name)}")
        if self.role != "both" and self.transfer_tokens % self.page_size:
            raise UserError(f"transfer_tokens {self.transfer_tokens} is not a multiple of page_size {self.page_size}")
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


def config_from_dict(values: Any) -> ModelConfig:
    """The inverse of `config_to_dict`. UserError names a field that is missing, unknown or of a wrong kind."""
    if not isinstance(values, dict):
        raise UserError("not a model configuration: not an object with fields")
    try:
        return _build(ModelConfig, values, "")
    except UserError as error:
        raise UserError(f"not a model configuration: {error}") from None


def _build(kind: Any, values: dict[str, Any], where: str) -> Any:
    """The dataclass `kind` with `values`; `where` stands before the names of its fields in messages."""
    types = typing.get_type_hints(kind)
    for name in values.keys() - types.keys():
        raise UserError(f"unknown field {where}{name}")
    for field in dataclasses.fields(kind):
        if field.name not in values and field.default is dataclasses.MISSING:
            raise UserError(f"field {where}{field.name} is missing")
    return kind(**{name: _convert(types[name], value, where + name) for name, value in values.items()})


def _convert(kind: Any, value: Any, name: str) -> Any:
    """`value` as `kind`: a plain type, a dataclass, or a union of those, of which the one that fits best is taken."""
    kinds = typing.get_args(kind) or (kind,)
    if isinstance(value, dict) and (classes := [k for k in kinds if dataclasses.is_dataclass(k)]):
        best = max(classes, key=lambda k: len(value.keys() & typing.get_type_hints(k).keys()))
        return _build(best, value, f"{name}.")
    if float in kinds and type(value) is int:
        value = float(value)
    if type(value) not in kinds:
        raise UserError(f"field {name} cannot be {value!r}")
    return value
