"""Prompts and examples: uids, mapped columns, generated problems, and every bad row by name."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratoon.data.arithmetic import CEILING_FACTOR, Problem, make_problems
from ratoon.data.examples import load_examples
from ratoon.data.prompts import PromptStyle, load_prompts
from ratoon.errors import CapabilityError, ConfigError, DataError
from ratoon.models.tiny import make_tiny_model
from ratoon.models.tokenizer import Tokenizer
from ratoon.rl.rewards import build_rewards
from ratoon.rl.rewards.base import Response

ARITHMETIC = {"kind": "arithmetic", "size": 40, "seed": 3, "min_terms": 2, "max_terms": 9}
STYLE = PromptStyle()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny_model(path, hidden_size=16, intermediate_size=16, num_layers=1)
    return Tokenizer.load(path)


def _jsonl(path: Path, *rows: Any) -> dict[str, Any]:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(line + "\n" for line in lines))
    return {
        "kind": "jsonl",
        "path": path,
        "columns": {"prompt": "question", "answer": "gold"},
        "limit": None,
    }


def test_rows_become_prompts_whose_uid_is_their_line(tmp_path: Path, tokenizer: Tokenizer) -> None:
    section = _jsonl(
        tmp_path / "sums.jsonl",
        {"question": "1+1", "gold": "2", "level": 3},
        "",
        {"question": "2+2", "gold": 4},
        {"question": "1/2", "gold": 0.5},
    )
    prompts = load_prompts(section, tokenizer, split="train", style=STYLE)
    assert [(p.dataset, p.row) for p in prompts] == [("sums/train", row) for row in (0, 2, 3)]
    assert [(p.text, p.answer) for p in prompts] == [("1+1", "2"), ("2+2", "4"), ("1/2", "0.5")]
    assert prompts[0].ids == tokenizer.prompt("1+1")
    assert prompts[0].fields == {"gold": "2", "level": 3}
    limited = load_prompts({**section, "limit": 2}, tokenizer, split="train", style=STYLE)
    assert limited == prompts[:2]


def test_answers_can_be_left_out(tmp_path: Path, tokenizer: Tokenizer) -> None:
    section = _jsonl(tmp_path / "p.jsonl", {"question": "1+1"})
    section["columns"] = {"prompt": "question", "answer": None}
    (prompt,) = load_prompts(section, tokenizer, split="eval", style=STYLE)
    assert prompt.answer is None


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [
        ([], "bad.jsonl: holds no rows"),
        (["", "  "], "bad.jsonl: holds no rows"),
        ([{"question": "a", "gold": "1"}, "{oops"], r"row 1 \(line 2\): not valid JSON"),
        ([[1, 2]], r"row 0 \(line 1\): holds a list"),
        (
            [{"question": "a", "gold": "1"}, {"question": "a", "answer": "1"}],
            r"row 1 \(line 2\): has no column 'gold'; columns found: 'question', 'answer'",
        ),
        ([{"question": None, "gold": "1"}], "column 'question' holds None"),
        ([{"question": "a", "gold": ["1"]}], r"column 'gold' holds \['1'\]"),
    ],
)
def test_bad_files_are_refused_by_file_row_and_column(
    tmp_path: Path, tokenizer: Tokenizer, rows: list[Any], complaint: str
) -> None:
    section = _jsonl(tmp_path / "bad.jsonl", *rows)
    with pytest.raises(DataError, match=complaint) as caught:
        load_prompts(section, tokenizer, split="train", style=STYLE)
    assert "bad.jsonl" in str(caught.value)


def test_files_that_cannot_be_read_are_named(tmp_path: Path, tokenizer: Tokenizer) -> None:
    section = _jsonl(tmp_path / "gone.jsonl", {"question": "a", "gold": "1"})
    (tmp_path / "gone.jsonl").write_bytes(b'{"question": "\xff\xfe"}')
    with pytest.raises(DataError, match=r"gone\.jsonl, row 0 \(line 1\): is not UTF-8"):
        load_prompts(section, tokenizer, split="train", style=STYLE)
    (tmp_path / "gone.jsonl").unlink()
    with pytest.raises(DataError, match=r"gone\.jsonl: no such file"):
        load_prompts(section, tokenizer, split="train", style=STYLE)
    (tmp_path / "gone.jsonl").mkdir()
    with pytest.raises(DataError, match=r"gone\.jsonl: cannot be read"):
        load_prompts(section, tokenizer, split="train", style=STYLE)


def test_long_prompts_are_counted_and_the_longest_named(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    texts = ["a", "a" * 30, "a" * 50, "a" * 40]
    section = _jsonl(tmp_path / "p.jsonl", *({"question": t, "gold": "1"} for t in texts))
    with pytest.raises(DataError, match=r"3 of 4 rows have more than 31 .* row 2 with 52"):
        load_prompts(section, tokenizer, split="train", style=PromptStyle(max_tokens=31))
    fits = PromptStyle(max_tokens=52)
    assert len(load_prompts(section, tokenizer, split="train", style=fits)) == 4


def test_an_empty_prompt_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    section = _jsonl(tmp_path / "p.jsonl", {"question": "", "gold": "1"})
    with pytest.raises(DataError, match=r"p/train, row 0: the prompt is empty"):
        load_prompts(section, tokenizer, split="train", style=PromptStyle(chat_template=False))


def test_system_message_and_template_shape_the_prompt(tmp_path: Path, tokenizer: Tokenizer) -> None:
    section = _jsonl(tmp_path / "p.jsonl", {"question": "hi", "gold": "1"})

    def ids(style: PromptStyle) -> tuple[int, ...]:
        return load_prompts(section, tokenizer, split="train", style=style)[0].ids

    assert tokenizer.decode(ids(PromptStyle("be brief")), keep_special=True) == (
        "<bos>be brief<sep>hi<sep>"
    )
    assert tokenizer.decode(ids(PromptStyle(chat_template=False)), keep_special=True) == "hi"


@settings(deadline=None)
@given(st.lists(st.integers(1, 99), min_size=2, max_size=8))
def test_every_line_of_a_solution_is_true_and_the_last_is_the_answer(values: list[int]) -> None:
    problem = Problem((values[0], *(v if v % 2 else -v for v in values[1:])))
    *steps, last = problem.solution.splitlines()
    total = str(values[0])
    for step in steps:
        left, right = step.split(" = ")
        assert left.split(" ", 1)[0] == total
        assert eval(left) == int(right)
        total = right
    assert last == f"Answer: {problem.answer}"
    assert problem.answer == total
    assert eval(problem.text.removesuffix(" = ?\n")) == int(problem.answer)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 2**32))
def test_train_and_held_out_problems_never_have_the_same_content(a: int, b: int) -> None:
    train = make_problems("train", size=150, seed=a, max_terms=3, max_value=9)
    held_out = make_problems("eval", size=50, seed=b, max_terms=3, max_value=9)
    assert len(set(train)) == 150
    assert not {problem.text for problem in train} & {problem.text for problem in held_out}


def test_problems_are_fixed_by_the_seed_and_a_larger_size_goes_on() -> None:
    few = make_problems("train", size=30, seed=5, max_terms=14)
    assert make_problems("train", size=60, seed=5, max_terms=14)[:30] == few
    assert make_problems("train", size=30, seed=6, max_terms=14) != few


def test_lengths_have_a_long_tail_within_their_bounds() -> None:
    problems = make_problems("train", size=2000, seed=0, min_terms=2, max_terms=14, max_value=20)
    lengths = sorted(len(problem.terms) for problem in problems)
    assert (lengths[0], lengths[-1]) == (2, 14)
    assert lengths[1000] <= 5
    assert lengths[1900] >= 2 * lengths[1000]
    for problem in problems:
        totals = [sum(problem.terms[:end]) for end in range(1, len(problem.terms) + 1)]
        assert all(0 <= total < CEILING_FACTOR * 20 for total in totals)
        assert all(1 <= abs(term) <= 20 for term in problem.terms)


def test_more_problems_than_there_are_is_an_error() -> None:
    with pytest.raises(DataError, match=r"size = 1000, but only \d+ different problems"):
        make_problems("train", size=1000, max_terms=2, max_value=3)


def test_generated_prompts_are_judged_right_by_the_number_reward(tokenizer: Tokenizer) -> None:
    prompts = load_prompts(ARITHMETIC, tokenizer, split="train", style=STYLE)
    examples = load_examples(ARITHMETIC, tokenizer, split="train", style=STYLE)
    rewards = build_rewards([{"kind": "number"}])
    rewards.check(prompts)
    for prompt, example in zip(prompts, examples, strict=True):
        assert prompt.ids == example.prompt_ids
        assert (prompt.dataset, prompt.row) == (example.dataset, example.row)
        solution = tokenizer.decode(example.completion_ids)
        assert rewards.parts(prompt, Response(solution)) == {"number": 1.0}
        assert rewards.parts(prompt, Response(solution + "1")) == {"number": 0.0}
        assert example.completion_ids[-1] == tokenizer.end_id


def test_examples_are_read_from_mapped_columns(tmp_path: Path, tokenizer: Tokenizer) -> None:
    section = _jsonl(tmp_path / "e.jsonl", {"q": "1+1", "a": "is 2"}, {"q": "2+2", "a": "is 4"})
    section["columns"] = {"prompt": "q", "completion": "a", "messages": None}
    examples = load_examples(section, tokenizer, split="train", style=STYLE)
    assert [example.row for example in examples] == [0, 1]
    assert examples[0].prompt_ids == tokenizer.prompt("1+1")
    assert examples[0].completion_ids == tokenizer.completion("is 2")
    with pytest.raises(DataError, match=r"2 of 2 rows have more than 9 tokens"):
        load_examples(section, tokenizer, split="train", style=PromptStyle(max_tokens=9))


def test_an_example_without_completion_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    section = _jsonl(tmp_path / "e.jsonl", {"q": "1+1", "a": "2"}, {"q": "2+2", "a": ""})
    section["columns"] = {"prompt": "q", "completion": "a", "messages": None}
    with pytest.raises(DataError, match=r"e/train, row 1: the completion is empty"):
        load_examples(section, tokenizer, split="train", style=STYLE)


def _gym(name: str = "chain_sum", **options: Any) -> dict[str, Any]:
    return {"kind": "reasoning_gym", "name": name, "size": 5, "seed": 1, "options": options}


def test_gym_tasks_bring_what_their_scorer_needs(tokenizer: Tokenizer) -> None:
    pytest.importorskip("reasoning_gym", reason="the extra `tasks` is not installed")
    prompts = load_prompts(_gym(max_terms=3), tokenizer, split="train", style=STYLE)
    assert [(p.dataset, p.row) for p in prompts] == [("chain_sum/train", row) for row in range(5)]
    rewards = build_rewards([{"kind": "reasoning_gym", "strict": True}])
    rewards.check(prompts)
    right, wrong = Response(f"Answer: {prompts[0].answer}"), Response("Answer: 1x")
    assert rewards.parts(prompts[0], right) == {"reasoning_gym": 1.0}
    assert rewards.parts(prompts[0], wrong) == {"reasoning_gym": 0.0}


@pytest.mark.parametrize(
    ("section", "named"),
    [(_gym("no_such_task"), "no_such_task"), (_gym(no_such_option=1), "no_such_option")],
)
def test_gym_tasks_and_options_that_do_not_exist_are_named(
    tokenizer: Tokenizer, section: dict[str, Any], named: str
) -> None:
    pytest.importorskip("reasoning_gym", reason="the extra `tasks` is not installed")
    with pytest.raises(ConfigError, match=named):
        load_prompts(section, tokenizer, split="train", style=STYLE)


def test_a_missing_gym_says_what_to_install(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(CapabilityError, match=r"pip install .*ratoon\[tasks\]"):
        load_prompts(_gym(), tokenizer, split="train", style=STYLE)
    with pytest.raises(CapabilityError, match=r"pip install .*ratoon\[tasks\]"):
        build_rewards([{"kind": "reasoning_gym", "strict": True}]).load()


def test_word_problems_load_from_their_published_files(
    shared_data: Path, tokenizer: Tokenizer
) -> None:
    section = {
        "kind": "jsonl",
        "path": shared_data / "rl/gsm8k/test.jsonl",
        "columns": {"prompt": "question", "answer": "answer"},
        "limit": 200,
    }
    prompts = load_prompts(section, tokenizer, split="eval", style=STYLE)
    rewards = build_rewards([{"kind": "number"}])
    rewards.check(prompts)
    for prompt in prompts:
        gold = (prompt.answer or "").rpartition("#### ")[2]
        parts = rewards.parts(prompt, Response(f"So the answer is {gold}."))
        assert parts == {"number": 1.0}
