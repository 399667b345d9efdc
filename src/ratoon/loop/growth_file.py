"""The decisions of an adaptive schedule as a file of the run, and the way back from it.

`growth.json` says when the subnetwork grew, to what and why, and what deciding cost. A run with
`evolve.replay` takes the stages from there and asks nothing: it trains the same weights, without
probes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ratoon.errors import ConfigError
from ratoon.est.adaptive import AdaptiveSchedule, Decision
from ratoon.est.schedule import NewLayers, Stage, StagedSchedule
from ratoon.est.subnetwork import Rates
from ratoon.observe.files import to_json, write_atomically
from ratoon.observe.run_folder import RunFolder

_FORMAT = "ratoon-growth-1"


def write_growth(folder: RunFolder, schedule: AdaptiveSchedule) -> None:
    """Write what has been decided so far; slopes are in nats per operation."""
    ladder = schedule.settings.ladder

    def entry(decision: Decision) -> dict[str, Any]:
        return {
            "step": decision.step,
            "rates": ladder[decision.rung].values,
            "new_rates": ladder[decision.new_rung].values,
            "reason": decision.reason,
            "own_slope": decision.own_slope,
            "slopes": [
                {"rates": ladder[rung].values, "slope": slope}
                for rung, slope in decision.slopes.items()
            ],
        }

    record = {
        "format": _FORMAT,
        "steps": schedule.settings.total_steps,
        "stages": [
            {
                "step": stage.start,
                "layers": stage.rates.layers,
                "heads": stage.rates.heads,
                "neurons": stage.rates.neurons,
            }
            for stage in schedule.stages
        ],
        "decisions": [entry(decision) for decision in schedule.log],
        "probe_flops": schedule.probe_flops,
        "probe_s": schedule.probe_seconds,
    }
    write_atomically(folder.growth, to_json(record, indent=2) + "\n")


def read_growth(path: Path, total_steps: int, new_layers: NewLayers) -> StagedSchedule:
    """The stages that a run of `total_steps` went through.

    Raises: ConfigError if the file is no such record, is of a run of another length, or ends before
    the whole model trains.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["format"] != _FORMAT:
            raise ValueError(f"format {record['format']!r}")
        steps = record["steps"]
        stages = tuple(
            Stage(each["step"], Rates(each["layers"], each["heads"], each["neurons"]), new_layers)
            for each in record["stages"]
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"evolve.replay = {path} is no record of growth ({type(error).__name__}: {error}); "
            "give growth.json of an adaptive run"
        ) from None
    if steps != total_steps:
        raise ConfigError(
            f"evolve.replay = {path} is of a run of {steps} steps, and `steps` is {total_steps}; "
            "give the same number, or the stages as shares in evolve.stages"
        )
    try:
        return StagedSchedule(stages, total_steps)
    except ConfigError as error:
        raise ConfigError(f"evolve.replay = {path}: {error}") from None
