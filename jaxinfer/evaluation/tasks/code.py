"""Short Python functions to complete from a docstring, in the manner of HumanEval: hidden tests decide."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxinfer.evaluation.tasks.base import Dialogue, Example, integer, pick
from jaxinfer.evaluation.tasks.sandbox import run_programs
from jaxinfer.text.tokenizer import USER

_NAMES = ("f", "g", "solve", "compute", "work")
_LISTS, _SCALARS, _STRINGS = ("xs", "items", "nums"), (("a", "b"), ("n", "m")), ("s", "text", "word")

# (how the docstring puts it, the expression); `k` is a constant of the problem.
_FILTERS = (
    (("numbers",), ""),
    (("even numbers",), "x % 2 == 0"),
    (("odd numbers",), "x % 2 == 1"),
    (("positive numbers",), "x > 0"),
    (("negative numbers",), "x < 0"),
    (("numbers greater than {k}", "numbers over {k}"), "x > {k}"),
    (("numbers less than {k}", "numbers under {k}"), "x < {k}"),
    (("multiples of {k}", "numbers divisible by {k}"), "x % {k} == 0"),
)
_MAPS = (
    (("{them}",), "x"),
    (("squares of the {them}",), "x * x"),
    (("doubles of the {them}",), "2 * x"),
    (("{them}, each plus {k}", "{them}, each increased by {k}"), "x + {k}"),
    (("{them}, each times {k}", "{them}, each multiplied by {k}"), "x * {k}"),
    (("absolute values of the {them}",), "abs(x)"),
)
_FOLDS = (
    (("list of the {them}", "{them}, as a list"), "[{each}]"),
    (("sum of the {them}", "total of the {them}"), "sum({each})"),
    (("largest of the {them}, or 0",), "max(({each}), default=0)"),
    (("smallest of the {them}, or 0",), "min(({each}), default=0)"),
    (("sorted {them}",), "sorted({each})"),
)
_SCALAR = (
    (("{a} plus {b} times {k}",), "{a} + {b} * {k}"),
    (("{a} times {b} plus {k}",), "{a} * {b} + {k}"),
    (("{a} minus {b} plus {k}",), "{a} - {b} + {k}"),
    (("the larger of {a} and {b} plus {k}",), "max({a}, {b}) + {k}"),
    (("the smaller of {a} and {b} times {k}",), "min({a}, {b}) * {k}"),
    (("the remainder of {a} plus {b} by {k}",), "({a} + {b}) % {k}"),
    (("whether {a} plus {b} is greater than {k}",), "{a} + {b} > {k}"),
    (("whether {a} is divisible by {k}",), "{a} % {k} == 0"),
    (("{a} if it is over {k}, else {b}",), "{a} if {a} > {k} else {b}"),
)
_STRING = (
    (("{s} reversed",), "{s}[::-1]"),
    (("{s} in upper case",), "{s}.upper()"),
    (("{s} repeated {k} times",), "{s} * {k}"),
    (("the first {k} letters of {s}",), "{s}[:{k}]"),
    (("the last {k} letters of {s}",), "{s}[-{k}:]"),
    (("{s} without its first {k} letters",), "{s}[{k}:]"),
    (("how often {c} occurs in {s}",), '{s}.count("{c}")'),
    (("{s} without the letter {c}",), '{s}.replace("{c}", "")'),
    (("whether {s} starts with {c}",), '{s}.startswith("{c}")'),
    (("the length of {s} plus {k}",), "len({s}) + {k}"),
)

Draft = tuple[str, str, str, Callable[[], str]]  # parameters, docstring, expression, maker of argument text


def _pipeline(rng: np.random.Generator) -> Draft:
    """Filter, map, fold over a list of numbers."""
    xs = pick(rng, _LISTS)
    (keep, condition), (change, element), (fold, whole) = (
        pick(rng, _FILTERS),
        pick(rng, _MAPS),
        pick(rng, _FOLDS),
    )
    first, second = integer(rng, 2, 9), integer(rng, 2, 9)
    kept = f"{pick(rng, keep).format(k=first)} in {xs}"
    them = pick(rng, change).format(them=kept, k=second)
    each = f"{element.format(k=second)} for x in {xs}" + (
        f" if {condition.format(k=first)}" if condition else ""
    )
    doc = f"the {pick(rng, fold).format(them=them)}"

    def numbers() -> str:
        return str([integer(rng, -9, 20) for _ in range(integer(rng, 3, 5))])

    return xs, doc, whole.format(each=each), numbers


def _scalars(rng: np.random.Generator) -> Draft:
    a, b = pick(rng, _SCALARS)
    docs, expression = pick(rng, _SCALAR)
    k = integer(rng, 2, 12)

    def arguments() -> str:
        return f"{integer(rng, 0, 20)}, {integer(rng, 0, 20)}"

    return f"{a}, {b}", pick(rng, docs).format(a=a, b=b, k=k), expression.format(a=a, b=b, k=k), arguments


def _strings(rng: np.random.Generator) -> Draft:
    s = pick(rng, _STRINGS)
    docs, expression = pick(rng, _STRING)
    fill = {"s": s, "k": integer(rng, 2, 5), "c": pick(rng, "abcde")}

    def word() -> str:
        return '"' + "".join(pick(rng, "abcde") for _ in range(integer(rng, 3, 7))) + '"'

    return s, pick(rng, docs).format(**fill), expression.format(**fill), word


def _evaluate(parameters: str, expression: str, arguments: str) -> Any:
    # Both texts are made here, never by a model.
    return eval(f"(lambda {parameters}: {expression})({arguments})")


@dataclass(frozen=True)
class Code:
    """Functions of one expression over lists, numbers or strings."""

    name: str = "code"
    max_tokens: int = 64
    limit_s: float = 1.0

    def generate(self, rng: np.random.Generator, difficulty: float = 1.0) -> Example:
        """A header with one worked example; six hidden tests."""
        parameters, doc, expression, arguments = pick(rng, (_pipeline, _pipeline, _scalars, _strings))(rng)
        name = pick(rng, _NAMES)
        shown, *hidden = [
            (text, _evaluate(parameters, expression, text)) for text in (arguments() for _ in range(7))
        ]
        shown_text = f">>> {name}({shown[0]})\n    {shown[1]!r}"
        header = f'def {name}({parameters}):\n    """Return {doc}.\n\n    {shown_text}\n    """'
        tests = [f"assert {name}({text}) == {value!r}" for text, value in hidden]
        turns = Dialogue().say(USER, header).expect(f"    return {expression}").turns
        return Example(self.name, turns, {"header": header, "tests": tests})

    def score(self, example: Example, replies: Sequence[str]) -> float:
        """1 if the header with the reply as its body passes the hidden tests."""
        return self.score_many([example], [replies])[0]

    def score_many(self, examples: Sequence[Example], replies: Sequence[Sequence[str]]) -> list[float]:
        """Scores of many examples, all run by one helper process."""
        programs = [
            self._program(example, reply) for example, (reply,) in zip(examples, replies, strict=True)
        ]
        return [float(passed) for passed in run_programs(programs, self.limit_s)]

    @staticmethod
    def _program(example: Example, reply: str) -> str:
        # A body is welcome with or without its indent.
        body = textwrap.indent(textwrap.dedent(reply), "    ")
        return "\n".join([example.info["header"], body, *example.info["tests"]])
