"""A penalty for length."""

from __future__ import annotations

from dataclasses import dataclass

from ratoon.errors import RewardError
from ratoon.records import Prompt
from ratoon.rl.rewards.base import Response, Reward


@dataclass(frozen=True, slots=True)
class LengthReward(Reward):
    """0 up to `target` tokens, falling linearly to -1 at `limit` and beyond.

    Source: the soft overlong punishment of DAPO (Yu et al. 2025,
    https://arxiv.org/abs/2503.14476, equation 13) with `target` = L_max - L_cache and `limit` =
    L_max.
    """

    target: int
    limit: int

    def score(self, prompt: Prompt, response: Response) -> float:
        """Judge the number of tokens; the text does not matter."""
        if response.num_tokens is None:
            raise RewardError("The reward `length` needs the number of the response's tokens.")
        excess = response.num_tokens - self.target
        return -min(1.0, max(0.0, excess / (self.limit - self.target)))
