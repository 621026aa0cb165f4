"""Calls are found in each format, what is not whole stays text, and ids are those the model knows."""

import json

import pytest

from jaxinfer.text.tool_calls import count_calls, for_template, format_of, parse, restore_ids, sanitise_id

PROPERTIES = {"city": {"type": "string"}, "days": {"type": "integer"}}
WEATHER, TIME = {"name": "get_weather", "parameters": {"properties": PROPERTIES}}, {"name": "get_time_2"}
TOOLS = [{"type": "function", "function": WEATHER}, {"type": "function", "function": TIME}]


def kimi(*calls: tuple[str, str]) -> str:
    inside = "".join(
        f"<|tool_call_begin|>{id}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>" for id, arguments in calls
    )
    return f"<|tool_calls_section_begin|>{inside}<|tool_calls_section_end|>"


ONE = {
    "kimi": kimi(("functions.get_weather:0", '{"city": "Rome", "days": 2}')),
    "glm": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
    "tagged": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>',
    "json": '{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}',
}


@pytest.mark.parametrize("format", ONE)
def test_a_call_in_each_format(format):
    before = "" if format == "json" else "Let me look. "
    content, (call,) = parse(before + ONE[format], format, TOOLS)
    assert content == before.strip()
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Rome", "days": 2})
    assert call.id == ("functions.get_weather:0" if format == "kimi" else "call00000")


@pytest.mark.parametrize("format", ONE)
def test_answers_without_calls_are_content(format):
    for text in ("It is sunny.", "", '{"city": "Rome"}', "[1]", "<tool_call>", "{"):
        assert parse(text, format, TOOLS) == (text, [])


@pytest.mark.parametrize("format", ["kimi", "tagged", "json"])
def test_a_call_that_is_not_whole_or_names_no_tool_stays_text(format):
    for text in (ONE[format].replace('2}', "2"), ONE[format].replace("get_weather", "get_whether")):
        assert parse(text, format, TOOLS) == (text, [])
    assert len(parse(ONE[format].replace("get_weather", "anything"), format)[1]) == 1  # no list to check against


def test_several_calls_are_numbered_on_from_the_conversation():
    text = kimi(("functions.get_weather:3", "{}"), ("functions.get_time_2:4", ""))
    _, calls = parse(text, "kimi", TOOLS, earlier=3)
    assert [(c.id, c.arguments) for c in calls] == [("functions.get_weather:3", "{}"), ("functions.get_time_2:4", "{}")]


@pytest.mark.parametrize("id", ["functions.get_time_2:0", "functions_get_time_2_0", "get_time_2:0", "get_time_2"])
def test_an_id_gone_wrong_still_names_its_tool(id):
    _, (call,) = parse(kimi((id, "{}")), "kimi", TOOLS)
    assert (call.id, call.name) == ("functions.get_time_2:0", "get_time_2")


def test_history_with_sanitised_ids_becomes_what_the_model_wrote():
    """A client that takes no dots and colons, and one that makes up its own ids."""
    calls = [
        {"id": "functions.get_weather:0", "function": WEATHER},
        {"id": "functions.get_time_2:1", "function": TIME},
    ]
    original = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "tool_calls": calls},
        *({"role": "tool", "tool_call_id": call["id"], "content": "x"} for call in reversed(calls)),
        {"role": "assistant", "tool_calls": [{"id": "functions.get_weather:2", "function": WEATHER}]},
    ]
    assert restore_ids(original) == original and count_calls(original) == 3
    for change in (sanitise_id, lambda id: f"call_{hash(id)}"):
        changed = json.loads(json.dumps(original))
        for message in changed:
            for call in message.get("tool_calls", []):
                call["id"] = change(call["id"])
            if "tool_call_id" in message:
                message["tool_call_id"] = change(message["tool_call_id"])
        assert changed != original and restore_ids(changed) == original


def test_templates_get_arguments_as_objects_and_kimi_as_they_were_written():
    written = '{"city":"Rome"}'
    history = [{"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": written}}]}]
    (message,) = for_template(history, "glm")
    assert message["tool_calls"] == [{"id": "a", "function": {"name": "f", "arguments": {"city": "Rome"}}}]
    (message,) = for_template(history, "kimi")
    assert message["tool_calls"] == [{"id": "functions.f:0", "function": {"name": "f", "arguments": written}}]
    history[0]["tool_calls"][0]["function"]["arguments"] = "{"
    assert for_template(history, "json") == history


def test_sanitised_ids():
    assert sanitise_id("functions.get_weather:0") == "functions_get_weather_0"


def test_the_format_follows_from_the_template():
    assert format_of("... <|tool_call_begin|> ...") == "kimi"
    assert format_of("<tool_call>{name}<arg_key>") == "glm"
    assert format_of("<tool_call>") == "tagged" and format_of("") == "json"
