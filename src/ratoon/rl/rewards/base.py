"""What a reward is, and how several make one score."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Real

from ratoon.errors import RewardError
from ratoon.records import Prompt


@dataclass(frozen=True, slots=True)
class Response:
    """What is judged: decoded text without special tokens, and its length where it is known."""

    text: str
    num_tokens: int | None = None


class Reward:
    """Judges one response. Frozen and picklable: it travels to worker processes.

    A kind defines `__call__`, or `score` if text alone is not enough for it.
    """

    def load(self) -> None:
        """Import what scoring needs; called once in each process before the first score.

        Raises:
            CapabilityError: if a package is missing.
            ConfigError: if the user's function cannot be imported.
        """

    def check(self, prompt: Prompt) -> None:
        """Refuse a prompt that this reward could never judge, before any work starts.

        Raises:
            DataError: naming the data set, the row and what is missing.
        """

    def __call__(self, prompt: Prompt, text: str) -> float:
        """Score `text`, the decoded response without special tokens."""
        raise NotImplementedError

    def score(self, prompt: Prompt, response: Response) -> float:
        """Score the response."""
        return self(prompt, response.text)


@dataclass(frozen=True, slots=True)
class Term:
    """One reward of a sum; `name` labels its part in metrics."""

    name: str
    weight: float
    reward: Reward


@dataclass(frozen=True, slots=True)
class RewardSum:
    """The weighted sum of several rewards."""

    terms: tuple[Term, ...]

    def load(self) -> None:
        """Prepare every term; see `Reward.load`."""
        for term in self.terms:
            term.reward.load()

    def check(self, prompts: Iterable[Prompt]) -> None:
        """Refuse prompts that a term could never judge; see `Reward.check`."""
        for prompt in prompts:
            for term in self.terms:
                term.reward.check(prompt)

    def parts(self, prompt: Prompt, response: Response) -> dict[str, float]:
        """The unweighted score of each term.

        Raises:
            RewardError: if a term returns something that is not a finite number.
        """
        return {
            term.name: finite_score(term.reward.score(prompt, response), term.name)
            for term in self.terms
        }

    def total(self, parts: dict[str, float]) -> float:
        """The weighted sum of `parts`."""
        return math.fsum(term.weight * parts[term.name] for term in self.terms)


def finite_score(value: object, name: str) -> float:
    """`value` as a float; booleans count as 0 and 1.

    Raises:
        RewardError: if it is None, NaN, infinite or no number.
    """
    if not isinstance(value, Real) or not math.isfinite(value):
        raise RewardError(
            f"Reward {name!r} returned {value!r} ({type(value).__name__}); a finite number is "
            "expected."
        )
    return float(value)
