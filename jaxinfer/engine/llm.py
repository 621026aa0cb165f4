"""`LLM`: the notebook's face of the engine."""

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxinfer.checkpoints.model import Model
from jaxinfer.config import EngineConfig, PhasePrecision, Precision
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.readers import Readers
from jaxinfer.engine.request import Completion, SamplingParams
from jaxinfer.engine.separated import Separated
from jaxinfer.errors import UserError
from jaxinfer.parallel.compilation import use_compilation_cache


class LLM:
    """A model ready to answer.

    >>> llm = LLM("tiny", kv_format="fp8_e4m3")  # doctest: +SKIP
    >>> llm.generate(["<|bos|><|user|>..."], SamplingParams(max_tokens=32))[0].text  # doctest: +SKIP
    """

    def __init__(
        self,
        model: str | Path | Model = "tiny",
        *,
        weight_format: str = "bf16",
        kv_format: str = "bf16",
        phases: PhasePrecision | None = None,
        **options,
    ):
        """`model`: the name or folder of a checkpoint. With `phases`, prefill and decode are workers of their own, each
        at its precision; otherwise both run at the formats given. `options` are fields of EngineConfig. UserError on
        bad input."""
        config = EngineConfig(precision=Precision.parse(weight_format, kv_format), **options)
        use_compilation_cache()
        loaded = model if isinstance(model, Model) else Model.load(model, config.devices)
        self.engine: Engine | Separated = Separated.of(loaded, config, phases) if phases else Engine(loaded, config)

    @property
    def model(self) -> Model:
        return self.engine.model

    @functools.cached_property
    def _readers(self) -> Readers:
        return Readers(self.engine)

    @property
    def precision(self) -> str:
        """What weights and KV pages are kept in."""
        return self.engine.precision

    def generate(
        self, prompts: str | Sequence[str | list[int]], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """One completion a prompt, in order. All are checked before any is queued."""
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        each = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * len(prompts)
        if len(each) != len(prompts):
            raise UserError(f"{len(prompts)} prompts but {len(each)} sampling parameters; give one, or one each")
        ids: list[int] = []
        try:
            for prompt, sampling in zip(prompts, each, strict=True):
                ids.append(self._readers.submit(prompt, sampling, pieces=False))
            return [e.completion for i in ids for e in self._readers.events(i) if e.completion]
        finally:  # whatever came between: a prompt that is refused, an interrupt
            for i in ids:
                self._readers.close(i)

    def stream(self, prompt: str | list[int], params: SamplingParams | None = None) -> Iterator[str]:
        """The text of one completion, piece by piece. Leaving the loop early cancels the request; several streams may
        be read in any order, and one that is not read holds up nobody."""
        request = self._readers.submit(prompt, params)
        try:
            yield from (e.text for e in self._readers.events(request) if e.text)
        finally:
            self._readers.close(request)
