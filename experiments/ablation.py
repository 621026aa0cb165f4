"""What the tables share: one model served at several precisions, each measured once, however many tables ask for it."""

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich.progress import Progress

from jaxinfer.checkpoints.model import Model
from jaxinfer.config import EngineConfig, Precision
from jaxinfer.engine import Engine
from jaxinfer.evaluation import divergence, statistics
from jaxinfer.evaluation.answering import replies
from jaxinfer.evaluation.scoring import mean_by, score_all
from jaxinfer.evaluation.table import run_meta
from jaxinfer.evaluation.tasks import TASKS, Example
from jaxinfer.evaluation.tasks.base import examples
from jaxinfer.evaluation.tasks.tool_call import ToolCall
from jaxinfer.evaluation.throughput import DecodeRun, decode_run

REFERENCE = Precision.parse("bf16", "bf16")


@dataclass(frozen=True)
class Effort:
    """How much is measured: held-out `examples` a task, of which `texts` are used to compare distributions, `rounds` of
    interleaved timings, decode `steps` of each."""

    examples: int
    texts: int
    rounds: int
    steps: int


QUICK = Effort(examples=16, texts=6, rounds=9, steps=24)
FULL = Effort(examples=100, texts=40, rounds=21, steps=64)
PROMPT_TOKENS = 64  # of a request whose decoding is timed
WARMUP = 1  # rounds that are not counted


@dataclass
class Ablation:
    """One model and all that was measured of it so far. `budget_bytes` is the pool memory that capacities are for."""

    model: Model
    command: str
    effort: Effort = QUICK
    seed: int = 0
    devices: int = 1
    budget_bytes: int = 16 << 20
    progress: Progress = field(default_factory=lambda: Progress(disable=True))

    # ---- served once for each precision ----

    @functools.cached_property
    def _engines(self) -> dict[EngineConfig, Engine]:
        return {}

    def engine(self, precision: Precision, **options: Any) -> Engine:
        """The engine that serves at `precision`, with further fields of EngineConfig, started on first use."""
        config = EngineConfig(precision=precision, devices=self.devices, **options)
        if config not in self._engines:
            with self._task(f"starting an engine, {precision}, integrity {config.integrity}", None):
                self._engines[config] = Engine(self.model, config)
        return self._engines[config]

    # ---- quality ----

    @functools.cached_property
    def examples(self) -> list[Example]:
        """Held-out examples, `effort.examples` of each task."""
        n = self.effort.examples
        return [e for task in TASKS.values() for e in examples(task, n, held_out=True, seed=self.seed)]

    @functools.cached_property
    def _answers(self) -> dict[Precision, tuple[list[list[str]], np.ndarray]]:
        return {}

    def answers(self, precision: Precision) -> tuple[list[list[str]], np.ndarray]:
        """What each of `examples` is answered greedily at `precision`, and the scores."""
        if precision not in self._answers:
            engine = self.engine(precision)
            with self._task(f"answering at {precision}", len(self.examples)) as advance:
                texts = replies(engine, self.examples, advance)
            self._answers[precision] = texts, np.array(score_all(self.examples, texts))
        return self._answers[precision]

    def quality(self, precision: Precision) -> dict[str, Any]:
        """The `quality` field of a row: each task's score and its paired difference from the reference precision."""
        found, reference = self.answers(precision)[1], self.answers(REFERENCE)[1]
        of = lambda name: None if precision == REFERENCE else reference[self._members(name)]  # noqa: E731
        return {name: statistics.quality(found[self._members(name)], of(name)) for name in TASKS}

    def recall_by_distance(self, precision: Precision) -> dict[str, float]:
        """Share of keys retrieved, by the distance in tokens between a key and the question."""
        members = self._members("retrieval")
        chosen, scores = [self.examples[i] for i in members], self.answers(precision)[1][members]
        bands = mean_by(chosen, scores.tolist(), "band")
        return {band: bands[band]["score"] for band in sorted(bands, key=lambda band: int(band.partition("-")[0]))}

    def tool_call_validity(self, precision: Precision) -> float:
        """Share of tool calls that are JSON and fit their schema, right or wrong."""
        texts, task = self.answers(precision)[0], ToolCall()
        return float(np.mean([task.validity(self.examples[i], texts[i]) for i in self._members("tool_call")]))

    def _members(self, task: str) -> np.ndarray:
        return np.flatnonzero([example.task == task for example in self.examples])

    @functools.cached_property
    def _logits(self) -> dict[Precision, np.ndarray]:
        return {}

    def divergence(self, precision: Precision) -> dict[str, float]:
        """`kl`, `top1_agreement` and `answer_tokens` against the reference, on the true answers of some examples."""
        some = [self.examples[i] for name in TASKS for i in self._members(name)[: self.effort.texts]]
        texts = divergence.texts_of(self.model, some)
        for each in (REFERENCE, precision):
            if each not in self._logits:
                with self._task(f"comparing distributions at {each}", len(texts)) as advance:
                    self._logits[each] = divergence.answer_logits(self.model, each, texts, advance)
        found = divergence.divergence(self._logits[REFERENCE], self._logits[precision])
        return {**found, "answer_tokens": len(self._logits[REFERENCE])}

    # ---- speed ----

    def decode_runs(self, engines: dict[str, Engine], concurrency: int) -> dict[str, list[DecodeRun]]:
        """Decode runs of each engine, taken in turn: as many as `effort.rounds`."""
        runs: dict[str, list[DecodeRun]] = {name: [] for name in engines}

        def one(name: str) -> float:
            run = decode_run(engines[name], concurrency, PROMPT_TOKENS, self.effort.steps, self.seed)
            runs[name].append(run)
            return run.tokens_per_s

        self.timed(f"decoding {concurrency} at once", {name: functools.partial(one, name) for name in engines})
        return {name: done[WARMUP:] for name, done in runs.items()}

    def timed(self, description: str, runs: Mapping[str, Callable[[], float]]) -> dict[str, np.ndarray]:
        """What each of `runs` returns, taken in turn: as many as `effort.rounds`, after WARMUP that do not count."""
        with self._task(description, (WARMUP + self.effort.rounds) * len(runs)) as advance:
            return statistics.interleave(runs, self.effort.rounds, WARMUP, advance)

    # ---- what every table says of itself ----

    def meta(self, precisions: Iterable[Precision], **extra: Any) -> dict[str, Any]:
        """The `meta` of a table."""
        return run_meta(
            self.command,
            self.seed,
            self.effort.examples,
            precision=[str(p) for p in precisions],
            model=self.model.config.name,
            compute_dtype=str(np.dtype(self.model.compute_dtype)),
            timing={"rounds": self.effort.rounds, "steps": self.effort.steps, "prompt_tokens": PROMPT_TOKENS},
            **extra,
        )

    def _task(self, description: str, total: int | None) -> "_Step":
        return _Step(self.progress, description, total)


class _Step:
    """One line of the progress display while it lasts."""

    def __init__(self, progress: Progress, description: str, total: int | None):
        self._progress, self._description, self._total = progress, description, total

    def __enter__(self) -> Callable[[], None]:
        self._id = self._progress.add_task(self._description, total=self._total)
        return lambda: self._progress.advance(self._id)

    def __exit__(self, *_: object) -> None:
        self._progress.remove_task(self._id)


def rates(runs: list[DecodeRun]) -> np.ndarray:
    """Decode tokens a second of each run."""
    return np.array([run.tokens_per_s for run in runs])


def speed_fields(runs: list[DecodeRun], reference: list[DecodeRun] | None) -> dict[str, Any]:
    """`decode_tokens_per_s` (median) and `decode_ratio`, the median over rounds of its ratio to the reference's."""
    fields: dict[str, Any] = {"decode_tokens_per_s": float(np.median(rates(runs)))}
    ratio = statistics.ratio_interval(rates(runs), rates(reference)) if reference else None
    return fields | {"decode_ratio": ratio.fields("ratio") if ratio else None}
