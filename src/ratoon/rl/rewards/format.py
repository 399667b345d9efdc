"""The right form."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ratoon.records import Prompt
from ratoon.rl.rewards.base import Reward


@dataclass(frozen=True, slots=True)
class FormatReward(Reward):
    """1 if the regular expression is found in the response, else 0; `.` matches newlines."""

    pattern: str

    def __call__(self, prompt: Prompt, text: str) -> float:
        r"""Search anywhere; anchor with `\A` and `\Z` where the whole response is meant."""
        return float(re.search(self.pattern, text, re.DOTALL) is not None)
