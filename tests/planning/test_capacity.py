"""Bytes: figures worked by hand, and the same bytes counted on arrays that exist."""

import jax
import pytest

from jaxinfer.cache.kv import KVCache
from jaxinfer.checkpoints.model import quantize_params, weight_bytes
from jaxinfer.config import PRESETS, GQAConfig, MLAConfig, ModelConfig, MoEConfig, Precision, RopeConfig
from jaxinfer.errors import UserError
from jaxinfer.parallel.sharding import cache_sharding, make_mesh, param_shardings
from jaxinfer.planning.capacity import PARTS, Capacity, kv_bytes_per_token, kv_gpu_bytes_per_token, total, weights
from jaxinfer.planning.gpus import GPU, GPUS
from jaxinfer.planning.model import PlannedModel
from jaxinfer.quantization.formats import KVFormat, WeightFormat

GIB = 2**30
BF16, FP8, INT4 = (WeightFormat.parse(text) for text in ("bf16", "fp8_e4m3", "int4:g32"))
KIMI, GLM = PlannedModel.find("kimi-k2.6"), PlannedModel.find("glm-5.2")
MLA_MODEL = ModelConfig(
    name="latent",
    vocab=256,
    hidden=128,
    layers=3,
    dense_layers=1,
    dense_intermediate=512,
    attention=MLAConfig(heads=8, q_lora=96, kv_lora=64, nope_dim=16, rope_dim=8, v_dim=32),
    moe=MoEConfig(experts=8, top_k=2, intermediate=256, shared_experts=2),
    rope=RopeConfig(),
    max_position=512,
)
GQA_MODEL = MLA_MODEL.replace(
    name="grouped",
    dense_layers=0,
    dense_intermediate=0,
    attention=GQAConfig(heads=16, kv_heads=8, head_dim=16, qk_norm=True),
)
FORMATS = ["bf16", "fp8_e4m3", "int4:g32", "int4:g32+dense"]


def gpu_bytes(tree, device: jax.Device) -> int:
    """Bytes that the arrays of `tree` have on one device."""
    shards = (shard for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards)
    return sum(shard.data.nbytes for shard in shards if shard.device == device)


@pytest.mark.parametrize("config", [MLA_MODEL, GQA_MODEL], ids=lambda config: config.name)
@pytest.mark.parametrize("format", FORMATS)
def test_weights_take_what_placed_arrays_take(config, format, random_params):
    params = quantize_params(config, random_params(config), WeightFormat.parse(format))
    mesh = make_mesh(8)
    placed = jax.device_put(params, param_shardings(config, params, mesh))
    found, alone = (weights(PlannedModel(config), WeightFormat.parse(format), devices) for devices in (8, 1))
    assert total(found, "bytes") == total(alone, "bytes") == total(alone) == weight_bytes(params)
    assert {total(found)} == {gpu_bytes(placed, device) for device in mesh.devices.flat}


@pytest.mark.parametrize("config", [MLA_MODEL, GQA_MODEL], ids=lambda config: config.name)
@pytest.mark.parametrize("kv", ["bf16", "fp8_e4m3"])
@pytest.mark.parametrize("devices", [1, 8])
def test_a_token_takes_what_the_pool_takes(config, kv, devices):
    model, format, mesh = PlannedModel(config), KVFormat(kv), make_mesh(devices)
    cache = KVCache.create(config.attention.entries, config.layers, 2, 4, format)
    entries = jax.device_put(cache.entries, cache_sharding(config, mesh))
    assert kv_bytes_per_token(model, format) == cache.bytes_per_token
    assert kv_gpu_bytes_per_token(model, format, devices) * 2 * 4 == gpu_bytes(entries, mesh.devices.flat[-1])


def test_kimi_parameters_by_hand():
    attention = 7168 * 1536 + 1536 * 64 * 192 + 7168 * 576 + 512 * 64 * (128 + 128) + 64 * 128 * 7168
    expert, norms = 3 * 7168 * 2048, 2 * 7168 + 1536 + 512
    sparse = attention + norms + 385 * expert + 384 * 7168 + 384
    dense = attention + norms + 3 * 7168 * 18432
    expected = 2 * 163840 * 7168 + 7168 + dense + 60 * sparse
    assert total(weights(KIMI, BF16, 8), "parameters") == expected == 1_026_408_232_448


def test_kimi_int4_by_hand():
    """Half a byte and a bf16 scale over 32 for routed experts, two bytes for the rest, four for the router's bias."""
    experts, bias = 60 * 384 * 3 * 7168 * 2048, 60 * 384
    rest = 1_026_408_232_448 - experts - bias
    found = weights(KIMI, INT4, 8)
    assert total(found, "bytes") == experts // 2 + experts // 32 * 2 + 2 * rest + 4 * bias
    assert total(found, "bytes") / GIB == pytest.approx(553.4, abs=0.05)
    whole = 2 * 61 * 7168 * (1536 + 576) + 60 * 7168 * 384 * 2 + 4 * bias + 2 * (61 * (2 * 7168 + 2048) + 7168)
    assert total(found) == (total(found, "bytes") - whole) // 8 + whole


@pytest.mark.parametrize(("format", "low", "high"), [(FP8, 703.7, 704.2), (INT4, 419.9, 420.9)])
def test_glm_checkpoints_sum_to_the_published_layouts(format, low, high):
    assert low <= total(weights(GLM, format, 8, draft=True), "bytes") / GIB <= high


def test_glm_extras_by_hand():
    indexer = 2048 * 32 * 128 + 6144 * 128 + 6144 * 32 + 2 * 128
    found = weights(GLM, BF16, 8, draft=True)
    assert total([w for w in found if w.part == "indexer"], "parameters") == 21 * indexer
    sparse_layer = total(weights(PlannedModel(GLM.config.replace(layers=1, dense_layers=0)), BF16, 8), "parameters")
    draft = sparse_layer - 2 * 154_880 * 6144 + 2 * 6144 * 6144 + indexer
    assert total([w for w in found if w.part == "draft layers"], "parameters") == draft
    assert total(found) - total(weights(GLM, BF16, 8)) == total([w for w in found if w.part == "draft layers"])


@pytest.mark.parametrize(
    ("model", "kv", "expected"),
    [
        (KIMI, "bf16", 70_272),
        (KIMI, "fp8_e4m3", 35_136),
        (GLM, "bf16", 2 * (78 * 576 + 21 * 128)),
        (GLM, "fp8_e4m3", 47_616),
    ],
)
def test_bytes_per_token(model, kv, expected):
    assert kv_bytes_per_token(model, KVFormat(kv)) == kv_gpu_bytes_per_token(model, KVFormat(kv), 8) == expected


@pytest.mark.parametrize("name", [*PRESETS, "glm-5.2"])
def test_every_tensor_has_a_part(name):
    assert {weight.part for weight in weights(PlannedModel.find(name), INT4, 8, draft=True)} <= set(PARTS)


def test_capacity():
    capacity = Capacity(usable=1000, weights=300, per_token=7)
    assert (capacity.free, capacity.tokens, capacity.concurrency(9), capacity.concurrency(101)) == (700, 100, 11, 0)
    assert Capacity(usable=1000, weights=1001, per_token=7).tokens == 0
    kimi = Capacity.of(KIMI, Precision.parse("int4:g32", "bf16"), GPU.find("H200"), 8)
    assert kimi.tokens == (135_679_338_086 - 76_182_593_536) // 70_272


def test_gpus_are_plausible():
    for gpu in GPUS.values():
        assert gpu.fp8_flops >= gpu.bf16_flops > gpu.bandwidth > gpu.link > gpu.memory


def test_what_does_not_fit_is_said():
    with pytest.raises(UserError, match="3 devices do not divide"):
        weights(KIMI, INT4, 3)
    with pytest.raises(UserError, match="group size 128 does not divide the 64 inputs"):
        weights(PlannedModel(MLA_MODEL), WeightFormat.parse("int4:g128+dense"), 8)
    with pytest.raises(UserError, match="unknown GPU 'h20'; there are: a100, b200, h100, h200"):
        GPU.find("h20")
