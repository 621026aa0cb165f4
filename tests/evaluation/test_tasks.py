"""Tasks: true answers score 1, wrong ones 0, prompts are repeatable, split by hash and long enough apart."""

import json
import time

import numpy as np
import pytest

from jaxinfer.evaluation.scoring import mean_by, score_all
from jaxinfer.evaluation.tasks import TASKS, examples, is_held_out, schema
from jaxinfer.evaluation.tasks.retrieval import BANDS, Retrieval
from jaxinfer.evaluation.tasks.sandbox import run_programs

NAMES = sorted(TASKS)
WEATHER = schema.tool(
    "weather",
    {"city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"type": "string", "enum": ["C", "F"]}},
    ["city"],
)


def true_replies(example):
    return [turn.answer for turn in example.turns]


def wrong(answer):
    """Another answer of the same form: the last letter or digit replaced by its successor."""
    at = max(i for i, char in enumerate(answer) if char.isalnum())
    return answer[:at] + {"D": "A", "9": "1"}.get(answer[at], chr(ord(answer[at]) + 1)) + answer[at + 1 :]


@pytest.mark.parametrize("name", NAMES)
def test_true_answers_score_one(name):
    chosen = examples(TASKS[name], 200, held_out=True, seed=1)
    assert score_all(chosen, [true_replies(example) for example in chosen]) == [1.0] * 200


@pytest.mark.parametrize("name", [name for name in NAMES if name != "code"])
def test_wrong_answers_score_zero(name):
    chosen = examples(TASKS[name], 200, held_out=True, seed=2)
    for example in chosen:
        *first, last = true_replies(example)
        assert TASKS[name].score(example, [*first, wrong(last)]) == 0.0, last


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "reply", ["", "I do not know", "{", "####", '{"name":[],"arguments":{}}', "    return"]
)
def test_junk_scores_zero(name, reply):
    example = examples(TASKS[name], 1, held_out=True, seed=3)[0]
    assert TASKS[name].score(example, [reply] * len(example.turns)) == 0.0


@pytest.mark.parametrize("name", NAMES)
def test_held_out_and_training_prompts_are_distinct_and_disjoint(name):
    prompts = {
        held: [example.turns[0].prompt for example in examples(TASKS[name], 100, held_out=held, seed=4)]
        for held in (False, True)
    }
    assert all(is_held_out(prompt) == held for held, found in prompts.items() for prompt in found)
    assert len(set(prompts[False] + prompts[True])) == 200


def test_one_prompt_in_sixteen_is_held_out():
    share = np.mean([is_held_out(f"prompt {i}") for i in range(20_000)])
    assert abs(share - 1 / 16) < 0.006


@pytest.mark.parametrize("name", NAMES)
def test_a_seed_decides_the_examples(name):
    first, again, other = (examples(TASKS[name], 20, held_out=False, seed=seed) for seed in (5, 5, 6))
    assert first == again
    assert first != other


def test_too_many_examples_is_an_error_and_no_endless_loop():
    class Constant:
        name, max_tokens = "constant", 1

        def generate(self, rng, difficulty=1.0):
            return examples(TASKS["choice"], 1, held_out=True, seed=0)[0]

        def score(self, example, replies):
            return 0.0

    with pytest.raises(ValueError, match="only 1 distinct"):
        examples(Constant(), 2, held_out=True, seed=0)


@pytest.mark.parametrize("name", NAMES)
def test_each_prompt_holds_the_true_history(name):
    for example in examples(TASKS[name], 50, held_out=False, seed=7):
        assert example.turns[0].prompt.startswith("<|bos|>")
        for turn, after in zip(example.turns, example.turns[1:], strict=False):
            assert after.prompt.startswith(f"{turn.prompt}{turn.answer}<|end|>")
        assert all(turn.prompt.endswith("<|assistant|>") for turn in example.turns)


def test_arithmetic_chain_is_right_and_ends_in_the_answer():
    for example in examples(TASKS["arithmetic"], 200, held_out=False, seed=8):
        *chain, last = example.turns[0].answer.split("\n")
        for line in chain:
            left, right = line.split("=")
            assert eval(left) == int(right)
        assert last == f"#### {right}"
        assert 2 <= len(chain) <= 4
        assert example.info["value"] >= 0


def test_choice_letters_are_balanced():
    letters = [example.info["letter"] for example in examples(TASKS["choice"], 1000, held_out=False, seed=9)]
    assert all(200 < letters.count(letter) < 300 for letter in "ABCD")


@pytest.mark.parametrize(
    ("arguments", "valid"),
    [
        ({"city": "Rome"}, True),
        ({"city": "Rome", "days": 2, "unit": "C"}, True),
        ({"days": 2}, False),  # the required one is missing
        ({"city": 3}, False),
        ({"city": "Rome", "days": "2"}, False),
        ({"city": "Rome", "days": True}, False),
        ({"city": "Rome", "days": 2.5}, False),
        ({"city": "Rome", "unit": "K"}, False),
        ({"city": "Rome", "wind": 1}, False),
    ],
)
def test_schema_validity(arguments, valid):
    assert schema.is_valid(schema.call("weather", arguments), [WEATHER]) is valid
    assert not schema.is_valid(schema.call("other", arguments), [WEATHER])


def test_a_valid_call_need_not_be_the_right_one():
    task = TASKS["tool_call"]
    example = next(e for e in examples(task, 50, held_out=True, seed=10) if '"amount"' in e.info["expected"])
    expected = json.loads(example.info["expected"])
    other = schema.call(
        expected["name"], expected["arguments"] | {"amount": expected["arguments"]["amount"] + 1}
    )
    assert (task.validity(example, [other]), task.score(example, [other])) == (1.0, 0.0)
    reordered = json.dumps(
        {"arguments": dict(reversed(expected["arguments"].items())), "name": expected["name"]}
    )
    assert task.score(example, [reordered]) == 1.0


def test_code_is_judged_by_what_it_does():
    chosen = [e for e in examples(TASKS["code"], 400, held_out=False, seed=11) if "sum(" in e.turns[0].answer]
    truth = [e.turns[0].answer for e in chosen]
    unlike = [[answer.replace("sum(", "0 + sum(")] for answer in truth]
    broken = [[answer.replace("sum(", "1 + sum(")] for answer in truth]
    assert set(score_all(chosen, unlike)) == {1.0}
    assert set(score_all(chosen, broken)) == {0.0}


def test_an_endless_loop_scores_zero_in_time_and_hurts_no_other():
    example = examples(TASKS["code"], 1, held_out=True, seed=12)[0]
    loop = "    while True:\n        try:\n            while True:\n                pass\n"
    stubborn = loop + "        except:\n            pass"
    started = time.monotonic()
    replies = [[stubborn], [example.turns[0].answer], ["    while True: pass"]]
    assert score_all([example] * 3, replies) == [0.0, 1.0, 0.0]
    assert time.monotonic() - started < 8


@pytest.mark.parametrize(
    "program",
    [
        "import os",
        "open('/etc/passwd')",
        "eval('1')",
        "().__class__",
        "x = [0] * (1 << 40)",
        "while True: pass",
        "def",
        "f = lambda: f()\nf()",
        "'{0}'.format(1)",
        "\0",
    ],
)
def test_the_sandbox_fails_what_it_must(program):
    assert run_programs([program, "assert sum([1, 2]) == 3"], limit_s=0.5) == [False, True]


def test_retrieval_reaches_every_band_and_has_one_right_value():
    chosen = examples(TASKS["retrieval"], 200, held_out=True, seed=13)
    bands = mean_by(chosen, [1.0] * 200, "band")
    assert set(bands) == {f"{low}-{high}" for low, high in BANDS}
    for example in chosen:
        prompt, value = example.turns[0].prompt, example.turns[0].answer
        key = prompt.split("<|end|>")[0].rstrip(".?").split()[-1]
        key = key if f" {key}=" in prompt else prompt.split("has ")[-1].split("?")[0]
        assert prompt.count(f" {key}=") == 1
        assert f" {key}={value}," in prompt


def test_retrieval_difficulty_bounds_the_distance_and_queries_are_turns():
    near = examples(Retrieval(queries=4), 100, held_out=False, seed=14, difficulty=0.1)
    assert max(example.info["distance"] for example in near) < 110
    assert max(len(example.turns) for example in near) == 4
    replies = true_replies(near[-1])
    assert Retrieval().score(near[-1], ["0", *replies[1:]]) == pytest.approx(1 - 1 / len(replies))


def test_session_scores_each_turn():
    task = TASKS["session"]
    chosen = examples(task, 200, held_out=True, seed=15)
    assert {len(example.turns) for example in chosen} == {2, 3, 4, 5} - {4} | {len(e.turns) for e in chosen}
    example = next(e for e in chosen if len(e.turns) == 3)
    replies = true_replies(example)
    replies[1] = wrong(replies[1])
    assert task.turn_scores(example, replies) == [1.0, 0.0, 1.0]
    assert task.score(example, replies) == 0.0


def test_scores_keep_the_order_of_mixed_tasks():
    chosen = [examples(TASKS[name], 1, held_out=True, seed=16)[0] for name in [*NAMES, *NAMES]]
    replies = [true_replies(example) for example in chosen]
    replies[len(NAMES) :] = [[""] * len(example.turns) for example in chosen[len(NAMES) :]]
    assert score_all(chosen, replies) == [1.0] * len(NAMES) + [0.0] * len(NAMES)
    with pytest.raises(ValueError, match="lists of replies"):
        score_all(chosen, replies[1:])
