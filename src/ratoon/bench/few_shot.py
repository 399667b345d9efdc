"""Prompts of a given length: solved problems of the quickstart's task, then a long one to solve."""

from __future__ import annotations

import random
from pathlib import Path

from ratoon.data.arithmetic import make_problems
from ratoon.models.tokenizer import Tokenizer

# So long that no response ends within a benchmark's round.
_MIN_TERMS = 16
_MAX_TERMS = 32
_MAX_VALUE = 6
_SHOTS = 512


def few_shot_prompts(model: Path, count: int, length: int, seed: int) -> list[tuple[int, ...]]:
    """`count` prompts of exactly `length` tokens each, in the tokens of `model`.

    Each has other problems in another order; the first one is cut where it must be.
    """
    tokenizer = Tokenizer.load(model)
    solved = make_problems(
        "train", size=_SHOTS, seed=seed, max_terms=_MAX_TERMS, max_value=_MAX_VALUE
    )
    asked = make_problems(
        "eval",
        size=count,
        seed=seed,
        min_terms=_MIN_TERMS,
        max_terms=_MAX_TERMS,
        max_value=_MAX_VALUE,
    )
    prompts = []
    for row, question in enumerate(asked):
        shots = random.Random(f"{seed}/{row}")
        ids = tokenizer.encode(question.text)
        while len(ids) < length:
            shot = shots.choice(solved)
            ids = tokenizer.encode(f"{shot.text}{shot.solution}\n\n") + ids
        prompts.append(ids[-length:])
    return prompts
