"""The router against a slow one in float64 that goes through tokens and groups one by one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxinfer.config import MoEConfig
from jaxinfer.models.router import Router

TOKENS, HIDDEN, LAYERS = 200, 12, 2
BASE = MoEConfig(experts=16, top_k=4, intermediate=1)
CONFIGS = {
    "one group": BASE,
    "top 1": dataclasses.replace(BASE, top_k=1),
    "all experts": dataclasses.replace(BASE, top_k=16),
    "groups": dataclasses.replace(BASE, groups=4, top_groups=2),
    "one of many groups": dataclasses.replace(BASE, groups=4, top_groups=1),
    "groups of one": dataclasses.replace(BASE, groups=16, top_groups=6),
    "scaled": dataclasses.replace(BASE, scaling=2.5),
    "not renormalised": dataclasses.replace(BASE, renormalise=False, scaling=0.7),
    "softmax": dataclasses.replace(BASE, score="softmax", groups=2, top_groups=1),
}


def make(config: MoEConfig, seed: int = 0, bias: float = 0.3) -> Router:
    router = Router(LAYERS, HIDDEN, config, nnx.Rngs(seed), jnp.float32)
    rng = np.random.default_rng(seed)
    router.bias.set_value(jnp.asarray(rng.standard_normal((LAYERS, config.experts)) * bias, jnp.float32))
    return router


def slow(x, weight, bias, config: MoEConfig) -> tuple[list[set], np.ndarray]:
    """The chosen experts of each token, and the weight of every expert, 0 where not chosen."""
    chosen, weights = [], np.zeros((len(x), config.experts))
    for token, row in enumerate(np.asarray(x, np.float64)):
        logits = row @ np.asarray(weight, np.float64)
        if config.score == "sigmoid":
            score = 1 / (1 + np.exp(-logits))
        else:
            score = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
        choice = score + np.asarray(bias, np.float64)
        size = config.experts // config.groups
        value = [sum(sorted(choice[g * size : (g + 1) * size])[-2:]) for g in range(config.groups)]
        best = sorted(range(config.groups), key=lambda g: -value[g])[: config.top_groups]
        allowed = [e for g in best for e in range(g * size, (g + 1) * size)]
        picked = sorted(allowed, key=lambda e: -choice[e])[: config.top_k]
        total = sum(score[e] for e in picked) if config.renormalise else 1.0
        weights[token, picked] = [score[e] / total * config.scaling for e in picked]
        chosen.append(set(picked))
    return chosen, weights


def spread(experts, weights, count: int) -> np.ndarray:
    """Weights by expert."""
    table = np.zeros((len(experts), count))
    np.put_along_axis(table, np.asarray(experts), np.asarray(weights, np.float64), axis=1)
    return table


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize("layer", range(LAYERS))
def test_router(config, layer):
    x = np.random.default_rng(1).standard_normal((TOKENS, HIDDEN)).astype(np.float32)
    router = make(config)
    experts, weights = jax.jit(lambda x, layer: router(x, layer))(x, jnp.int32(layer))
    assert experts.shape == weights.shape == (TOKENS, config.top_k) and weights.dtype == jnp.float32
    chosen, expected = slow(x, router.weight.get_value()[layer], router.bias.get_value()[layer], config)
    assert [set(row) for row in np.asarray(experts).tolist()] == chosen
    assert all(len(row) == config.top_k for row in chosen)
    np.testing.assert_allclose(spread(experts, weights, config.experts), expected, rtol=1e-5, atol=1e-7)
    if config.renormalise:
        np.testing.assert_allclose(np.asarray(weights).sum(axis=1), config.scaling, rtol=1e-5)


@pytest.mark.parametrize("renormalise", [True, False])
def test_bias_moves_the_choice_and_not_the_weight(renormalise):
    """An expert with the greatest bias is everyone's, at the weight that its own score gives it."""
    config = dataclasses.replace(BASE, top_k=2, renormalise=renormalise)
    x = np.random.default_rng(2).standard_normal((TOKENS, HIDDEN)).astype(np.float32)
    router = make(config, bias=0.0)
    plain, _ = router(x, jnp.int32(0))
    assert (np.asarray(plain) == 5).any(axis=1).mean() < 0.5
    router.bias.set_value(router.bias.get_value().at[:, 5].set(100.0))
    experts, weights = router(x, jnp.int32(0))
    assert (np.asarray(experts)[:, 0] == 5).all()
    score = 1 / (1 + np.exp(-(x.astype(np.float64) @ np.asarray(router.weight.get_value()[0], np.float64))))
    own = np.take_along_axis(score, np.asarray(experts), axis=1)
    expected = own / own.sum(axis=1, keepdims=True) if renormalise else own
    np.testing.assert_allclose(weights, expected, rtol=1e-5)


def test_a_group_counts_by_its_two_best():
    """One brilliant expert among poor ones loses to two good ones."""
    config = dataclasses.replace(BASE, experts=6, groups=2, top_groups=1, top_k=2)
    router = make(config, bias=0.0)
    router.weight.set_value(jnp.zeros_like(router.weight.get_value()))
    router.bias.set_value(jnp.tile(jnp.array([9.0, 0.0, 0.0, 5.0, 5.0, 0.0]), (LAYERS, 1)))
    experts, _ = router(jnp.ones((1, HIDDEN)), jnp.int32(0))
    assert set(np.asarray(experts)[0].tolist()) == {3, 4}


def test_narrow_hidden_states_are_scored_in_float32():
    """Two experts a thousandth apart: bf16 logits would tie."""
    router = make(dataclasses.replace(BASE, top_k=1), bias=0.0)
    weight = np.zeros((LAYERS, HIDDEN, 16), np.float32)
    weight[:, 0, 3], weight[:, 0, 2] = 1.001, 1.0
    router.weight.set_value(jnp.asarray(weight))
    experts, weights = router(jnp.ones((8, HIDDEN), jnp.bfloat16), jnp.int32(1))
    assert np.asarray(experts).tolist() == [[3]] * 8 and weights.dtype == jnp.float32
