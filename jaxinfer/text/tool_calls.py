"""Tool calls in the text of an answer, in the formats that models write, and their ids.

Formats: `kimi` (a section of calls between special tokens, ids `functions.NAME:INDEX`), `glm` (keys and values between
tags), `tagged` (JSON between `<tool_call>` tags: Qwen, Hermes), `json` (nothing but the object).
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

KIMI_MARKERS = tuple(
    f"<|{name}|>"
    for name in (
        *("tool_calls_section_begin", "tool_calls_section_end", "tool_call_begin", "tool_call_end"),
        "tool_call_argument_begin",
    )
)
_KIMI = re.compile(r"<\|tool_call_begin\|>(.*?)<\|tool_call_argument_begin\|>(.*?)<\|tool_call_end\|>", re.DOTALL)
_KIMI_SECTION = re.compile(r"<\|tool_calls_section_begin\|>.*?(?:<\|tool_calls_section_end\|>|\Z)", re.DOTALL)
_TAGGED = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_GLM_PAIR = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    """`arguments` is a JSON object as text, the way OpenAI's API hands it out."""

    id: str
    name: str
    arguments: str


Found = tuple[str, str]
"""Name and arguments, JSON."""


def format_of(template: str) -> str:
    """The format in which a model with this chat template writes its calls."""
    if "<|tool_call_begin|>" in template:
        return "kimi"
    if "<arg_key>" in template:
        return "glm"
    return "tagged" if "<tool_call>" in template else "json"


def parse(
    text: str, format: str, tools: Sequence[Mapping[str, Any]] = (), earlier: int = 0
) -> tuple[str, list[ToolCall]]:
    """What is left of `text` as content, and the calls in it, in order. A call that is not whole JSON, or names no tool
    of `tools` (if there are any), stays in the text. `earlier`: calls in the conversation so far, from which ids count
    on."""
    schemas = {tool.get("function", tool)["name"]: tool.get("function", tool) for tool in tools}
    found: list[Found] = []

    def take(call: Found | None, original: str) -> str:
        if call is None or (schemas and call[0] not in schemas):
            return original
        found.append(call)
        return ""

    content = READERS[format](text, take, schemas).strip() if text else ""
    return content, [ToolCall(call_id(format, n, earlier + i), n, arguments) for i, (n, arguments) in enumerate(found)]


def call_id(format: str, name: str, index: int) -> str:
    """The id of a conversation's call number `index`: as Kimi was trained to write and read it; for models that do
    not see ids, or take nine letters and digits (Mistral's), one of these."""
    return f"functions.{name}:{index}" if format == "kimi" else f"call{index:05}"


def for_template(messages: Iterable[Mapping[str, Any]], format: str) -> list[dict[str, Any]]:
    """A history in OpenAI's form as templates expect it: for Kimi with its own ids and the arguments as written,
    for others with the arguments as objects."""
    if format == "kimi":
        return restore_ids(messages)
    prepared = []
    for message in messages:
        new = dict(message)
        if calls := message.get("tool_calls"):
            new["tool_calls"] = [{**call, "function": _with_object(call.get("function") or {})} for call in calls]
        prepared.append(new)
    return prepared


def _with_object(function: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return {**function, "arguments": json.loads(function["arguments"])}
    except (KeyError, TypeError, json.JSONDecodeError, RecursionError):
        return dict(function)


def sanitise_id(id: str) -> str:
    """`id` for clients that take letters, digits, `_` and `-` only."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", id)


def restore_ids(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A history with the ids that the model would have written, whatever clients made of them: a model that sees other
    ids soon writes malformed ones. The answers of tools follow the calls they belong to."""
    restored: list[dict[str, Any]] = []
    ids: dict[str, str] = {}
    count = 0
    for message in messages:
        new = dict(message)
        if calls := message.get("tool_calls"):
            new["tool_calls"] = []
            for call in calls:
                name = (call.get("function") or {}).get("name", "")
                ids[call.get("id", "")] = own = call_id("kimi", name, count)
                new["tool_calls"].append({**call, "id": own})
                count += 1
        if "tool_call_id" in message:
            new["tool_call_id"] = ids.get(message["tool_call_id"], message["tool_call_id"])
        restored.append(new)
    return restored


def count_calls(messages: Iterable[Mapping[str, Any]]) -> int:
    """Calls in a conversation so far."""
    return sum(len(message.get("tool_calls") or ()) for message in messages)


# ---- formats: each gives the text without the calls that `take` took

Take = Callable[[Found | None, str], str]


def _kimi(text: str, take: Take, schemas: Mapping[str, Any]) -> str:
    def section(match: re.Match[str]) -> str:
        left = _KIMI.sub(lambda call: take(_kimi_call(call[1], call[2], schemas), call[0]), match[0])
        return "" if not re.sub(r"<\|tool_calls_section_(?:begin|end)\|>", "", left).strip() else left

    return _KIMI_SECTION.sub(section, text)


def _kimi_call(id: str, arguments: str, schemas: Mapping[str, Any]) -> Found | None:
    """The name is in the id, `functions.NAME:INDEX`; an id gone wrong still names a tool of `schemas`."""
    match = re.fullmatch(r"(?:functions[._])?(.+?)(?:[:_]\d+)?", id.strip(), re.DOTALL)
    name = match[1] if match else id.strip()
    if id.strip() in schemas:
        name = id.strip()
    return _checked(name, arguments)


def _glm(text: str, take: Take, schemas: Mapping[str, Any]) -> str:
    def call(match: re.Match[str]) -> str:
        name, _, rest = match[1].partition("<arg_key>")
        pairs = _GLM_PAIR.findall("<arg_key>" + rest)
        types = schemas.get(name.strip(), {}).get("parameters", {}).get("properties", {})
        arguments = {key.strip(): _glm_value(value, types.get(key.strip(), {}).get("type")) for key, value in pairs}
        return take((name.strip(), json.dumps(arguments, ensure_ascii=False)), match[0])

    return _TAGGED.sub(call, text)


def _glm_value(text: str, kind: object) -> Any:
    """Strings stand bare, everything else is JSON."""
    if kind == "string":
        return text
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _tagged(text: str, take: Take, schemas: Mapping[str, Any]) -> str:
    return _TAGGED.sub(lambda match: take(_object_call(match[1]), match[0]), text)


def _json(text: str, take: Take, schemas: Mapping[str, Any]) -> str:
    """The whole answer is one call, or a list of them."""
    try:
        value = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        return text
    calls = [_object_call(json.dumps(item)) for item in (value if isinstance(value, list) else [value])]
    if not calls or not all(call and (not schemas or call[0] in schemas) for call in calls):
        return text
    return "".join(take(call, text) for call in calls)


def _object_call(text: str) -> Found | None:
    try:
        value = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    said = value.get("arguments", value.get("parameters", {}))
    return _checked(value["name"], said if isinstance(said, str) else json.dumps(said, ensure_ascii=False))


def _checked(name: str, arguments: str) -> Found | None:
    try:
        whole = isinstance(json.loads(arguments.strip() or "{}"), dict)
    except (json.JSONDecodeError, RecursionError):
        whole = False
    return (name, arguments.strip() or "{}") if whole and name else None


READERS: dict[str, Callable[[str, Take, Mapping[str, Any]], str]] = {
    "kimi": _kimi,
    "glm": _glm,
    "tagged": _tagged,
    "json": _json,
}
