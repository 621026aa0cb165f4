"""How the processes of a worker meet: who is let in, and the one line that says why not. jax starts nowhere here."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection

import pytest

from jaxinfer.errors import UserError
from jaxinfer.parallel import peer
from jaxinfer.parallel.multihost import Span, meet, start
from jaxinfer.parallel.peer import Peer, PeerGone, together

KEY = b"of the tests"


@pytest.fixture
def address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


def outcomes(spans: list[Span], agree: list[dict], wait: float = 20.0) -> list:
    """What `meet` gives each: the indexes of those it has met, or the message of its UserError."""

    def one(span: Span, values: dict):
        try:
            met, coordinator = meet(span, values, wait)
        except UserError as error:
            return str(error)
        assert coordinator.rpartition(":")[0] == "127.0.0.1"
        for connection in met.values():
            connection.close()
        return sorted(met)

    with ThreadPoolExecutor(len(spans)) as pool:
        return list(pool.map(one, spans, agree))


def test_three_meet(address):
    spans = [Span(address, 3, index, KEY) for index in range(3)]
    assert outcomes(spans, [{"model": "tiny"}] * 3) == [[1, 2], [0], [0]]


def test_who_differs_is_named_on_both_sides(address):
    spans = [Span(address, 2, index, KEY) for index in range(2)]
    message = "engine.num_pages is 64 in process 1 and 32 in process 0; give all the same"
    assert outcomes(spans, [{"engine.num_pages": "32"}, {"engine.num_pages": "64"}]) == [message] * 2


def test_other_versions_and_other_devices_differ(address):
    spans = [Span(address, 2, index, KEY, local_devices=2 + index) for index in range(2)]
    assert outcomes(spans, [{}, {}])[0].startswith("local_devices is 3 in process 1 and 2 in process 0")
    spans = [Span(address, 2, index, KEY) for index in range(2)]
    assert outcomes(spans, [{}, {"jax": "0.1"}])[1].startswith("jax is 0.1 in process 1 and ")


def test_two_of_one_index(address):
    spans = [Span(address, 3, index, KEY) for index in (0, 1, 1)]
    found = outcomes(spans, [{}] * 3)
    assert found[0] == "two processes have the index 1; give each its own" and found[0] in found[1:]


def test_a_wrong_key_and_a_stranger_are_not_let_in(address):
    """They do not keep those away who belong there."""
    with ThreadPoolExecutor(3) as pool:
        leader = pool.submit(outcomes, [Span(address, 2, 0, KEY)], [{}])
        wrong = outcomes([Span(address, 2, 1, b"another")], [{}])
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        right = outcomes([Span(address, 2, 1, KEY)], [{}])
        assert wrong == [f"{address} refuses the key; give all processes of a worker the same"]
        assert right == [[0]] and leader.result() == [[1]]


def test_nobody_comes(address):
    assert outcomes([Span(address, 2, 0, KEY)], [{}], 0.2) == [f"process 1 has not come to {address}; start it"]
    assert outcomes([Span(address, 2, 1, KEY)], [{}], 0.2) == [f"nobody listens at {address}; start process 0 there"]


def test_an_address_in_use(address):
    host, _, port = address.rpartition(":")
    with socket.create_server((host, int(port))):
        [message] = outcomes([Span(address, 2, 0, KEY)], [{}])
    assert message == f"process 0 can't listen at {address}: Address already in use; give another address"


@pytest.mark.parametrize(
    "change, message",
    [
        ({"index": 2}, "process index 2 is not one of 0 to 1"),
        ({"index": -1}, "process index -1 is not one of 0 to 1"),
        ({"processes": 0}, "processes must be at least 1, not 0"),
        ({"address": "here"}, "'here' is not host:port"),
        ({"address": "here:99999"}, "'here:99999' is not host:port"),
        ({"key": b""}, "the key of a worker's processes is empty"),
        ({"local_devices": 0}, "local_devices must be at least 1, not 0"),
    ],
)
def test_spans_that_are_none(change, message):
    with pytest.raises(UserError, match=message):
        Span(**{"address": "here:7100", "processes": 2, "index": 0, "key": KEY} | change)


def test_a_process_that_has_used_jax_does_not_start(address):
    with pytest.raises(UserError, match="jax has started already"):
        start(Span(address, 2, 0, KEY), {})


# ---- peers


@pytest.fixture
def two() -> tuple[Peer, Peer]:
    """Both ends of one connection."""
    ends = [Peer(index, Connection(raw.detach())) for index, raw in enumerate(socket.socketpair())]
    yield ends[1], ends[0]
    for end in ends:
        end.close()


def test_messages_arrive_in_order_and_work_that_fails_tells_why(two):
    here, there = two
    for message in ({"a": [1, "x"]}, [], {"b": None}):
        here.send(message)
    assert [there.receive() for _ in range(3)] == [{"a": [1, "x"]}, [], {"b": None}]
    with pytest.raises(ValueError), together([here]):
        raise ValueError("no such page")
    with pytest.raises(PeerGone, match="process 0 has ended: no such page"), together([there]):
        there.receive()
    with pytest.raises(PeerGone, match="process 0"), together([there]):
        raise AssertionError("not begun")


def test_silence_counts_as_an_end(monkeypatch):
    """A process that hangs keeps its connection. One that is alive is heard of though it says nothing."""
    monkeypatch.setattr(peer, "LIMIT", 0.4)
    mine, other = socket.socketpair()
    silent = Peer(1, Connection(mine.detach()))
    with pytest.raises(PeerGone, match="process 1 is gone"):
        silent.receive()
    silent.close()
    other.close()
    ends = [Peer(index, Connection(raw.detach())) for index, raw in enumerate(socket.socketpair())]
    time.sleep(1.0)
    for end in ends:
        end.check()
    for end in ends:
        end.close()


def test_who_takes_no_notice_of_a_loss_is_ended(monkeypatch, capfd):
    monkeypatch.setattr(peer, "GRACE", 0.2)
    ended = threading.Event()
    monkeypatch.setattr(peer.os, "_exit", lambda code: ended.set() if code == 1 else None)
    mine, other = socket.socketpair()
    lost = Peer(3, Connection(mine.detach()))
    other.close()
    assert ended.wait(5)
    assert capfd.readouterr().err == "process 3 is gone; this process of its worker ends too\n"
    lost.close()
