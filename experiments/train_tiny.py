"""Trains the small model that ships with the project on tasks with checkable answers, from nothing, on a CPU.

    python -m experiments.train_tiny --out out/tiny --minutes 90 --seed 0

The schedule follows the share of the time budget that has passed, so a run ends on time at any speed; after a
kill, `--resume` goes on from the last snapshot. Leaves in DIR: tokenizer.json, train_log.jsonl, snapshot.npz,
params.npz.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxinfer.evaluation.tasks import TASKS, Example, Task, is_held_out
from jaxinfer.evaluation.tasks.base import pick
from jaxinfer.evaluation.tasks.retrieval import KEYS, Retrieval
from jaxinfer.evaluation.tasks.words import NAMES
from jaxinfer.text.tokenizer import ASSISTANT, BOS, END, Tokenizer

PROMPT_WEIGHT = 0.1  # of a prompt token in the loss; an answer token has 1 or more
BIAS_STEP = 1e-3  # of the router's balancing bias (DeepSeek-V3, section 2.1.2)
VOCABULARY = 1024
CAPACITY_FACTOR = 1.25  # room of an expert, of its even share; what exceeds it is dropped, in training only
SNAPSHOT_SECONDS = 300
ECHO_SHARE = 0.15  # of the examples of a batch; see `echo`
# Share of the other examples; retrieval asks several questions of one text to learn more from it.
MIXTURE: dict[str, float] = {
    "arithmetic": 0.36,
    "choice": 0.24,
    "tool_call": 0.16,
    "code": 0.06,
    "retrieval": 0.10,
    "session": 0.08,
}
TRAINERS: dict[str, Task] = {**TASKS, "retrieval": Retrieval(queries=8)}
TASK_NAMES = (*TASKS, "echo")  # what is counted in the log
ECHO = len(TASKS)


# ---- data ----


def curriculum(progress: float) -> dict[str, float]:
    """Difficulty of each task at `progress` in [0, 1]: short retrieval and small numbers come first."""
    return dict.fromkeys(TASKS, 1.0) | {
        "retrieval": float(np.clip(0.06 + 1.9 * (progress - 0.08), 0.06, 1.0)),
        "arithmetic": float(np.clip(0.35 + 1.6 * progress, 0.35, 1.0)),
    }


def training_examples(
    rng: np.random.Generator, progress: Callable[[], float], mixture: Mapping[str, float]
) -> Iterator[Example]:
    """Endless examples of the mixture, none of them held out."""
    names, weights = list(mixture), np.array(list(mixture.values()))
    while True:
        name = names[int(rng.choice(len(names), p=weights / weights.sum()))]
        example = TRAINERS[name].generate(rng, curriculum(progress())[name])
        if not is_held_out(example.turns[0].prompt):
            yield example


@dataclass(frozen=True)
class Encoded:
    """One example as tokens [n]; `answer` [n] is the weight of what the model must say, else 0."""

    tokens: np.ndarray
    answer: np.ndarray
    task: int


def encode(example: Example, tokenizer: Tokenizer) -> Encoded:
    """All turns in one run of tokens; each answer ends with `<|end|>`, which is predicted too.

    A token of an answer weighs 1, in an answer of under eight tokens up to 4: a letter counts like a chain.
    """
    tokens, answer, seen = [], [], 0
    for turn in example.turns:
        for text, said in ((turn.prompt[seen:], False), (turn.answer + END, True)):
            ids = tokenizer.encode(text, special=True)
            tokens += ids
            answer += [said * min(4.0, max(1.0, 8 / len(ids)))] * len(ids)
        seen = len(turn.prompt) + len(turn.answer) + len(END)
    return Encoded(np.array(tokens, np.int32), np.array(answer, np.float32), TASK_NAMES.index(example.task))


def echo(rng: np.random.Generator, tokenizer: Tokenizer) -> Encoded:
    """Names and numbers in random order, and the same again: practice in copying, which most of an answer is."""
    count = int(rng.integers(2, 12))
    words = [pick(rng, NAMES) if rng.random() < 0.5 else str(rng.integers(10, 1000)) for _ in range(count)]
    said = tokenizer.encode(" ".join(words))
    first, between, last = (tokenizer.encode(mark, special=True) for mark in (BOS, ASSISTANT, END))
    tokens = np.array(first + said + between + said + last, np.int32)
    answer = (np.arange(len(tokens)) >= len(said) + 2).astype(np.float32)
    return Encoded(tokens, answer, ECHO)


class Batch(NamedTuple):
    """Packed rows [rows, length]: inputs, targets and weights, place in and number of the example, task."""

    tokens: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    positions: np.ndarray
    segments: np.ndarray
    tasks: np.ndarray

    @classmethod
    def empty(cls, rows: int, length: int, pad: int) -> Batch:
        """All padding: weight 0, segment 0, task -1."""

        def ints(fill: int) -> np.ndarray:
            return np.full((rows, length), fill, np.int32)

        return cls(ints(pad), ints(pad), np.zeros((rows, length), np.float32), ints(0), ints(0), ints(-1))

    def place(self, row: int, at: int, segment: int, item: Encoded) -> None:
        """Write `item` into `row` from column `at`; the last token is a target only."""
        n = len(item.tokens) - 1
        span = (row, slice(at, at + n))
        self.tokens[span], self.targets[span] = item.tokens[:-1], item.tokens[1:]
        self.weights[span] = np.maximum(item.answer[1:], 0.0 if item.task == ECHO else PROMPT_WEIGHT)
        self.positions[span], self.segments[span] = np.arange(n), segment
        self.tasks[span] = np.where(item.answer[1:] > 0, item.task, -1)


def pack(stream: Iterator[Encoded], rows: int, length: int, pad: int, look: int = 24) -> Batch:
    """Fill `rows` rows of `length` tokens, each with the first examples in the stream that still fit.

    A row is closed after `look` examples in succession that did not fit; those are left for the next row.
    """
    batch, waiting = Batch.empty(rows, length, pad), list[Encoded]()
    for row in range(rows):
        at, segment, missed = 0, 0, list[Encoded]()
        while at < length and len(missed) < look:
            item = waiting.pop(0) if waiting else next(stream)
            n = len(item.tokens) - 1
            if at + n > length:
                missed.append(item)
                continue
            segment += 1
            batch.place(row, at, segment, item)
            at += n
        waiting += missed
    return batch


def batches(tokenizer: Tokenizer, seed: int, progress: Callable[[], float], tokens: int) -> Iterator[Batch]:
    """Endless batches of `tokens` tokens; more and more of them in long rows with far retrieval first."""
    rng = np.random.default_rng(seed)

    def stream(mixture: Mapping[str, float], echoes: float = 0.0) -> Iterator[Encoded]:
        for example in training_examples(rng, progress, mixture):
            while rng.random() < echoes:
                yield echo(rng, tokenizer)
            yield encode(example, tokenizer)

    every, long = stream(MIXTURE, ECHO_SHARE), stream({"retrieval": 1.0})
    while True:
        is_long = rng.random() < 0.35 * min(1.0, max(0.0, (progress() - 0.15) / 0.3))
        length = 1024 if is_long else 256
        rows = tokens // length
        opening = list(islice(long, rows)) if is_long else []
        fitting = (item for source in (opening, every) for item in source if len(item.tokens) <= length)
        yield pack(fitting, rows, length, tokenizer.pad_id)


def prefetched(source: Iterator[Batch], depth: int = 4) -> Iterator[Batch]:
    """The same batches, made ahead of time by a thread; an error there is raised here."""
    ready: queue.Queue = queue.Queue(depth)

    def fill() -> None:
        try:
            for batch in source:
                ready.put(batch)
        except BaseException as error:  # noqa: BLE001 (handed over to the consumer)
            ready.put(error)

    threading.Thread(target=fill, daemon=True).start()
    while True:
        item = ready.get()
        if isinstance(item, BaseException):
            raise item
        yield item


def trained_tokenizer(path: Path, seed: int = 0, per_task: int = 3000) -> Tokenizer:
    """The tokenizer at `path`; it is trained on generated examples and saved there if there is none."""
    if path.exists():
        return Tokenizer.load(path)
    rng = np.random.default_rng(seed)

    def texts() -> Iterator[str]:
        for name, task in TASKS.items():
            for _ in range(per_task if name != "retrieval" else per_task // 10):
                last = task.generate(rng).turns[-1]
                yield last.prompt + last.answer
        # Every word of the lexicon should be one token.
        yield from [" " + " ".join(KEYS)] * (per_task // 15)

    tokenizer = Tokenizer.train(texts(), VOCABULARY)
    tokenizer.save(path)
    return tokenizer


# ---- one step ----


def learning_rate(progress: float, peak: float) -> float:
    """Linear warm-up over 2% of the time, then half a cosine down to 2% of `peak`."""
    if progress < 0.02:
        return peak * max(progress, 1e-3) / 0.02
    return peak * (0.02 + 0.98 * 0.5 * (1 + np.cos(np.pi * min(1.0, (progress - 0.02) / 0.98))))


def path_name(path: tuple) -> str:
    """A leaf's path as `a/b/c`."""
    return "/".join(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path)


def make_step(forward: Callable, config: Any) -> tuple[Callable, Callable]:
    """(`init(params) -> state`, jitted `step(params, state, batch, rate, bias_step)`).

    `step` returns new params, new state and metrics: loss, answer_nll, correct and counted [tasks],
    loads [layers, experts].
    """
    import jax
    import jax.numpy as jnp
    import optax

    def is_bias(path: tuple) -> bool:
        return path_name(path).endswith("router/bias")

    def decays(params: Any) -> Any:
        def matrix(path: tuple, leaf: Any) -> bool:
            return leaf.ndim >= 2 and not any(part in path_name(path) for part in ("norm", "bias"))

        return jax.tree_util.tree_map_with_path(matrix, params)

    optimiser = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(b1=0.9, b2=0.95, eps=1e-9),
        optax.add_decayed_weights(0.1, decays),
    )

    def loss_of(params: Any, batch: Batch, total_weight: Any) -> tuple:
        logits, loads = forward(
            config, params, batch.tokens, batch.positions, batch.segments, capacity_factor=CAPACITY_FACTOR
        )
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets)
        one_hot = jax.nn.one_hot(batch.tasks, len(TASK_NAMES))  # task -1 gives zeros
        correct = (logits.argmax(-1) == batch.targets)[..., None] * one_hot
        loss = (nll * batch.weights).sum() / total_weight
        return loss, (loads, correct.sum((0, 1)), one_hot.sum((0, 1)), (nll * (batch.tasks >= 0)).sum())

    # Each device (a core, on the CPU) takes an equal share of the rows; what it finds is summed over all.
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, everywhere = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()

    def share(params: Any, batch: Batch) -> tuple:
        total_weight = jax.lax.psum(batch.weights.sum(), "data")
        return jax.lax.psum(jax.value_and_grad(loss_of, has_aux=True)(params, batch, total_weight), "data")

    gradients = jax.shard_map(share, mesh=mesh, in_specs=(everywhere, rows), out_specs=everywhere, check_vma=False)

    def step(params: Any, state: Any, batch: Batch, rate: Any, bias_step: Any) -> tuple:
        (loss, (loads, correct, counted, answer_nll)), grads = gradients(params, batch)
        grads = jax.tree_util.tree_map_with_path(lambda p, g: jnp.zeros_like(g) if is_bias(p) else g, grads)
        updates, state = optimiser.update(grads, state, params)
        # An expert with less than its share of the tokens becomes easier to choose, and the other way round.
        balance = bias_step * jnp.sign(loads.mean(-1, keepdims=True) - loads)

        def moved(path: tuple, leaf: Any, update: Any) -> Any:
            return (
                leaf + balance.reshape(leaf.shape).astype(leaf.dtype)
                if is_bias(path)
                else leaf - rate * update
            )

        params = jax.tree_util.tree_map_with_path(moved, params, updates)
        metrics = {
            "loss": loss,
            "correct": correct,
            "counted": counted,
            "loads": loads,
            "answer_nll": answer_nll,
        }
        return params, state, metrics

    placed = jax.sharding.NamedSharding(mesh, everywhere)
    return jax.jit(optimiser.init, out_shardings=placed), jax.jit(step, donate_argnums=(0, 1), out_shardings=placed)


# ---- snapshots ----


def save_arrays(path: Path, tree: Any) -> None:
    """Write the leaves of `tree`, named by their paths, to an .npz, whole or not at all."""
    import jax

    leaves = {path_name(keys): np.asarray(leaf) for keys, leaf in jax.tree_util.tree_leaves_with_path(tree)}
    unfinished = path.with_name(path.name + ".unfinished")
    with unfinished.open("wb") as file:
        np.savez(file, **leaves)  # type: ignore[arg-type]
    os.replace(unfinished, path)


def load_arrays(path: Path, like: Any) -> Any:
    """The tree saved at `path`, shaped as `like` (arrays or descriptions of them); ValueError where a leaf does not
    fit."""
    import jax

    with np.load(path) as saved:

        def leaf(keys: tuple, old: Any) -> Any:
            name = path_name(keys)
            if name not in saved or saved[name].shape != getattr(old, "shape", ()):
                raise ValueError(f"{path} does not fit this model: {name} is missing or has another shape")
            return jax.numpy.asarray(saved[name])

        return jax.tree_util.tree_map_with_path(leaf, like)


# ---- the run ----


class Log:
    """Sums metrics between lines and appends the lines to `train_log.jsonl` and the terminal."""

    def __init__(self, path: Path, steps: int):
        """Goes on after `steps` steps; lines of later ones, which a killed run had written, are dropped."""
        kept = [line for line in path.read_text().splitlines() if json.loads(line)["step"] <= steps] if steps else []
        path.write_text("".join(f"{line}\n" for line in kept))
        self._path, self._sums, self._n = path, dict[str, np.ndarray](), 0

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Add the metrics of one step."""
        self._n += 1
        for key, value in metrics.items():
            self._sums[key] = self._sums.get(key, 0) + np.asarray(value, np.float64)

    def write(self, **fields: Any) -> None:
        """One line for the steps since the last."""
        sums, counted = self._sums, np.maximum(self._sums["counted"], 1)
        loads = sums["loads"]
        line = fields | {
            "loss": float(sums["loss"] / self._n),
            "answer_loss": float(sums["answer_nll"] / counted.sum()),
            "accuracy": {
                name: round(float(a), 4)
                for name, a in zip(TASK_NAMES, sums["correct"] / counted, strict=True)
            },
            "load_max_over_mean": round(float((loads.max(-1) / loads.mean(-1)).max()), 3),
        }
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        accuracy = " ".join(f"{name[:5]}={value:.2f}" for name, value in line["accuracy"].items())
        print(
            f"{line['step']:6d} {line['seconds']:6.0f}s {line['tokens'] / 1e6:5.2f}M loss {line['loss']:.3f} "
            f"answer {line['answer_loss']:.3f} {accuracy} load {line['load_max_over_mean']}",
            flush=True,
        )
        self._sums, self._n = {}, 0


def train(
    config: Any,
    params: Any,
    forward: Callable,
    tokenizer: Tokenizer,
    out: Path,
    *,
    minutes: float,
    seed: int,
    resume: bool = False,
    batch_tokens: int = 2048,
    peak_rate: float = 2e-3,
    log_every: int = 20,
) -> Any:
    """Train `params` for `minutes`, with snapshots and log in `out`; returns them and writes params.npz."""
    init, step_fn = make_step(forward, config)
    run = {"params": params, "state": init(params), "step": 0, "tokens": 0, "seconds": 0.0}
    snapshot = out / "snapshot.npz"
    if resume and snapshot.exists():
        run = load_arrays(snapshot, run)
        run |= {"step": int(run["step"]), "tokens": int(run["tokens"]), "seconds": float(run["seconds"])}
    budget, started, saved = 60 * minutes, time.monotonic() - run["seconds"], time.monotonic()

    def progress() -> float:
        return min(1.0, (time.monotonic() - started) / budget)

    log = Log(out / "train_log.jsonl", run["step"])
    # A resumed run draws fresh examples, not the ones it has seen.
    for batch in prefetched(batches(tokenizer, seed + 7919 * run["step"], progress, batch_tokens)):
        at = progress()
        rate = learning_rate(at, peak_rate)
        run["params"], run["state"], metrics = step_fn(
            run["params"], run["state"], batch, np.float32(rate), np.float32(BIAS_STEP if at < 0.95 else 0.0)
        )
        log.add(metrics)
        run |= {"step": run["step"] + 1, "tokens": run["tokens"] + int((batch.segments > 0).sum())}
        run["seconds"] = time.monotonic() - started
        done = run["seconds"] >= budget
        if done or run["step"] % log_every == 0:
            log.write(
                step=run["step"], tokens=run["tokens"], seconds=round(run["seconds"], 1), lr=float(rate)
            )
        if done or time.monotonic() - saved > SNAPSHOT_SECONDS:
            save_arrays(snapshot, run)
            saved = time.monotonic()
        if done:
            break
    save_arrays(out / "params.npz", run["params"])
    return run["params"]


def main() -> None:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the run's files")
    parser.add_argument("--minutes", type=float, default=90, help="time budget, compilation included")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the data")
    parser.add_argument("--preset", default="tiny", help="model preset")
    parser.add_argument("--rate", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--batch-tokens", type=int, default=2048, help="tokens in a step")
    parser.add_argument("--devices", type=int, default=os.cpu_count() or 1, help="CPU cores to share a step")
    parser.add_argument("--resume", action="store_true", help="go on from DIR/snapshot.npz if there is one")
    parser.add_argument("--tokenizer-only", action="store_true", help="train DIR/tokenizer.json and stop")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = trained_tokenizer(args.out / "tokenizer.json")
    if args.tokenizer_only:
        return
    # Before jax starts. One device would keep to one core for most of a step.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={args.devices}"
    import jax

    from jaxinfer.config import ModelConfig
    from jaxinfer.models.decoder import forward, init_params

    config = ModelConfig.preset(args.preset)
    params = init_params(config, jax.random.key(args.seed), dtype=jax.numpy.float32)
    train(
        config,
        params,
        forward,
        tokenizer,
        args.out,
        minutes=args.minutes,
        seed=args.seed,
        resume=args.resume,
        batch_tokens=args.batch_tokens,
        peak_rate=args.rate,
    )


if __name__ == "__main__":
    main()
