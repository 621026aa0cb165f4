"""Layouts: what can't work is one line that names the field, before any worker has started."""

import dataclasses
import socket

import pytest

from jaxinfer.distributed.fleet import Fleet, to_toml
from jaxinfer.distributed.layout import Layout, WorkerSpec, check_ports, free_ports
from jaxinfer.distributed.router import Peer, Router
from jaxinfer.errors import UserError

PAIR = Layout((WorkerSpec("prefill", 7101), WorkerSpec("decode", 7102)))


def read(tmp_path, text: str) -> Layout:
    path = tmp_path / "layout.toml"
    path.write_text(text)
    return Layout.read(path)


def with_worker(index: int, **changes) -> Layout:
    workers = list(PAIR.workers)
    workers[index] = dataclasses.replace(workers[index], **changes)
    return dataclasses.replace(PAIR, workers=tuple(workers))


def test_a_layout_is_read_as_it_was_written(tmp_path):
    span = {"devices": 4, "processes": 2, "span": "10.0.0.2:7103"}
    layout = dataclasses.replace(with_worker(1, kv_budget_mib=8.5, host="10.0.0.2", **span), max_context=256)
    assert read(tmp_path, to_toml(layout)) == layout


def test_formats_default_to_those_of_the_phase_and_budgets_to_whole_pages():
    prefill, decode = (PAIR.engine_config(w) for w in PAIR.workers)
    assert str(prefill.precision) == "weights fp8_e4m3, KV bf16" and str(prefill.handover) == "fp8_e4m3"
    assert str(decode.precision) == "weights int4:g32, KV fp8_e4m3" and decode.role == "decode"
    # 144 bytes a token and layer, 4 layers, 16 tokens a page.
    assert PAIR.engine_config(with_worker(1, kv_budget_mib=1).workers[1]).num_pages == 2**20 // (144 * 4 * 16)


WRONG = [
    ({"role": "both"}, {}, "role must be prefill or decode, not 'both'"),
    ({"port": 0}, {}, "port must be between 1 and 65535, not 0"),
    ({"port": 7102}, {}, "port 7102 of 127.0.0.1 is given to two workers"),
    ({"page_size": 32}, {}, "page_size must be the same for all workers that are joined, not 16 and 32"),
    ({"model": "other"}, {}, "model must be the same for all workers that are joined, not other and tiny"),
    ({"kv": "fp9"}, {}, "unknown KV format 'fp9'"),
    ({"weights": "int3"}, {}, "unknown weight format 'int3'"),
    ({}, {"num_pages": 63}, "num_pages 63 of 16 tokens hold less than one context, max_context 1024"),
    ({}, {"kv_budget_mib": 0.001}, "kv_budget_mib 0.001 is too small for one page of 9,216 bytes"),
    ({}, {"kv_budget_mib": 1.0, "num_pages": 9}, "give num_pages or kv_budget_mib, not both"),
    ({"processes": 0}, {}, "processes must be at least 1, not 0"),
    ({"processes": 2, "devices": 3, "span": "127.0.0.1:7103"}, {}, "devices 3 do not divide by processes 2"),
    ({"processes": 2, "devices": 2}, {}, "prefill worker 127.0.0.1:7101: span '' is not host:port"),
    ({"processes": 2, "devices": 2, "span": "127.0.0.1"}, {}, "span '127.0.0.1' is not host:port"),
    ({"processes": 2, "devices": 2, "span": "127.0.0.1:7102"}, {}, "port 7102 of 127.0.0.1 is given to two workers"),
    ({}, {"role": "prefill"}, "no worker has the role decode; give at least one"),
]


@pytest.mark.parametrize("prefill, decode, message", WRONG)
def test_what_cannot_work_names_the_field(tmp_path, prefill, decode, message):
    workers = [dataclasses.replace(w, **c) for w, c in zip(PAIR.workers, (prefill, decode), strict=True)]
    with pytest.raises(UserError) as caught:
        read(tmp_path, to_toml(dataclasses.replace(PAIR, workers=tuple(workers))))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_worker_is_started_here_only_if_all_of_it_is_here():
    wide = WorkerSpec("decode", 7102, devices=4, processes=2, span="127.0.0.1:7103")
    assert wide.local and wide.at(1, b"secret").local_devices == 2
    assert not dataclasses.replace(wide, span="10.0.0.2:7103").local


def test_decode_workers_take_one_format():
    other = WorkerSpec("decode", 7103, kv="bf16")
    with pytest.raises(UserError, match="kv of decode must be the same for all workers that are joined"):
        dataclasses.replace(PAIR, workers=(*PAIR.workers, other)).check()


@pytest.mark.parametrize(
    "text, message",
    [
        ("model = ", "is not TOML"),
        ("modle = 'tiny'", "unknown field modle; there are: workers, model"),
        ("worker = 3", "worker must be a list of tables"),
        ("[[worker]]\nrole = 'decode'", "worker 0: field port is missing"),
        ("[[worker]]\nrole = 'decode'\nport = '7'", "worker 0: port must be of type int, not '7'"),
        ("[[worker]]\nrole = 'decode'\nport = 7\ndevices = -1", "worker 0: devices must not be negative, not -1"),
        ("transfer_tokens = 24\n[[worker]]\nrole = 'prefill'\nport = 7\n[[worker]]\nrole = 'decode'\nport = 8",
         "transfer_tokens 24 is not a multiple of page_size 16"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_layout(tmp_path, text, message):
    with pytest.raises(UserError) as caught:
        read(tmp_path, text)
    assert message in str(caught.value) and "layout.toml" in str(caught.value)


def test_a_port_in_use_is_found_before_any_worker_starts(monkeypatch):
    port, other = free_ports(2)
    started = []
    monkeypatch.setattr(Fleet, "_start", lambda self, worker: started.append(worker))
    with socket.create_server(("127.0.0.1", port)):
        with pytest.raises(UserError, match=f"port {port} cannot be used: Address already in use"):
            check_ports([WorkerSpec("prefill", port)])
        with pytest.raises(UserError, match=f"port {port} cannot be used"):
            Fleet(with_worker(0, port=port))
        with pytest.raises(UserError, match=f"port {port} cannot be used"):
            Fleet(with_worker(0, port=other, devices=2, processes=2, span=f"127.0.0.1:{port}"))
    assert started == []


HELLO = {"role": "prefill", "version": "1", "jax": "0.10.2", "model": {"name": "a"}, "page_size": 16,
         "transfer_tokens": 128, "kv": "fp8_e4m3", "address": ""}  # fmt: skip


@pytest.mark.parametrize(
    "change, message",
    [
        ({"version": "2"}, "version is 2 there and 1 elsewhere; they can't be joined"),
        ({"jax": "0.11"}, "jax is 0.11 there and 0.10.2 elsewhere"),
        ({"model": {"name": "b"}}, "model is {'name': 'b'} there"),
        ({"page_size": 32}, "page_size is 32 there and 16 elsewhere"),
        ({"kv": "bf16"}, "kv is bf16 there and fp8_e4m3 elsewhere"),
        ({"role": "decode"}, "role is decode there, prefill in the layout"),
    ],
)
def test_workers_that_cannot_be_joined_are_told_apart(change, message):
    router = Router.__new__(Router)
    router._identity = HELLO
    with pytest.raises(UserError) as caught:
        router._check_identity(Peer(PAIR.workers[0]), {**HELLO, **change})
    assert message in str(caught.value) and "prefill worker 127.0.0.1:7101" in str(caught.value)
