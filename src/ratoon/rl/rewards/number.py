"""A right number."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal

from ratoon.errors import DataError
from ratoon.records import Prompt
from ratoon.rl.rewards.answers import after_marker, numbers_in
from ratoon.rl.rewards.base import Reward


@dataclass(frozen=True, slots=True)
class NumberReward(Reward):
    """1 if the response's number equals the answer's exactly, else 0.

    The response's number is the first one after the last `Answer:`; without that marker, the last
    one. `1,250`, `1250.0` and `+1250` are equal.
    """

    def check(self, prompt: Prompt) -> None:
        """Refuse a prompt whose answer holds no number."""
        if prompt.answer is None or not numbers_in(prompt.answer):
            raise DataError(
                f"{prompt.dataset}, row {prompt.row}: the reward `number` needs an answer that is "
                f"a number, found {prompt.answer!r}."
            )

    def __call__(self, prompt: Prompt, text: str) -> float:
        """Compare as decimals, without rounding."""
        return float(_response_number(text) == numbers_in(prompt.answer or "")[-1])


def _response_number(text: str) -> Decimal | None:
    marked = after_marker(text)
    if marked is not None:
        return next(iter(numbers_in(marked)), None)
    return next(reversed(numbers_in(text)), None)
