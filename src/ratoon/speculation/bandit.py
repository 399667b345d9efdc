"""BEG-MAB: the bucketed epsilon-greedy bandit of TLT, as a baseline for `cost_model`.

Arms are grouped by the number of tokens to verify, and each group serves a range of live batches:
many tokens for few sequences, few for many. Within a group the arm with the highest median reward
is taken, but for a share of the steps, which explore. Source: TLT (arXiv 2511.16665), section 4.2.
"""

from __future__ import annotations

import random
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from ratoon.errors import ConfigError
from ratoon.speculation.strategy import PLAIN, Strategy
from ratoon.speculation.tuner import StepRecord, Unmeasured, Why

EPSILON = 0.1
WINDOW = 300


class BanditTuner(Unmeasured):
    """Learns the tokens per second of each arm from the last steps that took it.

    `groups` are pairs (largest live batch, arms) in ascending order of batch; above the last one
    decoding is plain. An arm that was never taken is taken next. `seed` decides what explores.
    """

    def __init__(
        self,
        groups: Sequence[tuple[int, Sequence[Strategy]]],
        *,
        epsilon: float = EPSILON,
        window: int = WINDOW,
        seed: int = 0,
    ) -> None:
        limits = [limit for limit, _ in groups]
        if any(low >= high for low, high in zip([0, *limits], limits, strict=False)):
            raise ConfigError(f"bandit: live batches {limits} must be positive and ascending")
        if any(not arms for _, arms in groups):
            raise ConfigError("bandit: a group has no arms; give each at least one")
        if not 0 <= epsilon <= 1 or window < 1:
            raise ConfigError(
                f"bandit: epsilon = {epsilon} must lie in [0, 1], window = {window} be at least 1"
            )
        self._groups = [(limit, tuple(arms)) for limit, arms in groups]
        self._epsilon = epsilon
        self._source = random.Random(seed)
        self._rewards: dict[Strategy, deque[float]] = {
            arm: deque(maxlen=window) for _, group in self._groups for arm in group
        }

    @property
    def why(self) -> Why:
        """See `Tuner.why`. Within a bucket every arm guesses, so only its limit switches."""
        return Why("live batch", "the arms of this live batch's bucket")

    def choose(self, num_live: int) -> Strategy:
        """See `Tuner.choose`."""
        arms = next((arms for limit, arms in self._groups if num_live <= limit), (PLAIN,))
        if len(arms) == 1:
            return arms[0]
        untried = [arm for arm in arms if not self._rewards[arm]]
        if untried:
            return untried[0]
        if self._source.random() < self._epsilon:
            return self._source.choice(arms)
        return max(arms, key=lambda arm: statistics.median(self._rewards[arm]))

    def observe(self, record: StepRecord) -> None:
        """See `Tuner.observe`. The reward is tokens per second of the whole live batch."""
        rewards = self._rewards.get(record.strategy)
        if rewards is not None:
            rewards.append(record.tokens / (record.draft_s + record.verify_s))

    def state_dict(self) -> dict[str, Any]:
        """See `StatefulTuner.state_dict`. Windows are in the order of the groups' arms."""
        version, numbers, spare = self._source.getstate()
        return {
            "rewards": [list(window) for window in self._rewards.values()],
            "source": [version, list(numbers), spare],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `StatefulTuner.load_state_dict`."""
        for window, rewards in zip(self._rewards.values(), state["rewards"], strict=True):
            window.clear()
            window.extend(rewards)
        version, numbers, spare = state["source"]
        self._source.setstate((version, tuple(numbers), spare))
