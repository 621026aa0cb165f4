"""Serving: requests in, tokens out. `LLM` for notebooks, `Engine` underneath it."""

from jaxinfer.engine.engine import Engine, Event
from jaxinfer.engine.llm import LLM
from jaxinfer.engine.request import Completion, Request, SamplingParams

__all__ = ["LLM", "Completion", "Engine", "Event", "Request", "SamplingParams"]
