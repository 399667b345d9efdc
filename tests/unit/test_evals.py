"""Evaluation: figures against enumeration, tasks from their files, what is refused and why."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest

from ratoon.data.prompts import PromptStyle
from ratoon.errors import ConfigError, DataError
from ratoon.evals.kept import KeptResponses
from ratoon.evals.plan import EvalPlan, check_plan
from ratoon.evals.statistics import pass_at_k
from ratoon.evals.summary import compare, summarise
from ratoon.evals.tasks import TASKS, find_task, load_task
from ratoon.models.tiny import make_tiny_model
from ratoon.models.tokenizer import Tokenizer
from ratoon.records import Completion, DrawKey, Request, SamplingParams, Stream
from ratoon.rl.rewards import build_rewards
from ratoon.rl.rewards.base import Response

WARM = SamplingParams(temperature=1.0)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny_model(path, hidden_size=16, intermediate_size=16, num_layers=1)
    return Tokenizer.load(path)


def test_pass_at_k_is_the_share_of_subsets_with_a_right_one() -> None:
    for samples in range(1, 7):
        for correct in range(samples + 1):
            grades = [1] * correct + [0] * (samples - correct)
            for k in range(1, samples + 1):
                subsets = list(itertools.combinations(grades, k))
                share = sum(map(any, subsets)) / len(subsets)
                assert pass_at_k(samples, correct, k) == pytest.approx(share)


def test_pass_at_k_is_unbiased_and_the_plug_in_estimate_is_not() -> None:
    chance, samples, k = 0.3, 5, 3
    expected, plugged = 0.0, 0.0
    for correct in range(samples + 1):
        weight = math.comb(samples, correct) * chance**correct * (1 - chance) ** (samples - correct)
        expected += weight * pass_at_k(samples, correct, k)
        plugged += weight * (1 - (1 - correct / samples) ** k)
    assert expected == pytest.approx(1 - (1 - chance) ** k)
    assert abs(plugged - expected) > 0.02


def _rows(grades: list[list[float]]) -> list[dict[str, Any]]:
    return [
        {"row": row, "reward": reward, "token_ids": [1] * (2 + row), "finish": "stop"}
        for row, prompt in enumerate(grades)
        for reward in prompt
    ]


def test_errors_are_clustered_by_prompt() -> None:
    """Repeating each response makes no figure surer; an error over responses would shrink."""
    grades = [[1.0], [0.0], [1.0], [1.0]]
    once = summarise("task", _rows(grades), (1,))
    often = summarise("task", _rows([prompt * 9 for prompt in grades]), (1,))
    assert once["pass@1"] == often["pass@1"] == 0.75
    assert once["pass@1_stderr"] == often["pass@1_stderr"]
    assert once["pass@1_stderr"] == pytest.approx(statistics.stdev([1, 0, 1, 1]) / 2)
    assert (often["prompts"], often["responses"], often["tokens_mean"]) == (4, 36, 3.5)


def test_a_partial_reward_is_not_right() -> None:
    figures = summarise("task", _rows([[0.99, 1.0], [0.0, 1.0]]), (2,))
    assert (figures["pass@1"], figures["pass@2"]) == (0.5, 1.0)


def test_differences_are_paired_by_prompt() -> None:
    base = [[1.0], [0.0], [1.0], [0.0]]
    better = [[1.0], [1.0], [1.0], [0.0]]
    found = compare("task", _rows(better), _rows(base))
    assert (found["difference"], found["better"], found["worse"]) == (0.25, 1, 0)
    assert found["stderr"] == pytest.approx(0.25)
    assert compare("task", _rows(base), _rows(better))["difference"] == -0.25


def _keep(path: Path, groups: list[tuple[Request, ...]], count: int) -> list[Request]:
    """Adds that many of the missing responses; returns what is missing then."""
    with KeptResponses(path, groups) as kept:
        for request in [r for group in kept.missing for r in group][:count]:
            kept.add(Completion(request.key, request.prompt_ids, (7,), (-0.5,), "stop", 0))
    with KeptResponses(path, groups) as kept:
        return [r for group in kept.missing for r in group]


def test_finished_responses_are_kept_and_a_cut_line_is_not(tmp_path: Path) -> None:
    def request(row: int, sample: int) -> Request:
        return Request(DrawKey(0, Stream.EVAL, 0, "task", row, sample), (1,), 9, (2,))

    groups = [tuple(request(row, sample) for sample in (0, 1)) for row in (4, 8)]
    path = tmp_path / "task.partial.jsonl"
    assert _keep(path, groups, 3) == [groups[1][1]]
    with path.open("a") as file:
        file.write('{"row": 8, "sam')
    assert _keep(path, groups, 0) == [groups[1][1]]
    assert _keep(path, groups, 1) == []
    assert [json.loads(line)["row"] for line in path.read_text().splitlines()] == [4, 4, 8, 8]


def test_unknown_tasks_and_missing_files_are_named(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match=r"'gsm8'.*gsm8k.*reasoning-gym:NAME"):
        find_task("gsm8")
    with pytest.raises(ConfigError, match=r"gsm8k is read from a file.*--data"):
        load_task(TASKS["gsm8k"], None, tokenizer)
    with pytest.raises(DataError, match=r"gsm8k/test\.jsonl: no such file"):
        load_task(TASKS["gsm8k"], tmp_path, tokenizer)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"samples": 2}, "at --temperature 0 all responses"),
        ({"params": SamplingParams(temperature=0.0, top_p=0.9)}, "no effect at --temperature 0"),
        ({"samples": 2, "params": WARM, "ks": (1, 3)}, "--k 3: must lie between 1"),
        ({"tasks": (TASKS["mbpp"],)}, "--allow-code-execution"),
    ],
)
def test_contradictions_end_before_the_work(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        check_plan(EvalPlan(**{"tasks": (TASKS["gsm8k"],), **changes}))


def _write_gsm8k(folder: Path) -> None:
    (folder / "gsm8k").mkdir()
    rows = [{"question": f"{n}+1", "answer": f"<<{n}+1>>so\n#### {n + 1}"} for n in range(3)]
    for name in ("train", "test"):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "gsm8k" / f"{name}.jsonl").write_text(lines)


def test_worked_examples_stand_before_each_prompt(tmp_path: Path, tokenizer: Tokenizer) -> None:
    _write_gsm8k(tmp_path)
    plain = load_task(TASKS["gsm8k"], tmp_path, tokenizer, limit=2)
    assert [(p.dataset, p.row, p.text) for p in plain] == [("gsm8k", 0, "0+1"), ("gsm8k", 1, "1+1")]
    shown = load_task(TASKS["gsm8k"], tmp_path, tokenizer, limit=1, few_shot=1)[0]
    turns = [
        {"role": "system", "content": TASKS["gsm8k"].instruction},
        {"role": "user", "content": "0+1"},
        {"role": "assistant", "content": "so\nAnswer: 1"},
        {"role": "user", "content": "0+1"},
    ]
    assert shown.ids == tokenizer.chat(turns)
    style = PromptStyle(chat_template=False)
    (bare,) = load_task(TASKS["gsm8k"], tmp_path, tokenizer, limit=1, few_shot=1, style=style)
    assert tokenizer.decode(bare.ids) == "0+1\nso\nAnswer: 1\n\n0+1\n"
    with pytest.raises(ConfigError, match="svamp has no worked examples; only gsm8k has"):
        load_task(TASKS["svamp"], _with_svamp(tmp_path), tokenizer, few_shot=1)


def _with_svamp(folder: Path) -> Path:
    (folder / "svamp").mkdir()
    row = {"Body": "a", "Question": "b", "Answer": 145.0}
    (folder / "svamp" / "SVAMP.json").write_text(json.dumps([row]))
    return folder


@pytest.mark.parametrize(
    ("name", "rows", "right"),
    [
        ("gsm8k", 1319, "so it is {}"),
        ("svamp", 1000, "Answer: {}"),
        ("multiarith", 600, "Answer: {}"),
    ],
)
def test_published_files_are_read_and_graded(
    shared_data: Path, tokenizer: Tokenizer, name: str, rows: int, right: str
) -> None:
    prompts = load_task(TASKS[name], shared_data / "rl", tokenizer)
    assert len(prompts) == rows
    rewards = build_rewards([TASKS[name].reward])
    rewards.check(prompts)
    for prompt in prompts[:100]:
        gold = (prompt.answer or "").rpartition("#### ")[2]
        assert set(rewards.parts(prompt, Response(right.format(gold))).values()) == {1.0}


def test_published_programs_pass_their_tests(shared_data: Path, tokenizer: Tokenizer) -> None:
    from ratoon.rl.rewards import confined

    if not confined.is_supported():
        pytest.skip("the sandbox is written for Linux on x86-64")
    prompts = load_task(TASKS["mbpp"], shared_data / "rl", tokenizer, limit=8)
    rewards = build_rewards([{**TASKS["mbpp"].reward, "allow_code_execution": True}])
    rewards.check(prompts)
    for prompt in prompts:
        right = Response(f"```python\n{prompt.fields['code']}\n```")
        assert rewards.parts(prompt, right) == {"code": 1.0}
        assert rewards.parts(prompt, Response("```python\npass\n```")) == {"code": 0.0}
