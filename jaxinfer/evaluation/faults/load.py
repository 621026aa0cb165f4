"""What the campaign serves: a small random model, and seeded workloads whose prompts carry a marker each."""

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.checkpoints.model import EMBEDDED, Model
from jaxinfer.config import EngineConfig, MLAConfig, ModelConfig, MoEConfig, Precision, RopeConfig
from jaxinfer.engine import Engine, SamplingParams
from jaxinfer.models.decoder import Params, parameter_specs
from jaxinfer.models.parameter import ParameterSpec
from jaxinfer.text.tokenizer import Tokenizer

CONFIG = ModelConfig(
    name="small",
    vocab=1024,
    hidden=64,
    layers=2,
    dense_layers=1,
    dense_intermediate=64,
    attention=MLAConfig(heads=8, q_lora=32, kv_lora=32, nope_dim=16, rope_dim=8, v_dim=16),
    moe=MoEConfig(experts=8, top_k=2, intermediate=32),
    rope=RopeConfig(interleaved=True),
    max_position=128,
)
ENGINE = EngineConfig(
    precision=Precision.parse("f32", "fp8_e4m3"),
    page_size=4,
    num_pages=40,
    max_slots=4,
    max_context=32,
    decode_buckets=(4,),
    prefill_buckets=((2, 8),),
    logprobs=0,
)
MARKER = 3  # tokens at the front of a prompt that no other prompt has
REQUESTS = 6
FIRST_TOKEN = 7  # ordinary tokens start here


def random_params(config: ModelConfig, seed: int = 0) -> Params:
    """Float32 weights drawn without compiling anything: matrices that keep the size of what passes through, so that
    every cached value matters to every logit, norms and biases that are not the neutral ones."""
    rng = np.random.default_rng(seed)

    def draw(spec: ParameterSpec) -> jax.Array:
        values = rng.standard_normal(spec.shape, np.float32)
        if spec.axes[-1] == "norm":
            return jax.device_put(1 + 0.3 * values)
        return jax.device_put(values * np.float32(0.1 if spec.kind == "float32" else spec.shape[-2] ** -0.5))

    return jax.tree.map(draw, parameter_specs(config), is_leaf=lambda x: isinstance(x, ParameterSpec))


def random_model(seed: int = 0) -> Model:
    """The small model with random weights, and the tokenizer that ships."""
    tokenizer = Tokenizer.load(EMBEDDED["tiny"] / "tokenizer.json")
    return Model(CONFIG, random_params(CONFIG, seed), {"latent": jnp.full(CONFIG.layers, 0.02)}, tokenizer)


@dataclass(frozen=True)
class Workload:
    """Prompts, the engine step in which each arrives, and how many tokens it asks for."""

    prompts: list[list[int]]
    arrivals: list[int]
    params: list[SamplingParams]

    @classmethod
    def draw(cls, seed: int) -> "Workload":
        """REQUESTS requests, two of which wait for a slot. Lengths are around page boundaries; half draw at random."""
        rng = np.random.default_rng([seed, 1])
        page = ENGINE.page_size
        lengths = [page - 1, page, page + 1, 2 * page, *rng.integers(MARKER, 4 * page, REQUESTS - 4).tolist()]
        rng.shuffle(lengths)
        markers = rng.permutation(np.arange(FIRST_TOKEN, CONFIG.vocab))[: MARKER * REQUESTS].reshape(REQUESTS, MARKER)
        rest = [rng.integers(FIRST_TOKEN, CONFIG.vocab, n - MARKER) for n in lengths]
        prompts = [[*marker.tolist(), *tail.tolist()] for marker, tail in zip(markers, rest, strict=True)]
        arrivals = [0, 0, *rng.integers(0, 8, REQUESTS - 2).tolist()]
        params = [
            SamplingParams(int(rng.integers(6, 14)), temperature=float(i % 2), seed=i, ignore_eos=True)
            for i in range(REQUESTS)
        ]
        return cls(prompts, arrivals, params)

    def others_changed(self, keep: int) -> "Workload":
        """The same, with other markers in all prompts but one: what of it shows in that one's output is a leak."""
        span = CONFIG.vocab - FIRST_TOKEN
        other = lambda prompt: [(t - FIRST_TOKEN + 500) % span + FIRST_TOKEN for t in prompt[:MARKER]]  # noqa: E731
        prompts = [p if i == keep else other(p) + p[MARKER:] for i, p in enumerate(self.prompts)]
        return replace(self, prompts=prompts)


@dataclass
class Server:
    """An engine at one level, and the logits [V] that each request's tokens were drawn from, in order."""

    engine: Engine
    logits: dict[int, list[np.ndarray]] = field(default_factory=dict)

    @classmethod
    def start(cls, model: Model, config: EngineConfig) -> "Server":
        server = cls(None)  # type: ignore[arg-type]
        server.engine = Engine(model, config, lambda r, _, row: server.logits.setdefault(r, []).append(row.copy()))
        return server
