"""Where a text ends: stop tokens, stop strings, and what is held back because it may become one."""

from jaxinfer.engine.request import Request


def take_text(request: Request, token: int, end_tokens: frozenset[int]) -> tuple[str, str]:
    """Add `token` to the request's text; the part that can be shown now, and "stop" where the request ends with it.

    A stop token and a stop string are not part of the text. What may be the beginning of a stop string is held back.
    """
    params = request.params
    if token in params.stop_tokens or (token in end_tokens and not params.ignore_eos):
        return _show(request, request.held + request.decoder.flush()), "stop"
    pending = request.held + request.decoder.push(token)
    found = [(at, stop) for stop in params.stop if (at := pending.find(stop)) >= 0]
    if found:
        return _show(request, pending[: min(found)[0]]), "stop"
    keep = max((_overlap(pending, stop) for stop in params.stop), default=0)
    shown = _show(request, pending[: len(pending) - keep])
    request.held = pending[len(pending) - keep :]
    return shown, ""


def _show(request: Request, text: str) -> str:
    request.text += text
    request.held = ""
    return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
