"""Multiple-choice questions about facts in the prompt, in the manner of MMLU and ARC."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxinfer.evaluation.tasks.base import Dialogue, Example, integer, pick, sample
from jaxinfer.evaluation.tasks.words import ANIMALS, COLOURS, FOODS, JOBS, NAMES, PLACES, THINGS
from jaxinfer.text.tokenizer import USER

LETTERS = "ABCD"


@dataclass(frozen=True)
class _Relation:
    """A kind of fact: who, what about them, how it is said, and how each side is asked for."""

    subjects: Sequence[str]
    objects: Sequence[str]
    facts: Sequence[str]
    ask_object: Sequence[str]
    ask_subject: Sequence[str]


_RELATIONS = (
    _Relation(
        ANIMALS,
        COLOURS,
        ("The {s} is {o}.", "There is a {o} {s}."),
        ("What colour is the {s}?",),
        ("Which animal is {o}?", "What is {o}?"),
    ),
    _Relation(
        NAMES,
        PLACES,
        ("{s} lives in {o}.", "{s} is from {o}."),
        ("Where is {s} from?", "Where is {s}?"),
        ("Who lives in {o}?", "Who is from {o}?"),
    ),
    _Relation(
        NAMES,
        FOODS,
        ("{s} likes {o}.", "{s} eats {o}."),
        ("What does {s} like?", "What does {s} eat?"),
        ("Who likes {o}?", "Who eats {o}?"),
    ),
    _Relation(
        THINGS,
        NAMES,
        ("The {s} belongs to {o}.", "The {s} was made by {o}."),
        ("Who has the {s}?",),
        ("What does {o} have?",),
    ),
    _Relation(
        NAMES,
        JOBS,
        ("{s} is a {o}.", "{s} works as a {o}."),
        ("What is the job of {s}?",),
        ("Who is the {o}?", "Who works as a {o}?"),
    ),
    _Relation(
        THINGS,
        PLACES,
        ("The {s} is in {o}.", "The {s} was found in {o}."),
        ("Where is the {s}?",),
        ("What is in {o}?", "What was found in {o}?"),
    ),
)


def _lookup(rng: np.random.Generator) -> tuple[str, str, list[str], list[str]]:
    """Facts of one relation, and a question for either side of one of them."""
    relation, n = pick(rng, _RELATIONS), integer(rng, 2, 5)
    subjects, objects = sample(rng, relation.subjects, n), sample(rng, relation.objects, n)
    facts = [pick(rng, relation.facts).format(s=s, o=o) for s, o in zip(subjects, objects, strict=True)]
    at = integer(rng, 0, n - 1)
    if rng.random() < 0.6:
        question, known, pool = (
            pick(rng, relation.ask_object).format(s=subjects[at]),
            objects,
            relation.objects,
        )
    else:
        question, known, pool = (
            pick(rng, relation.ask_subject).format(o=objects[at]),
            subjects,
            relation.subjects,
        )
    others = [*(x for x in known if x != known[at]), *sample(rng, [x for x in pool if x not in known], 3)]
    return " ".join(facts), question, [known[at]], others[:3] if n <= 4 else sample(rng, others[: n - 1], 3)


def _most(rng: np.random.Generator) -> tuple[str, str, list[str], list[str]]:
    """Four people with a number each: who has the most, or the fewest?"""
    names, things = sample(rng, NAMES, 4), pick(rng, ("coins", "books", "cards", "keys"))
    numbers = sample(rng, range(2, 99), 4)
    facts = [f"{name} has {number} {things}." for name, number in zip(names, numbers, strict=True)]
    word, best = pick(rng, (("most", max), ("fewest", min)))
    right = names[numbers.index(best(numbers))]
    return (
        " ".join(facts),
        f"Who has the {word} {things}?",
        [right],
        [name for name in names if name != right],
    )


@dataclass(frozen=True)
class Choice:
    """Questions with four options; some wrong options also occur in the facts."""

    name: str = "choice"
    max_tokens: int = 4

    def generate(self, rng: np.random.Generator, difficulty: float = 1.0) -> Example:
        """One question; its share of number comparisons is one in six."""
        facts, question, right, wrong = (_most if rng.random() < 1 / 6 else _lookup)(rng)
        options = sample(rng, right + wrong, len(LETTERS))
        lines = [f"{letter}) {option}" for letter, option in zip(LETTERS, options, strict=True)]
        text = "\n".join([f"{facts} {question}", *lines])
        letter = LETTERS[options.index(right[0])]
        return Example(self.name, Dialogue().say(USER, text).expect(letter).turns, {"letter": letter})

    def score(self, example: Example, replies: Sequence[str]) -> float:
        """1 if the reply is the letter, alone or followed by `)`, `.` or a space."""
        reply = replies[0].strip()
        return float(reply[:1] == example.info["letter"] and not reply[1:2].isalnum())
