"""Rewards: what counts as right, and how several make one score."""

from __future__ import annotations

import pickle
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import pytest

from ratoon.errors import ConfigError, DataError, RewardError
from ratoon.records import Prompt
from ratoon.rl.rewards import REWARDS, build_rewards
from ratoon.rl.rewards.answers import final_answer, numbers_in
from ratoon.rl.rewards.base import finite_score


def _prompt(answer: str | None = None, **fields: object) -> Prompt:
    return Prompt("set/train", 4, "question", (1, 2), answer, fields)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("from -3 to 1,250.50", ["-3", "1250.50"]),
        ("10-3 and 10 - 3 and (2)-1", ["10", "3", "10", "3", "2", "1"]),
        ("3,4 and 1,23", ["3", "4", "1", "23"]),
        ("$12. Then .5% or +7", ["12", ".5", "7"]),
        ("\u22128 and 1,234,567", ["-8", "1234567"]),
        ("no digits", []),
    ],
)
def test_numbers_are_read_with_signs_decimals_and_thousands(text: str, expected: list[str]) -> None:
    assert numbers_in(text) == [Decimal(number) for number in expected]


@pytest.mark.parametrize(
    ("text", "answer", "score"),
    [
        ("3 + 4 = 7\nAnswer: 7", "7", 1.0),
        ("Answer: 7 apples, not 9", "7", 1.0),
        ("Answer: 6\nAnswer: 7", "7", 1.0),
        ("Answer: none of 7", "8", 0.0),
        ("It is 3, no, 7.", "7", 1.0),
        ("7 then 3", "7", 0.0),
        ("Answer: 1,250.0", "1250", 1.0),
        ("Answer: -7", "7", 0.0),
        ("7 Answer:", "7", 0.0),
        ("", "7", 0.0),
        ("Answer: 0.1000000000000000055", "0.1", 0.0),
    ],
)
def test_a_number_must_be_equal_and_in_the_right_place(
    text: str, answer: str, score: float
) -> None:
    assert REWARDS["number"]()(_prompt(answer), text) == score


def test_the_answer_of_a_data_set_may_explain_itself() -> None:
    assert REWARDS["number"]()(_prompt("5 * 2 = 10\n#### 10"), "Answer: 10") == 1.0


def test_exact_ignores_outer_white_space_only() -> None:
    exact = REWARDS["exact"]()
    assert exact(_prompt("a b"), "  a b\n") == 1.0
    assert exact(_prompt("a b"), "a  b") == 0.0


def test_a_format_is_searched_across_lines() -> None:
    reward = REWARDS["format"](pattern=r"<a>.*</a>\Z")
    assert reward(_prompt(), "x<a>1\n2</a>") == 1.0
    assert reward(_prompt(), "<a>1</a> more") == 0.0


def test_the_final_answer_prefers_tags_then_the_marker() -> None:
    assert final_answer("<answer>1</answer> Answer: 2 <answer> 3 </answer>") == "3"
    assert final_answer("Answer: 1\nAnswer: 2") == "2"
    assert final_answer("  only this ") == "only this"


def test_prompts_that_can_never_be_judged_are_refused_by_row() -> None:
    rewards = build_rewards([{"kind": "number"}])
    rewards.check([_prompt("7")])
    with pytest.raises(DataError, match=r"set/train, row 4: .*number.*'seven'"):
        rewards.check([_prompt("7"), _prompt("seven")])
    with pytest.raises(DataError, match="row 4"):
        build_rewards([{"kind": "exact"}]).check([_prompt(None)])
    with pytest.raises(DataError, match="reasoning_gym"):
        build_rewards([{"kind": "reasoning_gym", "strict": True}]).check([_prompt("7")])


def test_a_sum_weighs_its_parts_and_keeps_them_apart() -> None:
    rewards = build_rewards(
        [
            {"kind": "number", "weight": 1.0},
            {"kind": "format", "weight": 0.25, "pattern": "Answer"},
            {"kind": "format", "weight": 0.5, "pattern": "thanks"},
        ]
    )
    parts = rewards.parts(_prompt("7"), "Answer: 7")
    assert parts == {"number": 1.0, "format": 1.0, "format_2": 0.0}
    assert rewards.total(parts) == 1.25
    assert pickle.loads(pickle.dumps(rewards)) == rewards


def test_no_reward_and_unknown_rewards_are_refused() -> None:
    with pytest.raises(ConfigError, match="No reward"):
        build_rewards([])
    with pytest.raises(ConfigError, match=r"'length'.*number"):
        build_rewards([{"kind": "length"}])


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), "1", [1.0], 1j])
def test_only_finite_numbers_are_scores(value: object) -> None:
    with pytest.raises(RewardError, match="finite number"):
        finite_score(value, "mine")


def test_booleans_and_numpy_scalars_are_scores() -> None:
    numpy = pytest.importorskip("numpy")
    assert finite_score(True, "mine") == 1.0
    assert finite_score(numpy.float32(0.5), "mine") == 0.5


def _python_reward(function: str) -> object:
    return build_rewards([{"kind": "python", "function": function}])


def test_a_function_of_a_file_sees_response_answer_and_fields(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("FACTOR = 2\n")
    file = tmp_path / "mine.py"
    file.write_text(
        "from helper import FACTOR\n"
        "def score(response, answer, fields):\n"
        "    return FACTOR * len(response) + int(answer) + fields['level']\n"
    )
    rewards = build_rewards([{"kind": "python", "function": f"{file}:score"}])
    rewards.load()
    assert rewards.parts(_prompt("7", level=100), "abc") == {"python": 113.0}


@pytest.mark.parametrize(
    ("content", "name", "complaint"),
    [
        (None, "score", "no such file"),
        ("def score(:\n", "score", "SyntaxError"),
        ("import a_package_that_is_not_there\n", "score", "a_package_that_is_not_there"),
        ("raise RuntimeError('at import')\n", "score", "at import"),
        ("import sys\nsys.exit(3)\n", "score", "SystemExit: 3"),
        ("def score(response, answer): return 1\n", "score", r"takes \(response, answer\), but"),
        ("def score(response, *, answer, fields): return 1\n", "score", "three positional"),
        ("def score(a, b, c, d): return 1\n", "score", "missing a required argument: 'd'"),
        ("other = 1\n", "score", "does not exist"),
        ("score = 1\n", "score", "is no function"),
    ],
)
def test_a_function_that_cannot_be_imported_is_a_config_error(
    tmp_path: Path, content: str | None, name: str, complaint: str
) -> None:
    file = tmp_path / "broken.py"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=complaint) as caught:
        build_rewards([{"kind": "python", "function": f"{file}:{name}"}]).load()
    assert "broken.py" in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        "def score(*parts): return 1.0\n",
        "def score(response, answer, fields, scale=2): return 1.0\n",
        "class score:\n    def __init__(self, *parts): pass\n    def __float__(self): return 1.0\n",
        "score = max\n",
    ],
)
def test_whatever_takes_three_arguments_can_be_a_reward(tmp_path: Path, content: str) -> None:
    (tmp_path / "fine.py").write_text(content)
    rewards = [{"kind": "python", "function": f"{tmp_path / 'fine.py'}:score"}]
    build_rewards(rewards).load()


def test_a_module_that_does_not_exist_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="no_such_module_at_all"):
        build_rewards([{"kind": "python", "function": "no_such_module_at_all:score"}]).load()


def test_rewards_import_no_torch() -> None:
    program = (
        "import sys, ratoon.rl.rewards.pool\n"
        "assert not {'torch', 'transformers', 'reasoning_gym'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_gym_scores_count_in_full_or_not_at_all_when_strict() -> None:
    gym = pytest.importorskip("reasoning_gym", reason="the extra `tasks` is not installed")
    entry = gym.create_dataset("spell_backward", size=1, seed=0)[0]
    prompt = _prompt(entry["answer"], task="spell_backward", entry=entry)
    wrong = entry["answer"][:-1] + "#"
    strict, lenient = REWARDS["reasoning_gym"](strict=True), REWARDS["reasoning_gym"](strict=False)
    strict.check(prompt)
    assert strict(prompt, f"So Answer: {entry['answer']}") == 1.0
    assert strict(prompt, f"Answer: {wrong}") == 0.0
    assert 0.0 < lenient(prompt, f"Answer: {wrong}") < 1.0
