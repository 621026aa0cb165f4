"""A worker over several processes: how they start, and what those do that no router talks to."""

import socket
from collections.abc import Sequence
from typing import Any

from jaxinfer.checkpoints.model import Model
from jaxinfer.distributed import wire
from jaxinfer.distributed.exchange import Exchange, RemoteArrival
from jaxinfer.distributed.layout import Layout, WorkerSpec
from jaxinfer.engine.decode import DecodeWorker
from jaxinfer.engine.lockstep import LockstepDecode, LockstepPrefill, agreement, follow
from jaxinfer.engine.prefill import PrefillWorker
from jaxinfer.parallel import multihost
from jaxinfer.parallel.peer import Peer, together

ALONE: dict[str, Any] = {"prefill": PrefillWorker, "decode": DecodeWorker}
LEADING: dict[str, Any] = {"prefill": LockstepPrefill, "decode": LockstepDecode}


def join(layout: Layout, spec: WorkerSpec, process: int) -> list[Peer]:
    """Bring the processes of a worker together, and start jax over all its devices; the others, as `multihost.start`
    gives them. Of a worker of one process nothing is started, and there are none."""
    if spec.processes == 1:
        return []
    model = Model.read_config(spec.model or layout.model)
    return multihost.start(spec.at(process, wire.key()), agreement(model, layout.engine_config(spec)))


def engine_of(layout: Layout, spec: WorkerSpec, followers: Sequence[Peer]) -> PrefillWorker | DecodeWorker:
    """The engine of a worker, or of its first process."""
    model, config = Model.load(spec.model or layout.model, spec.devices), layout.engine_config(spec)
    return LEADING[spec.role](model, config, followers) if followers else ALONE[spec.role](model, config)


class Follower:
    """A process of a worker that is not its first."""

    def __init__(self, layout: Layout, spec: WorkerSpec, process: int):
        """Waits for the others, then loads and compiles with them. UserError on bad input."""
        self._limit = layout.pull_timeout_s
        [self._leader] = join(layout, spec, process)
        with together([self._leader]):
            self.engine = engine_of(layout, spec, ())
            programs, host = self.engine.programs, _own_address(*spec.at(process).place)
            self._exchange = Exchange(host, programs.block, programs.block_shardings)

    def serve(self) -> None:
        """Follow the first process until it stops. PeerGone where it dies."""
        follow(self.engine, self._leader, lambda told: RemoteArrival(self._exchange, **told, limit=self._limit))


def _own_address(host: str, port: int) -> str:
    """The address of this host in the network of `host`. Nothing is sent."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return probe.getsockname()[0]
