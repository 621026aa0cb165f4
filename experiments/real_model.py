"""Table `kv-cache-smollm2`: BF16 pages against FP8 (e4m3) pages with scale 1 and with calibrated scales, on a real
model: WikiText-2 perplexity and distance, and ARC-Easy by the likelihood of the choices.

    python -m experiments.real_model --data wiki.test.raw.txt --arc ARC-Easy.test.jsonl --out experiments/results
"""

import argparse
import dataclasses
import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rich
import scipy.special
from jaxtyping import Array, Float, Int32
from rich.progress import Progress

from experiments.perplexity import CONTEXT, Tally, row, windows
from jaxinfer.cache.kv import KVCache
from jaxinfer.checkpoints import calibration
from jaxinfer.checkpoints.model import Model, unit_scales
from jaxinfer.config import ModelConfig, Precision
from jaxinfer.errors import UserError
from jaxinfer.evaluation.divergence import served_logits
from jaxinfer.evaluation.statistics import quality
from jaxinfer.evaluation.table import Table, check_writable, run_meta, to_rich, write
from jaxinfer.models.attention import PagedContext
from jaxinfer.models.decoder import Params, bind
from jaxinfer.quantization.formats import KVFormat

MODEL = "smollm2"
ROWS = (("bf16", "none"), ("fp8_e4m3", "1"), ("fp8_e4m3", "calibrated"))  # the first is what others are held against
CALIBRATION_WINDOWS, CALIBRATION_LENGTH = 16, 512
TEXTS, STEP = 16, 16  # texts of a batch, whose width is a multiple of STEP


@dataclass(frozen=True)
class Choice:
    """A question with one of its answers: tokens [n], those from `start` on are the answer, of so many `bytes`."""

    question: int
    tokens: list[int]
    start: int
    bytes: int
    right: bool


def read_choices(model: Model, path: Path, count: int, seed: int) -> list[Choice]:
    """The choices of `count` questions, drawn by `seed`. UserError where the file has fewer."""
    try:
        questions = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    if len(questions) < count:
        raise UserError(f"{path} has {len(questions)} questions, fewer than {count}")
    found = []
    for number, index in enumerate(np.random.default_rng(seed).permutation(len(questions))[:count]):
        stem, options, key = question_parts(questions[index])
        prompt = model.encode(f"Question: {stem}\nAnswer:")
        for label, text in options:
            tokens = prompt + model.tokenizer.encode(f" {text}")
            found.append(Choice(number, tokens, len(prompt), len(text.encode()), label == key))
    return found


def question_parts(said: dict[str, Any]) -> tuple[str, list[tuple[str, str]], str]:
    """Question, (label, text) of its choices, and the right label, in either of the two forms that are about."""
    question = said["question"]
    where = question if isinstance(question, dict) else said
    stem, choices = where.get("stem", question), where["choices"]
    if isinstance(choices, dict):
        return stem, list(zip(choices["label"], choices["text"], strict=True)), said["answerKey"]
    return stem, [(choice["label"], choice["text"]) for choice in choices], said["answerKey"]


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _answers(
    config: ModelConfig, kv: KVFormat, dtype, params: Params, scales, tokens: Int32[Array, "B T"], starts, counts
) -> Float[Array, " B"]:
    """Log-probability of each text's tokens from `starts` to `counts`, a page a text."""
    texts, width = tokens.shape
    there = jnp.arange(width) < counts[:, None]
    positions = jnp.where(there, jnp.arange(width), -1)
    own = jnp.arange(texts, dtype=jnp.int32)[:, None]
    context = PagedContext(positions, jnp.where(there, own, -1), positions, own, counts)
    cache = KVCache.create(config.attention.entries, config.cache_layers, texts, width, kv, scales)
    hidden, _ = bind(config, params).paged(tokens, context, cache, dtype)
    logits = jax.nn.log_softmax(bind(config, params).logits(hidden[:, :-1]), axis=-1)
    found = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
    answer = there[:, 1:] & (jnp.arange(1, width) >= starts[:, None])
    return jnp.where(answer, found, 0).sum(axis=1)


def answer_scores(model: Model, kv: str, choices: list[Choice], advance: Callable[[], None]) -> Float[np.ndarray, " n"]:
    """Log-probability of each choice."""
    precision = Precision.parse("f32", kv)
    params, scores = model.prepared(precision), np.empty(len(choices))
    order = sorted(range(len(choices)), key=lambda i: len(choices[i].tokens))
    for first in range(0, len(order), TEXTS):
        batch = order[first : first + TEXTS]
        width = -(-max(len(choices[i].tokens) for i in batch) // STEP) * STEP
        tokens, places = np.zeros((TEXTS, width), np.int32), np.ones((2, TEXTS), np.int32)
        for at, i in enumerate(batch):
            tokens[at, : len(choices[i].tokens)] = choices[i].tokens
            places[:, at] = choices[i].start, len(choices[i].tokens)
        found = _answers(model.config, precision.kv, model.compute_dtype, params, model.kv_scales, tokens, *places)
        scores[batch] = np.asarray(found)[: len(batch)]
        advance()
    return scores


def right_answers(choices: list[Choice], scores: Float[np.ndarray, " n"]) -> Float[np.ndarray, " questions"]:
    """1 for each question whose likeliest choice is the right one."""
    best: dict[int, int] = {}
    for i, choice in enumerate(choices):
        if choice.question not in best or scores[i] > scores[best[choice.question]]:
            best[choice.question] = i
    return np.array([float(choices[best[question]].right) for question in sorted(best)])


def measure_texts(models: dict, pieces: Int32[np.ndarray, "count n"], advance: Callable[[], None]) -> dict[Any, Tally]:
    served = {key: served_logits(model, Precision.parse("f32", key[0])) for key, model in models.items()}
    tallies = {key: Tally() for key in models}
    for tokens in pieces:
        base = None
        for key, logits in served.items():
            found = scipy.special.log_softmax(logits(tokens), axis=-1)
            tallies[key].add(found, base, tokens)
            base = found if base is None else base
            advance()
    return tallies


def calibrated(model: Model, text: str) -> dict[str, jax.Array]:
    """Scales from the text's last part, which no window reaches."""
    tokens = model.tokenizer.encode(text)[-CALIBRATION_WINDOWS * CALIBRATION_LENGTH :]
    pieces = calibration.windows(tokens, model.tokenizer.bos_id, CALIBRATION_LENGTH, CALIBRATION_WINDOWS)
    return calibration.calibrate(model.config, model.params, pieces)


def real_model(data: Path, arc: Path, count: int, questions: int, seed: int, command: str, progress: Progress) -> Table:
    model, text = Model.load(MODEL), calibration.read_text(data)
    pieces, choices = windows(model, text, count), read_choices(model, arc, questions, seed)
    scales = {"none": unit_scales(model.config), "1": unit_scales(model.config), "calibrated": calibrated(model, text)}
    models = {key: dataclasses.replace(model, kv_scales=scales[key[1]]) for key in ROWS}
    task = progress.add_task("measuring", total=len(ROWS) * (count + -(-len(choices) // TEXTS)))
    advance = functools.partial(progress.advance, task)
    tallies = measure_texts(models, pieces, advance)
    likely = {key: answer_scores(models[key], key[0], choices, advance) for key in ROWS}
    sizes = np.array([choice.bytes for choice in choices])
    tasks = {"arc_easy": np.ones(len(choices)), "arc_easy_by_length": sizes}
    rows = []
    for key in ROWS:
        right = {task: right_answers(choices, likely[key] / by) for task, by in tasks.items()}
        base = {task: right_answers(choices, likely[ROWS[0]] / by) for task, by in tasks.items()}
        scores = {task: quality(right[task], None if key == ROWS[0] else base[task]) for task in tasks}
        made = row(key[0], tallies[key], tallies[ROWS[0]], None)
        made = {name: value for name, value in made.items() if not name.startswith("reference")}
        size = {"kv_scales": key[1], "bytes_per_token": model.config.kv_bytes_per_token(KVFormat(key[0]))}
        rows.append({"kv_format": key[0], **size, **made, "quality": scores})
    peaks = {k: [float(v) * calibration.LIMIT for v in s] for k, s in scales["calibrated"].items()}
    said = ", ".join(f"{k} {min(v):.3g} to {max(v):.3g}" for k, v in peaks.items())
    return Table(
        "kv-cache-smollm2",
        rows,
        run_meta(command, seed, count, "f32 weights and arithmetic", model=model.config.name, tokens=pieces.size),
        f"KV cache of {model.config.name}: BF16 against FP8 (e4m3) pages",
        [
            f"Perplexity: the first {pieces.size} tokens of WikiText-2's test text in windows of {CONTEXT}, each by "
            "itself; the same tokens in every row. loss_diff: nats a token against bf16, paired by window, 95% t "
            "interval.",
            f"Scales were calibrated on {CALIBRATION_WINDOWS * CALIBRATION_LENGTH} tokens from the end of that text, "
            f"which no window reaches; largest entry of a layer: {said}.",
            f"ARC-Easy: {questions} questions drawn from the test set, zero-shot, the choice with the greatest "
            "log-likelihood, or that divided by the choice's bytes (by_length); differences are paired, 95% intervals.",
            "The weights are what the file's 4-bit formats (Q4_1, Q8_0) decode to: the rows compare KV formats only.",
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="WikiText-2's raw test text")
    parser.add_argument("--arc", type=Path, required=True, help="ARC-Easy's test questions, JSON lines")
    parser.add_argument("--windows", type=int, default=16, help=f"pieces of {CONTEXT} tokens, at least 2")
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the choice of questions")
    parser.add_argument("--out", type=Path, default=Path("experiments/results"))
    options = parser.parse_args()
    out = check_writable(options.out)
    given = f"--windows {options.windows} --questions {options.questions} --seed {options.seed} --out {out}"
    command = f"python -m experiments.real_model --data {options.data.name} --arc {options.arc.name} {given}"
    with Progress() as progress:
        counts = (options.windows, options.questions, options.seed)
        table = real_model(options.data, options.arc, *counts, command, progress)
    write(table, out)
    rich.print(to_rich(table))


if __name__ == "__main__":
    main()
