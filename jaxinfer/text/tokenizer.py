"""Byte-level BPE tokenizer, safe against special tokens in user text, and incremental decoding."""

from __future__ import annotations

import codecs
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


class Tokenizer:
    """Token ids of text and back.

    >>> tokenizer = Tokenizer.load("tokenizer.json")
    >>> tokenizer.decode(tokenizer.encode("7 owls"))
    '7 owls'
    """

    def __init__(self, backend: tokenizers.Tokenizer):
        missing = [token for token in (PAD, BOS, END) if backend.token_to_id(token) is None]
        if missing:
            raise ValueError(f"tokenizer has no {', '.join(missing)}")
        self._special = backend
        # The same merges with no special token registered: their spelling is then ordinary text.
        self._plain = tokenizers.Tokenizer(backend.model)
        self._plain.normalizer = backend.normalizer
        self._plain.pre_tokenizer = backend.pre_tokenizer
        self._special_ids = {
            id: token.content for id, token in backend.get_added_tokens_decoder().items() if token.special
        }

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Read a `tokenizer.json`; a missing or unreadable file raises ValueError naming the path."""
        if not Path(path).is_file():
            raise ValueError(f"no tokenizer at {path}")
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)))
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
            if id in self._special_ids:
                return self._special_ids[id].encode()
            return bytes(_BYTES[char] for char in self._special.id_to_token(id) or "")

        return [spelled(id) for id in range(self.vocab_size)]

    def _id(self, token: str) -> int:
        id = self._special.token_to_id(token)
        assert id is not None, f"{token} was looked for in __init__"
        return id

    @cached_property
    def vocab_size(self) -> int:
        """Number of token ids, special ones included."""
        return self._special.get_vocab_size(with_added_tokens=True)

    @property
    def pad_id(self) -> int:
        """Id of the padding token."""
        return self._id(PAD)

    @property
    def bos_id(self) -> int:
        """Id of the token that opens every prompt."""
        return self._id(BOS)

    @property
    def end_id(self) -> int:
        """Id of the token that ends a message."""
        return self._id(END)

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of all special tokens."""
        return frozenset(self._special_ids)


class StreamDecoder:
    """Decodes one token at a time and never emits part of a character.

    The pieces returned by `push` and the last `flush`, joined, equal `tokenizer.decode` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True):
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, id: int) -> str:
        """Text that token `id` completes; empty while a character is still open."""
        return "" if id in self._skipped else self._decoder.decode(self._tokenizer.token_bytes(id))

    def flush(self) -> str:
        """What is left at the end: U+FFFD for an unfinished character, else nothing."""
        return self._decoder.decode(b"", final=True)
