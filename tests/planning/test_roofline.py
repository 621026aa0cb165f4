"""Floors against figures worked by hand."""

import math

import pytest

from jaxinfer.config import GQAConfig, Precision
from jaxinfer.planning.capacity import total, weights
from jaxinfer.planning.gpus import GPU
from jaxinfer.planning.model import PlannedModel
from jaxinfer.planning.roofline import causal_pairs, decode_floor, experts_hit, flops_per_pair, prefill_floor

H200 = GPU.find("h200")
KIMI, GLM = PlannedModel.find("kimi-k2.6"), PlannedModel.find("glm-5.2")
BF16 = Precision.parse("bf16", "bf16")


def test_experts_hit():
    assert experts_hit(384, 8, 1) == pytest.approx(8)
    assert experts_hit(384, 8, 2) == pytest.approx(8 + 8 * 376 / 384)
    assert experts_hit(384, 8, 100_000) == pytest.approx(384)


def test_causal_pairs():
    assert causal_pairs(5) == sum(range(1, 6))
    assert causal_pairs(5, 3) == 1 + 2 + 3 + 3 + 3
    assert causal_pairs(2, 3) == 3


def test_flops_of_a_pair():
    assert flops_per_pair(KIMI.config, absorbed=True) == 2 * 64 * (576 + 512)
    assert flops_per_pair(KIMI.config, absorbed=False) == 2 * 64 * (192 + 128)
    grouped = KIMI.config.replace(attention=GQAConfig(heads=96, kv_heads=8, head_dim=128))
    assert flops_per_pair(grouped, absorbed=True) == 2 * 96 * (128 + 128)


def test_decode_of_one_token_by_hand():
    """On one GPU in bf16: a token reads the active weights, its row of the embedding and its cache."""
    floor = decode_floor(KIMI, BF16, H200, 1, batch=1, context=1000)
    attention = 7168 * 1536 + 1536 * 64 * 192 + 7168 * 576 + 512 * 64 * (128 + 128) + 64 * 128 * 7168
    expert, router = 3 * 7168 * 2048, 384 * 7168
    products = 61 * attention + 3 * 7168 * 18432 + 60 * (9 * expert + router) + 163840 * 7168
    norms = 61 * (2 * 7168 + 1536 + 512) + 7168
    bias = 60 * 384  # float32, and counted with the router's matrix
    assert floor.weight_bytes == pytest.approx(2 * (products + norms + 7168) + 4 * bias, rel=1e-12)
    assert floor.kv_bytes == 1001 * 70_272
    assert floor.bf16_flops == pytest.approx(2 * (products + bias) + 61 * 1000 * 2 * 64 * 1088, rel=1e-12)
    assert (floor.fp8_flops, floor.link_bytes) == (0, 0)
    assert floor.seconds == (floor.weight_bytes + floor.kv_bytes) / 4.8e12
    assert (floor.bound, floor.tokens_per_s) == ("memory", 1 / floor.seconds)


def test_large_batches_read_all_weights_and_share_them():
    precision = Precision.parse("int4:g32", "fp8_e4m3")
    small, large = (decode_floor(KIMI, precision, H200, 8, batch, 1) for batch in (1, 100_000))
    every = total(w for w in weights(KIMI, precision.weights, 8) if w.part != "embedding")
    assert small.weight_bytes < every / 10
    assert large.weight_bytes == pytest.approx(every, rel=0.01)
    assert large.bound == "compute"
    assert large.tokens_per_s > 100 * small.tokens_per_s


def test_fp8_products_run_at_the_fp8_rate():
    fp8 = prefill_floor(KIMI, Precision.parse("fp8_e4m3", "bf16"), H200, 8, 8192)
    plain = prefill_floor(KIMI, BF16, H200, 8, 8192)
    assert fp8.fp8_flops + fp8.bf16_flops == pytest.approx(plain.bf16_flops)
    assert plain.fp8_flops == 0 and fp8.fp8_flops > 0.8 * plain.bf16_flops
    assert fp8.times["compute"] < 0.7 * plain.times["compute"]


def test_link_carries_two_sums_a_layer():
    floor = decode_floor(KIMI, BF16, H200, 8, batch=64, context=1)
    assert floor.link_bytes == 61 * 2 * 64 * 7168 * 2
    assert floor.times["link"] == floor.link_bytes / 450e9


def test_sparse_attention_reads_at_most_its_choice():
    short, long, longer = (decode_floor(GLM, BF16, H200, 8, 1, context) for context in (2048, 10_000, 20_000))
    assert short.kv_bytes == 2 * (78 * 576 + 21 * 128) * 2049
    assert longer.kv_bytes - long.kv_bytes == 10_000 * 21 * 128 * 2
    assert longer.bf16_flops - long.bf16_flops == 10_000 * 21 * 2 * 32 * 128


@pytest.mark.parametrize("batch", [1, 8, 64])
def test_nothing_is_negative_or_endless(batch):
    floor = decode_floor(GLM, Precision.parse("int4:g32", "fp8_e4m3"), H200, 8, batch, 4096)
    assert 0 < floor.seconds < 1 and math.isfinite(floor.tokens_per_s)
    assert set(floor.times) == {"memory", "compute", "link"}
