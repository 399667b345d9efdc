"""Symbolic answers: what is equal, and what hangs an algebra system without hanging the run."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ratoon.errors import CapabilityError, DataError
from ratoon.records import Prompt
from ratoon.rl.rewards import build_rewards
from ratoon.rl.rewards.pool import RewardPool

SECTION = {"kind": "math_verify", "timeout_s": 2.0}


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    pytest.importorskip("math_verify", reason="the extra `math` is not installed")
    with RewardPool(build_rewards([SECTION]), timeout_s=120.0, on_error="count") as pool:
        yield pool


def _prompt(answer: str | None) -> Prompt:
    return Prompt("set/train", 4, "question", (1, 2), answer)


def _scores(pool: RewardPool, pairs: list[tuple[str, str]]) -> list[float]:
    for number, (answer, text) in enumerate(pairs):
        pool.submit(number, _prompt(answer), text)
    return [result.score for result in pool.drain()]


def test_equal_answers_are_right_however_they_are_written(pool: RewardPool) -> None:
    pairs = [
        ("6", "Answer: 6"),
        ("6", r"\boxed{\boxed{6}}"),
        ("1,080", "Answer: 1080"),
        ("1080", r"so \boxed{1,080}"),
        ("6", "Answer: $6"),
        (r"\$18.90", "Answer: $18.90"),
        ("6", "Answer: 6 apples"),
        (r"\frac{3}{4}", "Answer: 0.75"),
        ("x^2+1", "Answer: 1+x^2"),
        (r"\left( 3, \frac{\pi}{2} \right)", r"\boxed{(3, \pi/2)}"),
        ("5", "Therefore the final answer is $x = 5$."),
        ("all of it\n#### 6", "<answer>6</answer>"),
        (r"thus $\boxed{\frac12}$", r"\boxed{0.5}"),
        ("B", "Answer: (B)"),
    ]
    assert _scores(pool, pairs) == [1.0] * len(pairs)


def test_other_answers_are_wrong(pool: RewardPool) -> None:
    texts = ["Answer: 7", "", "no answer", r"\boxed{6", "Answer: None", "Answer: nan", "Answer: 6x"]
    assert _scores(pool, [("16", text) for text in texts]) == [0.0] * len(texts)


def test_an_answer_that_never_ends_is_wrong_and_the_next_one_is_judged(pool: RewardPool) -> None:
    texts = [r"\boxed{10^{10^{10}}}", r"\boxed{1000000!}", r"\boxed{6}"]
    assert _scores(pool, [("6", text) for text in texts]) == [0.0, 0.0, 1.0]
    assert not pool.failures


def test_a_reference_without_mathematics_is_a_failure_not_a_wrong_answer(pool: RewardPool) -> None:
    pool.submit("odd", _prompt("$ $"), "Answer: 6")
    (result,) = pool.drain()
    assert result.failure == "not_a_number"
    pool.failures.clear()
    with pytest.raises(DataError, match="row 4: the reward `math_verify` needs an answer"):
        build_rewards([SECTION]).check([_prompt(" ")])


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(CapabilityError, match=r"pip install .*ratoon\[math\]"):
        build_rewards([SECTION]).load()


def test_published_solutions_agree_with_their_answers(pool: RewardPool, shared_data: Path) -> None:
    lines = (shared_data / "rl/math/math500.jsonl").read_text().splitlines()[:100]
    rows = [json.loads(line) for line in lines]
    assert _scores(pool, [(row["answer"], row["solution"]) for row in rows]) == [1.0] * 100
