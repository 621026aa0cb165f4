"""Table `perplexity`: WikiText-2 perplexity of a real model at each KV format, and how far each format moves the next
token's distribution; the reference library on the same tokens beside it, where the `parity` extra is installed.

    python -m experiments.perplexity --data wiki.test.raw.txt --out experiments/results
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import rich
import scipy.special
import scipy.stats
from jaxtyping import Float, Int32
from rich.progress import Progress

from jaxinfer.checkpoints import gguf
from jaxinfer.checkpoints.model import Model
from jaxinfer.config import Precision
from jaxinfer.errors import UserError
from jaxinfer.evaluation.divergence import served_logits
from jaxinfer.evaluation.table import Table, check_writable, run_meta, to_rich, write

MODEL = "smollm2"
FORMATS = ("bf16", "f32", "fp8_e4m3")  # the first is what the others are held against
CONTEXT = 1024
Logits = Callable[[Int32[np.ndarray, " n"]], Float[np.ndarray, "n V"]]


class Tally:
    """Sums over windows of one format's logits beside those of the first format."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.kl: list[float] = []
        self.agreement: list[float] = []

    def add(self, logits: Float[np.ndarray, "n V"], base: Float[np.ndarray, "n V"] | None, tokens) -> None:
        """Count one window: the log-probabilities of `logits`, and of the first format where this isn't it."""
        targets = np.arange(len(tokens) - 1), tokens[1:]
        self.losses.append(float(-logits[targets].mean()))
        if base is not None:
            self.kl.append(float((np.exp(base) * (base - logits)).sum(-1).mean()))
            self.agreement.append(float((base.argmax(-1) == logits.argmax(-1)).mean()))

    @property
    def perplexity(self) -> float:
        return float(np.exp(np.mean(self.losses)))


def windows(model: Model, text: str, count: int) -> Int32[np.ndarray, "count n"]:
    """The first `count` pieces of the text, CONTEXT tokens each. UserError where it is too short."""
    tokens = model.tokenizer.encode(text[: count * CONTEXT * 8])[: count * CONTEXT]
    if len(tokens) < count * CONTEXT:
        raise UserError(f"the text has {len(tokens)} tokens, fewer than {count} windows of {CONTEXT}")
    return np.array(tokens, np.int32).reshape(count, CONTEXT)


def measure(model: Model, pieces: Int32[np.ndarray, "count n"], advance: Callable[[], None]) -> dict[str, Tally]:
    """Each window at each format, weights and arithmetic in float32."""
    served = {kv: served_logits(model, Precision.parse("f32", kv)) for kv in FORMATS}
    tallies = {kv: Tally() for kv in FORMATS}
    for tokens in pieces:
        base = None
        for kv, logits in served.items():
            found = scipy.special.log_softmax(logits(tokens), axis=-1)
            tallies[kv].add(found, base, tokens)
            base = found if base is None else base
            advance()
    return tallies


def reference_losses(pieces: Int32[np.ndarray, "count n"], advance: Callable[[], None]) -> list[float] | None:
    """Each window's mean loss by the reference library, float32, from the same file; None where it is absent."""
    try:
        import torch
        import transformers
    except ImportError:
        return None
    file = gguf.installed(MODEL)
    model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    losses = []
    for tokens in pieces:
        ids = torch.tensor(tokens[None].astype(np.int64))
        with torch.no_grad():
            logits = model(ids).logits[0, :-1]
            losses.append(torch.nn.functional.cross_entropy(logits, ids[0, 1:]).item())
        advance()
    return losses


def row(kv: str, tally: Tally, base: Tally, reference: list[float] | None) -> dict[str, Any]:
    change = np.array(tally.losses) - base.losses
    half = scipy.stats.t.ppf(0.975, len(change) - 1) * change.std(ddof=1) / np.sqrt(len(change))
    limits = {"n": len(change), "ci_low": change.mean() - half, "ci_high": change.mean() + half}
    expected = None if reference is None else float(np.exp(np.mean(reference)))
    return {
        "kv_format": kv,
        "weight_format": "f32",
        "perplexity": tally.perplexity,
        "loss_diff": None if tally is base else {"diff": change.mean(), **limits},
        "kl": float(np.mean(tally.kl)) if tally.kl else None,
        "top1_agreement": float(np.mean(tally.agreement)) if tally.agreement else None,
        "top1_flips": 1 - float(np.mean(tally.agreement)) if tally.agreement else None,
        "reference_perplexity": expected,
        "reference_ratio": None if expected is None else tally.perplexity / expected,
        "source": "measured",
    }


def perplexity(data: Path, count: int, command: str, progress: Progress) -> Table:
    model = Model.load(MODEL)
    pieces = windows(model, data.read_text(), count)
    task = progress.add_task("windows", total=count * (len(FORMATS) + 1))
    tallies = measure(model, pieces, lambda: progress.advance(task))
    reference = reference_losses(pieces, lambda: progress.advance(task))
    return Table(
        "perplexity",
        [row(kv, tally, tallies[FORMATS[0]], reference) for kv, tally in tallies.items()],
        run_meta(command, 0, count, "f32 weights and arithmetic", model=model.config.name, tokens=pieces.size),
        f"WikiText-2 perplexity of {model.config.name} by KV format",
        [
            f"The first {pieces.size} tokens of the test text in windows of {CONTEXT}, each by itself.",
            "loss_diff: nats a token against the bf16 row, paired by window, 95% t interval. FP8 scales are 1, as the "
            "model was not calibrated.",
            "The weights are what the file's 4-bit formats (Q4_1, Q8_0) decode to: the rows compare KV formats only.",
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="WikiText-2's raw test text")
    parser.add_argument("--windows", type=int, default=16, help=f"pieces of {CONTEXT} tokens, at least 2")
    parser.add_argument("--out", type=Path, default=Path("experiments/results"))
    options = parser.parse_args()
    out = check_writable(options.out)
    command = f"python -m experiments.perplexity --data {options.data.name} --windows {options.windows} --out {out}"
    with Progress() as progress:
        table = perplexity(options.data, options.windows, command, progress)
    write(table, out)
    rich.print(to_rich(table))


if __name__ == "__main__":
    main()
