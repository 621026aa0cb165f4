"""Tool schemas (the part of JSON Schema that tools use) and calls checked against them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
}

Tool = Mapping[str, Any]


def compact(value: Any) -> str:
    """JSON without spaces, as schemas and tool results are written."""
    return json.dumps(value, separators=(",", ":"))


def tool(name: str, properties: Mapping[str, Mapping[str, Any]], required: Sequence[str]) -> Tool:
    """A tool whose arguments are an object with `properties`."""
    parameters = {"type": "object", "properties": dict(properties), "required": list(required)}
    return {"name": name, "parameters": parameters}


def call(name: str, arguments: Mapping[str, Any]) -> str:
    """The canonical text of a call."""
    return compact({"name": name, "arguments": dict(arguments)})


def parse_call(text: str) -> dict[str, Any] | None:
    """The call in `text`, or None if it is not exactly one JSON object with a name and arguments."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or set(value) != {"name", "arguments"}:
        return None
    return value if isinstance(value["name"], str) and isinstance(value["arguments"], dict) else None


def _fits(value: Any, schema: Mapping[str, Any]) -> bool:
    # In Python a bool is an int; in JSON it is not.
    right_type = isinstance(value, _TYPES[schema["type"]]) and (schema["type"] == "boolean") == isinstance(
        value, bool
    )
    return right_type and value in schema.get("enum", (value,))


def is_valid(text: str, tools: Sequence[Tool]) -> bool:
    """Whether `text` is a call of one of `tools` that its schema admits (types, required, enum)."""
    parsed = parse_call(text)
    if parsed is None:
        return False
    schema = next((t["parameters"] for t in tools if t["name"] == parsed["name"]), None)
    if not schema:
        return False
    arguments, properties = parsed["arguments"], schema["properties"]
    return set(schema["required"]) <= set(arguments) <= set(properties) and all(
        _fits(value, properties[key]) for key, value in arguments.items()
    )


def same_call(text: str, expected: str) -> bool:
    """Whether `text` is the call `expected`, whatever the order of keys and the spaces."""
    parsed = parse_call(text)
    # Compared as sorted JSON, so that 1, 1.0 and true stay different.
    return parsed is not None and json.dumps(parsed, sort_keys=True) == json.dumps(
        json.loads(expected), sort_keys=True
    )
