"""`ratoon bench rl`: whole steps of one recipe, decoded in different ways.

The arms differ in how responses are guessed and by whom a drafter is trained. None of that changes
a token, so every arm draws the same responses, earns the same rewards and trains the same policy:
arms are compared step by step on equal work, and that it was equal is checked.

A cell is one arm in one round. It is stored when it is done, under a name that holds a hash of all
that it depends on, so a benchmark that was interrupted goes on by the same command.
"""

from __future__ import annotations

import copy
import json
import resource
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ratoon.bench.intervals import median_interval
from ratoon.bench.timing import ratio_interval
from ratoon.config import build_config, resolved_yaml
from ratoon.config.rl import RLConfig
from ratoon.errors import ConfigError
from ratoon.loop.rl_run import run_rl
from ratoon.loop.rl_summary import step_records
from ratoon.models.compute_dtype import with_dtype
from ratoon.observe.completions import completions_path
from ratoon.observe.files import digest, read_lines, to_json, write_atomically
from ratoon.observe.observer import Observer
from ratoon.observe.provenance import provenance
from ratoon.observe.run_folder import RunFolder

PLAIN = "plain"
Values = dict[str, Any]
Say = Callable[[str], None]

_OFF = {"enabled": False}
_IN_ORDER = {"rollout": {"planner": "first_come"}}
# Sections of the recipe that an arm changes; None drops one.
ARMS: dict[str, Mapping[str, Values | None]] = {
    PLAIN: {"speculation": _OFF, "drafter": None, "spot": None, **_IN_ORDER},
    "sd-suffix": {
        "speculation": {"drafters": ["suffix"]},
        "drafter": None,
        "spot": None,
        **_IN_ORDER,
    },
    "sd-frozen": {"spot": _OFF, **_IN_ORDER},
    "tlt": _IN_ORDER,
    "tlt+planner": {"rollout": {"planner": "longest_first"}},
}
# Arms that draft with the drafter that all of them begin with.
_DRAFTING = ("sd-frozen", "tlt", "tlt+planner")
# What the best arm must gain on plain rollouts, how near the whole step must come to what that
# allows, and how much idle time must be used.
ROLLOUT_BAR, AMDAHL_BAR, FILLED_BAR = 1.8, 0.9, 0.9
_STEP_METRICS = {
    "time/rollout_s": "rollout_s",
    "time/reward_s": "reward_s",
    "time/update_s": "update_s",
    "time/weights_s": "weights_s",
    "time/step_s": "step_s",
    "idle/frac": "idle",
    "idle/filled_frac": "idle_filled",
    "speculation/acceptance_length": "acceptance_length",
    "drafter/tokens": "drafter_tokens",
    "policy/entropy": "entropy_per_token",
    "policy/kl": "kl",
    "reward/mean": "reward",
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """What is compared, and where results and unfinished runs lie.

    `values` are the recipe's own settings. `drafter` is the directory of the one that all drafting
    arms begin with; without it a run of the recipe under another seed trains one first.
    """

    values: Values
    arms: tuple[str, ...]
    rounds: int
    results: Path
    work: Path
    drafter: Path | None = None

    def __post_init__(self) -> None:
        unknown = sorted(set(self.arms) - ARMS.keys())
        if unknown or PLAIN not in self.arms:
            raise ConfigError(
                f"arms = {', '.join(self.arms)}: {', '.join(unknown) or 'plain is missing'}; give "
                f"{PLAIN}, which the others are compared with, and any of {', '.join(ARMS)}"
            )
        if self.drafter is not None and not (self.drafter / "config.json").is_file():
            raise ConfigError(f"drafter = {self.drafter}: holds no drafter; give its folder")
        for section in ("speculation", "spot"):
            if self.values.get(section, {}).get("enabled") is False:
                raise ConfigError(
                    f"{section}.enabled = false contradicts the arms, which switch it themselves; "
                    "remove it"
                )
        drafters = self.values.get("speculation", {}).get("drafters", ["learned"])
        if "learned" not in drafters and set(_DRAFTING) & set(self.arms):
            raise ConfigError(
                f"speculation.drafters = {list(drafters)}: {', '.join(_DRAFTING)} need the learned "
                "drafter; add it, or leave these arms out"
            )


def run(comparison: Comparison, say: Say) -> dict[str, Any]:
    """Run what is missing and compare; JSON values.

    Ratios are those of the same step in the same round, so that what a step's responses cost does
    not count; their median has a bootstrap interval. `amdahl_share` is the step's gain as a share
    of what the rollout's gain r allows, 1 / (1 - s + s / r) with s the rollout's share of a plain
    step.

    Raises: ConfigError if the arms' settings contradict each other.
    """
    comparison.results.mkdir(parents=True, exist_ok=True)
    drafter = comparison.drafter
    if drafter is None and set(_DRAFTING) & set(comparison.arms):
        drafter = _trained_drafter(comparison, say)
    cells = []
    for number in range(comparison.rounds):
        # Every other round in reverse, so that no arm always follows the same one.
        for arm in comparison.arms[:: 1 if number % 2 == 0 else -1]:
            cells.append(_cell(comparison, arm, number, drafter, say))
    return summarise(cells)


def arm_config(
    comparison: Comparison, arm: str, drafter: Path | None, *, seed: int | None = None
) -> RLConfig:
    """The configuration of one arm; its name is for `_cell` to give.

    Raises: ConfigError if the recipe does not allow the arm.
    """
    values = copy.deepcopy(comparison.values)
    for section, change in ARMS[arm].items():
        before = values.pop(section, {})
        if change is not None:
            values[section] = change if change == _OFF else {**before, **change}
    if arm in _DRAFTING and drafter is not None:
        values["drafter"] = {**values.get("drafter", {}), "path": str(drafter)}
    values.pop("evaluation", None)
    values.pop("replay_last_step", None)
    values["data"] = {**values["data"], "eval": None}
    values["checkpoint"] = {"every": 10**6}
    values["output_dir"] = str(comparison.work)
    if seed is not None:
        values["seed"] = seed
    return with_dtype(build_config(RLConfig, values, source=f"arm {arm}"))


def _trained_drafter(comparison: Comparison, say: Say) -> Path:
    """A drafter that has seen as many steps of other prompts and noise."""
    seed = int(comparison.values.get("seed", 0)) + 1
    config = _named(arm_config(comparison, "tlt", None, seed=seed), "drafter")
    kept = comparison.results / config.name
    if not kept.exists():
        say("training the drafter that all drafting arms begin with")
        folder = _train(config)
        draft = kept.with_suffix(".part")
        shutil.rmtree(draft, ignore_errors=True)
        shutil.copytree(folder.drafter, draft)
        draft.rename(kept)
        shutil.rmtree(folder.path)
    return kept


def _cell(
    comparison: Comparison, arm: str, number: int, drafter: Path | None, say: Say
) -> dict[str, Any]:
    config = _named(arm_config(comparison, arm, drafter), f"{arm}-{number}")
    file = comparison.results / f"{config.name}.json"
    if not file.exists():
        say(f"round {number + 1} of {comparison.rounds}: {arm}")
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        folder = _train(config)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cell = {
            "arm": arm,
            "round": number,
            "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
            "numerics": json.loads(folder.summary.read_text(encoding="utf-8"))["numerics"],
            "steps": _steps(folder),
            "provenance": provenance(config.seed),
        }
        write_atomically(file, to_json(cell, indent=1) + "\n")
        shutil.rmtree(folder.path)
    stored: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return stored


def _named(config: RLConfig, label: str) -> RLConfig:
    depends = config.model_dump(mode="json", exclude={"name", "output_dir"})
    return config.model_copy(update={"name": f"{label}-{digest(depends)[:8]}"})


def _train(config: RLConfig) -> RunFolder:
    """Train anew: half a run's times cannot be gone on with."""
    path = config.output_dir / config.name
    shutil.rmtree(path, ignore_errors=True)
    folder = RunFolder.create(
        path, config_yaml=resolved_yaml(config), provenance=provenance(config.seed)
    )
    with Observer(folder) as observer:
        run_rl(config, folder, observer)
    return folder


def _steps(folder: RunFolder) -> list[dict[str, Any]]:
    """Each step's figures, and a hash of its responses."""
    rows = []
    for record in step_records(folder):
        path = completions_path(folder.completions, "train", record["step"])
        ids = [row["token_ids"] for row in read_lines(path, "token_ids")]
        figures = {short: record.get(name) for name, short in _STEP_METRICS.items()}
        tokens = {
            "responses": len(ids),
            "tokens": sum(map(len, ids)),
            "longest": max(map(len, ids)),
        }
        rows.append({"step": record["step"], **figures, **tokens, "said": digest(ids)[:16]})
    return rows


def summarise(cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One row for each arm, against plain decoding; JSON values."""
    arms = list(dict.fromkeys(cell["arm"] for cell in cells))
    by_arm = {arm: [cell for cell in cells if cell["arm"] == arm] for arm in arms}
    for runs in by_arm.values():
        runs.sort(key=lambda cell: int(cell["round"]))
    plain = _series(by_arm[PLAIN], "step_s")
    share = sum(_series(by_arm[PLAIN], "rollout_s")) / sum(plain)
    rows = [_row(arm, runs, by_arm[PLAIN], share) for arm, runs in by_arm.items()]
    guessing = [row for row in rows if row["arm"] != PLAIN]
    filled = [row["idle_filled"] for row in rows if row["idle_filled"] is not None]
    said = {tuple(step["said"] for step in cell["steps"]) for cell in cells}
    return {
        "benchmark": "rl",
        "numerics": sorted({cell["numerics"] for cell in cells}),
        "steps": len(cells[0]["steps"]),
        "rounds": len(by_arm[PLAIN]),
        "rollout_share_plain": share,
        "rows": rows,
        "tokens_identical": len(said) == 1,
        "curves": [
            {"arm": arm, "points": [_point(step) for step in by_arm[arm][0]["steps"]]}
            for arm in arms
        ],
        "bars_met": {
            f"rollout >= {ROLLOUT_BAR}x": _best(guessing, "rollout_low") >= ROLLOUT_BAR,
            f"step >= {AMDAHL_BAR} of Amdahl": _best(guessing, "amdahl_share") >= AMDAHL_BAR,
            f"idle filled >= {FILLED_BAR}": max(filled, default=0.0) >= FILLED_BAR,
        },
        "provenance": cells[0]["provenance"],
    }


def _row(
    arm: str, runs: Sequence[dict[str, Any]], plain: Sequence[dict[str, Any]], share: float
) -> dict[str, Any]:
    seconds = {part: _series(runs, part) for part in ("rollout_s", "update_s", "step_s")}
    rollout = ratio_interval(_series(plain, "rollout_s"), seconds["rollout_s"])
    step = ratio_interval(_series(plain, "step_s"), seconds["step_s"])
    allowed = 1.0 / (1.0 - share + share / rollout["median"])
    return {
        "arm": arm,
        "rollout": rollout["median"],
        "rollout_low": rollout["low"],
        "rollout_high": rollout["high"],
        "step": step["median"],
        "step_low": step["low"],
        "step_high": step["high"],
        "amdahl_share": step["median"] / allowed,
        **{name: median_interval(values)["median"] for name, values in seconds.items()},
        "reward_s": median_interval(_series(runs, "reward_s"))["median"],
        "idle": _mean(runs, "idle"),
        "idle_filled": _mean(runs, "idle_filled"),
        "acceptance_length": _mean(runs, "acceptance_length"),
        "drafter_tokens": _mean(runs, "drafter_tokens"),
        "cpu_s": median_interval([cell["cpu_s"] for cell in runs])["median"],
    }


def _series(runs: Sequence[dict[str, Any]], key: str) -> list[float]:
    return [float(step[key]) for cell in runs for step in cell["steps"]]


def _mean(runs: Sequence[dict[str, Any]], key: str) -> float | None:
    values = [step[key] for cell in runs for step in cell["steps"] if step[key] is not None]
    return sum(values) / len(values) if values else None


def _best(rows: Sequence[dict[str, Any]], key: str) -> float:
    return max((float(row[key]) for row in rows), default=0.0)


def _point(step: dict[str, Any]) -> dict[str, Any]:
    keys = ("step", "acceptance_length", "kl", "entropy_per_token", "rollout_s", "reward")
    return {key: step[key] for key in keys}
