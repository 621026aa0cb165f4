"""Turns a finished training run into the checkpoint that ships: bf16 weights, KV scales, log, scores and model card.

    python -m experiments.package_tiny --run out/tiny --out jaxinfer/checkpoints/tiny
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.progress import Progress

from experiments.train_tiny import load_arrays
from jaxinfer.checkpoints import orbax
from jaxinfer.checkpoints.calibration import calibrate
from jaxinfer.checkpoints.model import Model, quantize_params
from jaxinfer.config import EngineConfig, ModelConfig, Precision
from jaxinfer.engine import Engine
from jaxinfer.evaluation.answering import replies
from jaxinfer.evaluation.scoring import mean_by, score_all
from jaxinfer.evaluation.statistics import wilson_interval
from jaxinfer.evaluation.tasks import TASKS, examples
from jaxinfer.models.decoder import init_params
from jaxinfer.text.tokenizer import END, Tokenizer

CALIBRATION_EXAMPLES = 16  # of each task, from the training side
SCORED_EXAMPLES = 400  # of each task, held out
PRECISION = Precision.parse("bf16", "bf16")


def package(run: Path, out: Path, note: str) -> None:
    """Write the checkpoint of `run` to `out`, then serve it from there and score it. `note`: what the card adds about
    the training."""
    config = ModelConfig.preset("tiny")
    trained = load_arrays(run / "params.npz", jax.eval_shape(lambda: init_params(config, jax.random.key(0))))
    params = quantize_params(config, trained, PRECISION.weights)
    tokenizer = Tokenizer.load(run / "tokenizer.json")
    orbax.save(out, config, params, calibrate(config, params, calibration_texts(tokenizer)))
    for name in ("tokenizer.json", "train_log.jsonl"):
        shutil.copyfile(run / name, out / name)
    scores = score(Model.load(out))
    (out / "scores.json").write_text(json.dumps(scores, indent=2) + "\n")
    log = [json.loads(line) for line in (out / "train_log.jsonl").read_text().splitlines()]
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    (out / "README.md").write_text(card(config, count, scores, log, note))


def calibration_texts(tokenizer: Tokenizer) -> list[list[int]]:
    """Whole conversations of every task, none of them held out."""
    n = CALIBRATION_EXAMPLES
    turns = (e.turns[-1] for task in TASKS.values() for e in examples(task, n, held_out=False, seed=1))
    return [tokenizer.encode(turn.prompt + turn.answer + END, special=True) for turn in turns]


def score(model: Model) -> dict[str, Any]:
    """Exact match on held-out examples, with Wilson intervals; retrieval and code also by kind of example."""
    chosen = [e for t in TASKS.values() for e in examples(t, SCORED_EXAMPLES, held_out=True, seed=2)]
    with Progress() as progress:
        bar = progress.add_task("scoring", total=len(chosen))
        texts = replies(Engine(model, EngineConfig(precision=PRECISION)), chosen, lambda: progress.advance(bar))
    found = np.array(score_all(chosen, texts))
    tasks: dict[str, Any] = {}
    for name in TASKS:
        members = [i for i, e in enumerate(chosen) if e.task == name]
        right = wilson_interval(int(found[members].sum()), len(members))
        tasks[name] = right.fields("score")
        shared_keys = set.intersection(*(set(chosen[i].info) for i in members)) & {"band", "kind", "steps"}
        for key in sorted(shared_keys):
            tasks[name][f"by_{key}"] = mean_by([chosen[i] for i in members], found[members].tolist(), key)
    return {"precision": str(PRECISION), "held_out": True, "seed": 2, "tasks": tasks}


def card(config: ModelConfig, count: int, scores: dict[str, Any], log: list[dict[str, Any]], note: str) -> str:
    """The model card."""
    last, moe = log[-1], config.moe
    assert moe is not None
    rows = [
        f"| {name} | {s['score']:.3f} | {s['ci_low']:.3f} to {s['ci_high']:.3f} | {s['n']} |"
        for name, s in scores["tasks"].items()
    ]
    return f"""# tiny

A mixture-of-experts language model of {count / 1e6:.2f} million parameters, trained from nothing by this project
(`experiments/train_tiny.py`) so that every measurement can run on a real trained model anywhere.

**What it is.** Multi-head latent attention, {config.layers} layers ({config.dense_layers} dense), {moe.experts} routed
experts of which a token uses {moe.top_k}, {moe.shared_experts} shared expert, a sigmoid router balanced by a bias: the
architecture of the models that the project is about, at a size for a CPU. Context {config.max_position} tokens,
vocabulary {config.vocab}, weights in bf16.

**What it isn't.** An assistant, or a model of English. It knows six generated tasks and nothing else, and its scores
say nothing of other models' abilities. It is there to be quantised, served and compared with itself.

**Training.** {last["tokens"] / 1e6:.1f} million tokens in {last["seconds"] / 60:.0f} minutes on two CPU cores; the log
is `train_log.jsonl`. Held-out examples (1 in 16, by hash of the first prompt) were never trained on. The KV scales
were calibrated on {CALIBRATION_EXAMPLES} training examples of each task.{" " * bool(note) + note}

## Exact match on held-out examples ({scores["precision"]}, greedy)

| task | score | 95% interval | examples |
|---|--:|--:|--:|
{chr(10).join(rows)}

Made by `python -m experiments.package_tiny`; `scores.json` has the scores by kind of example.
"""


def main() -> None:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="folder of a finished run of experiments.train_tiny")
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--note", default="", help="what the card should add about the training")
    args = parser.parse_args()
    package(args.run, args.out, args.note)


if __name__ == "__main__":
    main()
