"""A right number."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from ratoon.errors import DataError
from ratoon.records import Prompt
from ratoon.rl.rewards.answers import marked_answer, numbers_in, reference_answer
from ratoon.rl.rewards.base import Reward


@dataclass(frozen=True, slots=True)
class NumberReward(Reward):
    r"""1 if the response's number equals the answer's exactly, else 0.

    The response's number is the first one of its marked answer (`<answer>`, `\boxed{}`,
    `Answer:`); without one, the last number. `1,250`, `1250.0`, `$1250` and `1250 apples` are
    equal, and `3/4` is `0.75`.

    Attributes:
        percent: `50%` is 0.5; otherwise the sign is a unit like any other.
    """

    percent: bool = False

    def check(self, prompt: Prompt) -> None:
        """Refuse a prompt whose answer holds no number."""
        if self._reference(prompt) is None:
            raise DataError(
                f"{prompt.dataset}, row {prompt.row}: the reward `number` needs an answer that is "
                f"a number, found {prompt.answer!r}."
            )

    def __call__(self, prompt: Prompt, text: str) -> float:
        """Compare as fractions, without rounding."""
        marked = marked_answer(text)
        found = numbers_in(text if marked is None else marked, percent=self.percent)
        if not found:
            return 0.0
        return float(found[0 if marked is not None else -1] == self._reference(prompt))

    def _reference(self, prompt: Prompt) -> Fraction | None:
        found = numbers_in(reference_answer(prompt.answer or ""), percent=self.percent)
        return found[-1] if found else None
