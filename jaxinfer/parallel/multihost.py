"""One worker over several processes: they meet, agree on what they run, and start jax together.

>>> peers = multihost.start(Span("10.0.0.1:7100", 2, index, key, 8), agree)  # in every process  # doctest: +SKIP

Process 0 leads. It listens at one address and checks every other process there before jax starts anywhere; the same
connections carry its messages afterwards (`peer`). jax's own connections between the processes are not authenticated:
the network between the hosts of a worker is taken to be private.

jax itself would have the leader wait for a process that has died, and then abort. So it is told that processes may come
and go, which leaves their loss to `peer`. What it insists on is process 0: where that dies, jax may abort the others
before they can say why they end.
"""

import itertools
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

import jax
import jax._src.distributed

from jaxinfer.errors import UserError
from jaxinfer.parallel.peer import LIMIT, REPLY, Peer, connection_over, patience, receive, send, together

WAIT = 120.0  # seconds that processes wait for each other to come
PATIENCE = 3600  # and, having met, to load and compile


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


def start(span: Span, agree: Mapping[str, str], wait: float = WAIT) -> list[Peer]:
    """Bring the processes together and start jax over all their devices. Must come before the first use of jax.

    `agree`: what must be the same in all, by name; the versions of jax and jaxinfer are added. Returns the followers in
    the leader, the leader alone in a follower. UserError, before jax starts, where the address can't be used, a process
    does not come within `wait` seconds, or it differs.
    """
    try:
        jax.config.update("jax_num_cpu_devices", span.local_devices)
    except RuntimeError:
        raise UserError("jax has started already; a process joins its worker before it uses jax") from None
    jax.config.update("jax_enable_preemption_service", False)  # it would catch SIGTERM, and the process live on
    jax.config.update("jax_enable_recoverability", True)
    if span.processes == 1:
        return []
    connections, coordinator = meet(span, agree, wait)
    peers = [Peer(index, connection) for index, connection in sorted(connections.items())]
    with together(peers):
        jax.distributed.initialize(
            coordinator,
            span.processes,
            span.index,
            cluster_detection_method="deactivate",
            initialization_timeout=int(wait),
            heartbeat_timeout_seconds=LIMIT,
            coordinator_bind_address=coordinator,
        )
    return peers


def wait_for_all() -> None:
    """Wait until every process has come here; each must come equally often. Whoever dies is noticed by its peers."""
    # No public function of jax waits without a collective, whose own patience is what this spares.
    client: Any = jax._src.distributed.global_state.client
    client.wait_at_barrier(f"jaxinfer {next(_waits)}", timeout_in_ms=1000 * PATIENCE)


_waits = itertools.count()


# ---- how they meet


def meet(span: Span, agree: Mapping[str, str], wait: float = WAIT) -> tuple[dict[int, Connection], str]:
    """The first half of `start`: connections to the other processes by index, and where jax is to coordinate them."""
    agree = {"jax": jax.__version__, "jaxinfer": version("jaxinfer"), **agree}
    agree |= {"processes": str(span.processes), "local_devices": str(span.local_devices)}
    return (_gather if span.index == 0 else _join)(span, agree, time.monotonic() + wait)


def _gather(span: Span, agree: dict[str, str], deadline: float) -> tuple[dict[int, Connection], str]:
    """The leader's side: a connection to every follower, by index, and where jax will coordinate them."""
    host, _ = span.place
    try:
        listener, free = _listener(*span.place), _listener(host, 0)
    except OSError as error:
        why = str(error.strerror).partition(" (")[0]
        raise UserError(f"process 0 can't listen at {span.address}: {why}; give another address") from None
    there: dict[int, Connection] = {}
    try:
        with listener, free:
            while missing := set(range(1, span.processes)) - there.keys():
                listener.settimeout(max(0.0, deadline - time.monotonic()))
                try:
                    connection, hello = _accept(listener, span.key)
                except TimeoutError:
                    raise UserError(f"process {min(missing)} has not come to {span.address}; start it") from None
                except (OSError, EOFError, ValueError, LookupError, TypeError, AuthenticationError):
                    continue  # whoever it was, it is none of ours
                there[hello["index"] if hello["index"] in missing else -1] = connection
                if objection := _objection(hello, missing, agree):
                    raise UserError(objection)
            port = free.getsockname()[1]
        coordinator = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        for index, connection in there.items():
            try:
                send(connection, {"coordinator": coordinator})
            except OSError:
                raise UserError(f"process {index} has come and gone; see its error") from None
    except UserError as error:
        for connection in there.values():
            with suppress(OSError):
                send(connection, {"error": str(error)})
            connection.close()
        raise
    return there, coordinator


def _objection(hello: Mapping[str, Any], missing: set[int], agree: Mapping[str, str]) -> str:
    """Why a follower that introduces itself so can't be one; empty if it can."""
    index, theirs = hello["index"], hello["agree"]
    for name in [*agree, *theirs]:
        there, here = (values.get(name, "not given") for values in (theirs, agree))
        if there != here:
            return f"{name} is {there} in process {index} and {here} in process 0; give all the same"
    return "" if index in missing else f"two processes have the index {index}; give each its own"


def _join(span: Span, agree: dict[str, str], deadline: float) -> tuple[dict[int, Connection], str]:
    """A follower's side of `_gather`."""
    while True:
        try:
            connection = connection_over(socket.create_connection(span.place, timeout=REPLY))
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
        send(connection, {"index": span.index, "agree": agree})
        patience(connection, max(1.0, deadline - time.monotonic()))
        reply = receive(connection)
    except AuthenticationError:
        raise UserError(f"{span.address} refuses the key; give all processes of a worker the same") from None
    except (OSError, EOFError, ValueError):
        raise UserError(f"process 0 at {span.address} ended before the worker was complete; see its error") from None
    if "error" in reply:
        raise UserError(reply["error"])
    patience(connection, LIMIT)
    return {0: connection}, reply["coordinator"]


def _listener(host: str, port: int) -> socket.socket:
    return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def _accept(listener: socket.socket, key: bytes) -> tuple[Connection, dict[str, Any]]:
    """The next one who connects, and how it introduces itself."""
    connection = connection_over(listener.accept()[0])
    try:
        deliver_challenge(connection, key)
        answer_challenge(connection, key)
        hello = receive(connection)
        if not isinstance(hello["index"], int) or not isinstance(hello["agree"], dict):
            raise ValueError("not an introduction")
    except BaseException:
        connection.close()
        raise
    patience(connection, LIMIT)
    return connection, hello
