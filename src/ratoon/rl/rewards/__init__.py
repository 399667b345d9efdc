"""Rewards, by the name that a configuration gives them. Imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ratoon.errors import ConfigError
from ratoon.rl.rewards.base import Reward, RewardSum, Term
from ratoon.rl.rewards.choice import ChoiceReward
from ratoon.rl.rewards.code import CodeReward
from ratoon.rl.rewards.exact import ExactReward
from ratoon.rl.rewards.format import FormatReward
from ratoon.rl.rewards.gym import GymReward
from ratoon.rl.rewards.length import LengthReward
from ratoon.rl.rewards.math_verify import MathVerifyReward
from ratoon.rl.rewards.number import NumberReward
from ratoon.rl.rewards.python import PythonReward

REWARDS: dict[str, Callable[..., Reward]] = {
    "number": NumberReward,
    "exact": ExactReward,
    "math_verify": MathVerifyReward,
    "choice": ChoiceReward,
    "format": FormatReward,
    "length": LengthReward,
    "reasoning_gym": GymReward,
    "code": CodeReward,
    "python": PythonReward,
}


def build_rewards(sections: Iterable[Mapping[str, Any]]) -> RewardSum:
    """The weighted sum that configuration sections describe.

    Args:
        sections: each with `kind`, `weight`, and the arguments of that kind.

    Raises:
        ConfigError: if there is no section, or one of an unknown kind.
    """
    terms: list[Term] = []
    seen: Counter[str] = Counter()
    for section in sections:
        arguments = dict(section)
        kind, weight = arguments.pop("kind"), float(arguments.pop("weight", 1.0))
        if kind not in REWARDS:
            raise ConfigError(f"Unknown reward {kind!r}; allowed: {', '.join(REWARDS)}.")
        seen[kind] += 1
        name = f"{kind}_{seen[kind]}" if seen[kind] > 1 else kind
        terms.append(Term(name, weight, REWARDS[kind](**arguments)))
    if not terms:
        raise ConfigError("No reward is configured; give at least one.")
    return RewardSum(tuple(terms))


__all__ = ["REWARDS", "Reward", "RewardSum", "Term", "build_rewards"]
