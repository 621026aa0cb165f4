"""A layout: the workers of a deployment, their hosts, ports, devices and formats, in one small TOML file.

    model = "tiny"
    max_context = 1024

    [[worker]]
    role = "prefill"
    port = 7101

    [[worker]]
    role = "decode"
    host = "10.0.0.2"
    port = 7102
    devices = 8
    kv_budget_mib = 4096

    [[worker]]
    role = "decode"
    host = "10.0.0.3"
    port = 7102
    devices = 16
    processes = 2            # on two hosts, with 8 devices each
    span = "10.0.0.3:7103"   # where the first process, on `host`, meets the others

What is wrong in it is found before any worker starts.
"""

import dataclasses
import socket
import tomllib
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from jaxinfer.checkpoints.model import Model
from jaxinfer.config import EngineConfig, PhasePrecision, Precision
from jaxinfer.errors import UserError
from jaxinfer.parallel.multihost import Span

LOCAL_PAIR = "local-pair"
LOCAL = ("127.0.0.1", "localhost", "::1")
ROLES = ("prefill", "decode")
DEFAULTS = PhasePrecision()


@dataclass(frozen=True)
class WorkerSpec:
    """One worker. `weights` and `kv` default to those of `PhasePrecision`; `num_pages`, or `kv_budget_mib` of memory
    for pages, to room for `max_slots` whole contexts. `model` and `page_size` are those of the layout.

    A worker of several `processes` has its `devices` in equal parts from each. They meet at `span` (host:port), where
    the first of them, which is also the one at `host` and `port`, listens."""

    role: str
    port: int
    host: str = "127.0.0.1"
    devices: int = 1
    processes: int = 1
    span: str = ""
    weights: str = ""
    kv: str = ""
    num_pages: int = 0
    kv_budget_mib: float = 0.0
    max_slots: int = 16
    model: str = ""
    page_size: int = 0

    def __str__(self) -> str:
        return f"{self.role} worker {self.host}:{self.port}"

    @property
    def local(self) -> bool:
        """Whether all its processes run on this host."""
        return self.host in LOCAL and (self.processes == 1 or self.at(0).place[0] in LOCAL)

    def at(self, process: int, key: bytes = b"-") -> Span:
        """One of the processes of a worker that has several. UserError names the field that is wrong."""
        if self.devices < self.processes or self.devices % self.processes:
            raise UserError(f"{self}: devices {self.devices} do not divide by processes {self.processes}")
        try:
            return Span(self.span, self.processes, process, key, self.devices // self.processes)
        except UserError as error:
            raise UserError(f"{self}: span {error}") from None

    @property
    def places(self) -> list[tuple[str, int]]:
        """Where it listens."""
        return [(self.host, self.port), *([self.at(0).place] if self.processes > 1 else [])]

    @property
    def precision(self) -> Precision:
        default: Precision = getattr(DEFAULTS, self.role)
        return Precision.parse(self.weights or str(default.weights), self.kv or str(default.kv))


@dataclass(frozen=True)
class Layout:
    """All workers, and what they share. Times in seconds: `pull_timeout_s` for the KV of one request to come over,
    `request_timeout_s` from a request's arrival to its end, `wait_s` for a worker to come back where none is left."""

    workers: tuple[WorkerSpec, ...]
    model: str = "tiny"
    page_size: int = 16
    max_context: int = 1024
    transfer_tokens: int = 128
    integrity: str = "tags"
    on_mismatch: str = "abort"
    logprobs: int = 5
    max_queue: int = 4096
    prefix_cache: bool = True
    pull_timeout_s: float = 10.0
    request_timeout_s: float = 300.0
    wait_s: float = 30.0

    @classmethod
    def read(cls, path: Path) -> Self:
        """The layout in a TOML file. UserError names the field that is wrong."""
        try:
            values = tomllib.loads(path.read_text())
        except OSError as error:
            raise UserError(f"layout {path} cannot be read: {error.strerror}; give {LOCAL_PAIR} or a file") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise UserError(f"layout {path} is not TOML: {error}") from None
        try:
            workers = values.pop("worker", [])
            if not isinstance(workers, list) or not all(isinstance(w, dict) for w in workers):
                raise UserError("worker must be a list of tables, each headed [[worker]]")
            specs = tuple(_build(WorkerSpec, each, f"worker {i}: ") for i, each in enumerate(workers))
            layout = _build(cls, {**values, "workers": specs}, "")
            layout.check()
        except UserError as error:
            raise UserError(f"layout {path}: {error}") from None
        return layout

    @classmethod
    def local_pair(cls, **shared: Any) -> Self:
        """One prefill and one decode worker on free ports of this host."""
        ports = free_ports(2)
        layout = cls(tuple(WorkerSpec(role, port) for role, port in zip(ROLES, ports, strict=True)), **shared)
        layout.check()
        return layout

    def of_role(self, role: str) -> list[WorkerSpec]:
        return [w for w in self.workers if w.role == role]

    def check(self) -> None:
        """UserError names the first field that is wrong, or in which workers can't be joined."""
        for worker in self.workers:
            if worker.role not in ROLES:
                raise UserError(f"role must be {' or '.join(ROLES)}, not {worker.role!r}")
            if not 0 < worker.port < 65536:
                raise UserError(f"{worker}: port must be between 1 and 65535, not {worker.port}")
            if worker.processes < 1:
                raise UserError(f"{worker}: processes must be at least 1, not {worker.processes}")
        for role in ROLES:
            if not self.of_role(role):
                raise UserError(f"no worker has the role {role}; give at least one")
        if len(places := [place for w in self.workers for place in w.places]) > len(set(places)):
            twice = next(p for p in places if places.count(p) > 1)
            raise UserError(f"port {twice[1]} of {twice[0]} is given to two workers or spans")
        for name, values in self._shared().items():
            if len(set(values)) > 1:
                what = " and ".join(sorted({str(v) for v in values}))
                raise UserError(f"{name} must be the same for all workers that are joined, not {what}")
        for worker in self.workers:
            self.engine_config(worker)

    def _shared(self) -> dict[str, list]:
        return {
            "model": [w.model or self.model for w in self.workers],
            "page_size": [w.page_size or self.page_size for w in self.workers],
            "kv of decode": [w.precision.kv for w in self.of_role("decode")],
        }

    def engine_config(self, worker: WorkerSpec) -> EngineConfig:
        """How the engine of a worker is set up. UserError where its pool can't hold one context."""
        page_size = worker.page_size or self.page_size
        config = EngineConfig(
            precision=worker.precision,
            page_size=page_size,
            num_pages=self._num_pages(worker, page_size),
            max_slots=worker.max_slots,
            max_context=self.max_context,
            decode_buckets=tuple(sorted({1, worker.max_slots})),
            prefill_buckets=((4, min(32, self.max_context)), (1, min(256, self.max_context))),
            max_queue=self.max_queue,
            integrity=self.integrity,
            on_mismatch=self.on_mismatch,
            logprobs=self.logprobs,
            devices=worker.devices,
            role=worker.role,
            prefix_cache=self.prefix_cache and worker.role == "prefill",
            handover=self.of_role("decode")[0].precision.kv,
            transfer_tokens=self.transfer_tokens,
        )
        if config.num_pages * page_size < self.max_context:
            raise UserError(
                f"{worker}: num_pages {config.num_pages} of {page_size} tokens hold less than one context, "
                f"max_context {self.max_context}; give more pages, or a shorter context"
            )
        return config

    def _num_pages(self, worker: WorkerSpec, page_size: int) -> int:
        if not worker.kv_budget_mib:
            return worker.num_pages or worker.max_slots * -(-self.max_context // page_size)
        if worker.num_pages:
            raise UserError(f"{worker}: give num_pages or kv_budget_mib, not both")
        model = Model.read_config(worker.model or self.model)
        page_bytes = model.kv_bytes_per_token(worker.precision.kv) * page_size
        pages = int(worker.kv_budget_mib * 2**20) // page_bytes
        if pages < 1:
            raise UserError(
                f"{worker}: kv_budget_mib {worker.kv_budget_mib:g} is too small for one page of {page_bytes:,} bytes"
            )
        return pages


def check_ports(workers: typing.Iterable[WorkerSpec]) -> None:
    """UserError where the port of a worker of this host is in use."""
    for worker in workers:
        for place in worker.places:
            with socket.socket(socket.AF_INET6 if ":" in place[0] else socket.AF_INET) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind(place)
                except OSError as error:
                    raise UserError(f"{worker}: port {place[1]} cannot be used: {error.strerror}") from None


def free_ports(count: int) -> list[int]:
    """Ports of this host that nothing listens on now."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind((LOCAL[0], 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def _build(kind: Any, values: dict[str, Any], where: str) -> Any:
    """A dataclass from plain values, each of the type of its field."""
    types = typing.get_type_hints(kind)
    if unknown := sorted(values.keys() - types.keys()):
        raise UserError(f"{where}unknown field {unknown[0]}; there are: {', '.join(types)}")
    if missing := [f.name for f in dataclasses.fields(kind) if _required(f) and f.name not in values]:
        raise UserError(f"{where}field {missing[0]} is missing")
    for name, value in values.items():
        expected = types[name]
        if expected is float and type(value) is int:
            values = {**values, name: float(value)}
        elif typing.get_origin(expected) is None and type(value) is not expected:
            raise UserError(f"{where}{name} must be of type {expected.__name__}, not {value!r}")
        if expected in (int, float) and value < 0:
            raise UserError(f"{where}{name} must not be negative, not {value}")
    return kind(**values)


def _required(field: dataclasses.Field) -> bool:
    return field.default is dataclasses.MISSING


