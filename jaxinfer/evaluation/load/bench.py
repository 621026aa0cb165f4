"""The benchmark of one engine under one load: what it is started with, and the table of what came of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxinfer.config import EngineConfig, ModelConfig, Precision
from jaxinfer.errors import UserError
from jaxinfer.evaluation.load.arrivals import Arrivals, ClosedLoop, Poisson
from jaxinfer.evaluation.load.driver import Served, drive
from jaxinfer.evaluation.load.lengths import Job, Mix
from jaxinfer.evaluation.load.measures import LoadResult
from jaxinfer.evaluation.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SLOTS, MOST_SLOTS = 16, 256
WARMUP = 4  # tokens of each request before the run
NOTES = [
    "Rates are over the time from the first arrival to the last end, filling and emptying included. Tokens of prompts "
    "count for requests that completed.",
    "ttft_ms and e2e_ms count from arrival, waiting in the queue included; tpot_ms = (e2e - ttft) / (tokens - 1); "
    "itl_ms are the gaps between tokens as the caller sees them, preemptions included.",
    "decoding: requests that got a token in one step; waiting: those that got none, in the queue or in prefill. "
    "kv_used: the share of the pool's pages that requests held after a step.",
]


@dataclass(frozen=True)
class Load:
    """What is offered: so many requests of a mix, by `concurrency` callers or at `rate` a second (one of the two)."""

    mix: Mix
    requests: int
    concurrency: int | None = None
    rate: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.concurrency is None) == (self.rate is None):
            raise UserError("give either --concurrency (a closed loop) or --rate (Poisson arrivals), not both")
        if self.requests < 1:
            raise UserError(f"requests must be at least 1, not {self.requests}")
        self.arrivals()

    def arrivals(self) -> Arrivals:
        if self.concurrency is not None:
            return ClosedLoop(self.concurrency)
        assert self.rate is not None
        return Poisson(self.rate, self.requests, self.seed)

    @property
    def slots(self) -> int:
        """Requests that decode at once, where nobody says otherwise: as many as there are callers."""
        return min(self.concurrency, MOST_SLOTS) if self.concurrency else SLOTS

    def __str__(self) -> str:
        if self.concurrency is not None:
            return f"closed loop of {self.concurrency}"
        return f"Poisson, {self.rate:g} requests/s"


def page_bytes(model: ModelConfig, precision: Precision, page_size: int) -> int:
    """Bytes of one page over all layers, as the pool counts them."""
    return model.kv_bytes_per_token(precision.kv) * page_size


def pages_in(budget_mib: float, model: ModelConfig, precision: Precision, page_size: int) -> int:
    """Whole pages in so many MiB. UserError where there is none."""
    page = page_bytes(model, precision, page_size)
    if budget_mib * 2**20 < page:
        raise UserError(
            f"--kv-budget-mib {budget_mib:g} is less than one page of {page:,} bytes in {precision.kv}; "
            f"give at least {page / 2**20:.2g}"
        )
    return int(budget_mib * 2**20) // page


def engine_config(
    model: ModelConfig,
    jobs: Sequence[Job],
    precision: Precision,
    slots: int,
    num_pages: int | None = None,
    budget_mib: float | None = None,
    **options: Any,
) -> EngineConfig:
    """An engine for exactly these jobs: no longer context, decode buckets up to `slots`, and the pages that are asked
    for, or a whole context for every slot. UserError where the longest job does not fit."""
    if num_pages is not None and budget_mib is not None:
        raise UserError("give either --num-pages or --kv-budget-mib, not both")
    page_size = EngineConfig.page_size
    longest = max(len(job.prompt) + job.output for job in jobs)
    context = min(model.max_position, -(-longest // page_size) * page_size)
    if budget_mib is not None:
        num_pages = pages_in(budget_mib, model, precision, page_size)
    elif num_pages is None:
        num_pages = slots * -(-context // page_size)
    if longest > num_pages * page_size:
        field = "--kv-budget-mib" if budget_mib is not None else "--num-pages"
        raise UserError(
            f"the longest request has {longest} tokens, {num_pages} pages hold {num_pages * page_size}; "
            f"raise {field}, or lower --input or --output"
        )
    return EngineConfig(
        precision=precision,
        page_size=page_size,
        num_pages=num_pages,
        max_slots=slots,
        max_context=context,
        decode_buckets=buckets(slots),
        prefill_buckets=((4, min(32, context)), (1, min(256, context))),
        **options,
    )


def buckets(slots: int) -> tuple[int, ...]:
    """Batch sizes to compile: powers of four below `slots`, then `slots`."""
    return (*(4**i for i in range(10) if 4**i < slots), slots)


def warm_up(engine: Served, jobs: Sequence[Job]) -> None:
    """The first steps of a process are slow: take them before anything is timed."""
    drive(engine, [Job(job.prompt, min(job.output, WARMUP)) for job in jobs[:2]], ClosedLoop(2))


def bench(
    engine: Served, jobs: Sequence[Job], load: Load, after_end: Callable[[], None] = lambda: None
) -> LoadResult:
    """One measured run, after a short one that is not."""
    warm_up(engine, jobs)
    return drive(engine, jobs, load.arrivals(), after_end)


def bench_table(result: LoadResult, load: Load, config: EngineConfig, meta: dict[str, Any]) -> Table:
    """One row: what was offered, and what came of it. KV use over time, point by point, is in `meta`."""
    mix, points = load.mix, result.kv_used.points
    row = {
        "weight_format": str(config.precision.weights),
        "kv_format": str(config.precision.kv),
        "arrivals": str(load),
        "lengths": f"{mix.kind}, {mix.input} + {mix.output}",
        "slots": config.max_slots,
        "num_pages": config.num_pages,
        **result.fields(),
        "kv_over_time": str(result.kv_used),
        "paper": None,
        "source": "measured",
    }
    series = {"seconds": [round(t, 3) for t, _ in points], "kv_used": [round(v, 4) for _, v in points]}
    return Table(
        "bench",
        [row],
        meta | {"over_time": series},
        f"{load.requests} requests, {load}",
        NOTES,
        lambda figure, _: draw_run(figure, result),
    )


def draw_run(figure: "Figure", result: LoadResult) -> None:
    """KV use over time, and the share of requests that had their first token, and their last, within so many ms."""
    over_time, shares = figure.subplots(1, 2)
    seconds, used = zip(*result.kv_used.points, strict=True) if result.kv_used.points else ((), ())
    over_time.step(seconds, used, where="post")
    over_time.set(xlabel="seconds", ylabel="share of KV pages held", ylim=(0, 1.05))
    for name in ("ttft", "e2e"):
        values = np.sort([1e3 * getattr(trace, name) for trace in result.completed])
        shares.step(values, np.arange(1, len(values) + 1) / max(1, len(values)), where="post", label=f"{name}_ms")
    shares.set(xlabel="milliseconds", ylabel="share of requests", xscale="log", ylim=(0, 1.05))
    shares.legend(fontsize=8)
