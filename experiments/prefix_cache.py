"""Table `prefix-cache`: time to the first token of a prompt whose beginning is cached, against one that is all new."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from experiments.ablation import REFERENCE, Ablation
from jaxinfer.engine import Completion, Engine, SamplingParams
from jaxinfer.evaluation import statistics
from jaxinfer.evaluation.table import Table

PROMPT_TOKENS = 900
SHARES = (0.0, 0.5, 0.9)
OPTIONS: dict[str, Any] = {"prefix_cache": True, "prefill_buckets": ((4, 32), (1, 96), (1, 256))}
"""A chunk for a short rest beside the usual ones; prompts without a shared beginning use it for their end as well."""


def prefix_cache(ablation: Ablation) -> Table:
    """A row for each share of the prompt that is shared, the first of them the control."""
    engine = ablation.engine(REFERENCE, **OPTIONS)
    rows = [measured_row(ablation, engine, share) for share in SHARES]
    return Table(
        "prefix-cache",
        rows,
        ablation.meta([REFERENCE], prefill_buckets=[list(b) for b in engine.config.prefill_buckets]),
        "Prefix cache: time to the first token with a shared beginning",
        [
            f"Prompts of {PROMPT_TOKENS} random tokens, one at a time, cold and cached in turn in one engine. Cold "
            "ones share nothing. shared_tokens: whole pages.",
            "ttft_ratio: cold over cached, the median over rounds with a 95% interval; the first row is the control.",
            "hit_rate: prompt tokens found in the cache, of all of the cached prompts' tokens.",
            "logit_difference: the largest between one prompt's logits cold and cached, in bf16 pages; logit_size: the "
            "largest logit.",
        ],
    )


@dataclass
class Asking:
    """Prompts that share their first `shared` tokens, of which the engine has been asked one."""

    engine: Engine
    shared: int
    rng: np.random.Generator
    beginning: list[int] = field(default_factory=list)
    cached: list[Completion] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.beginning = self.random(self.shared)
        ask(self.engine, self.beginning + self.random(PROMPT_TOKENS - self.shared))

    def random(self, count: int) -> list[int]:
        return self.rng.integers(0, self.engine.model.config.vocab, count).tolist()

    def cold_seconds(self) -> float:
        return ask(self.engine, self.random(PROMPT_TOKENS)).ttft

    def cached_seconds(self) -> float:
        done = ask(self.engine, self.beginning + self.random(PROMPT_TOKENS - self.shared))
        self.cached.append(done)
        return done.ttft


def measured_row(ablation: Ablation, engine: Engine, share: float) -> dict[str, Any]:
    """Cold and cached prompts in turn, then one prompt both ways."""
    size = engine.config.page_size
    shared = -int(-share * PROMPT_TOKENS // size) * size
    asking = Asking(engine, shared, np.random.default_rng(ablation.seed))
    runs: dict[str, Callable[[], float]] = {"cold": asking.cold_seconds, "cached": asking.cached_seconds}
    seconds = ablation.in_turn(f"prompts, {share:.0%} shared", runs, ablation.effort.rounds)
    found = [done.cached_tokens for done in asking.cached]
    return {
        "prompt_tokens": PROMPT_TOKENS,
        "shared_tokens": shared,
        "hit_rate": float(np.mean(found)) / PROMPT_TOKENS,
        "ttft_cold_ms": statistics.distribution(1e3 * seconds["cold"]),
        "ttft_ms": statistics.distribution(1e3 * seconds["cached"]),
        "ttft_ratio": statistics.ratio_interval(seconds["cold"], seconds["cached"]).fields("ratio"),
        **agreement(engine, asking.beginning + asking.random(PROMPT_TOKENS - shared)),
        "paper": None,
        "source": "measured",
    }


def agreement(engine: Engine, prompt: list[int]) -> dict[str, float]:
    """How far the logits behind a prompt move when all of it but the last page is taken from the cache."""
    seen: list[np.ndarray] = []
    before, engine.on_logits = engine.on_logits, lambda _request, _place, row: seen.append(row.copy())
    try:
        engine.drop_prefixes()
        for _ in range(2):
            ask(engine, prompt)
    finally:
        engine.on_logits = before
    return {"logit_difference": float(np.abs(seen[0] - seen[1]).max()), "logit_size": float(np.abs(seen[0]).max())}


def ask(engine: Engine, prompt: list[int]) -> Completion:
    """One token of an answer, the engine idle before and after."""
    engine.submit(prompt, SamplingParams(max_tokens=1, ignore_eos=True))
    [done] = [event.completion for event in engine.run() if event.completion]
    engine.synchronise()
    return done
