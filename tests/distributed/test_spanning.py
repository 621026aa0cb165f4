"""Workers of two processes with two devices each, behind one router: they serve what one engine serves, and whoever of
them dies takes its worker along, and nobody else."""

import time

import pytest

from jaxinfer.distributed.fleet import Fleet
from jaxinfer.distributed.layout import Layout, WorkerSpec, free_ports
from jaxinfer.distributed.router import Router
from jaxinfer.parallel.peer import GRACE
from tests.distributed.conftest import FLOAT32, SHARED
from tests.distributed.test_router import (
    assert_nothing_is_held,
    assert_same,
    expected,
    finish,
    submit,
    wait_for_all,
)

__all__ = ["expected"]  # a fixture of the router's tests
WIDE = 1  # the decode worker of two processes


@pytest.fixture(scope="module")
def deployment(checkpoint, environment):
    """A prefill worker and a decode worker of two processes, and a decode worker of one."""
    ports = free_ports(5)
    wide = {"devices": 4, "processes": 2}
    spans = [{**wide, "span": f"127.0.0.1:{port}"} for port in ports[3:]] + [{}]
    specs = [
        WorkerSpec(role, port, num_pages=16, max_slots=4, **FLOAT32, **span)
        for role, port, span in zip(("prefill", "decode", "decode"), ports, spans, strict=False)
    ]
    layout = Layout(tuple(specs), model=str(checkpoint), **SHARED)
    layout.check()
    with Fleet(layout, environment) as fleet:
        router = Router(layout, start_s=500)
        yield fleet, router


def test_log_probabilities_are_those_of_one_engine(deployment, expected):
    _, router = deployment
    ids = submit(router, 1)
    events = router.step()
    while not all(peer.holds for peer in router.peers[WIDE:]):
        events += router.step()
    done = finish(router, *events)
    for request, other in zip(ids, expected, strict=True):
        assert_same(done[request], other)
    assert_nothing_is_held(router)
    assert router.counters.handed_over > len(ids) and router.counters.preemptions  # some went back and forth


def test_a_killed_follower_costs_the_requests_of_its_worker(deployment, expected):
    """Of decode, in the midst of it: they fail with an error that names it, the others do not notice, and its first
    process ends too. Restarted, it serves."""
    fleet, router = deployment
    ids, events = submit(router, 1), []
    while len(router.peers[WIDE].holds) < 2:
        events += router.step()
    fleet.kill(WIDE, process=1)
    begun = time.monotonic()
    while router.peers[WIDE].channel is not None:
        events += router.step()
        assert time.monotonic() - begun < GRACE + 10
    done = finish(router, *events)
    failed = [i for i in ids if done[i].finish_reason == "failed"]
    assert 2 <= len(failed) < len(ids)
    for request, other in zip(ids, expected, strict=True):
        if request in failed:
            assert done[request].error == f"request {request}: the {router.peers[WIDE].spec} died"
        else:
            assert_same(done[request], other)
    assert fleet.processes[WIDE][0].wait(GRACE + 10) == 1
    fleet.restart(WIDE)
    wait_for_all(router)
    assert_nothing_is_held(router)
    again = submit(router, 1)
    assert_same(finish(router)[again[0]], expected[0])


def test_stop_ends_all_processes(deployment):
    fleet, router = deployment
    router.close(stop=True)
    codes = [process.wait(30) for own in fleet.processes for process in own]
    assert codes == [0] * 5
