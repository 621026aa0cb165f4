"""The campaign: put a fault into an engine under load, at a random moment, and judge what came of it; many times.

An *episode* is one workload served from an empty pool to the end. A clean episode gives what every request should say;
an episode with a fault is held against it, tokens and logits. Rows do not depend on their company in a batch here, so
the logits must be equal bit for bit, except of a request that was sent back and prefilled anew, whose sums come in
another order (TOLERANCE). What became of an injection:

- `detected`: the engine noticed, and no token drawn from a wrong logit was shown;
- `late`: it noticed, but after such a token; every request that showed one ended with the reason `integrity`;
- `missed`: a request that showed one ended as if nothing were wrong, or never ended;
- `harmless`: nothing was noticed and nothing was wrong.

`leaked` counts injections after which a request's logits depend on another's prompt: those with wrong logits are run
again, the same in all but the markers in the other prompts, and something must not change that does. It counts what was
shown late as well as what was missed.
"""

import dataclasses
import functools
import hashlib
import json
import logging
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import jaxinfer
from jaxinfer.cache import integrity
from jaxinfer.engine.request import Request, Status
from jaxinfer.evaluation.faults.books import BOOKS
from jaxinfer.evaluation.faults.fault import Fault
from jaxinfer.evaluation.faults.host import HOST
from jaxinfer.evaluation.faults.load import ENGINE, Server, Workload, random_model
from jaxinfer.evaluation.faults.pool import POOL
from jaxinfer.evaluation.faults.scene import Scene
from jaxinfer.evaluation.faults.tables import TABLES

FAULTS: tuple[Fault, ...] = (*TABLES, *BOOKS, *POOL, *HOST)
LEVELS = {
    "off": ENGINE.replace(integrity="off"),
    "tags": ENGINE.replace(integrity="tags"),
    "digest": ENGINE.replace(integrity="digest"),
    "digest-all": ENGINE.replace(integrity="digest", digest_pages=ENGINE.max_pages_per_slot),
}
"""`digest` checks one page of a slot a step, the default; `digest-all` each page before each read."""
WORKLOADS = 8
MOST_STEPS = 120  # an episode takes about 20
BLOCK = 25  # injections between two notes of progress
TOLERANCE = 0.5  # of FP8 pages written by prefill instead of decode, on logits of size 4


@dataclass(frozen=True)
class Said:
    """What the caller of one request saw, and the logits [tokens, V] behind it."""

    tokens: list[int]
    logits: np.ndarray
    reason: str
    sent_back: bool


@dataclass(frozen=True)
class Episode:
    """`said` by place in the workload. `noticed`: a check failed or the free list had to be written anew. `aborted`:
    places of the requests that ended for it. `victim`: the place of the fault's, None where it never took place."""

    said: dict[int, Said]
    noticed: bool
    aborted: list[int]
    victim: int | None
    pages_lost: bool
    pages_handed_out: int
    steps: int


@dataclass
class Campaign:
    """Servers at each level, started when they are needed, and what they say when nothing is wrong."""

    seed: int = 0

    def __post_init__(self) -> None:
        self._model = random_model()
        self._servers: dict[str, Server] = {}
        self._clean: dict[tuple[str, int], Episode] = {}
        self.seconds: dict[str, list[float]] = {}  # wall time of each injection, by level

    def server(self, level: str) -> Server:
        if level not in self._servers:
            self._servers[level] = Server.start(self._model, LEVELS[level])
        return self._servers[level]

    def clean(self, level: str, workload: int) -> Episode:
        """The workload without a fault."""
        if (level, workload) not in self._clean:
            self._clean[level, workload] = run(self.server(level), self.workload(workload))
        return self._clean[level, workload]

    def workload(self, number: int) -> Workload:
        return Workload.draw(self.seed * WORKLOADS + number)

    # ---- one injection

    def inject(self, fault: Fault, level: str, index: int) -> Counter[str]:
        """Injection `index` of a fault: one count of what came of it, and further ones of what must not happen. Empty
        where the fault could not be put in."""
        workload, clean = self.workload(index % WORKLOADS), self.clean(level, index % WORKLOADS)
        start = time.perf_counter()
        seeds = [self.seed, zlib.crc32(fault.name.encode()), index]
        faulty = run(self.server(level), workload, fault, clean.steps, seeds)
        if faulty.victim is None:
            return Counter()
        found = judge(clean, faulty)
        wrong = wrong_requests(clean, faulty)
        if wrong:
            other = run(self.server(level), workload.others_changed(wrong[0]), fault, clean.steps, seeds)
            found["leaked"] = int(not equal(faulty.said[wrong[0]], other.said[wrong[0]]))
        found["false_alarms"] = sum(place != faulty.victim for place in faulty.aborted) if fault.alone else 0
        self.seconds.setdefault(level, []).append(time.perf_counter() - start)
        return found

    def block(self, fault: Fault, level: str, first: int, count: int) -> Counter[str]:
        """`count` injections from number `first` on."""
        total: Counter[str] = Counter()
        for index in range(first, first + count):
            total.update(self.inject(fault, level, index))
        return total

    def quiet(self, level: str, operations: int) -> Counter[str]:
        """Clean episodes until so many pages were handed out and given back: every alarm is a false one."""
        total: Counter[str] = Counter(page_operations=0, false_alarms=0, wrong=0)
        number = 0
        while total["page_operations"] < operations:
            clean = self.clean(level, number % WORKLOADS)
            again = run(self.server(level), self.workload(number % WORKLOADS))
            total["page_operations"] += 2 * again.pages_handed_out
            total["false_alarms"] += int(again.noticed)
            total["wrong"] += len(wrong_requests(clean, again))
            number += 1
        return total


# ---- an episode


def run(
    server: Server, workload: Workload, fault: Fault | None = None, clean_steps: int = 0, seeds: Sequence[int] = ()
) -> Episode:
    """Serve a workload from an empty pool; `seeds` draw the moment, the victim and the damage."""
    engine, rng = server.engine, np.random.default_rng(list(seeds))
    programs = {name: getattr(engine.programs, name) for name in ("prefill", "admit")}
    engine.state = engine.programs.create_state()
    server.logits.clear()
    before = dataclasses.replace(engine.counters)
    first_tag = int(engine.state.allocator.next_tag)
    due = int(rng.integers(1, max(clean_steps - 2, 2)))
    ids: dict[int, int] = {}
    told: dict[int, list[int]] = {}
    reasons: dict[int, str] = {}
    sent_back: set[int] = set()
    victim = None
    step = 0
    while step < MOST_STEPS and (engine.busy or step <= max(workload.arrivals)):
        for place, arrival in enumerate(workload.arrivals):
            if arrival == step:
                ids[engine.submit(workload.prompts[place], workload.params[place])] = place
        if fault is not None and victim is None and step >= due:
            chosen = choose_victim(engine.scheduler.running, rng)
            if chosen is not None and fault.inject(Scene(engine, chosen, rng)):
                victim = ids[chosen.id]
        for event in engine.step():
            told.setdefault(ids[event.request], []).extend(event.tokens)
            if event.completion:
                reasons[ids[event.request]] = event.completion.finish_reason
                if event.completion.preemptions:
                    sent_back.add(ids[event.request])
        step += 1
    for request in list(ids):
        engine.cancel(request)  # whatever never ends
    list(engine.run())
    for name, program in programs.items():
        setattr(engine.programs, name, program)  # a fault of the host may still lie in wait
    said = {}
    for request, place in ids.items():
        tokens = told.get(place, [])
        rows = np.array(server.logits.get(request, [])[: len(tokens)])
        said[place] = Said(tokens, rows, reasons.get(place, "never"), place in sent_back)
    noticed = engine.counters.mismatches + engine.counters.repairs > before.mismatches + before.repairs
    aborted = [place for place, reason in reasons.items() if reason == "integrity"]
    state = engine.state.allocator
    lost = int(state.free_count) != engine.config.num_pages or bool(integrity.check_invariants(state))
    handed_out = (int(state.next_tag) - first_tag) % 2**32
    return Episode(said, noticed, aborted, victim, lost, handed_out, step)


def choose_victim(running: Sequence[Request], rng: np.random.Generator) -> Request | None:
    """A running request that has tokens in pages and more to come."""
    able = [r for r in running if r.cached and (r.status is Status.PREFILL or r.dispatched < r.params.max_tokens)]
    return able[int(rng.integers(len(able)))] if able else None


# ---- its judgement


def equal(one: Said, other: Said) -> bool:
    """Whether both show the same, as far as the shorter goes."""
    n = min(len(one.tokens), len(other.tokens))
    if not (one.sent_back or other.sent_back):
        return not n or (one.tokens[:n] == other.tokens[:n] and np.array_equal(one.logits[:n], other.logits[:n]))
    for place in range(n):
        if np.abs(one.logits[place] - other.logits[place]).max() > TOLERANCE:
            return False
        if one.tokens[place] != other.tokens[place]:
            return True  # as likely as each other: from here on they are two texts
    return True


def wrong_requests(clean: Episode, faulty: Episode) -> list[int]:
    """Places of the requests that showed what they would not have, or never ended."""
    return [
        place
        for place, said in faulty.said.items()
        if not equal(clean.said[place], said)
        or said.reason == "never"
        or (said.reason == "length" and len(said.tokens) != len(clean.said[place].tokens))
    ]


def judge(clean: Episode, faulty: Episode) -> Counter[str]:
    """One count of `detected`, `late`, `harmless` or `missed`, one of `injected`, and one where a page never came back.
    """
    wrong = wrong_requests(clean, faulty)
    delivered = [place for place in wrong if faulty.said[place].reason not in ("integrity", "cancelled")]
    if delivered:
        verdict = "missed"
    elif wrong:
        verdict = "late" if faulty.noticed else "missed"
    else:
        verdict = "detected" if faulty.noticed else "harmless"
    return Counter({verdict: 1, "injected": 1, "pages_lost": int(faulty.pages_lost)})


# ---- all of it


def campaign(
    levels: Sequence[str],
    injections: int,
    seed: int = 0,
    progress_file: Path | None = None,
    advance: Callable[[int], None] = lambda n: None,
    faults: Sequence[Fault] = FAULTS,
) -> tuple[Campaign, dict[tuple[str, str], Counter[str]]]:
    """Every fault at every level, `injections` times. Counts by (fault, level).

    With a `progress_file`, blocks that are noted there, of the same seed and the same code, are not run again, and each
    new one is noted when it is done: a campaign that was stopped goes on where it was. Injection i is the same whatever
    was run before it.
    """
    run_of = Campaign(seed)
    totals: dict[tuple[str, str], Counter[str]] = {(f.name, level): Counter() for f in faults for level in levels}
    done = dict(_noted(progress_file, seed)) if progress_file else {}
    logger = logging.getLogger("jaxinfer.integrity")
    was = logger.disabled
    logger.disabled = True  # thousands of lines that all were expected
    try:
        for level in levels:
            for fault in faults:
                for first in range(0, injections, BLOCK):
                    count = min(BLOCK, injections - first)
                    key = (fault.name, level, first, count)
                    if key not in done:
                        done[key] = run_of.block(fault, level, first, count)
                        _note(progress_file, seed, key, done[key])
                    totals[fault.name, level].update(done[key])
                    advance(count)
    finally:
        logger.disabled = was
    return run_of, totals


def _noted(file: Path, seed: int) -> Iterator[tuple[tuple[str, str, int, int], Counter[str]]]:
    """Blocks of the same seed and code in a progress file."""
    code = code_digest()
    for line in file.read_text().splitlines() if file.exists() else ():
        note = json.loads(line)
        if (note["seed"], note["code"]) == (seed, code):
            yield (note["fault"], note["level"], note["first"], note["count"]), Counter(note["found"])


def _note(file: Path | None, seed: int, key: tuple[str, str, int, int], found: Counter[str]) -> None:
    if file is not None:
        names = dict(zip(("fault", "level", "first", "count"), key, strict=True))
        with file.open("a") as out:
            out.write(json.dumps({"seed": seed, "code": code_digest(), **names, "found": dict(found)}) + "\n")


@functools.cache
def code_digest() -> str:
    """A fingerprint of the package's source: results of other code are not these results."""
    files = sorted(Path(jaxinfer.__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
