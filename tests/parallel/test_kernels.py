"""The kernels, run by their interpreter, on 1, 2, 4 and 8 devices: one step of a model gives the same logits, and those
of the reference, whether a matrix's groups divide over the devices or not (faults 12, 14 and 16)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.cache.kv import KVCache
from jaxinfer.checkpoints.model import quantize_params
from jaxinfer.config import MLAConfig, ModelConfig, MoEConfig, Precision, RopeConfig
from jaxinfer.models.attention import PagedContext
from jaxinfer.models.decoder import bind
from jaxinfer.parallel.kernels import Kernels
from jaxinfer.parallel.sharding import cache_sharding, make_mesh, param_shardings, replicated
from jaxinfer.quantization.tensor import QuantizedTensor

TOKENS, PAGE = 5, 16
# Every token goes to all experts: rounding can't send it to another one, and what is left is rounding itself. Inputs of
# the down matrices: 1024 are 128 a device on eight, four groups of 32 or one of 128; 384 are three groups of 32 on
# each of four devices, while those of 64 and 128 divide over two and one, and on eight not even blocks of 32 do.
MODEL = ModelConfig(
    name="split",
    vocab=64,
    hidden=128,
    layers=1,
    dense_layers=0,
    dense_intermediate=0,
    attention=MLAConfig(heads=8, q_lora=128, kv_lora=128, nope_dim=16, rope_dim=16, v_dim=32),
    moe=MoEConfig(experts=8, top_k=8, intermediate=1024, shared_experts=1),
    rope=RopeConfig(),
    max_position=64,
)
UNEVEN = MODEL.replace(moe=dataclasses.replace(MODEL.moe, intermediate=384))
TOLERANCE = 0.04  # bf16 activations (2^-9) in all of them; the order of sums and of rounding differs
AMONG_THEMSELVES = 0.015  # the same products on more devices: only the order of sums, and what it rounds otherwise

pytestmark = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs 8 devices")


def uneven_scales(params):
    """Weights whose size differs from one run of 32 inputs to the next by up to 2^4: a scale out of place shows."""
    rng = np.random.default_rng(1)

    def spread(weight):
        if weight.ndim < 3 or weight.shape[-2] % 32:
            return weight
        size = 2.0 ** rng.integers(-2, 3, (*weight.shape[:-2], weight.shape[-2] // 32, 1))
        return weight * jnp.asarray(size.repeat(32, axis=-2), jnp.float32)

    return jax.tree.map(spread, params)


@pytest.fixture(scope="module")
def make_params(random_params):
    return lambda config, weights: quantize_params(
        config, uneven_scales(random_params(config)), Precision.parse(weights, "bf16").weights
    )


def logits(config: ModelConfig, params, kv: str, devices: int = 1, kernels: str = "interpret") -> np.ndarray:
    """Of a short text, through pages."""
    mesh, format = make_mesh(devices), Precision.parse("bf16", kv).kv
    entries, scales = config.attention.entries, {"latent": jnp.full(config.layers, 0.03)}
    cache = KVCache.create(entries, config.layers, 1, PAGE, format, scales)
    here = KVCache({"latent": cache_sharding(config, mesh)}, {"latent": replicated(mesh)}, format)
    params = jax.device_put(params, param_shardings(config, params, mesh))
    context = PagedContext.one_text(PAGE, jnp.int32(TOKENS))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, config.vocab, (1, PAGE)), jnp.int32)

    def step(params, cache):
        model = bind(config, params)
        x, _ = model.paged(tokens, context, cache, jnp.bfloat16)
        return model.logits(x[0, :TOKENS])

    run = jax.jit(Kernels(kernels, mesh).traced(step))
    return np.asarray(run(params, jax.device_put(cache, here)), np.float32)


def difference(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.sqrt(np.square(found - expected).mean() / np.square(expected).mean()))


@pytest.mark.parametrize(
    ("config", "weights", "kv", "counts"),
    [
        (MODEL, "int4:g32+dense", "fp8_e4m3", (1, 2, 4, 8)),
        (MODEL, "int4:g64+dense", "bf16", (8,)),
        (MODEL, "int4:g128+dense", "bf16", (8,)),
        (UNEVEN, "int4:g32+dense", "bf16", (4,)),
        (UNEVEN, "int4:g64+dense", "bf16", (4,)),
        (MODEL, "bf16", "bf16", (8,)),
    ],
    ids=lambda value: value.moe.intermediate if isinstance(value, ModelConfig) else str(value),
)
def test_any_number_of_devices_gives_the_same(config, weights, kv, counts, make_params):
    params = make_params(config, weights)
    expected = logits(config, params, kv, kernels="reference")
    found = {devices: logits(config, params, kv, devices) for devices in counts}
    for devices, each in found.items():
        assert 0 < difference(each, expected) < TOLERANCE, devices
        assert difference(each, found[counts[0]]) < AMONG_THEMSELVES, devices


def test_scales_one_group_off_would_show(make_params):
    """What the comparison above can see: the scales of one kind of matrix, moved by one group of inputs."""
    params = make_params(MODEL, "int4:g32+dense")
    expected = logits(MODEL, params, "fp8_e4m3", kernels="reference")
    block = params["sparse"]
    for module in (block["mlp"], block["mlp"]["shared"], block["attention"]):
        name = "output" if "output" in module else "down"
        right = module[name]
        module[name] = jax.tree.map(
            lambda w: QuantizedTensor(w.data, jnp.roll(w.scale, 1, axis=-2), w.format),
            right,
            is_leaf=lambda w: isinstance(w, QuantizedTensor),
        )
        assert difference(logits(MODEL, params, "fp8_e4m3", kernels="reference"), expected) > 3 * TOLERANCE
        module[name] = right
