"""How long responses will be, by what is known of their prompt.

Lengths are kept as multiples of the mean of their round, so that a policy whose responses grow does
not make old observations wrong. A prompt is known by its own last responses; a new one by those to
prompts of about its length, or, while these are few, by all. Before the first round of a data set
nothing is known, and all are taken to be as long as they may be.
Source: ours.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

Uid = tuple[str, int]

# Responses kept of a prompt, of a class of prompts, and the number that make a class known.
_OWN = 16
_CLASS = 512
_KNOWN = 32
# What is known of others counts as much as so many own responses.
_PRIOR = 2.0


class LengthModel:
    """Predicts lengths in tokens; `end_round` makes what was observed known.

    Within a round only siblings tell: who finishes first is short, so that a mean over those that
    have finished would be too.
    """

    def __init__(self) -> None:
        # Mean of the last round, by data set: evaluation may be another kind of text than training.
        self._typical: dict[str, float] = {}
        self._prompts: dict[Uid, deque[float]] = {}
        self._classes: dict[int, deque[float]] = {}
        self._all: deque[float] = deque(maxlen=_CLASS)
        self._priors: dict[int, float] = {}
        self._round: list[tuple[Uid, int, int]] = []
        self._siblings: dict[Uid, list[int]] = {}

    def knows(self, dataset: str) -> bool:
        """Whether a round of this data set has ended."""
        return dataset in self._typical

    def predict(self, uid: Uid, prompt_tokens: int, limit: int) -> float:
        """Expected length, at most `limit`."""
        typical = self._typical.get(uid[0])
        if typical is None:
            return float(limit)
        own = self._prompts.get(uid, ())
        siblings = self._siblings.get(uid, ())
        known = typical * (sum(own) + _PRIOR * self._prior(prompt_tokens)) + sum(siblings)
        return min(float(limit), known / (len(own) + _PRIOR + len(siblings)))

    def observe(self, uid: Uid, prompt_tokens: int, tokens: int) -> None:
        """A response of this round has ended."""
        self._round.append((uid, prompt_tokens, tokens))
        self._siblings.setdefault(uid, []).append(tokens)

    def end_round(self) -> None:
        """Learn from the round's responses, all of which have ended."""
        by_dataset: dict[str, list[int]] = {}
        for uid, _, tokens in self._round:
            by_dataset.setdefault(uid[0], []).append(tokens)
        self._typical |= {name: statistics.fmean(found) for name, found in by_dataset.items()}
        for uid, prompt_tokens, tokens in self._round:
            share = tokens / self._typical[uid[0]]
            self._prompts.setdefault(uid, deque(maxlen=_OWN)).append(share)
            size = prompt_tokens.bit_length()
            self._classes.setdefault(size, deque(maxlen=_CLASS)).append(share)
            self._all.append(share)
        self._round.clear()
        self._siblings.clear()
        self._priors.clear()

    def state(self) -> dict[str, Any]:
        """JSON values that `load_state` continues from. Between rounds only."""
        return {
            "typical": dict(self._typical),
            "prompts": [[*uid, _rounded(own)] for uid, own in self._prompts.items()],
            "classes": {str(size): _rounded(values) for size, values in self._classes.items()},
            "all": _rounded(self._all),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` gave."""
        self._typical = dict(state["typical"])
        self._prompts = {
            (dataset, row): deque(own, maxlen=_OWN) for dataset, row, own in state["prompts"]
        }
        self._classes = {
            int(size): deque(values, maxlen=_CLASS) for size, values in state["classes"].items()
        }
        self._all = deque(state["all"], maxlen=_CLASS)
        self._priors.clear()

    def _prior(self, prompt_tokens: int) -> float:
        """Mean of what prompts of about this length were answered with, in multiples."""
        size = prompt_tokens.bit_length()
        if size not in self._priors:
            alike = self._classes.get(size, ())
            self._priors[size] = statistics.fmean(alike if len(alike) >= _KNOWN else self._all)
        return self._priors[size]


def _rounded(values: Iterable[float]) -> list[float]:
    return [round(value, 4) for value in values]
