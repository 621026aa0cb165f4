"""Word problems of two to four steps, in the manner of GSM8K: a worked chain, then `#### answer`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxinfer.evaluation.tasks.base import Dialogue, Example, integer, pick, sample
from jaxinfer.evaluation.tasks.words import NAMES, PLURALS
from jaxinfer.text.tokenizer import USER

_GAIN = ("buys {n} more", "finds {n} more", "gets {n} from {friend}", "makes {n} more", "wins {n}")
_LOSE = ("loses {n}", "sells {n}", "gives {n} to {friend}", "breaks {n}", "uses {n}")
_PACKS = ("buys {n} packs of {m}", "gets {n} bags with {m} in each", "fills {n} trays of {m}")
_TIMES = ("then has {n} times as many", "multiplies that by {n}")
_THEN = ("Then {who} {what}.", "Next {who} {what}.", "After that {who} {what}.", "{who} {what}.")
_ASK = (
    "How many {things} does {who} have now?",
    "How many {things} are there in the end?",
    "How many are left?",
)

Problem = tuple[str, list[str], int]


class _Chain:
    """Worked steps: `chain("12", "+", "5")` style arithmetic that remembers how it was done."""

    def __init__(self) -> None:
        self.steps: list[str] = []

    def __call__(self, left: int, sign: str, right: int) -> int:
        value = {"+": left + right, "-": left - right, "*": left * right}[sign]
        self.steps.append(f"{left}{sign}{right}={value}")
        return value


def _running_count(rng: np.random.Generator, top: int, steps: int) -> Problem:
    who, friend = sample(rng, NAMES, 2)
    things, chain = pick(rng, PLURALS), _Chain()
    value = integer(rng, 2, top)
    text = [pick(rng, ("{who} has {n} {things}.", "{who} starts with {n} {things}."))
            .format(who=who, n=value, things=things)]  # fmt: skip
    while len(chain.steps) < steps:
        n, m, kind = integer(rng, 2, top), 0, integer(rng, 0, 9)
        if kind < 4 and value > 2:
            n = integer(rng, 1, min(top, value - 1))
            what, value = pick(rng, _LOSE), chain(value, "-", n)
        elif kind < 8 or steps - len(chain.steps) < 2 and value > 99:
            what, value = pick(rng, _GAIN), chain(value, "+", n)
        elif steps - len(chain.steps) < 2:
            n = integer(rng, 2, 4)
            what, value = pick(rng, _TIMES), chain(value, "*", n)
        else:
            n, m = integer(rng, 2, 9), integer(rng, 2, 9)
            what, value = pick(rng, _PACKS), chain(value, "+", chain(n, "*", m))
        text.append(pick(rng, _THEN).format(who=who, what=what.format(n=n, m=m, friend=friend)))
    text.append(pick(rng, _ASK).format(things=things, who=who))
    return " ".join(text), chain.steps, value


def _shopping(rng: np.random.Generator, top: int, steps: int) -> Problem:
    who, (first, second), chain = pick(rng, NAMES), sample(rng, PLURALS, 2), _Chain()
    prices = [integer(rng, 2, max(3, top // 4)) for _ in range(2)]
    counts = [integer(rng, 2, 6) for _ in range(2)]
    text = pick(rng, (
        "{a} cost {p} each and {b} cost {q} each. {who} buys {n} {a} and {m} {b}.",
        "{who} buys {n} {a} at {p} each and {m} {b} at {q} each.",
    ))  # fmt: skip
    text = text.format(a=first, b=second, p=prices[0], q=prices[1], n=counts[0], m=counts[1], who=who)
    total = chain(chain(counts[0], "*", prices[0]), "+", chain(counts[1], "*", prices[1]))
    if steps < 4:
        return f"{text} {pick(rng, ('What is the total?', 'How much is that?'))}", chain.steps, total
    purse = total + integer(rng, 1, top)
    text += f" {who} pays with {purse}. {pick(rng, ('How much is the change?', 'How much comes back?'))}"
    return text, chain.steps, chain(purse, "-", total)


def _comparison(rng: np.random.Generator, top: int, steps: int) -> Problem:
    a, b, c = sample(rng, NAMES, 3)
    things, chain = pick(rng, PLURALS), _Chain()
    values = [integer(rng, max(3, top // 3), top)]
    text = [f"{a} has {values[0]} {things}."]
    for earlier, who in [(a, b), (b, c)][: 1 if steps < 4 else 2]:
        n = integer(rng, 2, max(3, min(top, values[-1]) // 2))
        if rng.random() < 0.5:
            text.append(f"{who} has {n} more than {earlier}.")
            values.append(chain(values[-1], "+", n))
        else:
            n = min(n, values[-1] - 1)
            text.append(f"{who} has {n} fewer than {earlier}.")
            values.append(chain(values[-1], "-", n))
    total = values[0]
    for value in values[1:]:
        total = chain(total, "+", value)
    text.append(
        pick(rng, ("How many do they have together?", "How many {things} in all?")).format(things=things)
    )
    return " ".join(text), chain.steps, total


def _rate(rng: np.random.Generator, top: int, steps: int) -> Problem:
    who, chain = pick(rng, NAMES), _Chain()
    n, days, extra = integer(rng, 2, max(3, top // 3)), integer(rng, 2, 7), integer(rng, 2, top)
    unit, verb = pick(rng, (("pages", "reads"), ("miles", "walks"), ("cards", "paints"), ("cakes", "bakes")))
    text = f"{who} {verb} {n} {unit} a day for {days} days"
    value = chain(chain(n, "*", days), "+", extra)
    text += pick(rng, (f" and then {extra} more.", f". On the last day {who} {verb} {extra} more."))
    if steps > 2:
        goal = value + integer(rng, 1, top)
        text += f" The goal is {goal}. How many {unit} are missing?"
        return text, chain.steps, chain(goal, "-", value)
    return f"{text} How many {unit} in all?", chain.steps, value


@dataclass(frozen=True)
class Arithmetic:
    """Word problems; `difficulty` scales the numbers (1: up to 60)."""

    name: str = "arithmetic"
    max_tokens: int = 64

    def generate(self, rng: np.random.Generator, difficulty: float = 1.0) -> Example:
        """One problem, its chain and its answer."""
        top = max(9, round(60 * difficulty))
        steps = integer(rng, 2, 4)
        make = pick(rng, (_running_count, _running_count, _shopping, _comparison, _rate))
        text, chain, value = make(rng, top, steps)
        answer = "\n".join([*chain, f"#### {value}"])
        return Example(
            self.name, Dialogue().say(USER, text).expect(answer).turns, {"value": value, "steps": len(chain)}
        )

    def score(self, example: Example, replies: Sequence[str]) -> float:
        """1 if the number after the last `####` is the answer."""
        numbers = re.findall(r"####\s*(-?\d+)", replies[0])
        return float(bool(numbers) and int(numbers[-1]) == example.info["value"])
