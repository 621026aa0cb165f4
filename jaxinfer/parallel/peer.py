"""Another process of a worker that spans several: messages to it, and whether it is still there.

Messages are JSON and nothing else. Who connects must have the key, but what is said is not encrypted.

Who dies takes the others along. The end of a process is seen by the end of its connection, at once; that it hangs, or
that its host or the network is gone, by its silence of LIMIT seconds. From then on the others have GRACE seconds to
leave the step they are in, which may wait for ever for the one that is gone, before they are ended where they stand.
"""

import json
import os
import queue
import socket
import struct
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

import jax

REPLY = 10.0  # seconds that a process may take to answer while it introduces itself
LIMIT = 30  # seconds after which a process that is not heard of counts as gone
GRACE = 10.0  # seconds from the loss of a process to the end of those that take no notice
MAX_BYTES = 1 << 28  # of one message


class PeerGone(RuntimeError):
    """A process of the worker is gone, or differs from the others. Nothing can be served any more."""


class Peer:
    """Another process of the worker: what it says, and whether it is still there.

    Once it is gone, `close` must be called within GRACE seconds; otherwise this process is ended with one line on
    standard error and exit code 1. Nothing milder reaches a thread that waits for a device that waits for the peer.
    """

    def __init__(self, index: int, connection: Connection):
        self.index, self._connection = index, connection
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._reason = "is gone"
        self._gone, self._closed, self._sending = threading.Event(), threading.Event(), threading.Lock()
        for work in (self._listen, self._beat):
            threading.Thread(target=work, name=f"process {index}", daemon=True).start()

    def __str__(self) -> str:
        return f"process {self.index}"

    def send(self, message: Any) -> None:
        """`message` as JSON; a string is the reason why this process ends. PeerGone where it can't be reached."""
        try:
            with self._sending:
                send(self._connection, message)
        except OSError:
            raise PeerGone(f"{self} is gone") from None

    def receive(self) -> Any:
        """Its next message, however long that takes. PeerGone when there will be none."""
        message = self._inbox.get()
        if message is None:
            raise PeerGone(f"{self} {self._reason}")
        return message

    def received(self) -> list[Any]:
        """The messages that are here and not yet received."""
        messages = []
        with suppress(queue.Empty):
            while (message := self._inbox.get_nowait()) is not None:
                messages.append(message)
            self._inbox.put(None)  # for who waits
        return messages

    def check(self, wait: float = 0.0) -> None:
        """PeerGone if it has gone, or goes within `wait` seconds."""
        if self._gone.wait(wait):
            raise PeerGone(f"{self} {self._reason}")

    def close(self, wait: float = 0.0) -> None:
        """End the connection, after `wait` seconds in which the peer may do so. Harmless when repeated."""
        if self._closed.is_set():
            return
        self._gone.wait(wait)
        with suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as raw:
            raw.shutdown(socket.SHUT_RDWR)  # wakes the thread that listens, which closing would not
        self._closed.set()

    def _listen(self) -> None:
        with suppress(EOFError, OSError, ValueError):
            while self._connection.poll(LIMIT):
                message = receive(self._connection)
                if isinstance(message, str):
                    self._reason = f"has ended: {message}"
                elif message is not None:
                    self._inbox.put(message)
        self._inbox.put(None)
        self._gone.set()
        if not self._closed.wait(GRACE):
            print(f"{self} is gone; this process of its worker ends too", file=sys.stderr, flush=True)
            os._exit(1)
        with self._sending:
            self._connection.close()

    def _beat(self) -> None:
        """Let the peer hear that this process is alive."""
        with suppress(PeerGone):
            while not self._gone.wait(LIMIT / 4):
                self.send(None)


@contextmanager
def together(peers: Sequence[Peer]) -> Iterator[None]:
    """Around work that takes all of them. Where it fails, the peers are told why and let go; where it fails because one
    of them has gone, PeerGone says so."""
    try:
        for peer in peers:
            peer.check()
        yield
    except BaseException as error:
        # Of a peer's end the collective it was in may tell before its connection does.
        lost = _lost(peers, GRACE / 2) if isinstance(error, jax.errors.JaxRuntimeError) else None
        for peer in peers:
            with suppress(PeerGone):
                peer.send(str(lost or error) or type(error).__name__)
            peer.close()
        if lost is not None:
            raise lost from None
        raise


def _lost(peers: Sequence[Peer], wait: float) -> PeerGone | None:
    try:
        for peer in peers:
            peer.check(wait)
    except PeerGone as lost:
        return lost
    return None


def connection_over(raw: socket.socket) -> Connection:
    """Messages over a TCP connection, sent at once; reading fails after REPLY seconds until `patience` says more."""
    raw.settimeout(None)
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection = Connection(raw.detach())
    patience(connection, REPLY)
    return connection


def patience(connection: Connection, seconds: float) -> None:
    """How long reading may wait before it fails."""
    with socket.socket(fileno=os.dup(connection.fileno())) as raw:
        whole = int(seconds)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", whole, int((seconds - whole) * 1e6)))


def send(connection: Connection, message: Any) -> None:
    """`message` as JSON."""
    connection.send_bytes(json.dumps(message).encode())


def receive(connection: Connection) -> Any:
    """The next message. EOFError, OSError or ValueError where there is none, or something else."""
    return json.loads(connection.recv_bytes(MAX_BYTES))
