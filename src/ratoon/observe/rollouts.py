"""What a rollout's decode steps were and took: one line a rollout in `rollouts.jsonl`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ratoon.errors import DataError
from ratoon.observe.completions import Split
from ratoon.observe.files import read_lines


@dataclass(slots=True)
class StepTally:
    """All steps of one worker with a live batch in `live` (both ends included) and one tree.

    `tree` names it: `plain`, or nodes per sequence, levels and drafters. `sequences` sums the live
    ones over the steps; `known[k]` counts those of them for which a step made k tokens known, so
    in a step that guessed, k - 1 drafted tokens were accepted. Times in seconds: `spent_s`
    measured, `expected_s` what the tuner expected before each step, `plain_s` what it expects that
    plain decoding takes for as many tokens; None where it measures nothing.
    """

    live: tuple[int, int]
    tree: str
    steps: int = 0
    sequences: int = 0
    drafted: int = 0
    known: list[int] = field(default_factory=list)
    spent_s: float = 0.0
    expected_s: float | None = None
    plain_s: float | None = None

    @property
    def guesses(self) -> bool:
        """Whether these steps guessed ahead."""
        return self.tree != PLAIN_TREE

    @property
    def tokens(self) -> int:
        """Tokens that became known."""
        return sum(count * k for k, count in enumerate(self.known))

    @property
    def accepted(self) -> list[int]:
        """Drafted tokens accepted at each depth, from 1 on; none in plain steps."""
        if not self.guesses:
            return []
        return [sum(self.known[depth + 1 :]) for depth in range(1, len(self.known) - 1)]


PLAIN_TREE = "plain"


@dataclass(frozen=True, slots=True)
class SpeculationChange:
    """At decode step `step` (from 1) of a worker, with `live` sequences, guessing began or ended.

    `cause` is what moved the tuner (such as `live batch`), `why` its reason in words and figures.
    """

    step: int
    live: int
    guesses: bool
    cause: str
    why: str


@dataclass(slots=True)
class WorkerSteps:
    """One worker's decode steps of one rollout.

    `changes` are the first ones, `num_changes` counts all; `probes` are single steps that were
    taken otherwise to learn what they cost or gain, and count as no change. `why` is the reason of
    the last choice.
    """

    tallies: list[StepTally] = field(default_factory=list)
    changes: list[SpeculationChange] = field(default_factory=list)
    num_changes: int = 0
    probes: int = 0
    why: str = ""

    @property
    def guessing(self) -> list[StepTally]:
        """The tallies of steps that guessed ahead."""
        return [tally for tally in self.tallies if tally.guesses]

    @property
    def saved_s(self) -> float | None:
        """Seconds that guessing saved against plain decoding, or below 0 lost.

        None where the tuner measures no times.
        """
        gains = [(t.plain_s, t.spent_s) for t in self.guessing]
        known = [plain_s - spent_s for plain_s, spent_s in gains if plain_s is not None]
        return sum(known) if len(known) == len(gains) else None


@dataclass(frozen=True, slots=True)
class RolloutRecord:
    """One rollout: of a training step, or of an evaluation after `step` steps.

    `numerics` as the workers proved them, `kernels` what they computed with
    (`provenance.kernels`). `off` says who switched speculation off, None if nobody did.
    """

    step: int
    split: Split
    seconds: float
    numerics: Literal["invariant", "tolerant"]
    kernels: str
    off: str | None
    workers: list[WorkerSteps]


def read_rollouts(path: Path) -> Iterator[RolloutRecord]:
    """The records of a run, none if the file is missing.

    Raises: DataError if a line is damaged.
    """
    if not path.is_file():
        return
    for number, row in enumerate(read_lines(path, "step", "split", "workers"), start=1):
        try:
            yield RolloutRecord(**row | {"workers": [_worker(item) for item in row["workers"]]})
        except (KeyError, TypeError) as error:
            raise DataError(f"{path}, line {number}: is no record of a rollout ({error})") from None


def _worker(values: dict[str, Any]) -> WorkerSteps:
    tallies = [StepTally(**row | {"live": tuple(row["live"])}) for row in values["tallies"]]
    changes = [SpeculationChange(**row) for row in values["changes"]]
    return WorkerSteps(**values | {"tallies": tallies, "changes": changes})
