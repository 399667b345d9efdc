"""The figures of one task, and of two models on the same keys, from graded responses."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ratoon.evals.statistics import paired_difference, pass_at_k, standard_error

# A line of stored responses: see `observe.completions.StoredCompletion`.
Row = Mapping[str, Any]


def summarise(name: str, rows: Sequence[Row], ks: Sequence[int]) -> dict[str, Any]:
    """Pass@1 and pass@k with standard errors over prompts, lengths, and the share cut off."""
    grades = _grades(rows)
    figures: dict[str, Any] = {"task": name, "prompts": len(grades), "responses": len(rows)}
    for k in sorted({1, *ks}):
        chances = [pass_at_k(len(prompt), sum(prompt), k) for prompt in grades]
        figures[f"pass@{k}"] = statistics.fmean(chances)
        figures[f"pass@{k}_stderr"] = standard_error(chances)
    figures["tokens_mean"] = statistics.fmean(len(row["token_ids"]) for row in rows)
    figures["cut_off"] = statistics.fmean(row["finish"] == "length" for row in rows)
    return figures


def compare(name: str, rows: Sequence[Row], against: Sequence[Row]) -> dict[str, Any]:
    """Pass@1 of the first less the second's, paired by prompt, with its standard error.

    Both have drawn with the same keys. `better` and `worse` count prompts.
    """
    first, second = (
        [statistics.fmean(prompt) for prompt in _grades(side)] for side in (rows, against)
    )
    difference, error = paired_difference(second, first)
    return {
        "task": name,
        "difference": difference,
        "stderr": error,
        "better": sum(a > b for a, b in zip(first, second, strict=True)),
        "worse": sum(a < b for a, b in zip(first, second, strict=True)),
        "prompts": len(first),
    }


def _grades(rows: Sequence[Row]) -> list[list[int]]:
    """1 for each right response, by prompt."""
    groups = itertools.groupby(rows, key=lambda row: row["row"])
    return [[int(row["reward"] >= 1.0) for row in group] for _, group in groups]
