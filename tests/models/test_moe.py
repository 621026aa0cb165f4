"""Experts against a loop over tokens in float64, however the tokens are spread over them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxinfer.config import GQAConfig, ModelConfig, MoEConfig, RopeConfig
from jaxinfer.models.moe import MoE, sort_by_expert

HIDDEN, WIDTH, EXPERTS, TOP_K, LAYERS = 16, 24, 6, 2, 2
LAYER = jnp.int32(1)


def config(top_k: int = TOP_K, shared: int = 1) -> ModelConfig:
    return ModelConfig(
        name="experts",
        vocab=8,
        hidden=HIDDEN,
        layers=LAYERS,
        dense_layers=0,
        dense_intermediate=0,
        attention=GQAConfig(heads=1, kv_heads=1, head_dim=2),
        moe=MoEConfig(experts=EXPERTS, top_k=top_k, intermediate=WIDTH, shared_experts=shared, scaling=1.7),
        rope=RopeConfig(),
        max_position=8,
    )


def make(top_k: int = TOP_K, shared: int = 1) -> MoE:
    """Random weights, drawn by numpy, which has nothing to compile."""
    rng = np.random.default_rng(0)
    module = nnx.eval_shape(lambda: MoE(LAYERS, config(top_k, shared), nnx.Rngs(0), jnp.float32))
    graph, abstract = nnx.split(module)

    def draw(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.asarray(rng.standard_normal(leaf.shape) / np.sqrt(leaf.shape[-2]), leaf.dtype)

    return nnx.merge(graph, jax.tree.map(draw, abstract))


serve_jit = nnx.jit(lambda moe, x, valid: moe(x, LAYER, valid))
train_jit = nnx.jit(lambda moe, x, valid, factor: moe.with_capacity(x, LAYER, valid, factor), static_argnums=3)

# What is added to the scores of the experts decides where the tokens go.
ROUTINGS = {
    "as they like": [0] * 6,
    "all to two": [0, 9, 0, 0, 9, 0],
    "first and last": [9, 0, 0, 0, 0, 9],
    "one has all, the rest share": [0, 0, 9, 0, 0, 0],
    "three are empty": [-9, 0, -9, 0, -9, 0],
}


def route(moe: MoE, bias) -> MoE:
    moe.router.bias.set_value(jnp.tile(jnp.array(bias, jnp.float32), (LAYERS, 1)))
    return moe


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def swiglu(x, gate, up, down) -> np.ndarray:
    return (silu(x @ gate) * (x @ up)) @ down


def slow(moe: MoE, x, valid, capacity: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Token by token, expert by expert; an expert that has had `capacity` tokens takes no more. Also how many tokens
    chose each expert."""
    experts, weights = moe.router(jnp.asarray(x), LAYER)
    matrices = [np.asarray(w.get_value()[LAYER], np.float64) for w in (moe.gate, moe.up, moe.down)]
    x, load = np.asarray(x, np.float64), np.zeros(EXPERTS, int)
    out = np.zeros_like(x)
    if moe.shared is not None:
        parts = (moe.shared.gate, moe.shared.up, moe.shared.down)
        out += swiglu(x, *(np.asarray(p.weight.get_value()[LAYER], np.float64) for p in parts))
    for token in np.flatnonzero(valid):
        for expert, weight in zip(np.asarray(experts)[token], np.asarray(weights, np.float64)[token], strict=True):
            load[expert] += 1
            if capacity is None or load[expert] <= capacity:
                out[token] += weight * swiglu(x[token], *(m[expert] for m in matrices))
    return out, load


def tokens(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, HIDDEN)).astype(np.float32)


@pytest.fixture(scope="module")
def moe():
    return make()


# Float32 sums of 24 products of numbers of order 1.
CLOSE = {"rtol": 1e-4, "atol": 2e-5}


@pytest.mark.parametrize("bias", ROUTINGS.values(), ids=ROUTINGS.keys())
@pytest.mark.parametrize("count", [1, 33])
def test_serving(moe, bias, count):
    x, valid = tokens(count), np.ones(count, bool)
    expected, load = slow(route(moe, bias), x, valid)
    if max(bias) == 9:
        assert set(np.flatnonzero(load == count)) >= set(np.flatnonzero(np.array(bias) == 9))
    if min(bias) < 0:
        assert not load[[0, 2, 4]].any()
    np.testing.assert_allclose(serve_jit(moe, x, valid), expected, **CLOSE)


@pytest.mark.parametrize(("top_k", "shared"), [(1, 0), (1, 2), (EXPERTS, 1)])
def test_serving_with_one_and_all_experts_and_other_shared_ones(top_k, shared):
    """With top-1 and a bias, all tokens are one expert's."""
    moe = route(make(top_k, shared), [0, 0, 0, 9, 0, 0])
    x, valid = tokens(33, 1), np.ones(33, bool)
    expected, load = slow(moe, x, valid)
    assert load.tolist() == ([0, 0, 0, 33, 0, 0] if top_k == 1 else [33] * 6)
    np.testing.assert_allclose(serve_jit(moe, x, valid), expected, **CLOSE)


def test_rows_that_are_not_valid_take_no_part(moe):
    """Whatever is in them: no other row changes by a bit, none is routed."""
    route(moe, ROUTINGS["as they like"])
    valid = np.random.default_rng(2).random(33) < 0.6
    x = tokens(33, 2)
    expected, _ = slow(moe, x, valid)
    found = np.asarray(serve_jit(moe, x, valid))
    np.testing.assert_allclose(found, expected, **CLOSE)
    for junk in (np.nan, np.inf, 1e30):
        spoilt = np.where(valid[:, None], x, np.float32(junk))
        np.testing.assert_array_equal(np.asarray(serve_jit(moe, spoilt, valid))[valid], found[valid])


@pytest.mark.parametrize("bias", ROUTINGS.values(), ids=ROUTINGS.keys())
def test_training_equals_serving_when_there_is_room(moe, bias):
    """Capacity for all tokens at each expert: nothing is dropped."""
    route(moe, bias)
    x, valid = tokens(33, 3), np.arange(33) != 7
    expected, load = slow(moe, x, valid)
    found, counted = train_jit(moe, x, valid, float(EXPERTS))
    np.testing.assert_array_equal(counted, load)
    np.testing.assert_allclose(found, expected, **CLOSE)
    np.testing.assert_allclose(found, serve_jit(moe, x, valid), **CLOSE)


@pytest.mark.parametrize("bias", [ROUTINGS["as they like"], ROUTINGS["all to two"]], ids=["spread", "crowded"])
def test_training_drops_the_latest_beyond_capacity(moe, bias):
    """1.0 times the even share of 66 assignments is 11 for each of 6 experts."""
    route(moe, bias)
    x, valid = tokens(33, 4), np.ones(33, bool)
    expected, load = slow(moe, x, valid, capacity=11)
    assert load.max() > 11
    found, counted = train_jit(moe, x, valid, 1.0)
    np.testing.assert_array_equal(counted, load)
    np.testing.assert_allclose(found, expected, **CLOSE)


def test_the_gradient_of_training_is_that_of_serving(moe):
    """In the direction of a random change of the inputs, by central differences of the serving path."""
    route(moe, ROUTINGS["all to two"])  # a choice that no small change alters
    x, direction, readout = tokens(33, 5), tokens(33, 6), tokens(33, 7)
    valid = np.ones(33, bool)
    read = lambda x: jnp.sum(moe.with_capacity(x, LAYER, jnp.asarray(valid), 6.0)[0] * readout)  # noqa: E731
    slope = jax.jit(jax.grad(read))(x)
    step = 1e-2
    ends = (np.asarray(serve_jit(moe, x + sign * step * direction, valid), np.float64) for sign in (1, -1))
    forward, backward = (np.sum(end * readout) for end in ends)
    assert np.sum(slope * direction) == pytest.approx((forward - backward) / (2 * step), rel=5e-3)


def test_sort_by_expert():
    chosen = jnp.array([[2, 0], [3, 2], [0, 2], [3, 3]], jnp.int32)  # 3: no expert
    order, counts = sort_by_expert(chosen, 3)
    assert counts.tolist() == [2, 0, 3]
    assert order.tolist() == [1, 4, 0, 3, 5, 2, 6, 7]
