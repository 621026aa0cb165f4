"""Serving: requests in, tokens out. `LLM` for notebooks, underneath it `Engine`, or `Separated` for prefill and decode
apart."""

from jaxinfer.engine.engine import Engine, Event
from jaxinfer.engine.llm import LLM
from jaxinfer.engine.request import Completion, Request, SamplingParams
from jaxinfer.engine.separated import Separated

__all__ = ["LLM", "Completion", "Engine", "Event", "Request", "SamplingParams", "Separated"]
