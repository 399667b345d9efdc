"""The scorers of reasoning-gym."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from ratoon.errors import CapabilityError, DataError
from ratoon.records import Prompt
from ratoon.rl.rewards.answers import final_answer
from ratoon.rl.rewards.base import Reward


@dataclass(frozen=True, slots=True)
class GymReward(Reward):
    """What the task that the prompt came from gives for the response's final answer.

    The scorers give some wrong answers small rewards (0.01 for any text in `countdown`); `strict`
    counts every score below 1 as 0. The final answer is the last `<answer>` element, else what
    follows the last `Answer:`, else the whole response.
    """

    strict: bool = True

    def load(self) -> None:
        """Import reasoning-gym, which takes about a second."""
        _library()

    def check(self, prompt: Prompt) -> None:
        """Refuse a prompt that is not a reasoning-gym task."""
        if not {"task", "entry"} <= prompt.fields.keys():
            raise DataError(
                f"{prompt.dataset}, row {prompt.row}: the reward `reasoning_gym` needs prompts of "
                "kind `reasoning_gym`."
            )

    def __call__(self, prompt: Prompt, text: str) -> float:
        """Score with the task's own function."""
        score = _scorer(prompt.fields["task"])(final_answer(text), prompt.fields["entry"])
        return float(score >= 1.0) if self.strict else score


def _library() -> Any:
    """The package, which has no types."""
    try:
        import reasoning_gym
    except ImportError:
        raise CapabilityError(
            "The reward `reasoning_gym` needs the package reasoning-gym, which is not installed: "
            'pip install "ratoon[tasks]".'
        ) from None
    return reasoning_gym


@cache
def _scorer(task: str) -> Callable[[str, Mapping[str, Any]], float]:
    scorer: Callable[[str, Mapping[str, Any]], float] = _library().get_score_answer_fn(task)
    return scorer
