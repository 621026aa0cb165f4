"""Tool sessions of two to five replies: calls whose arguments come from earlier results, then an answer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxinfer.evaluation.tasks import schema
from jaxinfer.evaluation.tasks.base import Dialogue, Example, integer, pick, sample
from jaxinfer.evaluation.tasks.words import COLOURS, NAMES, PLACES
from jaxinfer.text.tokenizer import SYSTEM, TOOL, USER

_FIND, _GET = ("find", "search", "look_up"), ("get", "read", "fetch")
_ENTITIES = ("user", "order", "card", "room", "team")
_ATTRIBUTES = ("price", "balance", "score", "age", "city", "colour")
_ASKS = ("What is the {attribute} of {name}?", "Tell me the {attribute} of {name}.", "{attribute} of {name}?")
_AGAIN = ("And the {attribute} of {name}?", "Now the {attribute} of {name}.")
_MISSING = 0.1  # share of look-ups that find nothing


def _value(rng: np.random.Generator, attribute: str) -> int | str:
    pools = {"city": PLACES, "colour": COLOURS}
    return pick(rng, pools[attribute]) if attribute in pools else integer(rng, 10, 999)


def _calls(text: str) -> bool:
    return text.startswith("{")


class _Script:
    """Writes one session: a tool that finds an id by name, and one tool for each of two attributes."""

    def __init__(self, rng: np.random.Generator):
        self.rng, self.dialogue = rng, Dialogue()
        entity = pick(rng, _ENTITIES)
        self.key = f"{entity}_id"
        self.find = schema.tool(f"{pick(rng, _FIND)}_{entity}", {"name": {"type": "string"}}, ["name"])
        verb = pick(rng, _GET)
        self.gets = {
            attribute: schema.tool(f"{verb}_{attribute}", {self.key: {"type": "integer"}}, [self.key])
            for attribute in sample(rng, _ATTRIBUTES, 2)
        }
        self.tools = [self.find, *self.gets.values()]
        self.dialogue.say(SYSTEM, schema.compact(self.tools))

    def look_up(self, name: str) -> int | None:
        """Call for the id of `name`; None if the result says there is none (the reply then says so)."""
        self.dialogue.expect(schema.call(self.find["name"], {"name": name}))
        if self.rng.random() < _MISSING:
            self.dialogue.say(TOOL, schema.compact({"error": "not found"})).expect(f"I can not find {name}.")
            return None
        id = integer(self.rng, 10, 99)
        self.dialogue.say(TOOL, schema.compact({self.key: id}))
        return id

    def read(self, id: int, name: str, attribute: str) -> None:
        """Call for one attribute, then answer with its value."""
        value = _value(self.rng, attribute)
        self.dialogue.expect(schema.call(self.gets[attribute]["name"], {self.key: id}))
        self.dialogue.say(TOOL, schema.compact({attribute: value}))
        self.dialogue.expect(f"The {attribute} of {name} is {value}.")


@dataclass(frozen=True)
class Session:
    """Sessions; every reply is predicted after the true history."""

    name: str = "session"
    max_tokens: int = 48

    def generate(self, rng: np.random.Generator, difficulty: float = 1.0) -> Example:
        """Look up, read, answer; some start from a given id, and half go on with a second question."""
        script, name = _Script(rng), pick(rng, NAMES)
        first, second = script.gets
        id: int | None
        if rng.random() < 0.3:
            id = integer(rng, 10, 99)
            script.dialogue.say(
                USER, f"{name} has {script.key} {id}. {pick(rng, _ASKS).format(attribute=first, name=name)}"
            )
        else:
            script.dialogue.say(USER, pick(rng, _ASKS).format(attribute=first, name=name))
            id = script.look_up(name)
        if id is not None:
            script.read(id, name, first)
            if rng.random() < 0.5:
                script.dialogue.say(USER, pick(rng, _AGAIN).format(attribute=second, name=name))
                script.read(id, name, second)
        return Example(self.name, script.dialogue.turns, {"tools": script.tools})

    def turn_scores(self, example: Example, replies: Sequence[str]) -> list[float]:
        """1 for each right reply: the expected call, or an answer with the expected words and numbers."""
        return [
            float(self._right(turn.answer, reply)) for turn, reply in zip(example.turns, replies, strict=True)
        ]

    @staticmethod
    def _right(expected: str, reply: str) -> bool:
        if _calls(expected):
            return schema.same_call(reply, expected)
        return re.findall(r"\w+", reply) == re.findall(r"\w+", expected)

    def score(self, example: Example, replies: Sequence[str]) -> float:
        """1 if every reply is right."""
        return float(all(self.turn_scores(example, replies)))
