"""Incidents: what a failed check found, for the error of the request and the log of the operator."""

import dataclasses
import json
import logging
from dataclasses import dataclass

import numpy as np

from jaxinfer.cache import INVALID, digest, integrity
from jaxinfer.steps import ServingState

logger = logging.getLogger("jaxinfer.integrity")
SHOWN = 4  # pages of an incident that are told one by one


@dataclass(frozen=True)
class BadPage:
    """A page that failed. `found` differs from `expected` (tags) where it is no longer the slot's, None where there is
    no such page; equal tags mean that its bytes are not those written. `owners`: the last requests that had it, the
    newest first."""

    column: int
    page: int
    expected: int
    found: int | None
    owners: list[int]

    def __str__(self) -> str:
        if self.found == self.expected:
            return f"page {self.page} does not hold what was written to it"
        return f"page {self.page} has tag {self.found}, expected {self.expected}"


@dataclass(frozen=True)
class Incident:
    """One request whose check failed in engine step `step`. `damaged`: bytes or lengths are wrong, so that tokens it
    had before may be wrong too; otherwise nothing was read from a bad page."""

    request: int
    slot: int
    step: int
    pages: list[BadPage]
    damaged: bool

    def __str__(self) -> str:
        where = "; ".join(map(str, self.pages[:SHOWN]))
        return f"request {self.request}, slot {self.slot}: {where or 'the slot belongs to another request'}"

    def log(self, action: str) -> None:
        """One line of JSON, at the level ERROR."""
        record = {"event": "integrity", "action": action, **dataclasses.asdict(self)}
        logger.error("%s", json.dumps(record | {"pages": record["pages"][:SHOWN], "bad_pages": len(self.pages)}))


def inspect(state: ServingState, intact: np.ndarray, request: int, slot: int, step: int) -> Incident:
    """What is wrong with `slot` now. `intact` [columns] is what `audit_step` says of its pages."""
    wrong = {m.column: (m.page, m.expected, m.found) for m in integrity.report(state.allocator, slot)}
    tags, table = np.asarray(state.allocator.page_tags), np.asarray(state.allocator.page_table)[slot]
    changed = [int(column) for column in np.flatnonzero(~intact) if int(column) not in wrong]
    for column in changed:
        page = int(table[column])
        tag = int(tags[page]) if 0 <= page < len(tags) else 0
        wrong[column] = (page, tag, tag)
    pages = [BadPage(column, *wrong[column], _owners(state, wrong[column][0])) for column in sorted(wrong)]
    return Incident(request, slot, step, pages, bool(changed) or not _scales_hold(state))


def _owners(state: ServingState, page: int) -> list[int]:
    """The ring of a page, without its empty places."""
    if state.owners is None or not 0 <= page < state.owners.ring.shape[0]:
        return []
    return [owner for owner in np.asarray(state.owners.ring)[page].tolist() if owner != INVALID]


def _scales_hold(state: ServingState) -> bool:
    return state.digests is None or int(digest.of_scales(state.cache)) == int(state.digests.scales)
