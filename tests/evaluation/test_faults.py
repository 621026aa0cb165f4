"""The fault campaign: what it counts, that it repeats, and that the checks are what catches."""

from collections import Counter

import numpy as np
import pytest

from experiments import faults as table
from jaxinfer.evaluation.faults import campaign as module
from jaxinfer.evaluation.faults.campaign import FAULTS, LEVELS, Episode, Said, campaign, equal, judge
from jaxinfer.evaluation.faults.fault import BEFORE, IN_TIME
from jaxinfer.evaluation.faults.load import MARKER, Workload

RIGHT = np.arange(12.0).reshape(3, 4)


def said(tokens=(1, 2, 3), logits=RIGHT, reason="length", sent_back=False) -> Said:
    return Said(list(tokens), logits[: len(tokens)], reason, sent_back)


def episode(*each: Said, noticed=False, pages_lost=False) -> Episode:
    aborted = [i for i, one in enumerate(each) if one.reason == "integrity"]
    return Episode(dict(enumerate(each)), noticed, aborted, 0, pages_lost, 9, 20)


CLEAN = episode(said(), said())


@pytest.mark.parametrize(
    ("faulty", "verdict"),
    [
        (episode(said(), said()), "harmless"),
        (episode(said((1,), reason="integrity"), said(), noticed=True), "detected"),
        (episode(said((), reason="integrity"), said(), noticed=True), "detected"),
        (episode(said((1, 2), RIGHT + 1, "integrity"), said(), noticed=True), "late"),
        (episode(said((1, 2, 3), RIGHT + 1e-6), said()), "missed"),  # one rounding is enough
        (episode(said((1, 2, 4)), said()), "missed"),
        (episode(said((1,), reason="integrity"), said((1, 2, 3), RIGHT + 1), noticed=True), "missed"),
        (episode(said((1, 2), reason="never"), said()), "missed"),
        (episode(said((1, 2), reason="length"), said()), "missed"),
        (episode(said((1, 2), reason="cancelled"), said()), "harmless"),
        (episode(said(), said(), noticed=True), "detected"),
    ],
)
def test_verdicts(faulty, verdict):
    assert judge(CLEAN, faulty) == Counter({verdict: 1, "injected": 1, "pages_lost": 0})


def test_a_request_that_was_sent_back_may_differ_by_rounding():
    near, far = said(logits=RIGHT + 0.1, sent_back=True), said(logits=RIGHT + 1, sent_back=True)
    assert equal(said(), near) and not equal(said(), far)
    assert not equal(said(), said(logits=RIGHT + 0.1))


def test_workloads_repeat_and_their_markers_are_unique():
    one, again, other = Workload.draw(3), Workload.draw(3), Workload.draw(4)
    assert one == again != other
    markers = [tuple(p[:MARKER]) for p in one.prompts]
    assert len({t for m in markers for t in m}) == MARKER * len(markers)
    changed = one.others_changed(2)
    assert [a == b for a, b in zip(one.prompts, changed.prompts, strict=True)] == [i == 2 for i in range(len(markers))]
    assert [a[MARKER:] for a in one.prompts] == [b[MARKER:] for b in changed.prompts]
    assert not {t for m in markers for t in m} & {t for p in changed.prompts[3:] for t in p[:MARKER]}


def test_every_fault_says_what_it_claims_and_why_not():
    assert len({f.name for f in FAULTS}) == len(FAULTS)
    covered = {number for f in FAULTS for number in f.classes}
    assert {1, 2, 8, 9, 13, 21, 22, 23, 24} <= covered
    for fault in FAULTS:
        assert set(fault.claims) <= set(LEVELS) and set(fault.claims.values()) <= {BEFORE, IN_TIME}
        assert fault.why or set(fault.claims) == set(LEVELS)


def few(*names: str):
    return [f for f in FAULTS if f.name in names]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Three faults at three levels, and the file that notes them."""
    file = tmp_path_factory.mktemp("campaign") / "progress.jsonl"
    chosen = few("page table, another's page", "late write", "poison")
    return *campaign(("off", "tags", "digest"), 4, 0, file, faults=chosen), file, chosen


def test_the_checks_are_what_catches(results):
    """The same injections: with the checks off they are missed and leak; with them they are not."""
    _, totals, _, _ = results
    table_fault, write = "page table, another's page", "late write"
    assert totals[table_fault, "off"]["missed"] > 0 and totals[table_fault, "off"]["leaked"] > 0
    assert totals[table_fault, "tags"]["detected"] > 0 == totals[table_fault, "tags"]["missed"]
    assert totals[write, "tags"]["missed"] > 0 and totals[write, "tags"]["leaked"] > 0
    assert totals[write, "digest"]["missed"] == 0
    for level in ("off", "tags", "digest"):
        assert totals["poison", level]["harmless"] == 4
        assert sum(totals[write, level][v] for v in ("detected", "late", "harmless", "missed")) == 4


def test_a_campaign_goes_on_where_it_was(results, monkeypatch):
    run, totals, file, chosen = results
    monkeypatch.setattr(module.Campaign, "inject", lambda *_: pytest.fail("an injection was made twice"))
    _, again = campaign(("off", "tags", "digest"), 4, 0, file, faults=chosen)
    assert again == totals
    monkeypatch.setattr(module.Campaign, "inject", lambda *_: Counter(injected=1))
    _, fresh = campaign(("off",), 4, 1, file, faults=chosen)
    assert all(count == Counter(injected=4) for count in fresh.values())


def test_an_injection_repeats_and_compiles_nothing(results):
    import jax

    run, _, _, chosen = results
    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compiled.append(event) if event.endswith("backend_compile_duration") else None
    )
    assert [run.inject(f, "digest", i) for f in chosen for i in (0, 3)] == [
        run.inject(f, "digest", i) for f in chosen for i in (0, 3)
    ]
    assert run.quiet("digest", 60)["false_alarms"] == 0
    assert compiled == []


def test_rows_of_the_table():
    fault = next(f for f in FAULTS if f.name == "late write")
    row = table.row_of(fault, "digest", Counter(injected=5, late=2, detected=3, leaked=1))
    assert row["claim"] == IN_TIME and row["upheld"] and row["late"] == 2 and row["why"] is None
    assert not table.row_of(fault, "digest-all", Counter(injected=5, late=1, detected=4))["upheld"]
    assert not table.row_of(fault, "digest", Counter(injected=5, missed=1))["upheld"]
    unclaimed = table.row_of(fault, "tags", Counter(injected=5, missed=5))
    assert unclaimed["upheld"] is None and "not what is in it" in unclaimed["why"]
