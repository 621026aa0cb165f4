"""Vocabularies in tiktoken's form, as Kimi ships them, as a tokenizer of the `tokenizers` library."""

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from jaxinfer.errors import UserError
from jaxinfer.text.tokenizer import BYTE_CHARS

_LETTER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_SMALL = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PIECES = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_LETTER}*{_SMALL}+{_ENDING}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_LETTER}+{_SMALL}*{_ENDING}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""How Kimi's tokenizer cuts text before it merges bytes (tokenization_kimi.py)."""
RESERVED = 256
"""Special tokens after the ordinary ones, named or not."""


def read_tiktoken(path: Path, added: Mapping[str, Mapping[str, Any]]) -> tokenizers.Tokenizer:
    """`path` has a token in base64 and its rank on each line; `added` are the special tokens by id, as
    tokenizer_config.json has them. UserError where the file is damaged."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        token, _, rank = line.partition(" ")
        try:
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise UserError(f"{path}: line {number} is no token and rank") from None
    if any(bytes([byte]) not in ranks for byte in range(256)):
        raise UserError(f"{path}: not every byte has a token")
    spelled = {token: "".join(BYTE_CHARS[byte] for byte in token) for token in ranks}
    merges = [(spelled[left], spelled[right]) for left, right in _merges(ranks)]
    vocabulary = {spelled[token]: rank for token, rank in ranks.items()}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    cut, spell = pre_tokenizers.Split(Regex(PIECES), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([cut, spell])
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(_special(len(ranks), added))
    return backend


def _merges(ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """The pairs that make each token, in the order of the tokens' ranks: tiktoken merges whatever pair makes the token
    of lowest rank."""
    merges = []
    for token, _ in sorted(ranks.items(), key=lambda item: item[1]):
        cuts = ((token[:i], token[i:]) for i in range(1, len(token)))
        pairs = [(left, right) for left, right in cuts if left in ranks and right in ranks]
        merges += sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    return merges


def _special(first: int, added: Mapping[str, Mapping[str, Any]]) -> list[AddedToken]:
    """In the order of their ids, which go on from the ordinary ones."""
    named = {int(id): token["content"] for id, token in added.items()}
    last = max([first + RESERVED - 1, *named]) if named else first - 1
    return [
        AddedToken(named.get(id, f"<|reserved_token_{id}|>"), special=True, normalized=False)
        for id in range(first, last + 1)
    ]
