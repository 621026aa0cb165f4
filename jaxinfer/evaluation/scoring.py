"""Scores of many examples at once, whole or by a property of the example."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from jaxinfer.evaluation.tasks import TASKS, Example


def score_all(examples: Sequence[Example], replies: Sequence[Sequence[str]]) -> list[float]:
    """The score of each example, in order; `replies[i]` has one reply for each turn of `examples[i]`.

    Examples of different tasks may be mixed. A task with `score_many` gets all of its examples in one call.
    """
    if len(examples) != len(replies):
        raise ValueError(f"{len(examples)} examples but {len(replies)} lists of replies")
    members = defaultdict(list)
    for i, example in enumerate(examples):
        members[example.task].append(i)
    scores = [0.0] * len(examples)
    for name, indices in members.items():
        chosen, said = [examples[i] for i in indices], [replies[i] for i in indices]
        task = TASKS[name]
        many = getattr(
            task, "score_many", lambda e, r, task=task: [task.score(*pair) for pair in zip(e, r, strict=True)]
        )
        for i, score in zip(indices, many(chosen, said), strict=True):
            scores[i] = score
    return scores


def mean_by(examples: Sequence[Example], scores: Sequence[float], key: str) -> dict[str, dict[str, float]]:
    """Mean score and count for each value of `info[key]`, such as retrieval's `band`."""
    groups = defaultdict(list)
    for example, score in zip(examples, scores, strict=True):
        groups[str(example.info[key])].append(score)
    return {value: {"score": float(np.mean(group)), "n": len(group)} for value, group in groups.items()}
