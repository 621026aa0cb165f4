"""What a task is: examples made from a random generator, and a score for the replies to them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from jaxinfer.text.tokenizer import ASSISTANT, BOS, END

HELD_OUT_SHARE = 16  # one prompt in 16 is for evaluation only


@dataclass(frozen=True)
class Turn:
    """`prompt`: all text so far, up to `<|assistant|>`. `answer`: what to say, without `<|end|>`."""

    prompt: str
    answer: str


@dataclass(frozen=True)
class Example:
    """One or more turns of `task`; each turn's prompt holds the true answers of the turns before it."""

    task: str
    turns: tuple[Turn, ...]
    info: Mapping[str, Any] = field(default_factory=dict)


class Task(Protocol):
    """A family of examples. `max_tokens` bounds a reply; `score` is in [0, 1], one reply for each turn."""

    @property
    def name(self) -> str: ...
    @property
    def max_tokens(self) -> int: ...

    def generate(self, rng: np.random.Generator, difficulty: float = 1.0) -> Example: ...

    def score(self, example: Example, replies: Sequence[str]) -> float: ...


class Dialogue:
    """Grows a conversation message by message and keeps the turns that must be predicted."""

    def __init__(self) -> None:
        self._text = BOS
        self._turns: list[Turn] = []

    def say(self, marker: str, text: str) -> Dialogue:
        """Append a message of another role."""
        self._text += f"{marker}{text}{END}"
        return self

    def expect(self, answer: str) -> Dialogue:
        """Append the reply to predict here."""
        self._turns.append(Turn(self._text + ASSISTANT, answer))
        return self.say(ASSISTANT, answer)

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The turns so far."""
        return tuple(self._turns)


def is_held_out(text: str) -> bool:
    """Whether the example whose first prompt is `text` is for evaluation only (1 in 16, by hash)."""
    return hashlib.blake2b(text.encode(), digest_size=8).digest()[-1] % HELD_OUT_SHARE == 0


def examples(task: Task, n: int, *, held_out: bool, seed: int, difficulty: float = 1.0) -> list[Example]:
    """`n` examples with distinct first prompts, all held out or none; the same for the same seed.

    Raises ValueError if the task does not have that many.
    """
    rng = np.random.default_rng(seed)
    found: dict[str, Example] = {}
    for _ in range(1000 + 8 * HELD_OUT_SHARE * n):
        if len(found) == n:
            break
        example = task.generate(rng, difficulty)
        prompt = example.turns[0].prompt
        if is_held_out(prompt) == held_out:
            found.setdefault(prompt, example)
    if len(found) < n:
        raise ValueError(f"task {task.name} gave only {len(found)} distinct examples of the {n} asked for")
    return list(found.values())


def pick(rng: np.random.Generator, items: Sequence[Any]) -> Any:
    """One item, uniformly; the item itself and no numpy copy of it."""
    return items[int(rng.integers(len(items)))]


def sample(rng: np.random.Generator, items: Sequence[Any], n: int) -> list[Any]:
    """`n` distinct items in random order."""
    return [items[int(i)] for i in rng.permutation(len(items))[:n]]


def integer(rng: np.random.Generator, low: int, high: int) -> int:
    """A Python int in [low, high]."""
    return int(rng.integers(low, high + 1))
