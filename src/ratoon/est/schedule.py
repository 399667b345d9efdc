"""When the subnetwork grows: stages with fixed boundaries.

A schedule never shrinks on any axis, ends with the whole model, and stops growing before the
learning rate decays.

Source: three stages (layers, heads and neurons; then heads and neurons; then all) are those of
Evolving Subnetwork Training, https://arxiv.org/abs/2406.06962.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ratoon.errors import ConfigError
from ratoon.est.subnetwork import Rates

NewLayers = Literal["as_they_are", "stack", "zero_output"]


@dataclass(frozen=True, slots=True)
class Stage:
    """Training from step `start` on with subnetworks of `rates`.

    `new_layers` says what becomes of layers that take part from this stage on: nothing (random
    subnetworks have trained them all), copies of the layers before them with their moments, or
    layers whose outputs begin at zero. See `growth`.
    """

    start: int
    rates: Rates
    new_layers: NewLayers = "as_they_are"


@dataclass(frozen=True, slots=True)
class StagedSchedule:
    """Stages in order; each lasts until the next starts, the last until `total_steps`.

    Raises: ConfigError if stages are out of order, start past the end, shrink, or do not end dense.
    """

    stages: tuple[Stage, ...]
    total_steps: int

    def __post_init__(self) -> None:
        starts = [stage.start for stage in self.stages]
        if not starts or starts[0] != 0:
            raise ConfigError(f"stages start at {starts}; the first must start at 0")
        for before, after in itertools.pairwise(self.stages):
            if after.start <= before.start:
                raise ConfigError(
                    f"a stage at step {after.start} follows one at step {before.start}; each must "
                    "start later than the one before (short runs round fractions together)"
                )
            if not after.rates.covers(before.rates):
                raise ConfigError(
                    f"the stage at step {after.start} has rates {after.rates.values} after "
                    f"{before.rates.values}; a subnetwork never shrinks: raise them"
                )
        if starts[-1] >= self.total_steps:
            raise ConfigError(
                f"the last stage starts at step {starts[-1]} of {self.total_steps}; it must start "
                "before the end"
            )
        if not self.stages[-1].rates.is_full:
            raise ConfigError(
                f"the last stage has rates {self.stages[-1].rates.values}; training must end with "
                "the whole model: give 1, 1, 1"
            )

    @staticmethod
    def of(parts: Sequence[StagePart], total_steps: int) -> StagedSchedule:
        """Stages at fractions of the run, rounded to whole steps. Raises: ConfigError as above."""
        stages = []
        for part in parts:
            if not 0.0 <= part.start_frac < 1.0:
                raise ConfigError(
                    f"a stage starts at {part.start_frac} of the run; give a fraction in [0, 1)"
                )
            stages.append(Stage(round(part.start_frac * total_steps), part.rates, part.new_layers))
        return StagedSchedule(tuple(stages), total_steps)

    def index(self, step: int) -> int:
        """Number of the stage that optimizer step `step` belongs to, from 0."""
        return sum(stage.start <= step for stage in self.stages[1:])

    def at(self, step: int) -> Stage:
        """The stage of optimizer step `step`."""
        return self.stages[self.index(step)]

    def require_growth_before(self, decay_start: int) -> None:
        """Check that the last stage starts no later than the learning rate's decay.

        Only schedules with a plateau have such a step; a cosine falls from its beginning.
        Raises: ConfigError.
        """
        last = self.stages[-1].start
        if last > decay_start:
            raise ConfigError(
                f"the last stage starts at step {last}, after the learning rate begins to decay at "
                f"step {decay_start}; the whole model needs the full rate first: grow earlier or "
                "decay later"
            )


@dataclass(frozen=True, slots=True)
class StagePart:
    """A stage that starts at a fraction of the run."""

    start_frac: float
    rates: Rates
    new_layers: NewLayers = "as_they_are"


_ALL_HALVES, _WIDTH_HALVES, _FULL = Rates(0.5, 0.5, 0.5), Rates(1.0, 0.5, 0.5), Rates()

# The paper's boundaries are reconstructed, not read: all rates one half and these fractions give
# exactly the savings that it reports for the blocks, 4/15 and 1/4.
PRESETS: dict[str, tuple[StagePart, ...]] = {
    "gpt2_reconstructed": (
        StagePart(0.0, _ALL_HALVES),
        StagePart(2 / 15, _WIDTH_HALVES),
        StagePart(7 / 15, _FULL),
    ),
    "tinyllama_reconstructed": (
        StagePart(0.0, _ALL_HALVES),
        StagePart(1 / 6, _WIDTH_HALVES),
        StagePart(5 / 12, _FULL),
    ),
}
