"""The very answer."""

from __future__ import annotations

from dataclasses import dataclass

from ratoon.errors import DataError
from ratoon.records import Prompt
from ratoon.rl.rewards.answers import final_answer
from ratoon.rl.rewards.base import Reward


@dataclass(frozen=True, slots=True)
class ExactReward(Reward):
    r"""1 if the response, without outer white space, is the answer, else 0.

    Attributes:
        final: compare the response's final answer (`<answer>`, `\boxed{}`, `Answer:`) instead.
    """

    final: bool = False

    def check(self, prompt: Prompt) -> None:
        """Refuse a prompt without an answer."""
        if prompt.answer is None:
            raise DataError(
                f"{prompt.dataset}, row {prompt.row}: the reward `exact` needs an answer; map the "
                "column that holds it."
            )

    def __call__(self, prompt: Prompt, text: str) -> float:
        """Compare character by character."""
        said = final_answer(text) if self.final else text.strip()
        return float(prompt.answer is not None and said == prompt.answer.strip())
