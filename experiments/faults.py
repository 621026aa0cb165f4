"""Table `faults`: what became of faults that were put into a running engine, a row a fault and level."""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxinfer.errors import UserError
from jaxinfer.evaluation.faults.campaign import FAULTS, LEVELS, Campaign, campaign
from jaxinfer.evaluation.faults.fault import BEFORE, Fault
from jaxinfer.evaluation.faults.load import ENGINE
from jaxinfer.evaluation.table import Table, run_meta

QUICK = (5, 1_000)
FULL = (1000, 1_000_000)
"""Injections of each fault at each level, and page operations of the clean runs at each level."""
COUNTS = ("injected", "detected", "late", "harmless", "missed", "leaked", "false_alarms", "pages_lost")
NOT_APPLICABLE = {
    "3 and 4, as transfers": "pages are not loaded from or sent to another memory; what they leave behind in a page is "
    "put in as lost write and torn page",
    "5, cached": "no prefix is cached; prompts of a page less, exactly, and more by one are in every workload",
    "6, 17": "no prefix is cached, so nothing is looked up by hash and nothing is inserted twice",
    "10, sparse attention": "no index picks tokens; entries of the page table out of range are put in",
    "11": "no fault of its own: markers are in every prompt, and leaked counts what shows of them elsewhere",
    "23, hand-over": "prefill and decode share the slots; a slot given away is put in",
}
"""Public fault classes whose machinery does not exist here, and why no row stands for them."""


def faults(
    levels: Sequence[str],
    injections: int,
    operations: int,
    seed: int,
    command: str,
    progress_file: Path | None = None,
    advance: Callable[[int], None] = lambda n: None,
) -> Table:
    """Run the campaign. UserError for a level that there isn't."""
    for level in levels:
        if level not in LEVELS:
            raise UserError(f"unknown level {level!r}; there are: {', '.join(LEVELS)}")
    run, totals = campaign(levels, injections, seed, progress_file, advance)
    rows = [quiet_row(run, level, operations) for level in levels]
    each = ((fault, level, totals[fault.name, level]) for fault in FAULTS for level in levels)
    rows += [row_of(fault, level, found) for fault, level, found in each if found["injected"]]
    cost = {level: 1e3 * float(np.median(times)) for level, times in run.seconds.items()}
    meta = run_meta(command, seed, injections, str(ENGINE.precision), ms_per_injection=cost, operations=operations)
    return Table("faults", rows, meta, "Faults put into a running engine", notes(rows))


def quiet_row(run: Campaign, level: str, operations: int) -> dict[str, Any]:
    """Clean runs: every alarm is a false one."""
    found = run.quiet(level, operations)
    return {
        "fault": "none",
        "level": level,
        "page_operations": found["page_operations"],
        "missed": found["wrong"],
        "false_alarms": found["false_alarms"],
        "claim": BEFORE,
        "upheld": not (found["wrong"] or found["false_alarms"]),
        "source": "measured",
    }


def row_of(fault: Fault, level: str, found: Counter[str]) -> dict[str, Any]:
    """Counts of one fault at one level, what the level claims, and whether that held."""
    claim = fault.claims.get(level)
    broken = found["missed"] or found["false_alarms"] or (claim == BEFORE and (found["late"] or found["leaked"]))
    return {
        "fault": fault.name,
        "level": level,
        "classes": ", ".join(map(str, fault.classes)) or None,
        **{name: found[name] for name in COUNTS},
        "claim": claim,
        "upheld": not broken if claim else None,
        "why": fault.why if not claim else None,
        "source": "measured",
    }


def broken_claims(table: Table) -> list[str]:
    """Rows whose claim did not hold, by fault and level."""
    return [f"{row['fault']} at {row['level']}" for row in table.rows if row["upheld"] is False]


def notes(rows: Sequence[dict[str, Any]]) -> list[str]:
    """How to read the table."""
    unchecked = [row for row in rows if row["level"] == "off" and row["fault"] != "none"]
    missed, leaked, injected = (sum(row[name] for row in unchecked) for name in ("missed", "leaked", "injected"))
    found = [
        "detected: noticed before a token drawn from wrong logits was shown; late: noticed, and the request ended with "
        "`integrity`, but after such a token; missed: a request with such a token ended as if nothing were wrong; "
        "harmless: nothing was noticed and nothing was wrong.",
        "leaked: injections after which something shown to one request, in time or late, depends on another's prompt.",
        "false_alarms: requests that ended with `integrity` and were not concerned, or clean runs with any alarm. "
        "pages_lost: runs after which a page was not free again; the next request that is refused one has it found.",
        "digest checks one page of each slot a step; digest-all every page before every read.",
        *(f"Not applicable, class {number}: {why}." for number, why in NOT_APPLICABLE.items()),
    ]
    if injected:
        found.append(f"With the checks off, {missed} of {injected} injections were missed and {leaked} leaked.")
    return found
