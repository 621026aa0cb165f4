"""One worker over several processes: they meet, agree on what they run, and start jax together.

>>> peers = multihost.start(span, agree)  # in every process, before the first use of jax  # doctest: +SKIP
>>> engine = Lockstep(model, config, peers) if span.index == 0 else Engine(model, config)  # doctest: +SKIP

Process 0 leads. It listens at one address and checks every other process there before jax starts anywhere; the same
connections carry its messages afterwards, as JSON and nothing else. Whoever connects must have the key, but what is
said is not encrypted, and jax's own connections between the processes are not even authenticated: the network between
the hosts of a worker is taken to be private.

Who dies takes the others along. The end of a process is seen by the end of its connection, at once; the end of its host
or of the network, after LIMIT seconds. From then on the others have GRACE seconds to leave the step they are in, which
may wait for the one that is gone and for ever, before they are ended where they stand (`Peer`).
"""

import json
import os
import queue
import socket
import struct
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

import jax

from jaxinfer.errors import UserError

WAIT = 120.0  # seconds that processes wait for each other to come
REPLY = 10.0  # seconds that a process may take to answer while it introduces itself
LIMIT = 30  # seconds after which a process that is not heard of counts as gone
GRACE = 10.0  # seconds from the loss of a process to the end of those that have not noticed
MAX_BYTES = 1 << 28  # of one message


class PeerGone(RuntimeError):
    """A process of the worker is gone, or differs from the others. Nothing can be served any more."""


@dataclass(frozen=True)
class Span:
    """Which of a worker's `processes` this one is. `address`: host:port where process 0 listens, the same in all;
    `key`: a secret that all of them have; `local_devices`: how many each brings, on the CPU made by jax."""

    address: str
    processes: int
    index: int
    key: bytes
    local_devices: int = 1

    def __post_init__(self) -> None:
        host, _, port = self.address.rpartition(":")
        rules = [
            (bool(host) and port.isdecimal() and 0 < int(port) < 1 << 16, f"{self.address!r} is not host:port"),
            (self.processes >= 1, f"processes must be at least 1, not {self.processes}"),
            (0 <= self.index < self.processes, f"process index {self.index} is not one of 0 to {self.processes - 1}"),
            (self.local_devices >= 1, f"local_devices must be at least 1, not {self.local_devices}"),
            (bool(self.key), "the key of a worker's processes is empty; give all of them the same secret"),
        ]
        for holds, message in rules:
            if not holds:
                raise UserError(message)

    @property
    def place(self) -> tuple[str, int]:
        """Host and port of `address`."""
        host, _, port = self.address.rpartition(":")
        return host.strip("[]"), int(port)


class Peer:
    """Another process of the worker: what it says, and whether it is still there.

    Once it is gone, `close` must be called within GRACE seconds; otherwise this process is ended with one line on
    standard error and exit code 1. Nothing milder reaches a thread that waits for a device that waits for the peer.
    """

    def __init__(self, index: int, connection: Connection):
        self.index, self._connection = index, connection
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._last: Any = None
        self._gone, self._closed = threading.Event(), threading.Event()
        threading.Thread(target=self._listen, name=f"process {index}", daemon=True).start()

    def __str__(self) -> str:
        return f"process {self.index}"

    def send(self, message: Any) -> None:
        """PeerGone where it can't be reached."""
        try:
            _send(self._connection, message)
        except OSError:
            raise PeerGone(f"{self} is gone") from None

    def receive(self) -> Any:
        """Its next message, however long that takes. PeerGone when there will be none."""
        message = self._inbox.get()
        if message is None:
            raise PeerGone(f"{self} is gone")
        return message

    def check(self, wait: float = 0.0) -> None:
        """PeerGone if it has gone, or goes within `wait` seconds; says why if that was its last message."""
        if self._gone.wait(wait):
            raise PeerGone(f"{self}: {self._last}" if isinstance(self._last, str) else f"{self} is gone")

    def close(self) -> None:
        """End the connection; the other side sees this process go. Harmless when repeated."""
        self._closed.set()
        with suppress(OSError):  # wakes the thread that listens, which a plain close would not
            socket.socket(fileno=os.dup(self._connection.fileno())).shutdown(socket.SHUT_RDWR)

    def _listen(self) -> None:
        with suppress(EOFError, OSError, ValueError):
            while True:
                self._last = _receive(self._connection)
                self._inbox.put(self._last)
        self._inbox.put(None)
        self._gone.set()
        if not self._closed.wait(GRACE):
            print(f"{self} is gone; this process of its worker ends too", file=sys.stderr, flush=True)
            os._exit(1)
        self._connection.close()


def start(span: Span, agree: Mapping[str, str], wait: float = WAIT) -> list[Peer]:
    """Bring the processes together and start jax over all their devices. Must come before the first use of jax.

    `agree`: what must be the same in all, by name; the versions of jax and jaxinfer are added. Returns the followers in
    the leader, the leader alone in a follower. UserError, before jax starts, where the address can't be used, a process
    does not come within `wait` seconds, or it differs.
    """
    jax.config.update("jax_enable_preemption_service", False)  # it would catch SIGTERM, and the process live on
    with suppress(RuntimeError):  # GPUs are there or not; only the CPU's devices are made
        jax.config.update("jax_num_cpu_devices", span.local_devices)
    if span.processes == 1:
        return []
    agree = {"jax": jax.__version__, "jaxinfer": version("jaxinfer"), **agree}
    agree |= {"processes": str(span.processes), "local_devices": str(span.local_devices)}
    connections, coordinator = (_gather if span.index == 0 else _join)(span, agree, time.monotonic() + wait)
    peers = [Peer(index, connection) for index, connection in sorted(connections.items())]
    jax.distributed.initialize(
        coordinator,
        span.processes,
        span.index,
        cluster_detection_method="deactivate",
        initialization_timeout=int(wait),
        heartbeat_timeout_seconds=LIMIT,
        shutdown_timeout_seconds=int(GRACE),
        coordinator_bind_address=coordinator,
    )
    return peers


# ---- how they meet


def _gather(span: Span, agree: dict[str, str], deadline: float) -> tuple[dict[int, Connection], str]:
    """The leader's side: a connection to every follower, by index, and where jax will coordinate them."""
    host, _ = span.place
    try:
        listener, free = _listener(*span.place), _listener(host, 0)
    except OSError as error:
        raise UserError(f"process 0 can't listen at {span.address}: {error.strerror}; give another address") from None
    there: dict[int, Connection] = {}
    try:
        with listener, free:
            while missing := set(range(1, span.processes)) - there.keys():
                listener.settimeout(max(0.0, deadline - time.monotonic()))
                try:
                    connection, hello = _accept(listener, span.key)
                except TimeoutError:
                    raise UserError(f"process {min(missing)} has not come to {span.address}; start it") from None
                except (OSError, EOFError, ValueError, AuthenticationError):
                    continue  # whoever it was, it is none of ours
                there[hello["index"] if hello["index"] in missing else -1] = connection
                if objection := _objection(hello, missing, agree):
                    raise UserError(objection)
            port = free.getsockname()[1]
        coordinator = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        for connection in there.values():
            _send(connection, {"coordinator": coordinator})
    except UserError as error:
        for connection in there.values():
            with suppress(OSError):
                _send(connection, {"error": str(error)})
            connection.close()
        raise
    return there, coordinator


def _objection(hello: Mapping[str, Any], missing: set[int], agree: Mapping[str, str]) -> str:
    """Why a follower that introduces itself so can't be one; empty if it can."""
    index, theirs = hello["index"], hello["agree"]
    for name in agree.keys() | theirs.keys():
        if theirs.get(name) != agree.get(name):
            return (
                f"process {index} has {name} {theirs.get(name, 'not at all')}, process 0 {agree.get(name, 'not at all')}"
                "; give all the same"
            )
    return "" if index in missing else f"two processes have the index {index}; give each its own"


def _join(span: Span, agree: dict[str, str], deadline: float) -> tuple[dict[int, Connection], str]:
    """A follower's side of `_gather`."""
    while True:
        try:
            connection = _connection(socket.create_connection(span.place, timeout=REPLY))
            break
        except socket.gaierror as error:
            raise UserError(f"no host for {span.address}: {error.strerror}") from None
        except OSError:
            if time.monotonic() > deadline:
                raise UserError(f"nobody listens at {span.address}; start process 0 there") from None
            time.sleep(0.1)
    try:
        answer_challenge(connection, span.key)
        deliver_challenge(connection, span.key)
        _send(connection, {"index": span.index, "agree": agree})
        _patience(connection, max(1.0, deadline - time.monotonic()))
        reply = _receive(connection)
    except AuthenticationError:
        raise UserError(f"{span.address} refuses the key; give all processes of a worker the same") from None
    except (OSError, EOFError, ValueError):
        raise UserError(f"process 0 at {span.address} ended before the worker was complete; see its error") from None
    if "error" in reply:
        raise UserError(reply["error"])
    _patience(connection, 0)
    return {0: connection}, reply["coordinator"]


def _listener(host: str, port: int) -> socket.socket:
    return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def _accept(listener: socket.socket, key: bytes) -> tuple[Connection, dict[str, Any]]:
    """The next one who connects, and how it introduces itself."""
    connection = _connection(listener.accept()[0])
    try:
        deliver_challenge(connection, key)
        answer_challenge(connection, key)
        hello = _receive(connection)
        if not isinstance(hello["index"], int) or not isinstance(hello["agree"], dict):
            raise ValueError("not an introduction")
    except BaseException:
        connection.close()
        raise
    _patience(connection, 0)
    return connection, hello


# ---- what they say


def _connection(raw: socket.socket) -> Connection:
    """Messages over a TCP connection: sent at once, and broken when the other host has not been heard of for LIMIT."""
    raw.settimeout(None)
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    probes = {"KEEPIDLE": LIMIT // 3, "KEEPINTVL": LIMIT // 6, "KEEPCNT": 4, "USER_TIMEOUT": 1000 * LIMIT}
    for name, value in {"NODELAY": 1, **probes}.items():
        if option := getattr(socket, f"TCP_{name}", None):  # not every system has them all
            raw.setsockopt(socket.IPPROTO_TCP, option, value)
    connection = Connection(raw.detach())
    _patience(connection, REPLY)
    return connection


def _patience(connection: Connection, seconds: float) -> None:
    """How long reading may wait before it fails; 0: for ever."""
    with socket.socket(fileno=os.dup(connection.fileno())) as raw:
        whole = int(seconds)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", whole, int((seconds - whole) * 1e6)))


def _send(connection: Connection, message: Any) -> None:
    connection.send_bytes(json.dumps(message).encode())


def _receive(connection: Connection) -> Any:
    return json.loads(connection.recv_bytes(MAX_BYTES))
