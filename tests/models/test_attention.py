"""The paged decoder equals the plain one: texts served in chunks of any size over pages in any order, logits against
those of the whole text at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.cache.kv import KVCache
from jaxinfer.config import GQAConfig, IndexerConfig, MLAConfig, ModelConfig, MoEConfig, RopeConfig, YarnConfig
from jaxinfer.models.attention import PagedContext, causal_mask
from jaxinfer.models.decoder import bind, forward
from jaxinfer.models.rope import rotate
from jaxinfer.quantization.formats import KVFormat

PAGE, PAGES, ROWS, CHUNK, LONGEST, VOCAB = 4, 120, 3, 32, 140, 61  # 140 tokens are more than a block of the kernel
TOLERANCE = 1e-4  # float32, logits of order 1
F32, FP8 = KVFormat.parse("f32"), KVFormat.parse("fp8_e4m3")


def model(attention: MLAConfig | GQAConfig, rope: RopeConfig, dense_layers: int = 1) -> ModelConfig:
    return ModelConfig(
        name="small",
        vocab=VOCAB,
        hidden=32,
        layers=3,
        dense_layers=dense_layers,
        dense_intermediate=48,
        attention=attention,
        moe=MoEConfig(experts=4, top_k=2, intermediate=16),
        rope=rope,
        max_position=256,
    )


def sparse(top_k: int, pattern: str, interleaved: bool = False) -> MLAConfig:
    """Latent attention over the best `top_k` of 140 tokens."""
    indexer = IndexerConfig(heads=6, head_dim=8, top_k=top_k, interleaved=interleaved, pattern=pattern)
    return MLAConfig(4, kv_lora=16, nope_dim=8, rope_dim=4, v_dim=12, q_lora=24, indexer=indexer)


YARN = YarnConfig(factor=8.0, original_max_position=32, mscale=1.2, mscale_all_dim=0.8)
MODELS = {
    "mla": model(MLAConfig(4, kv_lora=16, nope_dim=8, rope_dim=4, v_dim=12, q_lora=24), RopeConfig(interleaved=True)),
    "mla, direct queries, yarn": model(MLAConfig(2, 8, nope_dim=6, rope_dim=8, v_dim=4), RopeConfig(yarn=YARN), 0),
    "mla, indexer": model(sparse(8, "FFF"), RopeConfig(interleaved=True)),
    "mla, shared choice": model(sparse(70, "FSF", interleaved=True), RopeConfig(interleaved=True)),
    "gqa": model(GQAConfig(heads=4, kv_heads=2, head_dim=8), RopeConfig()),
    "gqa, partial, qk norm": model(GQAConfig(6, 2, 8, qk_norm=True), RopeConfig(fraction=0.5, interleaved=True), 3),
}


class Case:
    """A model with random weights, its compiled forms, three texts, and their logits from the plain form."""

    def __init__(self, config: ModelConfig, params):
        self.config, self.params = config, params
        rng = np.random.default_rng(0)
        self.lengths = [LONGEST, 2 * PAGE, 37]
        self.tokens = rng.integers(0, VOCAB, (ROWS, LONGEST)).astype(np.int32)
        self.positions = np.broadcast_to(np.arange(LONGEST, dtype=np.int32), self.tokens.shape)
        self.segments = (self.positions < np.array(self.lengths)[:, None]).astype(np.int32)
        self.plain = jax.jit(lambda *inputs: forward(config, self.params, *inputs)[0])
        self.expected = np.asarray(self.plain(self.tokens, self.positions, self.segments))

        def paged(tokens, context, cache):
            decoder = bind(config, self.params)
            hidden, cache = decoder.paged(tokens, context, cache, jnp.float32)
            return decoder.logits(hidden), cache

        self.paged = jax.jit(paged, donate_argnums=2)

    def serve(self, seed: int, format: KVFormat, scales=None) -> list[np.ndarray]:
        """Logits of each text, fed in chunks of random sizes (1 to 32, some rows pausing) to a shuffled pool."""
        rng = np.random.default_rng(seed)
        columns = -(-LONGEST // PAGE)
        table = rng.permutation(PAGES)[: ROWS * columns].reshape(ROWS, columns).astype(np.int32)
        # A row knows only the pages that its text will need.
        table[np.arange(columns) >= -(-np.array(self.lengths) // PAGE)[:, None]] = -1
        cache = KVCache.create(self.config.attention.entries, self.config.cache_layers, PAGES, PAGE, format, scales)
        done, found = np.zeros(ROWS, int), [[] for _ in range(ROWS)]
        while (done < self.lengths).any():
            counts = np.minimum(rng.choice([0, 1, PAGE, 11, CHUNK], ROWS), self.lengths - done)
            inside = np.arange(CHUNK) < counts[:, None]
            positions = np.where(inside, done[:, None] + np.arange(CHUNK), -1).astype(np.int32)
            tokens = np.where(inside, np.take_along_axis(self.tokens, np.maximum(positions, 0), 1), 0)
            pages = np.where(inside, np.take_along_axis(table, np.maximum(positions, 0) // PAGE, 1), -1)
            done = done + counts
            offsets = np.where(inside, positions % PAGE, -1)
            context = PagedContext(positions, pages, offsets, table, done.astype(np.int32))
            logits, cache = self.paged(tokens, context, cache)
            for row in range(ROWS):
                found[row].append(np.asarray(logits)[row, : counts[row]])
        return [np.concatenate(parts) for parts in found]


@pytest.fixture(scope="module", params=MODELS)
def case(request, random_params):
    config = MODELS[request.param]
    return Case(config, random_params(config))


def by_hand(config: ModelConfig, params, x: np.ndarray, layer: int) -> np.ndarray:
    """One layer's attention over one text `[T, D]` in float64: each token and head over all tokens up to it."""
    weight = lambda name: np.asarray(params[name]["weight"], np.float64)[layer]  # noqa: E731
    turn = lambda a: np.asarray(  # noqa: E731
        rotate(jnp.asarray(a, jnp.float32)[None], jnp.arange(len(x))[None], config.rope), np.float64
    )[0]
    norm = lambda a, name: a / np.sqrt((a * a).mean(-1, keepdims=True) + config.rms_eps) * weight(name)  # noqa: E731
    dims = config.attention
    split = lambda a, heads: a.reshape(len(x), heads, -1)  # noqa: E731
    if isinstance(dims, MLAConfig):
        low = norm(x @ weight("query_down"), "query_norm") if dims.q_lora else x
        query = split(low @ weight("query_up"), dims.heads)
        query = np.concatenate([query[..., : dims.nope_dim], turn(query[..., dims.nope_dim :])], -1)
        down = x @ weight("latent_down")
        latent, shared = norm(down[:, : dims.kv_lora], "latent_norm"), turn(down[:, None, dims.kv_lora :])
        key = split(latent @ weight("key_up"), dims.heads)
        key = np.concatenate([key, shared.repeat(dims.heads, axis=1)], -1)
        value = split(latent @ weight("value_up"), dims.heads)
    else:
        query, key = split(x @ weight("query"), dims.heads), split(x @ weight("key"), dims.kv_heads)
        if dims.qk_norm:
            query, key = norm(query, "query_norm"), norm(key, "key_norm")
        query, key = turn(query), turn(key).repeat(dims.heads // dims.kv_heads, axis=1)
        value = split(x @ weight("value"), dims.kv_heads).repeat(dims.heads // dims.kv_heads, axis=1)
    out = np.zeros((len(x), dims.heads, value.shape[-1]))
    for token in range(len(x)):
        for head in range(dims.heads):
            scores = key[: token + 1, head] @ query[token, head] * config.softmax_scale
            weights = np.exp(scores - scores.max())
            out[token, head] = weights / weights.sum() @ value[: token + 1, head]
    return out.reshape(len(x), -1) @ weight("output")


def test_plain_attention_by_hand(case):
    """The reference itself against its definition."""
    stack = "dense" if case.config.dense_layers == 3 else "sparse"
    x = np.random.default_rng(1).standard_normal((1, 9, 32)).astype(np.float32)
    attention = getattr(bind(case.config, case.params), stack).attention
    positions, mask = jnp.arange(9)[None], causal_mask(jnp.ones((1, 9), jnp.int32))
    found = jax.jit(lambda x: attention.plain(x, jnp.int32(1), positions, mask))(x)[0]
    expected = by_hand(case.config, case.params[stack]["attention"], x[0].astype(np.float64), 1)
    assert expected.std() > 0.1
    np.testing.assert_allclose(found, expected, atol=1e-5)


def largest_difference(case: Case, found: list[np.ndarray]) -> float:
    return max(abs(logits - case.expected[row, : len(logits)]).max() for row, logits in enumerate(found))


@pytest.mark.parametrize("seed", range(2))
def test_paged_equals_plain(case, seed):
    found = case.serve(seed, F32)
    assert [len(logits) for logits in found] == case.lengths
    assert np.std(case.expected[0]) > 0.3, "logits that hardly differ would agree with anything"
    assert largest_difference(case, found) < TOLERANCE


def test_packed_texts_do_not_see_each_other(case):
    """Two texts in one row, and padding between them, as training packs them."""
    short, long = case.lengths[2], case.lengths[0] - case.lengths[2] - 5
    tokens, positions, segments = (np.zeros((ROWS, LONGEST), np.int32) for _ in range(3))
    tokens[0, :short], segments[0, :short] = case.tokens[2, :short], 1
    tokens[0, -long:], segments[0, -long:] = case.tokens[0, :long], 2
    positions[0, :short], positions[0, -long:] = np.arange(short), np.arange(long)
    found = np.asarray(case.plain(tokens, positions, segments))[0]
    assert abs(found[:short] - case.expected[2, :short]).max() < TOLERANCE
    assert abs(found[-long:] - case.expected[0, :long]).max() < TOLERANCE


def test_later_tokens_change_nothing(case):
    changed = case.tokens.copy()
    changed[:, 30:] = (changed[:, 30:] + 1) % VOCAB
    found = np.asarray(case.plain(changed, case.positions, case.segments))
    np.testing.assert_array_equal(found[0, :30], case.expected[0, :30])
    assert abs(found[0, 30:] - case.expected[0, 30:]).max() > 0.1


@pytest.mark.parametrize("case", ["mla", "gqa"], indirect=True)
def test_fp8_pages_are_read_with_their_scales(case):
    """Fault 12. A scale that holds all entries keeps the logits near, one at which all of them saturate does not. Near
    in the mean: where rounding sends a token to another expert, its logits move far."""

    def difference(scale: float) -> float:
        scales = {kind: jnp.full(layers, scale) for kind, layers in case.config.cache_layers.items()}
        found = case.serve(0, FP8, scales)[0]
        return np.sqrt(np.mean((found - case.expected[0]) ** 2)) / np.std(case.expected[0])

    assert 0 < difference(8 / 448) < 0.3 < 0.7 < difference(8 / 448_000)


def test_causal_mask():
    mask = causal_mask(jnp.array([[1, 1, 0, 2, 2, 2]]))[0]
    seen = [{int(s) for s in np.flatnonzero(row)} for row in np.asarray(mask)]
    assert seen == [{0}, {0, 1}, set(), {3}, {3, 4}, {3, 4, 5}]
