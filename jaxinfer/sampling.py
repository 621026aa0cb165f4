"""Choosing the next token on the device: greedy, temperature, top-k, top-p, min-p, with a seed for each request.

A request's draw depends on its seed and on how many tokens it has had, never on the batch it happens to be in.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, UInt32


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingState:
    """One row a slot: how it samples, the token it had last, how many it has had, its log-probabilities wanted."""

    temperature: Float[Array, " S"]
    top_p: Float[Array, " S"]
    top_k: Int32[Array, " S"]
    min_p: Float[Array, " S"]
    seeds: UInt32[Array, " S"]
    emitted: Int32[Array, " S"]
    last_token: Int32[Array, " S"]
    logprobs: Int32[Array, " S"]
    owner_tags: UInt32[Array, " S"]  # the slot tag that the request in the slot was given

    @classmethod
    def create(cls, slots: int) -> "SamplingState":
        floats, ints = jnp.zeros(slots, jnp.float32), jnp.zeros(slots, jnp.int32)
        unsigned = ints.astype(jnp.uint32)
        # Copies: the state is donated, so no two leaves may share a buffer.
        return jax.tree.map(jnp.copy, cls(floats, floats, ints, floats, unsigned, ints, ints, ints, unsigned))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Logprobs:
    """Natural log-probabilities under the model (temperature 1): of the chosen token and of the likeliest ones."""

    chosen: Float[Array, " B"]
    top_tokens: Int32[Array, "B n"]
    top: Float[Array, "B n"]


def sample(logits: Float[Array, "B V"], rows: SamplingState) -> Int32[Array, " B"]:
    """The next token of each row; `rows` holds a row's settings in the order of the batch. Temperature 0 is greedy."""
    greedy = _likeliest(logits)
    draws = rows.temperature > 0
    drawn = jax.lax.cond(jnp.any(draws), lambda: _draw(logits, rows), lambda: greedy)
    return jnp.where(draws, drawn, greedy)


def _draw(logits, rows: SamplingState):
    scaled = logits / jnp.maximum(rows.temperature, 1e-6)[:, None]
    kept = jnp.where(keep_mask(scaled, rows.top_k, rows.top_p, rows.min_p), scaled, -jnp.inf)
    keys = jax.vmap(lambda seed, n: jax.random.fold_in(jax.random.key(seed), n))(rows.seeds, rows.emitted)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[-1:], jnp.float32))(keys)
    return _likeliest(kept + noise)


def _likeliest(logits: Float[Array, "B V"]) -> Int32[Array, " B"]:
    """The first of the largest, as argmax gives it, in two reductions that XLA vectorises on the CPU: argmax takes
    five times as long. Of a row with a NaN, the last token."""
    tokens = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    largest = logits == logits.max(axis=-1, keepdims=True)
    return jnp.where(largest, tokens, logits.shape[-1] - 1).min(axis=-1)


def keep_mask(logits: Float[Array, "B V"], top_k: Int32[Array, " B"], top_p, min_p):
    """Which tokens may be drawn: the `top_k` likeliest (0: all), of those the fewest that reach `top_p` of the whole,
    of those the ones at least `min_p` times as likely as the likeliest. The likeliest always may."""
    order = jnp.argsort(-logits, axis=-1, stable=True)
    rank = jnp.argsort(order, axis=-1)
    by_k = (rank < top_k[:, None]) | (top_k <= 0)[:, None]
    probability = jax.nn.softmax(jnp.where(by_k, logits, -jnp.inf), axis=-1)
    descending = jnp.take_along_axis(probability, order, axis=-1)
    before = jnp.take_along_axis(jnp.cumsum(descending, axis=-1) - descending, rank, axis=-1)
    # At 1 all are kept: the rounded sum may reach 1 before the last ones.
    by_p = (before < top_p[:, None]) | (top_p >= 1)[:, None] | (rank == 0)
    return by_k & by_p & (probability >= min_p[:, None] * probability.max(axis=-1, keepdims=True))


def log_probabilities(logits: Float[Array, "B V"], tokens: Int32[Array, " B"], wanted, top: int) -> Logprobs:
    """Those of the chosen tokens and the `top` likeliest; zeros when no row in `wanted` asks for them."""

    def compute():
        normal = jax.nn.log_softmax(logits, axis=-1)
        values, indices = jax.lax.top_k(normal, top)
        chosen = jnp.take_along_axis(normal, tokens[:, None], axis=-1)[:, 0]
        return Logprobs(chosen, indices.astype(jnp.int32), values)

    rows = logits.shape[0]
    nothing = Logprobs(jnp.zeros(rows), jnp.zeros((rows, top), jnp.int32), jnp.zeros((rows, top)))
    return jax.lax.cond(jnp.any(wanted > 0), compute, lambda: nothing)
