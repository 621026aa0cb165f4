"""Table `worker-deaths`: prefill and decode processes killed again and again under load, and what became of requests.

    python -m experiments.worker_deaths --kills 20 --out experiments/results

Two prefill workers and one decode worker on this host. A prefill worker is killed when the router hears of KV that it
has just put on offer: the pull finds nobody. A decode worker is killed when it has been told of KV that it is about to
pull. A killed worker is started anew, and used again.
"""

import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from jaxinfer.distributed.fleet import Fleet
from jaxinfer.distributed.layout import Layout, WorkerSpec, free_ports
from jaxinfer.distributed.router import Peer, Router
from jaxinfer.engine.request import Completion, SamplingParams
from jaxinfer.evaluation.table import Table, check_writable, run_meta, to_rich, write

REQUESTS = 12  # under way around a kill
LOGPROB_TOLERANCE = 1e-4
LIMIT_S = 60.0


def main(
    kills: Annotated[int, typer.Option("--kills", min=1, help="of each role")] = 20,
    model: Annotated[str, typer.Option("--model")] = "tiny",
    out: Annotated[Path | None, typer.Option("--out")] = None,
    seed: Annotated[int, typer.Option("--seed", min=0)] = 0,
) -> None:
    if out is not None:
        check_writable(out)
    command = shlex.join(["python", "-m", "experiments.worker_deaths", *sys.argv[1:]])
    table = worker_deaths(layout(model), kills, seed, command)
    if out is not None:
        write(table, out)
    from rich.console import Console

    Console().print(to_rich(table))


def layout(model: str, **shared: Any) -> Layout:
    """Float32 throughout, so that an outcome that moves at all shows."""
    ports = free_ports(3)
    specs = [
        WorkerSpec(role, port, weights="f32", kv="f32", max_slots=4)
        for role, port in zip(("prefill", "prefill", "decode"), ports, strict=True)
    ]
    times = {"max_context": 256, "pull_timeout_s": 5.0, "request_timeout_s": LIMIT_S}
    return Layout(tuple(specs), **{"model": model, **times, **shared})


@dataclass
class Deaths:
    """A deployment under load, and what was seen of it."""

    fleet: Fleet
    router: Router
    rng: np.random.Generator
    expected: dict[tuple[int, ...], Completion] = field(default_factory=dict)

    def prompts(self) -> list[list[int]]:
        vocab = self.router.model_config.vocab
        return [self.rng.integers(7, vocab, int(n)).tolist() for n in self.rng.integers(1, 100, REQUESTS)]

    def serve(self, prompts: list[list[int]]) -> list[Completion]:
        ids = [self.router.submit(p, params(i)) for i, p in enumerate(prompts)]
        done = {e.request: e.completion for e in self.router.run() if e.completion}
        return [done[i] for i in ids]

    def index(self, peer: Peer) -> int:
        return self.router.peers.index(peer)

    def kill_on_handoff(self, role: str) -> Callable[[], None]:
        """Kill one worker of `role` at the next handoff; the result undoes the ambush."""
        handle = self.router._on_handoff
        waits = int(self.rng.integers(0, REQUESTS // 2))  # handoffs that are let through

        def ambush(source: Peer, message: dict[str, Any]) -> None:
            nonlocal waits
            waits -= 1
            if waits != -1:
                handle(source, message)
            elif role == "prefill":
                self.fleet.kill(self.index(source))
                handle(source, message)
            else:
                handle(source, message)
                target = next(p for p in self.router.peers if p.spec.role == "decode")
                self.fleet.kill(self.index(target))

        self.router._on_handoff = ambush  # type: ignore[method-assign, assignment]
        return lambda: setattr(self.router, "_on_handoff", handle)

    def revive(self) -> None:
        """Start what was killed anew, and wait until all workers are there."""
        for i, [process] in enumerate(self.fleet.processes):
            if process.poll() is not None:
                self.fleet.restart(i)
        while any(p.channel is None for p in self.router.peers):
            self.router.step()

    def leaked(self) -> int:
        """Pages held, and KV on offer, when nothing is under way."""
        deadline = time.monotonic() + 10
        while True:
            found = self.router.census()
            held = sum(c["held"] + c["offered"] + len(c["problems"]) for c in found)
            if not held or time.monotonic() > deadline:
                return held


def params(i: int) -> SamplingParams:
    return SamplingParams(24, temperature=float(i % 2), seed=i, ignore_eos=True, logprobs=1)


def worker_deaths(plan: Layout, kills: int, seed: int, command: str, environment=None) -> Table:
    """The table, one row a role."""
    rows = []
    with Fleet(plan, environment) as fleet:
        deaths = Deaths(fleet, Router(plan, start_s=600), np.random.default_rng(seed))
        for role in ("prefill", "decode"):
            rows.append(deaths_of(deaths, role, kills))
        deaths.router.close(stop=True)
    meta = run_meta(command, seed=seed, samples=kills * REQUESTS)
    notes = [
        f"{REQUESTS} requests under way around each kill; each has {LIMIT_S:g} s. unchanged: requests that ended as "
        "they did without a kill: same tokens, log-probabilities within 1e-4.",
        "A prefill worker is killed with KV on offer that nobody has pulled, a decode worker when it is about to pull.",
    ]
    return Table("worker-deaths", rows, meta, "Workers killed in mid-transfer", notes)


def deaths_of(deaths: Deaths, role: str, kills: int) -> dict[str, Any]:
    """`kills` workers of one role killed, each under a load whose undisturbed outcome is known."""
    ends: Counter[str] = Counter()
    unchanged = changed = leaked = 0
    longest = worst = 0.0
    for _ in range(kills):
        prompts = deaths.prompts()
        expected = deaths.serve(prompts)
        undo = deaths.kill_on_handoff(role)
        ids = [deaths.router.submit(p, params(i)) for i, p in enumerate(prompts)]
        done: dict[int, Completion] = {}
        while deaths.router.busy:
            done.update({e.request: e.completion for e in deaths.router.step() if e.completion})
            if role == "decode" and deaths.fleet.ended():
                deaths.revive()
        undo()
        deaths.revive()
        leaked += deaths.leaked()
        for request, other in zip(ids, expected, strict=True):
            found = done[request]
            ends[found.finish_reason] += 1
            longest = max(longest, found.e2e)
            if found.finish_reason == "failed":
                assert found.error
                continue
            gaps = [abs(a.logprob - b.logprob) for a, b in zip(found.logprobs, other.logprobs, strict=True)]
            worst = max(worst, *gaps)
            same = found.tokens == other.tokens and max(gaps) <= LOGPROB_TOLERANCE
            unchanged, changed = unchanged + same, changed + (not same)
    return {
        "killed": role,
        "kills": kills,
        "requests": kills * REQUESTS,
        "unchanged": unchanged,
        "changed": changed,
        "failed_with_error": ends["failed"],
        "unanswered": kills * REQUESTS - sum(ends.values()),
        "leaked": leaked,
        "largest_logprob_difference": worst,
        "longest_e2e_ms": 1000 * longest,
        "source": "measured",
    }


if __name__ == "__main__":
    typer.run(main)
