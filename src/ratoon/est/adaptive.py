"""A schedule that decides from what training shows when to grow, and how far.

Now and then the trainer is asked what larger subnetworks would gain: it trains a copy of its state
for a while with each (a probe, which costs what it costs), or asks an estimate. The subnetwork
grows when a larger one's loss falls faster per operation than its own does, to the one that falls
fastest. Bounds hold whatever the losses say. Each decision is written down with its reasons;
`AdaptiveSchedule.replayed` turns them into fixed stages, which a second run follows exactly.

Losses that are compared must be of one kind. Of random subnetworks that is the whole model's
held-out loss, since a larger subnetwork's own loss is lower at once; of nested ones the held-out
loss of the prefix itself.

Source: growing when slopes per compute meet: Shen et al. 2022, https://arxiv.org/abs/2203.06211,
section 4.3. Measured slopes, jumps and the replay are ours.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

from ratoon.errors import CheckpointError, ConfigError
from ratoon.est.schedule import NewLayers, Stage, StagedSchedule
from ratoon.est.subnetwork import Rates

Reason = Literal["slope", "stay", "longest", "deadline"]


@dataclass(frozen=True, slots=True)
class AdaptiveSettings:
    """Bounds and patience of an adaptive schedule, in optimizer steps.

    `ladder` holds the rates that may be used, the last ones full. A stage lasts `min_steps` at
    least and `max_steps` at most. The whole model trains from `deadline` on, which is before the
    learning rate decays. Every `check_every` steps the slopes are compared; the own one is that of
    the last `window` losses observed, which are of one stage. Growing needs a slope of more than
    `margin` times the own one.

    Raises: ConfigError if the ladder shrinks or does not end dense, or the bounds cannot be kept.
    """

    ladder: tuple[Rates, ...]
    total_steps: int
    deadline: int
    min_steps: int
    max_steps: int
    check_every: int
    window: int
    margin: float = 1.0
    new_layers: NewLayers = "as_they_are"

    def __post_init__(self) -> None:
        for before, after in itertools.pairwise(self.ladder):
            if before == after or not after.covers(before):
                raise ConfigError(
                    f"the ladder goes from {before.values} to {after.values}; each rung must be "
                    "larger than the one before"
                )
        if len(self.ladder) < 2 or not self.ladder[-1].is_full:
            raise ConfigError("the ladder needs two rungs or more, and must end at rates 1, 1, 1")
        if not 0 < self.deadline < self.total_steps:
            raise ConfigError(
                f"the deadline of growth is step {self.deadline} of {self.total_steps}; give a "
                "step between the first and the last"
            )
        if not 0 < self.min_steps <= self.max_steps:
            raise ConfigError(
                f"a stage lasts {self.min_steps} to {self.max_steps} steps; the first number must "
                "be positive and not above the second"
            )
        if self.min_steps > self.deadline:
            raise ConfigError(
                f"min_steps = {self.min_steps} is beyond the deadline of growth, step "
                f"{self.deadline}; give less"
            )
        if self.window < 2:
            raise ConfigError(f"a window of {self.window} losses has no slope; give 2 or more")


@dataclass(frozen=True, slots=True)
class Decision:
    """What was decided before optimizer step `step`, and from which slopes (nats per operation)."""

    step: int
    rung: int
    new_rung: int
    reason: Reason
    own_slope: float | None
    slopes: dict[int, float]


class AdaptiveSchedule:
    """The schedule so far, and what it needs to go on. Steps are given in order, each once."""

    def __init__(self, settings: AdaptiveSettings) -> None:
        self.settings = settings
        self.log: list[Decision] = []
        self.probe_flops = 0.0
        self.probe_seconds = 0.0
        self._rung = 0
        self._started = 0
        self._checked = 0
        self._history: list[tuple[float, float]] = []

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Stages so far, the present one last."""
        settings = self.settings
        grown = [Stage(0, settings.ladder[0], settings.new_layers)]
        for decision in self.log:
            if decision.new_rung != decision.rung:
                rates = settings.ladder[decision.new_rung]
                grown.append(Stage(decision.step, rates, settings.new_layers))
        return tuple(grown)

    @property
    def rung(self) -> int:
        """Index of the present rates in the ladder."""
        return self._rung

    def index(self, step: int) -> int:
        """Number of the stage that a step up to the present one belongs to, from 0."""
        return sum(stage.start <= step for stage in self.stages[1:])

    def at(self, step: int) -> Stage:
        """The stage of a step up to the present one."""
        return self.stages[self.index(step)]

    def observe(self, loss: float, flops: float) -> None:
        """Keep a loss that was measured, and the operations of all training before it."""
        self._history = [*self._history, (flops, loss)][-self.settings.window :]

    def observe_probe(self, flops: float, seconds: float) -> None:
        """Add up what deciding costs: losses that are measured, and probes."""
        self.probe_flops += flops
        self.probe_seconds += seconds

    def asks(self, step: int) -> tuple[int, ...]:
        """Rungs whose slopes `decide` wants before `step`: the next and the last, or none."""
        settings, last = self.settings, len(self.settings.ladder) - 1
        if self._rung == last or self._must_grow(step) is not None:
            return ()
        lasted = step - self._started
        if lasted < settings.min_steps or step - self._checked < settings.check_every:
            return ()
        if len(self._history) < settings.window:
            return ()
        return tuple(sorted({self._rung + 1, last}))

    def decide(self, step: int, slopes: Mapping[int, float]) -> Stage:
        """The stage of `step`, which is the next one. Call it before every step.

        `slopes` has, for each rung that `asks` named, the fall of its loss per operation.
        """
        forced = self._must_grow(step)
        if forced is not None:
            reason, target = forced
            self._note(step, target, reason, {})
        elif slopes:
            best = max(slopes, key=lambda rung: (slopes[rung], rung))
            own = self._slope()
            grows = own is None or slopes[best] > self.settings.margin * own
            self._note(
                step, best if grows else self._rung, "slope" if grows else "stay", dict(slopes)
            )
        return self.at(step)

    def _must_grow(self, step: int) -> tuple[Reason, int] | None:
        last = len(self.settings.ladder) - 1
        if self._rung == last:
            return None
        if step >= self.settings.deadline:
            return "deadline", last
        if step - self._started >= self.settings.max_steps:
            return "longest", self._rung + 1
        return None

    def _note(self, step: int, rung: int, reason: Reason, slopes: dict[int, float]) -> None:
        self.log.append(Decision(step, self._rung, rung, reason, self._slope(), slopes))
        self._checked = step
        if rung != self._rung:
            self._rung, self._started, self._history = rung, step, []

    def _slope(self) -> float | None:
        return loss_slope(self._history)

    def replayed(self) -> StagedSchedule:
        """Fixed stages with the same boundaries. Raises: ConfigError before the last stage."""
        return StagedSchedule(self.stages, self.settings.total_steps)

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run goes on from, as JSON values."""
        return {
            "log": [
                asdict(decision) | {"slopes": [list(item) for item in decision.slopes.items()]}
                for decision in self.log
            ],
            "history": [list(pair) for pair in self._history],
            "checked": self._checked,
            "probe_flops": self.probe_flops,
            "probe_seconds": self.probe_seconds,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken.

        Raises: CheckpointError if the log is of another ladder.
        """
        log = [
            Decision(**(entry | {"slopes": {int(rung): slope for rung, slope in entry["slopes"]}}))
            for entry in state["log"]
        ]
        if any(decision.new_rung >= len(self.settings.ladder) for decision in log):
            raise CheckpointError(
                f"the schedule's log goes beyond the {len(self.settings.ladder)} rungs of the "
                "configured ladder; resume with the configuration it was written with"
            )
        self.log = log
        self._rung = log[-1].new_rung if log else 0
        self._started = self.stages[-1].start
        self._checked = int(state["checked"])
        self._history = [(float(flops), float(loss)) for flops, loss in state["history"]]
        self.probe_flops = float(state["probe_flops"])
        self.probe_seconds = float(state["probe_seconds"])


def loss_slope(history: Sequence[tuple[float, float]]) -> float | None:
    """Fall of the loss per operation by least squares over `(operations, loss)`; None of one."""
    if len(history) < 2:
        return None
    flops, losses = np.asarray(history, dtype=np.float64).T
    flops = flops - flops.mean()
    spread = float(flops @ flops)
    return None if spread == 0.0 else -float(flops @ (losses - losses.mean())) / spread


@dataclass(frozen=True, slots=True)
class PowerLaw:
    """An estimate instead of a probe: loss = floor + factor * operations ** -exponent.

    Fitted to an earlier full run of the model, or of a similar one. Its slope is asked at the loss
    that has been reached: what a full model that stood there would gain per operation.
    """

    floor: float
    factor: float
    exponent: float

    def slope_at(self, loss: float) -> float:
        """Fall per operation where the law passes `loss`; 0 below its floor."""
        above = loss - self.floor
        if above <= 0.0:
            return 0.0
        flops = (above / self.factor) ** (-1.0 / self.exponent)
        return float(self.exponent * above / flops)

    @staticmethod
    def fit(flops: Sequence[float], losses: Sequence[float]) -> PowerLaw:
        """Least squares in logarithms for the best of many floors below all losses.

        Raises: ConfigError if there are fewer than four points, or the losses do not fall.
        """
        x, y = np.log(np.asarray(flops, dtype=np.float64)), np.asarray(losses, dtype=np.float64)
        best: tuple[float, PowerLaw] | None = None
        if len(x) >= 4:
            for share in np.linspace(0.0, 0.99, 100):
                floor = float(share * y.min())
                slope, start = np.polyfit(x, np.log(y - floor), 1)
                law = PowerLaw(floor, float(np.exp(start)), -float(slope))
                error = float(np.square(y - floor - np.exp(start + slope * x)).sum())
                if slope < 0 and (best is None or error < best[0]):
                    best = error, law
        if best is None:
            raise ConfigError(
                f"a power law needs four points or more of a falling loss; there are {len(x)} "
                f"from {y.tolist()[:1]} to {y.tolist()[-1:]}"
            )
        return best[1]


def ladder(first: Rates, quantum: float = 0.25) -> tuple[Rates, ...]:
    """Rungs from `first` to full: layers grow first, then heads and neurons, by `quantum` at most.

    Few rungs mean few shapes to compile, and few switches.
    Example: `ladder(Rates(.5, .5, .5), .5)` is the paper's three stages.
    """
    rungs = [first]
    while not rungs[-1].is_full:
        last = rungs[-1]
        if last.layers < 1.0:
            rungs.append(replace(last, layers=min(1.0, last.layers + quantum)))
        else:
            heads, neurons = (min(1.0, rate + quantum) for rate in (last.heads, last.neurons))
            rungs.append(replace(last, heads=heads, neurons=neurons))
    return tuple(rungs)
