"""`ratoon bench pretrain`: does training on subnetworks that grow pay, at equal seconds?

A cell is one run: an arm with a budget of seconds, a learning rate and a seed. All cells read the
same tokens in the order of their seed and end with a learning rate of 0. Each is stored when it is
done, under a name that holds a hash of all that it depends on, and goes on from its last checkpoint
when the study was interrupted; so a study is resumed by the same command.

The first seed tries every learning rate, the others take the best of each arm and budget.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ratoon.bench.study_arms import ARMS, BATCH_TOKENS, arm_config
from ratoon.bench.study_times import Times, measure_times, num_steps, seconds_until
from ratoon.bench.timing import worker_pool
from ratoon.config import resolved_yaml
from ratoon.config.pretrain import PretrainConfig
from ratoon.data.prepare import TRAIN
from ratoon.data.token_file import TokenFile
from ratoon.errors import ConfigError
from ratoon.est.schedule import Stage
from ratoon.loop.pretrain_run import pretrain
from ratoon.loop.pretrain_setup import open_data
from ratoon.observe.files import digest, write_atomically
from ratoon.observe.observer import Observer
from ratoon.observe.provenance import provenance
from ratoon.observe.run_folder import RunFolder
from ratoon.observe.sinks import read_steps

TIMES = "times.json"
TIMING_ROUNDS = 9
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Study:
    """What is compared, and where results and unfinished runs lie.

    `width` is that of the model. `tokens` are those of the full model's run of budget 1; a budget
    is a share of its seconds.
    """

    width: int
    data: Path
    results: Path
    work: Path
    arms: tuple[str, ...]
    budgets: tuple[float, ...]
    lrs: tuple[float, ...]
    seeds: int
    tokens: int

    def __post_init__(self) -> None:
        for budget in self.budgets:
            if not 0 < budget < math.inf:
                raise ConfigError(f"budgets: {budget:g} must be a share > 0 of the full model's")
        for lr in self.lrs:
            if not 0 < lr < 1:
                raise ConfigError(f"lrs: {lr:g} must be a learning rate > 0 and < 1")
        unknown = sorted(set(self.arms) - ARMS.keys())
        if unknown or "full" not in self.arms:
            raise ConfigError(
                f"arms = {', '.join(self.arms)}: {', '.join(unknown) or 'full is missing'}; give "
                f"full, which the others are compared with, and any of {', '.join(ARMS)}"
            )


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of a study."""

    arm: str
    budget: float
    lr: float
    seed: int


def run(study: Study, processes: int, say: Say) -> list[dict[str, Any]]:
    """Run what is missing, in `processes` processes of one thread; the results of all cells.

    Raises: ConfigError, DataError if the study cannot begin.
    """
    for arm in study.arms:
        open_data(
            arm_config(
                arm,
                study.data,
                width=study.width,
                steps=1000,
                lr=1e-3,
                seed=0,
                name=arm,
                output_dir=study.work,
            )
        )
    study.results.mkdir(parents=True, exist_ok=True)
    times = _times(study, say)
    first = [
        Cell(arm, budget, lr, 0)
        for budget in study.budgets
        for arm in study.arms
        for lr in study.lrs
    ]
    done = _run_cells(study, times, first, processes, say)
    best = best_rates(done)
    rest = [
        Cell(arm, budget, best[arm, budget], seed)
        for seed in range(1, study.seeds)
        for budget in study.budgets
        for arm in study.arms
    ]
    return done + _run_cells(study, times, rest, processes, say)


def best_rates(results: Iterable[dict[str, Any]]) -> dict[tuple[str, float], float]:
    """The learning rate with the lowest loss of the first seed, by arm and budget."""
    best: dict[tuple[str, float], dict[str, Any]] = {}
    for result in results:
        key = result["arm"], result["budget"]
        if result["seed"] == 0 and (key not in best or result["loss"] < best[key]["loss"]):
            best[key] = result
    return {key: float(result["lr"]) for key, result in best.items()}


def load_results(folder: Path) -> list[dict[str, Any]]:
    """All stored cells, whatever study they are of. Raises: ConfigError if there is none."""
    files = sorted(folder.glob("cell-*.json"))
    if not files:
        raise ConfigError(
            f"results = {folder} holds no finished run (cell-*.json); give the folder of a study"
        )
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def _times(study: Study, say: Say) -> Times:
    """Seconds of a step by arm and stage; measured once, and then part of the study."""
    path = study.results / TIMES
    times: Times = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    missing = [arm for arm in study.arms if arm not in times]
    if missing:
        # The full model is measured again beside them, and scales what was measured earlier.
        say(f"timing the stages of {', '.join(missing)}")
        with worker_pool() as pool:
            arms = list(dict.fromkeys(["full", *missing]))
            found = pool.submit(
                measure_times, arms, study.data, study.width, TIMING_ROUNDS
            ).result()
        scale = times["full"][0][-1] / found["full"][0][-1] if "full" in times else 1.0
        for arm in missing:
            times[arm] = [
                (layers, heads, neurons, scale * seconds)
                for layers, heads, neurons, seconds in found[arm]
            ]
        write_atomically(path, json.dumps(times, indent=2) + "\n")
    return times


def _run_cells(
    study: Study, times: Times, cells: Sequence[Cell], processes: int, say: Say
) -> list[dict[str, Any]]:
    results, missing = [], []
    for cell in cells:
        config = cell_config(study, times, cell)
        path = study.results / f"{config.name}.json"
        if path.exists():
            results.append(json.loads(path.read_text(encoding="utf-8")))
        else:
            missing.append((cell, config))
    with worker_pool(processes) as pool:
        futures: dict[Future[dict[str, Any]], Cell] = {
            pool.submit(run_cell, cell, config, times, study.results): cell
            for cell, config in missing
        }
        for count, future in enumerate(as_completed(futures), start=1):
            result = future.result()
            results.append(result)
            say(
                f"{count} of {len(missing)}: {result['arm']} at {result['budget']:g} of the "
                f"seconds, lr {result['lr']:g}, seed {result['seed']}: {result['loss']:.4f}"
            )
    return results


def cell_config(study: Study, times: Times, cell: Cell) -> PretrainConfig:
    """The configuration of a cell; its name tells the cell and holds a hash of all the rest."""
    seconds = cell.budget * study.tokens / BATCH_TOKENS * times["full"][0][-1]

    def make(steps: int, name: str) -> PretrainConfig:
        return arm_config(
            cell.arm,
            study.data,
            width=study.width,
            steps=steps,
            lr=cell.lr,
            seed=cell.seed,
            name=name,
            output_dir=study.work,
        )

    steps = num_steps(make(1000, "draft"), times[cell.arm], seconds)
    draft = make(steps, "draft").model_dump(mode="json", exclude={"output_dir", "data"})
    data = TokenFile(study.data / TRAIN, 1).header.sha256
    name = f"cell-{cell.arm}-{cell.budget:g}-{cell.lr:g}-{cell.seed}"
    return make(steps, f"{name}-{digest([draft, data])[:8]}")


def run_cell(cell: Cell, config: PretrainConfig, times: Times, results: Path) -> dict[str, Any]:
    """Train one cell to its end, from its last checkpoint if it has one, and store its result."""
    torch.set_num_threads(1)
    path, text = config.output_dir / config.name, resolved_yaml(config)
    folder = (
        RunFolder.resume(path, config_yaml=text)
        if (path / "config.resolved.yaml").exists()
        else RunFolder.create(path, config_yaml=text, provenance=provenance(config.seed))
    )
    with Observer(folder) as observer:
        run = pretrain(config, folder, observer)
    curve = _curve(folder, run.stages, times[cell.arm], times["full"][0][-1])
    result = {
        "arm": cell.arm,
        "budget": cell.budget,
        "lr": cell.lr,
        "seed": cell.seed,
        "width": config.model.shape.width if config.model.shape else None,
        "steps": config.steps,
        "data": TokenFile(config.data.path / TRAIN, 1).header.sha256,
        "stages": [[stage.start, *stage.rates.values] for stage in run.stages],
        "loss": curve[-1]["loss"],
        "curve": curve,
        "provenance": provenance(config.seed),
    }
    write_atomically(results / f"{config.name}.json", json.dumps(result) + "\n")
    shutil.rmtree(path)
    return result


def _curve(
    folder: RunFolder,
    stages: Sequence[Stage],
    times: Sequence[tuple[float, float, float, float]],
    full_step_s: float,
) -> list[dict[str, float]]:
    """Held-out loss of the full model against steps, tokens, operations and seconds.

    A probe's operations take as long as those of full steps.
    """
    seen = read_steps(folder.metrics)
    end = seen[max(seen)]
    full_step_flops = end["pretrain/flops"] / (1.0 - end["pretrain/saved_frac"]) / max(seen)
    return [
        {
            "step": step,
            "tokens": record.get("pretrain/tokens", 0),
            "flops": record.get("pretrain/flops", 0.0),
            "seconds": seconds_until(step, stages, times)
            + record.get("pretrain/probe_flops", 0.0) / full_step_flops * full_step_s,
            "loss": record["pretrain/eval_loss"],
        }
        for step, record in seen.items()
        if "pretrain/eval_loss" in record
    ]
