"""Messages between router and workers: JSON objects over TCP, each end proving that it knows the key.

The key is in the environment variable JAXINFER_KEY; without one, only a local deployment is safe from strangers on the
host.
"""

import json
import os
import socket
import struct
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

from jaxinfer.errors import UserError

HANDSHAKE_S = 5.0
Message = dict[str, Any]


class Gone(Exception):
    """The other end has closed the connection, or died."""


def key() -> bytes:
    """What both ends must know."""
    return os.environ.get("JAXINFER_KEY", "jaxinfer").encode()


class Channel:
    """One end of a connection. `send` and `receive` raise Gone."""

    def __init__(self, connection: Connection):
        self._connection = connection

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, message: Message) -> None:
        try:
            self._connection.send_bytes(json.dumps(message).encode())
        except OSError as error:
            raise Gone(str(error)) from None

    def receive(self, timeout: float = 0.0) -> Message | None:
        """The next message, None where none comes within `timeout` seconds."""
        try:
            return json.loads(self._connection.recv_bytes()) if self._connection.poll(timeout) else None
        except (OSError, EOFError) as error:
            raise Gone(str(error) or "the connection was closed") from None

    def close(self) -> None:
        self._connection.close()


class Listener:
    """Where a worker is reached. UserError where the port can't be used."""

    def __init__(self, host: str, port: int):
        try:
            self._socket = socket.create_server((host, port))
        except OSError as error:
            why = str(error.strerror).partition(" (")[0]
            raise UserError(f"port {port} of {host} cannot be used: {why}") from None

    def fileno(self) -> int:
        return self._socket.fileno()

    def accept(self, timeout: float | None) -> Channel | None:
        """The next end that knows the key; None where none comes within `timeout` seconds, or it does not know it."""
        self._socket.settimeout(timeout)
        try:
            peer, _ = self._socket.accept()
        except TimeoutError:
            return None
        return _authenticated(peer, (deliver_challenge, answer_challenge))

    def close(self) -> None:
        self._socket.close()


def connect(host: str, port: int, timeout: float) -> Channel | None:
    """The channel to a worker, None where nobody answers. UserError where it has another key."""
    try:
        peer = socket.create_connection((host, port), timeout)
    except OSError:
        return None
    channel = _authenticated(peer, (answer_challenge, deliver_challenge))
    return channel


def _authenticated(peer: socket.socket, exchange) -> Channel | None:
    """A channel once both ends have answered; a silent or wrong one is closed."""
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.settimeout(None)  # a plain descriptor from here on, with limits of the kernel's while it is not yet trusted
    _limit(peer, HANDSHAKE_S)
    plain = socket.socket(fileno=os.dup(peer.fileno()))
    connection = Connection(peer.detach())
    try:
        for each in exchange:
            each(connection, key())
        _limit(plain, 0.0)
        return Channel(connection)
    except Exception:  # whatever a stranger sends
        connection.close()
        return None
    finally:
        plain.close()


def _limit(peer: socket.socket, seconds: float) -> None:
    whole = int(seconds)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", whole, int((seconds - whole) * 1e6)))
