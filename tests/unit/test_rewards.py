"""Rewards: what counts as right, and how several make one score."""

from __future__ import annotations

import pickle
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest

from ratoon.errors import ConfigError, DataError, RewardError
from ratoon.records import Prompt
from ratoon.rl.rewards import REWARDS, build_rewards
from ratoon.rl.rewards.answers import final_answer, last_box, numbers_in, reference_answer
from ratoon.rl.rewards.base import Response, RewardSum, finite_score


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
        ("3/4 cup, -1/2, 1,000/4 and 1/0", ["3/4", "-1/2", "250", "1", "0"]),
        (r"\$1{,}080 or 1,\!080 or 50\%", ["1080", "1080", "50"]),
        ("9" * 9000, [str(int("9" * 4000))]),
        ("no digits", []),
    ],
)
def test_numbers_are_read_with_signs_decimals_and_thousands(text: str, expected: list[str]) -> None:
    assert numbers_in(text) == [Fraction(number) for number in expected]


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
        ("Answer: $6", "6", 1.0),
        ("Answer: 60", "6", 0.0),
        ("6 apples", "6", 1.0),
        ("Answer: 1080 dollars", "1,080", 1.0),
        ("Answer: 3/4", "0.75", 1.0),
        ("Answer: 3/4", "3", 0.0),
        (r"so \boxed{\boxed{6}}, as 7 > 6 and 8", "6", 1.0),
        (r"\boxed{5} no, \boxed{6} Answer: 7", "6", 1.0),
        (r"it is 6, \boxed{7", "7", 1.0),
        ("<answer>6</answer> in 7 steps", "6", 1.0),
        ("Answer: 10^10^10", "6", 0.0),
        ("Answer: 50%", "50", 1.0),
        ("Answer: NaN", "6", 0.0),
        ("None", "6", 0.0),
    ],
)
def test_a_number_must_be_equal_and_in_the_right_place(
    text: str, answer: str, score: float
) -> None:
    assert REWARDS["number"]()(_prompt(answer), text) == score


def test_the_answer_of_a_data_set_may_explain_itself() -> None:
    assert REWARDS["number"]()(_prompt("5 * 2 = 10\n#### 10"), "Answer: 10") == 1.0
    assert reference_answer("so 2\n#### 1,080 ") == "1,080"
    assert reference_answer(r"It is $\boxed{\frac{1}{2}}$, not 3.") == r"\frac{1}{2}"


def test_a_percent_sign_is_a_unit_unless_it_is_to_count() -> None:
    percent = REWARDS["number"](percent=True)
    assert percent(_prompt("0.5"), "Answer: 50%") == 1.0
    assert percent(_prompt("50%"), r"\boxed{50\%}") == 1.0
    assert percent(_prompt("50"), "Answer: 50%") == 0.0


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (r"\boxed{1} and \boxed{2}", "2"),
        (r"\boxed{\boxed{2} + x}", "2 + x"),
        (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{\left\{1, 2\right\}}", r"\left\{1, 2\right\}"),
        (r"\boxed{1 + \boxed{2}", "2"),
        (r"} \fbox{3} }", "3"),
        (r"\boxed{3", None),
        ("no box", None),
        ("\\boxed{" * 5000 + "6" + "}" * 5000, "6"),
    ],
)
def test_a_box_is_the_last_outermost_one_that_is_closed(text: str, inside: str | None) -> None:
    assert last_box(text) == inside


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("The answer is (B).", 1.0),
        ("The correct answer is: **B**", 1.0),
        ("Option B is correct, because D is false.", 1.0),
        (r"\boxed{\text{(B)}}", 1.0),
        ("Answer: B) six apples", 1.0),
        ("I would choose option B", 1.0),
        ("B", 1.0),
        ("(B) six apples", 1.0),
        ("B. Because", 1.0),
        ("The answer is A or so; no, the answer is B", 1.0),
        ("The answer is a book", 0.0),
        ("Bob says so", 0.0),
        ("The answer is Bob", 0.0),
        ("Answer: C, not B", 0.0),
        ("A robe takes 2 bolts. The answer is D.", 0.0),
        ("", 0.0),
    ],
)
def test_a_choice_is_read_from_the_usual_phrases(text: str, score: float) -> None:
    choice = REWARDS["choice"]()
    choice.check(_prompt("(B)"))
    assert choice(_prompt("(B)"), text) == score
    assert choice(_prompt("A"), "A robe takes 2 bolts") == 0.0
    with pytest.raises(DataError, match=r"letters A, B, C, D, E, found '6'"):
        choice.check(_prompt("6"))


def test_length_costs_linearly_between_target_and_limit() -> None:
    rewards = build_rewards([{"kind": "length", "target": 100, "limit": 200, "weight": 0.5}])
    for tokens, part in ((0, 0.0), (100, 0.0), (101, -0.01), (150, -0.5), (200, -1.0), (900, -1.0)):
        parts = rewards.parts(_prompt(), Response("whatever", tokens))
        assert parts == {"length": part}
        assert rewards.total(parts) == 0.5 * part
    with pytest.raises(RewardError, match="number of the response's tokens"):
        rewards.parts(_prompt(), Response("whatever"))


def test_exact_ignores_outer_white_space_only() -> None:
    exact = REWARDS["exact"]()
    assert exact(_prompt("a b"), "  a b\n") == 1.0
    assert exact(_prompt("a b"), "a  b") == 0.0
    assert REWARDS["exact"](final=True)(_prompt("a b"), "Well. Answer: a b") == 1.0


def test_a_format_is_searched_across_lines() -> None:
    reward = REWARDS["format"](pattern=r"<a>.*</a>\Z")
    assert reward(_prompt(), "x<a>1\n2</a>") == 1.0
    assert reward(_prompt(), "<a>1</a> more") == 0.0


def test_the_final_answer_prefers_tags_then_the_marker() -> None:
    assert final_answer("<answer>1</answer> Answer: 2 <answer> 3 </answer>") == "3"
    assert final_answer("Answer: 1\nAnswer: 2") == "2"
    assert final_answer(r"Answer: $\boxed{2}$, or so") == "2"
    assert final_answer(r"<answer>\boxed{3}</answer> \boxed{2}") == "3"
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
    parts = rewards.parts(_prompt("7"), Response("Answer: 7"))
    assert parts == {"number": 1.0, "format": 1.0, "format_2": 0.0}
    assert rewards.total(parts) == 1.25
    assert pickle.loads(pickle.dumps(rewards)) == rewards


def test_no_reward_and_unknown_rewards_are_refused() -> None:
    with pytest.raises(ConfigError, match="No reward"):
        build_rewards([])
    with pytest.raises(ConfigError, match=r"'beauty'.*number"):
        build_rewards([{"kind": "beauty"}])


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), "1", [1.0], 1j])
def test_only_finite_numbers_are_scores(value: object) -> None:
    with pytest.raises(RewardError, match="finite number"):
        finite_score(value, "mine")


def test_booleans_and_numpy_scalars_are_scores() -> None:
    numpy = pytest.importorskip("numpy")
    assert finite_score(True, "mine") == 1.0
    assert finite_score(numpy.float32(0.5), "mine") == 0.5


def _parts(rewards: RewardSum, prompt: Prompt, text: str) -> dict[str, float]:
    return rewards.parts(prompt, Response(text))


def _written(tmp_path: Path, content: str) -> RewardSum:
    """A reward of the function `score` in a file with this content."""
    file = tmp_path / "written.py"
    file.write_text(content)
    rewards = build_rewards([{"kind": "python", "function": f"{file}:score"}])
    rewards.load()
    return rewards


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
    assert _parts(rewards, _prompt("7", level=100), "abc") == {"python": 113.0}


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


@pytest.mark.parametrize("word", ["", "async "])
@pytest.mark.parametrize(
    ("parameters", "value", "expected"),
    [
        ("response, answer, fields", "len(response) + fields['level']", 103.0),
        ("prompts, completions, **columns", "[len(c) + x for c, x in {PAIRS}]", 103.0),
        ("completions, level", "[len(completions[0]) + level[0]]", 103.0),
        ("completions, answer, *, ids=None", "[float(answer == ['7'])]", 1.0),
        ("prompts, completions, **kwargs", "[None]", 0.0),
        ("data_source, solution_str, ground_truth, extra_info=None", "{VERL}", 1.0),
        ("solution_str, ground_truth, **kwargs", "{'score': 0.5, 'acc': 1.0}", 0.5),
    ],
)
def test_functions_of_trl_and_verl_are_called_as_these_do(
    tmp_path: Path, word: str, parameters: str, value: str, expected: float
) -> None:
    value = value.replace("{PAIRS}", "zip(completions, columns['level'])").replace(
        "{VERL}", "float((data_source, ground_truth, extra_info) == ('sums', '7', {'index': 4}))"
    )
    rewards = _written(tmp_path, f"{word}def score({parameters}):\n    return {value}\n")
    prompt = _prompt("7", level=100, data_source="sums", extra_info={"index": 4})
    assert _parts(rewards, prompt, "abc") == {"python": expected}


def test_a_function_of_trls_sees_conversations_as_messages(tmp_path: Path) -> None:
    rewards = _written(
        tmp_path,
        "def score(prompts, completions):\n"
        "    return [p[0]['content'] == c[0]['content'] for p, c in zip(prompts, completions)]\n",
    )
    messages = ({"role": "user", "content": "say it"},)
    prompt = Prompt("set", 0, "say it", (1,), messages=messages)
    assert _parts(rewards, prompt, "say it") == {"python": 1.0}
    assert _parts(rewards, prompt, "no") == {"python": 0.0}


@pytest.mark.parametrize(
    ("parameters", "complaint"),
    [
        ("completions, solution_str", "`completions` is TRL's and `solution_str` verl's"),
        ("solution_str, tokenizer", "give `tokenizer` a default"),
        ("**kwargs", "three positional parameters, or those of TRL"),
    ],
)
def test_a_function_of_no_known_form_is_a_config_error(
    tmp_path: Path, parameters: str, complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        _written(tmp_path, f"def score({parameters}): return 1\n")


@pytest.mark.parametrize(
    ("definition", "complaint"),
    [
        ("(completions, level, depth): return [1]", "takes the column `depth`.*found: level"),
        ("(completions): return 1.0", "must return a list"),
        ("(completions): return [1.0, 2.0]", "must return a list"),
        ("(completions): return None", "must return a list"),
        ("(completions): return [float('nan')]", "finite number"),
        ("(solution_str, ground_truth): return {'acc': 1}", "without `score`"),
        ("(solution_str, ground_truth): return None", "finite number"),
    ],
)
def test_what_such_a_function_may_not_return_is_said(
    tmp_path: Path, definition: str, complaint: str
) -> None:
    rewards = _written(tmp_path, f"def score{definition}\n")
    with pytest.raises(RewardError, match=complaint):
        _parts(rewards, _prompt("7", level=1), "abc")


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
