"""One tool call as JSON: choose among one to three tools and fill in the arguments from a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxinfer.evaluation.tasks import schema
from jaxinfer.evaluation.tasks.base import Dialogue, Example, integer, pick, sample
from jaxinfer.evaluation.tasks.words import COLOURS, FOODS, NAMES, PLACES, PLURALS
from jaxinfer.text.tokenizer import SYSTEM, USER


@dataclass(frozen=True)
class _Parameter:
    """`values`: what may be asked for; `said`: how the request puts it; `optional`: may be left unsaid."""

    kind: str
    values: Sequence[Any]
    said: str = ""
    enum: bool = False
    optional: bool = False


@dataclass(frozen=True)
class _Action:
    """A thing to ask for: names the tool may bear, its parameters and ways to ask."""

    names: Sequence[str]
    asks: Sequence[str]
    parameters: dict[str, _Parameter]


_P = _Parameter
_DAYS, _ROOMS = ("Monday", "Friday", "Sunday"), ("kitchen", "hall", "attic")
_ACTIONS = (
    _Action(
        ("get_weather", "check_weather", "weather"),
        ("Show the weather in {city}", "Weather in {city}", "How is the weather in {city}"),
        {"city": _P("string", PLACES), "unit": _P("string", ("C", "F"), " in {}", enum=True, optional=True)},
    ),
    _Action(
        ("set_timer", "start_timer", "timer"),
        ("Set a timer for {minutes} minutes", "Start a {minutes} minute timer"),
        {"minutes": _P("integer", range(2, 91)), "label": _P("string", FOODS, " for {}", optional=True)},
    ),
    _Action(
        ("add_item", "list_add", "put_item"),
        ("Add {count} {item} to my list", "I need {count} {item}"),
        {"item": _P("string", PLURALS), "count": _P("integer", range(2, 60))},
    ),
    _Action(
        ("set_light", "light", "switch_light"),
        ("Make the {room} light {colour}", "I want {colour} light in the {room}"),
        {
            "room": _P("string", _ROOMS, enum=True),
            "colour": _P("string", COLOURS),
            "dim": _P("boolean", (True,), " and dim it", optional=True),
        },
    ),
    _Action(
        ("book_table", "reserve", "get_table"),
        ("Book a table for {people} on {day}", "Table for {people} on {day}"),
        {
            "people": _P("integer", range(2, 13)),
            "day": _P("string", _DAYS, enum=True),
            "name": _P("string", NAMES, " for {}", optional=True),
        },
    ),
    _Action(
        ("send_money", "pay", "transfer"),
        ("Send {amount} to {to}", "Pay {to} {amount}"),
        {"to": _P("string", NAMES), "amount": _P("integer", range(10, 999))},
    ),
    _Action(
        ("set_price", "price", "change_price"),
        ("Set the price of {item} to {price}", "{item} now cost {price}"),
        {
            "item": _P("string", PLURALS),
            "price": _P("number", tuple(n / 10 for n in range(11, 99) if n % 10)),
        },
    ),
    _Action(
        ("find_train", "train", "search_train"),
        ("Find a train from {start} to {end}", "Train from {start} to {end}"),
        {
            "start": _P("string", PLACES),
            "end": _P("string", PLACES),
            "day": _P("string", _DAYS, " on {}", enum=True, optional=True),
        },
    ),
    _Action(
        ("order_food", "order", "buy_food"),
        ("Order {food}", "I want {food}"),
        {"food": _P("string", FOODS), "count": _P("integer", range(2, 10), " for {}", optional=True)},
    ),
    _Action(
        ("mute", "set_mute", "mute_call"),
        ("{on} {name}",),
        {"name": _P("string", NAMES), "on": _P("boolean", (True, False))},
    ),
)
_SPOKEN = {True: "mute", False: "do not mute"}


def _tool(rng: np.random.Generator, action: _Action) -> schema.Tool:
    properties = {
        key: {"type": p.kind, "enum": list(p.values)} if p.enum else {"type": p.kind}
        for key, p in action.parameters.items()
    }
    required = [key for key, p in action.parameters.items() if not p.optional]
    return schema.tool(pick(rng, action.names), properties, required)


def _request(rng: np.random.Generator, action: _Action) -> tuple[str, dict[str, Any]]:
    """What the user says, and the arguments it means."""
    said = {key: p for key, p in action.parameters.items() if not p.optional or rng.random() < 0.5}
    arguments = {key: pick(rng, p.values) for key, p in said.items()}
    words = {key: _SPOKEN[value] if isinstance(value, bool) else value for key, value in arguments.items()}
    text = pick(rng, action.asks).format(**words)
    text += "".join(p.said.format(words[key]) for key, p in said.items() if p.optional)
    return f"{pick(rng, ('', 'Please: ', 'Now: '))}{text}{'?' if text.startswith('How') else '.'}", arguments


@dataclass(frozen=True)
class ToolCall:
    """Requests that one of the given tools serves."""

    name: str = "tool_call"
    max_tokens: int = 64

    def generate(self, rng: np.random.Generator, difficulty: float = 1.0) -> Example:
        """One request; the tools it does not need stand beside the one it needs."""
        actions = sample(rng, _ACTIONS, integer(rng, 1, 3))
        action = pick(rng, actions)
        tools = {id(a): _tool(rng, a) for a in actions}
        text, arguments = _request(rng, action)
        expected = schema.call(tools[id(action)]["name"], arguments)
        offered = list(tools.values())
        dialogue = Dialogue().say(SYSTEM, schema.compact(offered)).say(USER, text).expect(expected)
        return Example(self.name, dialogue.turns, {"tools": offered, "expected": expected})

    def score(self, example: Example, replies: Sequence[str]) -> float:
        """1 if the reply is a valid call and the expected one."""
        return float(
            self.validity(example, replies) and schema.same_call(replies[0], example.info["expected"])
        )

    def validity(self, example: Example, replies: Sequence[str]) -> float:
        """1 if the reply is a call that the schemas admit, right or not."""
        return float(schema.is_valid(replies[0], example.info["tools"]))
