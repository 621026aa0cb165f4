"""Replies of an engine to examples: one request a turn, all at once, greedy."""

from collections import defaultdict
from collections.abc import Callable, Sequence

from jaxinfer.engine import Engine, SamplingParams
from jaxinfer.errors import UserError
from jaxinfer.evaluation.tasks import TASKS, Example


def replies(
    engine: Engine, examples: Sequence[Example], advance: Callable[[], None] = lambda: None
) -> list[list[str]]:
    """`replies[i]`: one text a turn of `examples[i]`. `advance` is called as each example is done.

    UserError where an example does not fit the engine's context.
    """
    owner: dict[int, tuple[int, int]] = {}
    texts = [[""] * len(example.turns) for example in examples]
    missing: defaultdict[int, int] = defaultdict(int)
    turns = ((i, t, turn.prompt) for i, example in enumerate(examples) for t, turn in enumerate(example.turns))
    for i, t, prompt in turns:
        params = SamplingParams(max_tokens=TASKS[examples[i].task].max_tokens)
        try:
            owner[engine.submit(prompt, params)] = (i, t)
        except UserError as error:
            raise UserError(f"an example of task {examples[i].task} can't be served: {error}") from None
        missing[i] += 1
    for event in engine.run():
        if event.completion is None:
            continue
        i, t = owner[event.request]
        texts[i][t] = event.completion.text
        missing[i] -= 1
        if not missing[i]:
            advance()
    return texts
