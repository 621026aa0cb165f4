"""How far one precision's next-token distributions lie from another's on the same text: KL and top-1 agreement.

More telling than scores: every token of every answer counts, and a difference shows before it changes an answer.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import jax
import numpy as np
import scipy.special
from jaxtyping import Array, Bool, Float, Int32

from jaxinfer.cache.kv import KVCache
from jaxinfer.checkpoints.model import Model
from jaxinfer.config import ModelConfig, Precision
from jaxinfer.evaluation.tasks import Example
from jaxinfer.models.attention import PagedContext
from jaxinfer.models.decoder import Params, bind
from jaxinfer.quantization.formats import KVFormat
from jaxinfer.text.tokenizer import END

WIDTHS = (256, 1024)
"""Lengths that texts are padded to; one program each."""


@dataclass(frozen=True)
class Text:
    """Tokens [n] of an example's last turn, and which of them the model must predict."""

    tokens: Int32[np.ndarray, " n"]
    answer: Bool[np.ndarray, " n"]


def texts_of(model: Model, examples: Sequence[Example]) -> list[Text]:
    """The last turn of each example, prompt and true answer."""
    found = []
    for example in examples:
        turn = example.turns[-1]
        prompt, answer = model.encode(turn.prompt), model.tokenizer.encode(turn.answer + END, special=True)
        mask = np.arange(len(prompt) + len(answer)) >= len(prompt)
        found.append(Text(np.array(prompt + answer, np.int32), mask))
    return found


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _text_logits(
    config: ModelConfig, kv: KVFormat, dtype, params: Params, scales, tokens: Int32[Array, " n"], count
) -> Float[Array, "n V"]:
    cache = KVCache.create(config.attention.entries, config.cache_layers, 1, tokens.shape[0], kv, scales)
    context = PagedContext.one_text(tokens.shape[0], count)
    hidden, _ = bind(config, params).paged(tokens[None], context, cache, dtype)
    return bind(config, params).logits(hidden[0])


def served_logits(model: Model, precision: Precision) -> Callable[[Int32[np.ndarray, " n"]], Float[np.ndarray, "n V"]]:
    """A function that gives the logits after every token of a text, all read through pages in the KV format of
    `precision` with weights in its weight format: what serving computes, with the text forced."""
    params = model.prepared(precision)

    def logits(tokens):
        width = next(w for w in WIDTHS if w >= len(tokens))
        padded, count = np.pad(tokens, (0, width - len(tokens))), np.int32(len(tokens))
        rows = _text_logits(model.config, precision.kv, model.compute_dtype, params, model.kv_scales, padded, count)
        return np.asarray(rows)[: len(tokens)]

    return logits


def answer_logits(
    model: Model, precision: Precision, texts: Iterable[Text], advance: Callable[[], None] = lambda: None
) -> Float[np.ndarray, "answers V"]:
    """Logits from which each answer token of `texts` would be drawn, in order."""
    logits, found = served_logits(model, precision), []
    for text in texts:
        predicts = np.flatnonzero(text.answer) - 1  # the token before predicts it
        found.append(logits(text.tokens)[predicts])
        advance()
    return np.concatenate(found)


def divergence(
    reference: Float[np.ndarray, "answers V"], candidate: Float[np.ndarray, "answers V"]
) -> dict[str, float]:
    """`kl`: mean KL(reference || candidate), nats; `top1_agreement`: share of places with the same likeliest token."""
    p, q = (scipy.special.log_softmax(a.astype(np.float64), axis=-1) for a in (reference, candidate))
    return {
        "kl": float((np.exp(p) * (p - q)).sum(axis=-1).mean()),
        "top1_agreement": float((reference.argmax(-1) == candidate.argmax(-1)).mean()),
    }
