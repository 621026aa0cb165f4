"""Eight devices compute what one does: logits within float32's rounding, the allocator to the bit."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxinfer.cache import AllocatorState
from jaxinfer.cache.kv import KVCache
from jaxinfer.checkpoints.model import quantize_params
from jaxinfer.config import GQAConfig, MLAConfig, ModelConfig, MoEConfig, RopeConfig
from jaxinfer.errors import UserError
from jaxinfer.models.decoder import forward, parameter_specs
from jaxinfer.models.parameter import ParameterSpec
from jaxinfer.parallel.sharding import RULES, cache_sharding, make_mesh, param_shardings, replicated
from jaxinfer.quantization.formats import KVFormat, WeightFormat
from jaxinfer.quantization.tensor import QuantizedTensor
from jaxinfer.sampling import SamplingState
from jaxinfer.steps import OK, ServingState, admit_step, decode_step, prefill_step, verify_step

DEVICES, SLOTS, PAGE, PAGES, COLUMNS, CHUNK = 8, 4, 4, 16, 4, 8
TOLERANCE = 1e-4  # float32 sums in another order, logits of order 1

# Over 8 devices a group of 32 inputs is split in two in the down matrices (128 inputs: 16 a device), and is whole in
# the attention output (256 inputs: 32 a device, and one scale).
MLA = ModelConfig(
    name="latent",
    vocab=64,
    hidden=64,
    layers=2,
    dense_layers=1,
    dense_intermediate=128,
    attention=MLAConfig(heads=8, kv_lora=32, nope_dim=8, rope_dim=8, v_dim=32, q_lora=32),
    moe=MoEConfig(experts=8, top_k=2, intermediate=128),
    rope=RopeConfig(),
    max_position=64,
)
GQA = MLA.replace(name="grouped", attention=GQAConfig(heads=16, kv_heads=8, head_dim=8, qk_norm=True))

pytestmark = pytest.mark.skipif(len(jax.devices()) < DEVICES, reason=f"needs {DEVICES} devices")


def flat(tree) -> dict[str, object]:
    whole = lambda x: isinstance(x, (ParameterSpec, QuantizedTensor))  # noqa: E731
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=whole)
    return {"/".join(key.key for key in path): leaf for path, leaf in leaves}


# ---- serving


def serve(config: ModelConfig, params, devices: int) -> tuple[list[np.ndarray], list]:
    """Logits of a prefill in two chunks and of three more tokens, and the allocator after each step; greedy. The tokens
    come from decode steps, for GQA from prefill steps of one token each, which saves compilation."""
    mesh = make_mesh(devices)
    everywhere, entries = replicated(mesh), config.attention.entries
    params = jax.device_put(params, param_shardings(config, params, mesh))
    state = ServingState(
        KVCache.create(entries, config.layers, PAGES, PAGE, KVFormat.parse("f32")),
        AllocatorState.create(PAGES, SLOTS, COLUMNS, PAGE),
        SamplingState.create(SLOTS),
    )
    here = jax.tree.map(lambda _: everywhere, state)
    pools = dict.fromkeys(entries, cache_sharding(config, mesh))
    here = ServingState(KVCache(pools, here.cache.scales, state.cache.format), here.allocator, here.sampling)
    state = jax.device_put(state, here)
    make = lambda step: jax.jit(  # noqa: E731
        functools.partial(step, config, jnp.float32, 1), donate_argnums=1, out_shardings=(here, everywhere)
    )
    decode, prefill = make(decode_step), make(prefill_step)
    verify = jax.jit(verify_step, out_shardings=everywhere)
    slots = np.arange(SLOTS, dtype=np.int32)
    state = jax.jit(admit_step, out_shardings=here)(state, slots, SamplingState.create(SLOTS))

    tokens = np.random.default_rng(0).integers(0, config.vocab, (SLOTS, CHUNK)).astype(np.int32)
    logits, allocators = [], []
    for step in range(5):
        rows = slots if step != 3 else slots[::-1].copy()
        check = verify(state, rows)
        if step < 2:
            counts = np.array([[8, 3, 4, 5], [0, 1, 4, 2]][step], np.int32)
            state, output = prefill(params, state, np.where(counts > 0, rows, -1), tokens, counts, counts > 0, check)
        else:
            counts = np.ones(SLOTS, np.int32)
            if isinstance(config.attention, MLAConfig):
                state, output = decode(params, state, rows, check)
            else:
                state, output = prefill(params, state, rows, tokens, counts, counts > 0, check)
        assert np.asarray(output.status)[counts > 0].tolist() == [OK] * int((counts > 0).sum())
        logits.append(np.asarray(output.logits)[counts > 0])
        allocators.append(jax.tree.map(np.asarray, state.allocator))
        assert len(output.logits.sharding.device_set) == devices
    for kind, pool in state.cache.entries.items():
        split = devices if isinstance(config.attention, GQAConfig) else 1
        assert pool.addressable_shards[0].data.shape[3] == entries[kind] // split
    return logits, allocators


@pytest.mark.parametrize("config", [MLA, GQA], ids=lambda c: c.name)
def test_eight_devices_serve_what_one_does(config, random_params):
    params = random_params(config)
    one, eight = serve(config, params, 1), serve(config, params, DEVICES)
    for alone, together in zip(one[0], eight[0], strict=True):
        assert alone.std() > 0.3
        np.testing.assert_allclose(together, alone, atol=TOLERANCE)
    for alone, together in zip(one[1], eight[1], strict=True):
        jax.tree.map(np.testing.assert_array_equal, alone, together)


# ---- number formats


@pytest.fixture(scope="module")
def texts():
    """Tokens, positions and segments of two texts."""
    tokens = np.random.default_rng(1).integers(0, MLA.vocab, (2, 12)).astype(np.int32)
    return tokens, np.broadcast_to(np.arange(12, dtype=np.int32), (2, 12)), np.ones((2, 12), np.int32)


@pytest.mark.parametrize("name", ["int4:g32+dense", "fp8_e4m3"])
def test_quantised_weights_agree_on_any_number_of_devices(name, random_params, texts):
    """Fault 14: 1, 2, 4 and 8 devices; on 8 the groups of the down matrices are split between two of them."""
    config = MLA.replace(layers=1, dense_layers=0)
    params = jax.tree.map(np.asarray, quantize_params(config, random_params(config), WeightFormat.parse(name)))
    run = jax.jit(lambda params: forward(config, params, *texts)[0])
    logits = {}
    for devices in (1, 2, 4, DEVICES) if name.startswith("int4") else (1, DEVICES):
        placed = jax.device_put(params, param_shardings(config, params, make_mesh(devices)))
        logits[devices] = np.asarray(run(placed))
    assert logits[1].std() > 0.3
    for devices, found in logits.items():
        np.testing.assert_allclose(found, logits[1], atol=TOLERANCE, err_msg=f"{devices} devices")


def test_where_int4_lies_on_eight_devices(random_params):
    """Codes are split along their inputs with their scales; where that splits a block of 32, every device has all."""
    params = quantize_params(MLA, random_params(MLA), WeightFormat.parse("int4:g32+dense"))
    places = flat(param_shardings(MLA, params, make_mesh(DEVICES)))
    down, output = places["sparse/mlp/down"], places["sparse/attention/output/weight"]
    assert down.data.spec == down.scale.spec == P(None, None, None, None)
    assert output.data.spec == P(None, "tp", None) and output.scale.spec == P(None, "tp", None)
    up = places["sparse/mlp/up"]
    assert up.data.spec == up.scale.spec == P(None, None, None, "tp")


# ---- the table of places


@pytest.mark.parametrize("config", [MLA, GQA, ModelConfig.preset("kimi-k2.6"), ModelConfig.preset("deepseek-v3")])
def test_every_parameter_has_a_place_and_the_large_ones_are_split(config):
    specs = parameter_specs(config)
    abstract = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), specs, is_leaf=lambda x: isinstance(x, ParameterSpec)
    )
    places, specs = flat(param_shardings(config, abstract, make_mesh(DEVICES))), flat(specs)
    assert places.keys() == specs.keys()
    whole = {path for path, place in places.items() if place.is_fully_replicated}
    assert not any("expert" in specs[path].kind for path in whole)
    for path in whole:
        small = "norm" in path or "router" in path or "_down" in path
        assert small, f"{path} of shape {specs[path].shape} is on every device"
    on_one = sum(math.prod(places[path].shard_shape(spec.shape)) for path, spec in specs.items())
    total = sum(math.prod(spec.shape) for spec in specs.values())
    assert on_one < total / DEVICES * (1.02 if config.hidden > 1000 else 1.5)


def test_axes_that_are_split_are_checked_beforehand():
    """What `check_devices` lets pass divides: no weight falls back to being on every device."""
    for config in (MLA, GQA):
        config.check_devices(DEVICES)
        for path, spec in flat(parameter_specs(config)).items():
            for axis, size in zip(spec.axes, spec.shape, strict=True):
                assert axis not in RULES or size % DEVICES == 0, path


def test_more_devices_than_there_are_are_refused():
    count = len(jax.devices())
    with pytest.raises(UserError, match=rf"{count + 1} devices asked for, {count} there; .*--devices {count + 1}"):
        make_mesh(count + 1)
    assert make_mesh(count).shape == {"tp": count}
