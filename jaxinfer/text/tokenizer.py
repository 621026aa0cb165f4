"""BPE tokenizer, byte-level or with bytes as a fallback, safe against special tokens in user text, and incremental
decoding."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

PAD, BOS, END = "<|pad|>", "<|bos|>", "<|end|>"
SYSTEM, USER, ASSISTANT, TOOL = "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"
SPECIAL_TOKENS = (PAD, BOS, END, SYSTEM, USER, ASSISTANT, TOOL)

# A word keeps its leading space, every digit stands alone (so numbers align), the rest in runs.
_PIECES = Regex(r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


def _byte_alphabet() -> dict[str, int]:
    """The printable stand-in of each byte in byte-level BPE (GPT-2, `bytes_to_unicode`), inverted."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_alphabet()
BYTE_CHARS = {byte: char for char, byte in _BYTES.items()}
"""The printable stand-in of each byte."""
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """Token ids of text and back.

    >>> tokenizer = Tokenizer.load("tokenizer.json")
    >>> tokenizer.decode(tokenizer.encode("7 owls"))
    '7 owls'
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, bos: str | None = BOS, end: str = END, pad: str | None = PAD
    ):
        """`bos`, `end`, `pad`: spellings of the tokens for it; a model may have none that begins a text, or pads."""
        missing = [token for token in (pad, bos, end) if token is not None and backend.token_to_id(token) is None]
        if missing:
            raise ValueError(f"tokenizer has no {', '.join(missing)}")
        self._bos, self._end, self._pad = bos, end, pad
        self._special = backend
        # The same merges with no special token registered: their spelling is then ordinary text.
        self._plain = tokenizers.Tokenizer(backend.model)
        self._plain.normalizer = backend.normalizer
        self._plain.pre_tokenizer = backend.pre_tokenizer
        added = backend.get_added_tokens_decoder()
        self._added = {id: token.content for id, token in added.items()}
        self._special_ids = {id: token.content for id, token in added.items() if token.special}
        # Such a model spells a space "▁", and bytes that no other token covers "<0xE2>".
        self._spells_bytes = bool(getattr(backend.model, "byte_fallback", False))

    @classmethod
    def load(
        cls, path: str | Path, bos: str | None = BOS, end: str = END, pad: str | None = PAD
    ) -> Tokenizer:
        """Read a `tokenizer.json`; a missing or unreadable file raises ValueError naming the path."""
        if not Path(path).is_file():
            raise ValueError(f"no tokenizer at {path}")
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)), bos, end, pad)
        except Exception as error:  # noqa: BLE001 (the library raises no narrower class)
            reason = " ".join(str(error).split())
            raise ValueError(f"cannot read the tokenizer at {path}: {reason}") from None

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> Tokenizer:
        """Learn merges from `texts`; the ids 0.. are the special tokens in the order of SPECIAL_TOKENS."""
        backend = tokenizers.Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(_PIECES, "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=list(SPECIAL_TOKENS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        backend.train_from_iterator(texts, trainer)
        return cls(backend)

    def save(self, path: str | Path) -> None:
        """Write `tokenizer.json` at `path`."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._special.save(str(path))

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Token ids of `text`; `<|end|>` and its kin are markers only if `special`, otherwise plain text."""
        backend = self._special if special else self._plain
        return backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD. An unknown id raises ValueError."""
        kept = (id for id in ids if not (skip_special and id in self._special_ids))
        return b"".join(map(self.token_bytes, kept)).decode("utf-8", errors="replace")

    def token_bytes(self, id: int) -> bytes:
        """The bytes that token `id` stands for (a special token: its spelling)."""
        if not 0 <= id < self.vocab_size:
            raise ValueError(f"token id {id} is outside the vocabulary of {self.vocab_size}")
        return self._token_bytes[id]

    @cached_property
    def _token_bytes(self) -> list[bytes]:
        def spelled(id: int) -> bytes:
            if id in self._added:
                return self._added[id].encode()
            token = self._special.id_to_token(id) or ""
            if not self._spells_bytes:
                spelled_out = all(char in _BYTES for char in token)  # some vocabularies hold tokens that no text gives
                return bytes(_BYTES[char] for char in token) if spelled_out else token.encode()
            return bytes([int(match[1], 16)]) if (match := _BYTE.fullmatch(token)) else token.replace("▁", " ").encode()

        return [spelled(id) for id in range(self.vocab_size)]

    def id_of(self, token: str) -> int | None:
        """Id of the token spelled so, None where there is none."""
        return self._special.token_to_id(token)

    def _id(self, token: str) -> int:
        id = self.id_of(token)
        assert id is not None, f"{token} was looked for in __init__"
        return id

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest token id, special ones included."""
        return max(self._special.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def pad_id(self) -> int:
        """Id of the padding token; where there is none, of the one that ends a message."""
        return self._id(self._pad or self._end)

    @property
    def bos_id(self) -> int | None:
        """Id of the token that opens every prompt, None where there is none."""
        return None if self._bos is None else self._id(self._bos)

    @property
    def end_id(self) -> int:
        """Id of the token that ends a message."""
        return self._id(self._end)

    def added_tokens(self, special_only: bool = False) -> list[str]:
        """Spellings of the tokens that are no part of ordinary text."""
        return list((self._special_ids if special_only else self._added).values())

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of all special tokens."""
        return frozenset(self._special_ids)


class StreamDecoder:
    """Decodes one token at a time and never emits part of a character.

    The pieces returned by `push` and the last `flush`, joined, equal `tokenizer.decode` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True, keep: frozenset[int] = frozenset()):
        """`keep`: special tokens that are spelled out all the same, such as those around a tool call."""
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids - keep if skip_special else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, id: int) -> str:
        """Text that token `id` completes; empty while a character is still open."""
        return "" if id in self._skipped else self._decoder.decode(self._tokenizer.token_bytes(id))

    def flush(self) -> str:
        """What is left at the end: U+FFFD for an unfinished character, else nothing."""
        return self._decoder.decode(b"", final=True)
