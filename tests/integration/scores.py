"""A reward of tests."""

from __future__ import annotations


def varied(response: str, answer: str | None, fields: dict[str, object]) -> float:
    """Hardly ever equal for all members of a group, so that every step has something to learn."""
    return sum(map(ord, response)) % 17 / 16
