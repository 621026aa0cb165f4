"""Chat templates: a conversation as the text a model was trained on, rendered by Jinja in a sandbox.

What people and tools say cannot forge a marker of the template: wherever the spelling of a special token stands in a
message it is fenced before rendering, and what is fenced is encoded as ordinary text.
"""

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxinfer.errors import UserError
from jaxinfer.text.tokenizer import ASSISTANT, BOS, END, Tokenizer

Message = Mapping[str, Any]
"""{"role", "content"}, and what templates know besides: "tool_calls", "tool_call_id", "reasoning_content"."""

OPEN, CLOSE = "\ufdd0", "\ufdd1"  # two of Unicode's noncharacters, which no text holds
_FENCED = re.compile(f"{OPEN}([^{OPEN}{CLOSE}]*){CLOSE}")
_FENCES = str.maketrans("", "", OPEN + CLOSE)

DEFAULT = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message.role + '|>' + (message.content or '') + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '" + ASSISTANT + "' }}{% endif %}"
)
"""The template of the model that ships: every message between the marker of its role and the end of a message."""


class ChatTemplate:
    """A compiled template. `bos` and `eos` are what it calls `bos_token` and `eos_token`. UserError where `source` is
    no template."""

    def __init__(self, source: str = DEFAULT, bos: str = BOS, eos: str = END):
        self.source, self.bos, self.eos = source, bos, eos
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise UserError(f"the chat template is not valid: {error}") from None

    def encode(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> list[int]:
        """Tokens of the conversation, waiting for the assistant unless told otherwise. UserError where the template
        does not take such a conversation. `variables` are the template's own, such as `enable_thinking`."""
        fence = _Fence(tokenizer)
        try:
            text = self._template.render(
                messages=[fence.message(message) for message in messages],
                tools=fence.anywhere(list(tools), fence.strict) if tools else None,
                add_generation_prompt=add_generation_prompt,
                bos_token=self.bos,
                eos_token=self.eos,
                **variables,
            )
        except (jinja2.TemplateError, TypeError, KeyError, ValueError) as error:
            raise UserError(f"the chat template does not take this conversation: {error}") from None
        return _encode_fenced(tokenizer, text)


class _Fence:
    """Fences around spellings of added tokens. What an assistant said keeps those that are part of how it writes, such
    as `<think>`; special ones never pass."""

    def __init__(self, tokenizer: Tokenizer):
        self.strict = _any_of(tokenizer.added_tokens())
        self.special = _any_of(tokenizer.added_tokens(special_only=True))

    def message(self, message: Message) -> dict[str, Any]:
        spellings = self.special if message.get("role") == "assistant" else self.strict
        kept = {name: value for name, value in message.items() if name == "role"}
        return kept | {name: self.anywhere(v, spellings) for name, v in message.items() if name != "role"}

    def anywhere(self, value: Any, spellings: re.Pattern[str] | None) -> Any:
        """`value` with every string in it fenced."""
        if isinstance(value, str):
            bare = value.translate(_FENCES)
            return bare if spellings is None else spellings.sub(lambda match: f"{OPEN}{match[0]}{CLOSE}", bare)
        if isinstance(value, Mapping):
            return {key: self.anywhere(item, spellings) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.anywhere(item, spellings) for item in value]
        return value


def _any_of(tokens: Sequence[str]) -> re.Pattern[str] | None:
    longest_first = sorted(filter(str.strip, tokens), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def _encode_fenced(tokenizer: Tokenizer, text: str) -> list[int]:
    """Special tokens count as such except between fences."""
    tokens: list[int] = []
    for index, piece in enumerate(_FENCED.split(text)):
        if piece := piece.translate(_FENCES):
            tokens += tokenizer.encode(piece, special=index % 2 == 0)
    return tokens


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """As templates expect it: no HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(format: str) -> str:
    return datetime.datetime.now().strftime(format)
