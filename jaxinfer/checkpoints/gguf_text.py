"""The tokenizer and the chat template in the metadata of a GGUF file."""

from collections.abc import Callable
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from jaxinfer.errors import UserError
from jaxinfer.text.chat import ChatTemplate
from jaxinfer.text.tokenizer import Tokenizer

CONTROL, USER_DEFINED = 3, 4  # of tokenizer.ggml.token_type
_CUT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_WHOLE = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _split(digits: str) -> Any:
    cut = pre_tokenizers.Split(Regex(_CUT.format(digits=digits)), "isolated")
    return pre_tokenizers.Sequence([cut, _WHOLE])


CUTS: dict[str, Any] = {
    "gpt-2": _GPT2,
    "llama-bpe": _split(r"\p{N}{1,3}"),
    "qwen2": _split(r"\p{N}"),
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _GPT2]),
}
"""How text is cut before bytes are merged, by tokenizer.ggml.pre."""


def read_text(values: Callable[..., Any]) -> tuple[Tokenizer, ChatTemplate, frozenset[int]]:
    """The tokenizer, the template and the tokens that end a text; `values(name, default)` is a field of the metadata.
    UserError for a tokenizer that isn't byte-level BPE, or cuts text in an unknown way."""
    kind, cut = values("tokenizer.ggml.model"), values("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2" or cut not in CUTS:
        raise UserError(f"unknown tokenizer {kind}/{cut}; there are: {', '.join(f'gpt2/{name}' for name in CUTS)}")
    tokens = values("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in values("tokenizer.ggml.merges")]
    try:
        backend = tokenizers.Tokenizer(models.BPE({token: id for id, token in enumerate(tokens)}, merges))
    except Exception as error:  # the library raises no narrower class
        raise UserError(f"the vocabulary and its merges do not fit: {error}") from None
    backend.pre_tokenizer, backend.decoder = CUTS[cut], decoders.ByteLevel()
    kinds = list(zip(tokens, values("tokenizer.ggml.token_type"), strict=True))
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, k in kinds if k == CONTROL])
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t, k in kinds if k == USER_DEFINED])
    bos, end = tokens[values("tokenizer.ggml.bos_token_id")], tokens[values("tokenizer.ggml.eos_token_id")]
    begins = values("tokenizer.ggml.add_bos_token", False)
    tokenizer = Tokenizer(backend, bos if begins else None, end, pad=None)
    return tokenizer, ChatTemplate(values("tokenizer.chat_template"), bos, end), frozenset()
