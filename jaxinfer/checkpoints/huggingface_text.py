"""The tokenizer, the chat template and the tokens that end a text, from the files beside a checkpoint."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from jaxinfer.checkpoints.tensors import read_json
from jaxinfer.errors import UserError
from jaxinfer.text.chat import ChatTemplate
from jaxinfer.text.tiktoken import read_tiktoken
from jaxinfer.text.tokenizer import Tokenizer

PLAIN_TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message.content }}\n{% endfor %}"
"""For a model that was not trained to chat."""
Text = tuple[Tokenizer, ChatTemplate, frozenset[int]]


def read(folder: Path) -> Text:
    """Of a Hugging Face folder. UserError that names the file that is missing or damaged."""
    settings = _optional(folder / "tokenizer_config.json")
    backend = _backend(folder, settings)
    bos, eos = _spelling(settings.get("bos_token")), _spelling(settings.get("eos_token"))
    ids = [
        id
        for name in ("generation_config.json", "config.json")
        for id in _ids(_optional(folder / name).get("eos_token_id"))
        if backend.id_to_token(id) is not None
    ]
    end = eos or (backend.id_to_token(ids[0]) if ids else None)
    if end is None:
        raise UserError(f"{folder}: neither tokenizer_config.json nor generation_config.json says what ends a text")
    begins = bos is not None and (
        settings.get("add_bos_token") is True or backend.encode("").ids[:1] == [backend.token_to_id(bos)]
    )
    try:
        tokenizer = Tokenizer(backend, bos if begins else None, end, pad=None)
    except ValueError as error:
        raise UserError(f"{folder}: {error}") from None
    return tokenizer, ChatTemplate(_template(folder, settings), bos or "", end), frozenset(ids)


def read_own(folder: Path) -> Text:
    """Of a folder of the project's own: tokenizer.json with the project's markers, or the published files where it was
    converted from a published checkpoint."""
    if (folder / "tokenizer_config.json").is_file():
        return read(folder)
    try:
        return Tokenizer.load(folder / "tokenizer.json"), ChatTemplate(), frozenset()
    except ValueError as error:
        raise UserError(str(error)) from None


def _backend(folder: Path, settings: Mapping[str, Any]) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    try:
        if path.is_file():
            return tokenizers.Tokenizer.from_file(str(path))
        if (tiktoken := folder / "tiktoken.model").is_file():
            return read_tiktoken(tiktoken, settings.get("added_tokens_decoder") or {})
    except UserError:
        raise
    except Exception as error:  # the library raises no narrower class
        raise UserError(f"cannot read the tokenizer at {path}: {error}") from None
    raise UserError(f"no tokenizer at {path}")


def _optional(path: Path) -> dict[str, Any]:
    values = read_json(path) if path.is_file() else {}
    if not isinstance(values, dict):
        raise UserError(f"{path} is no object with fields")
    return values


def _spelling(token: Any) -> str | None:
    """A token is given as text, or as an object with it."""
    content = token.get("content") if isinstance(token, Mapping) else token
    return content if isinstance(content, str) else None


def _ids(said: Any) -> list[int]:
    return [id for id in (said if isinstance(said, list) else [said]) if isinstance(id, int)]


def _template(folder: Path, settings: Mapping[str, Any]) -> str:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text()
    found = settings.get("chat_template") or _optional(folder / "chat_template.json").get("chat_template")
    if isinstance(found, list):  # several, by name
        named = {one.get("name"): one.get("template") for one in found}
        found = named.get("default") or next(iter(named.values()), None)
    return found or PLAIN_TEMPLATE
