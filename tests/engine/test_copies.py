"""KV that every process pulls for itself: what the leader makes of the news of all."""

from types import SimpleNamespace

import pytest

from jaxinfer.engine.copies import Copy, news, verdicts


def waiting(*copies: Copy):
    """A worker in which requests 10, 11, ... wait for these."""
    requests = [SimpleNamespace(id=10 + i, arrival=copy) for i, copy in enumerate(copies)]
    return SimpleNamespace(awaiting=requests)


def own(ready: bool = False, lost: str = ""):
    return SimpleNamespace(tokens=4, ready=ready, lost=lost, told=None)


@pytest.fixture
def copy() -> Copy:
    return Copy(own(ready=True), number=3, missing=2)


def test_it_is_ready_once_all_have_it(copy):
    engine = waiting(copy)
    assert news(engine) == [(3, "")] and news(engine) == []  # said once
    assert not copy.ready  # for the engine, whatever this process has
    assert list(verdicts(engine, [(3, "")])) == [] and not copy.ready
    assert list(verdicts(engine, [[3, ""]])) == [(10, "")] and copy.ready and not copy.lost


def test_it_is_lost_as_soon_as_one_has_lost_it(copy):
    """Once, whatever the others say in the same round."""
    assert list(verdicts(waiting(copy), [(3, "late"), (3, "")])) == [(10, "late")]
    assert copy.lost == "late" and not copy.ready


def test_news_of_an_earlier_copy_change_nothing(copy):
    """A request that went back to prefill and came again has another number."""
    assert list(verdicts(waiting(copy), [(2, ""), (2, ""), (2, "late")])) == []
    assert copy.missing == 2 and not copy.ready and not copy.lost
