"""Key-value retrieval at a chosen distance: `owl=427` somewhere above, asked for at the end."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxinfer.evaluation.tasks.base import Dialogue, Example, integer, pick
from jaxinfer.evaluation.tasks.words import ANIMALS, COLOURS, FOODS, JOBS, NAMES, PLACES, PLURALS, THINGS
from jaxinfer.text.tokenizer import USER

KEYS = tuple(dict.fromkeys(ANIMALS + COLOURS + FOODS + JOBS + NAMES + PLACES + PLURALS + THINGS))
BANDS = ((8, 64), (64, 128), (128, 256), (256, 512), (512, 860))  # tokens between the pair and the question
_FILLERS = (
    " The sky was clear that day.",
    " It was late and the road was long.",
    " They sat by the fire and said little.",
    " No one was at the door.",
    " The rain came in the night.",
    " We left the town before the sun was up.",
    " The old house was cold.",
    " There was a light on the hill.",
)
_ASK = ("What is {key}?", "Give the value of {key}.", "Which value has {key}?")


def rough_tokens(text: str) -> int:
    """About how many tokens `text` has: one a word, one a digit, one a mark."""
    return len(re.findall(r" ?[A-Za-z]+|\d| ?[^\w\s]", text))


def band_of(distance: int) -> str:
    """Name of the distance band, such as `64-128`; the nearest one for a distance outside all."""
    low, high = next((band for band in BANDS if distance < band[1]), BANDS[-1])
    return f"{low}-{high}"


@dataclass(frozen=True)
class Retrieval:
    """One value for each question. `queries` > 1 asks for further keys of the same text in further turns."""

    queries: int = 1
    name: str = "retrieval"
    max_tokens: int = 8

    def generate(self, rng: np.random.Generator, difficulty: float = 1.0) -> Example:
        """Distances are drawn band by band, up to `difficulty` times the longest."""
        limit = max(32, round(BANDS[-1][1] * difficulty))
        low, high = pick(rng, [band for band in BANDS if band[0] < limit])
        distance = integer(rng, low, min(high, limit) - 1)
        keys = [KEYS[int(i)] for i in rng.permutation(len(KEYS))]
        filler_share = rng.uniform(0.2, 0.6)
        records: list[tuple[str, str, str]] = []  # (key, value, text); a filler has an empty key

        def add(pair: bool) -> int:
            key = keys.pop() if pair and keys else ""
            value = str(integer(rng, 100, 999))
            records.append((key, value, f" {key}={value}," if key else pick(rng, _FILLERS)))
            return rough_tokens(records[-1][2])

        before = integer(rng, 0, min(distance // 4 + 16, BANDS[-1][1] - distance))
        while before > 0:
            before -= add(rng.random() > filler_share)
        target = len(records)
        add(pair=True)
        while distance > 0:
            distance -= add(rng.random() > filler_share)
        return self._ask(rng, records, target)

    def _ask(self, rng: np.random.Generator, records: list[tuple[str, str, str]], target: int) -> Example:
        """The conversation about `records`, the pair number `target` first, others at random after it."""
        behind = np.cumsum([rough_tokens(text) for *_, text in records][::-1])[::-1]
        others = [i for i, (key, *_) in enumerate(records) if key and i != target]
        asked = [target, *(int(i) for i in rng.permutation(others)[: self.queries - 1])]
        dialogue, context = Dialogue(), "".join(text for *_, text in records)
        for i in asked:
            question = pick(rng, _ASK).format(key=records[i][0])
            dialogue.say(USER, f"{context} {question}" if i == target else question).expect(records[i][1])
        distances = [int(behind[i]) for i in asked]
        values = [records[i][1] for i in asked]
        info = {
            "values": values,
            "distance": distances[0],
            "band": band_of(distances[0]),
            "distances": distances,
        }
        return Example(self.name, dialogue.turns, info)

    def score(self, example: Example, replies: Sequence[str]) -> float:
        """Share of the questions answered with exactly the value."""
        values = example.info["values"]
        return sum(reply.strip() == value for reply, value in zip(replies, values, strict=True)) / len(values)
