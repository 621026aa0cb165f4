"""One of two processes that serve the small model: `python -m tests.engine.lockstep_member INDEX ADDRESS FOLDER TASK`.

`mixed` serves the workload and saves what came out; `endless` says when it serves, and goes on; `unlike` has the
follower see another token.
"""

import sys
from pathlib import Path

import numpy as np

from jaxinfer.engine import Engine, SamplingParams
from jaxinfer.engine.lockstep import Lockstep, agreement, follow
from jaxinfer.evaluation.faults import load
from jaxinfer.parallel import multihost
from jaxinfer.parallel.peer import PeerGone, together
from tests.engine.conftest import ENGINE, SMALL, prompts

CONFIG = ENGINE.replace(num_pages=20)  # a pool that runs out
DEVICES = 4


def mixed(engine: Engine) -> tuple[list[int], list]:
    """Four requests of every kind, one cancelled in its decode; their ids and completions."""
    texts = prompts(17, [20, 9, 3, 21])
    ids = [engine.submit(text, SamplingParams(24, ignore_eos=True, logprobs=2)) for text in texts[:2]]
    events = engine.step() + engine.step()
    ids.append(engine.submit(texts[2], SamplingParams(24, temperature=0.9, seed=7, ignore_eos=True, stop=("never",))))
    ids.append(engine.submit(texts[3], SamplingParams(24, temperature=0.9, top_k=40, ignore_eos=True)))
    while engine.counters.decode_tokens < 12:
        events += engine.step()
    engine.cancel(ids[2])
    done = {e.request: e.completion for e in (*events, *engine.run()) if e.completion}
    return ids, [done[i] for i in ids]


def save(file: Path, engine: Engine, logits: dict[int, list[np.ndarray]], **more) -> None:
    """The allocator's arrays and the logits that tokens were drawn from."""
    books = {f"allocator/{name}": value for name, value in allocator_arrays(engine).items()}
    np.savez(file, **books, **{f"logits/{i}": np.array(rows) for i, rows in logits.items()}, **more)


def allocator_arrays(engine: Engine) -> dict[str, np.ndarray]:
    return {name: np.asarray(value) for name, value in vars(engine.state.allocator).items()}


def main(index: int, address: str, folder: Path, task: str) -> None:
    config = CONFIG.replace(devices=DEVICES)
    span = multihost.Span(address, 2, index, b"of the tests", DEVICES // 2)
    peers = multihost.start(span, agreement(SMALL, config))
    model, logits = load.random_model(), {}
    record = lambda request, _, row: logits.setdefault(request, []).append(row.copy())  # noqa: E731
    if index:
        with together(peers):
            engine = Engine(model, config, record)
        if task == "unlike":
            take = engine._take_token
            engine._take_token = lambda request, token: take(request, (token + (request.id == 1)) % SMALL.vocab)
        follow(engine, *peers)
        save(folder / "1.npz", engine, logits)
        return
    leader = Lockstep(model, config, peers, record)
    if task == "endless":
        print("serving", flush=True)
    while task == "endless":
        if not leader.busy:
            leader.submit([11, 12, 13], SamplingParams(40, ignore_eos=True))
        leader.step()
    _, done = mixed(leader)
    leader.stop()
    sharding = leader.programs.params["sparse"]["mlp"]["gate"].sharding
    where = [len(sharding.device_set), len(sharding.addressable_devices), sharding.is_fully_replicated]
    reasons, tokens = [c.finish_reason for c in done], [t for c in done for t in c.tokens]
    save(
        folder / "0.npz", leader, logits, reasons=reasons, tokens=tokens, where=where,
        preemptions=leader.counters.preemptions, compiled=leader.programs.decode._cache_size(),
    )  # fmt: skip


if __name__ == "__main__":
    number, place, where, task = sys.argv[1:]
    try:
        main(int(number), place, Path(where), task)
    except PeerGone as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
