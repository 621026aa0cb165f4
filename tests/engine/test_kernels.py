"""The engine on its kernels, run by their interpreter, against the engine on plain jnp."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.checkpoints.model import EMBEDDED, Model
from jaxinfer.config import EngineConfig, ModelConfig, Precision
from jaxinfer.engine import Engine, SamplingParams
from jaxinfer.errors import UserError
from jaxinfer.text.tokenizer import Tokenizer
from tests.engine.conftest import prompts, serve

CONFIG = EngineConfig(num_pages=16, max_slots=2, max_context=48, decode_buckets=(2,), prefill_buckets=((2, 16),))


@pytest.fixture(scope="module")
def model(random_params) -> Model:
    """The preset's widths, which are the least that kernels take, with two layers."""
    config = ModelConfig.preset("tiny").replace(layers=2)
    tokenizer = Tokenizer.load(EMBEDDED["tiny"] / "tokenizer.json")
    scales = {"latent": jnp.full(config.layers, 0.03)}
    return Model(config, random_params(config), scales, tokenizer, jnp.bfloat16, expand_weights=False)


@pytest.mark.parametrize(
    ("weights", "kv", "devices", "tolerance"),
    [
        # bf16 activations (2^-9) in both; the order of sums and of rounding differs.
        ("int4:g32", "fp8_e4m3", 1, 0.04),
        ("int4:g32", "bf16", 2, 0.04),
        # FP8 products also round the activations, to 2^-4, which the plain path does not: 2^-4 / sqrt(3) of each
        # product, of which some ten lie one behind the other.
        ("fp8_e4m3", "fp8_e4m3", 1, 0.2),
    ],
)
def test_kernels_serve_what_the_reference_does(model, weights, kv, devices, tolerance):
    precision = Precision.parse(weights, kv)
    found = []
    for kernels in ("reference", "interpret"):
        served = serve(model, CONFIG.replace(precision=precision, devices=devices, kernels=kernels))
        ids = [served.engine.submit(p, SamplingParams(3, ignore_eos=True)) for p in prompts(50, [5, 21])]
        done = served.run()
        found.append([(done[i].tokens, np.array(served.logits[i])) for i in ids])
    errors, sizes = [], []
    for (tokens, plain), (others, kernel) in zip(*found, strict=True):
        # Compared as far as both were given the same text.
        same = next((i + 1 for i, (a, b) in enumerate(zip(tokens, others, strict=True)) if a != b), len(tokens))
        errors.append(np.square(plain[:same] - kernel[:same]).mean(axis=-1))
        sizes.append(np.square(plain[:same]).mean(axis=-1))
    # Root mean square: rounding may send one token to another expert, which moves it by any amount.
    error = np.sqrt(np.concatenate(errors).mean() / np.concatenate(sizes).mean())
    assert 0 < error < tolerance, error


def test_kernels_refuse_what_they_cannot_read(model):
    with pytest.raises(UserError, match="bf16 and fp8_e4m3 pages, not f32"):
        Engine(model, CONFIG.replace(precision=Precision.parse("bf16", "f32"), kernels="interpret"))
    with pytest.raises(UserError, match="unknown kernels 'fast'; use auto, reference, triton, interpret"):
        Engine(model, CONFIG.replace(kernels="fast"))
    assert dataclasses.replace(model).compute_dtype == jnp.bfloat16
