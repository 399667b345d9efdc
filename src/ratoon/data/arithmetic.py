"""Sums with worked solutions, generated: a procedural task with a long tail of lengths.

A problem is a chain of additions and subtractions. Its solution has one line for each partial
result, so that its length follows the number of terms, which falls off geometrically: many short
responses and a few several times as long, as in the reasoning of larger models.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ratoon.errors import DataError

Split = Literal["train", "eval"]

# Each further term is this likely, up to the most.
CONTINUE_CHANCE = 0.75
# One problem in so many is held out, whatever the seed.
EVAL_SHARE = 8
# Partial results stay below this many times the largest term, and never below zero.
CEILING_FACTOR = 5
_MAX_TRIES = 2_000


@dataclass(frozen=True, slots=True)
class Problem:
    r"""One sum.

    Example: `Problem(terms=(12, 7, -4))` has the text `"12 + 7 - 4 = ?\n"`, the answer `"15"` and
    the solution `"12 + 7 = 19\n19 - 4 = 15\nAnswer: 15"`.
    """

    terms: tuple[int, ...]

    @property
    def text(self) -> str:
        """The question."""
        return str(self.terms[0]) + "".join(_operation(term) for term in self.terms[1:]) + " = ?\n"

    @property
    def answer(self) -> str:
        """The result."""
        return str(sum(self.terms))

    @property
    def solution(self) -> str:
        """A line for each partial result, then the answer."""
        lines, total = [], self.terms[0]
        for term in self.terms[1:]:
            lines.append(f"{total}{_operation(term)} = {total + term}")
            total += term
        return "\n".join([*lines, f"Answer: {total}"])

    @property
    def split(self) -> Split:
        """Whether the problem is for training or held out: a function of its content alone."""
        digest = hashlib.blake2b(self.text.encode(), digest_size=8).digest()
        return "eval" if int.from_bytes(digest) % EVAL_SHARE == 0 else "train"


def _operation(term: int) -> str:
    return f" {'+' if term >= 0 else '-'} {abs(term)}"


def make_problems(
    split: Split,
    *,
    size: int,
    seed: int = 0,
    min_terms: int = 2,
    max_terms: int = 6,
    max_value: int = 20,
) -> list[Problem]:
    """Different problems of one split; a larger `size` continues the same list.

    Args:
        split: problems of different splits never have the same content, whatever their seeds.
        size: how many.
        seed: of the generator.
        min_terms: fewest terms, at least 2.
        max_terms: most terms.
        max_value: largest term; terms are at least 1.

    Raises:
        DataError: if there are not that many different problems.
    """
    drawn = _draw(random.Random(seed), min_terms, max_terms, max_value)
    found: dict[Problem, None] = {}
    tries = 0
    while len(found) < size:
        problem = next(drawn)
        tries += 1
        if problem.split == split and problem not in found:
            found[problem] = None
            tries = 0
        elif tries >= _MAX_TRIES:
            raise DataError(
                f"arithmetic: size = {size}, but only {len(found)} different problems were found "
                f"with {min_terms} to {max_terms} terms up to {max_value}. Lower size, or raise "
                "max_terms or max_value."
            )
    return list(found)


def _draw(
    source: random.Random, min_terms: int, max_terms: int, max_value: int
) -> Iterator[Problem]:
    ceiling = CEILING_FACTOR * max_value
    while True:
        num_terms = min_terms
        while num_terms < max_terms and source.random() < CONTINUE_CHANCE:
            num_terms += 1
        terms = [source.randint(1, max_value)]
        for _ in range(num_terms - 1):
            total, value = sum(terms), source.randint(1, max_value)
            can_subtract, can_add = value <= total, total + value < ceiling
            add = can_add and (not can_subtract or source.random() < 0.5)
            terms.append(value if add else -value)
        yield Problem(tuple(terms))
