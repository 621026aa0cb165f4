"""A model with sparse attention, served: logits equal the plain form's through chunks, mixed lengths, preemption, page
reuse and hand-over between pages, whatever layers share a choice; its index keys are covered by every check."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.checkpoints.model import Model
from jaxinfer.config import IndexerConfig
from jaxinfer.engine import SamplingParams
from jaxinfer.evaluation.faults import load
from tests.engine.conftest import ENGINE, SMALL, plain_logits, prompts, serve

TOLERANCE = 1e-4  # float32, logits of order 1
TOP_K = 10
LENGTHS = [3, 4, 5, 9, 10, 11, 30, 41]  # a page is 4 tokens, TOP_K 10


def sparse_model(small_model: Model, top_k: int = TOP_K, pattern: str = "FSFS") -> Model:
    indexer = IndexerConfig(heads=6, head_dim=16, top_k=top_k, interleaved=True, pattern=pattern)
    config = SMALL.replace(layers=4, dense_layers=2, attention=dataclasses.replace(SMALL.attention, indexer=indexer))
    scales = {"latent": jnp.full(4, 0.02), "index": jnp.full(pattern.count("F"), 0.02)}
    return Model(config, load.random_params(config), scales, small_model.tokenizer)


@pytest.fixture(scope="module")
def model(small_model) -> Model:
    return sparse_model(small_model)


@pytest.fixture(scope="module")
def served(model):
    """Few pages: requests wait, are preempted, and take pages that others used."""
    return serve(model, ENGINE.replace(num_pages=20, integrity="digest", digest_pages=2))


def largest_difference(served, model: Model, ids) -> float:
    done = served.run()
    worst = 0.0
    for i in ids:
        assert done[i].finish_reason == "length"
        expected = plain_logits(model, model.params, done[i].prompt + done[i].tokens)[len(done[i].prompt) - 1 : -1]
        worst = max(worst, float(np.abs(np.stack(served.logits[i]) - expected).max()))
    return worst


def test_served_equals_plain_with_preemption_and_page_reuse(served, model):
    for seed in (0, 1):
        ids = [served.engine.submit(p, SamplingParams(12, ignore_eos=True)) for p in prompts(seed, LENGTHS)]
        assert largest_difference(served, model, ids) < TOLERANCE
    assert served.engine.counters.preemptions > 0


def test_the_choice_matters_and_within_top_k_there_is_none(model, small_model):
    """Beyond TOP_K tokens logits differ from dense attention's, up to there they are the same."""
    [tokens] = prompts(3, [30])
    wide = sparse_model(small_model, top_k=64).config
    both = (dataclasses.replace(model, config=config) for config in (model.config, wide))
    sparse, dense = (plain_logits(each, model.params, tokens) for each in both)
    difference = np.abs(sparse - dense).max(axis=1)
    assert difference[:TOP_K].max() < TOLERANCE and difference[TOP_K:].max() > 0.1


def test_what_is_not_owned_is_not_read(served, model):
    """Every byte of the free pool is NaN, in every kind, before a request is served."""
    engine = served.engine
    poisoned = jax.tree.map(lambda a: jnp.full_like(a, jnp.nan), engine.state.cache.entries)
    engine.state = dataclasses.replace(engine.state, cache=dataclasses.replace(engine.state.cache, entries=poisoned))
    ids = [engine.submit(p, SamplingParams(6, ignore_eos=True)) for p in prompts(5, [1, 3, 4, 5, 22])]
    assert largest_difference(served, model, ids) < TOLERANCE


@pytest.mark.parametrize("kind", ["index", "latent"])
def test_digests_cover_every_kind(served, kind):
    engine = served.engine
    first = engine.submit(prompts(6, [13])[0], SamplingParams(20, ignore_eos=True))
    for _ in range(6):
        engine.step()
    page = int(np.asarray(engine.state.allocator.page_table).max(axis=0)[0])
    pool = engine.state.cache.entries[kind]
    entries = {**engine.state.cache.entries, kind: pool.at[0, page, 1, 3].add(1.0)}
    engine.state = dataclasses.replace(engine.state, cache=dataclasses.replace(engine.state.cache, entries=entries))
    assert served.run()[first].finish_reason != "length"
