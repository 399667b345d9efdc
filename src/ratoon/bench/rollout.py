"""`ratoon bench rollout`: plain and speculative decoding, against each other and against peers.

A case is a number of threads, a context, a temperature and a live batch. All arms of a case decode
the same few-shot prompts with the same weights in the same number format, take turns round by
round, and only their decode steps count. Nothing ends within a round, so the batch stays whole.

A case is stored when it is measured, under a name that holds a hash of all that it depends on, so a
benchmark that was interrupted goes on by the same command.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from ratoon.bench.live import TOKENS, positions_behind
from ratoon.bench.rollout_case import MAX_LIVE, Case, Group, Setting, measure, measure_switch
from ratoon.bench.rollout_record import summarise
from ratoon.bench.timing import worker_pool
from ratoon.config.speculation import Speculation
from ratoon.errors import ConfigError
from ratoon.models.hf_config import read_config, read_json
from ratoon.observe.files import digest, files_of, write_atomically
from ratoon.observe.provenance import provenance, usable_cores

# Live sequences, and their tokens, where the step from plain to speculative decoding is measured.
SWITCH_LIVE, SWITCH_CONTEXT = 16, 512
LEAST_CONTEXT = 16
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Matrix:
    """The cases: all combinations of these."""

    threads: tuple[int, ...] = (1,)
    contexts: tuple[int, ...] = (256,)
    temperatures: tuple[float, ...] = (1.0,)
    batches: tuple[int, ...] = (1, 4, 8)

    def __post_init__(self) -> None:
        """Raises: ConfigError for values that cannot be measured, on this machine or on any."""
        cores = usable_cores()
        allowed: dict[str, tuple[Sequence[float], float, float]] = {
            "--threads": (self.threads, 1, cores),
            "--contexts": (self.contexts, LEAST_CONTEXT, float("inf")),
            "--temperatures": (self.temperatures, 0, 2),
            "--batches": (self.batches, 1, MAX_LIVE),
        }
        for option, (values, least, most) in allowed.items():
            for value in values:
                if not least <= value <= most:
                    raise ConfigError(
                        f"{option} {value:g}: must be {least:g} "
                        + (f"to {most:g}" if most < float("inf") else "or more")
                        + (", the cores of this machine" if option == "--threads" else "")
                    )

    def groups(self, setting: Setting) -> dict[Group, list[Case]]:
        """The cases, those together that share a process."""
        return {
            Group(setting, threads, context, max(self.batches)): [
                Case(threads, context, temperature, size)
                for temperature, size in product(self.temperatures, self.batches)
            ]
            for threads, context in product(self.threads, self.contexts)
        }


FULL = Matrix((1, 2), (256, 1024), (0.0, 0.6, 1.0), (1, 2, 4, 8, 16, 32, 64))


def run(
    setting: Setting, matrix: Matrix, results: Path, say: Say = lambda text: None
) -> dict[str, Any]:
    """Measure what is not in `results` yet, and compare; JSON values.

    Without a drafter only the suffix drafter guesses. Ratios are medians over rounds with a
    bootstrap interval; a bar is met by the interval's worse end.

    Raises: ConfigError for contexts that the model is too short for; CheckpointError if a model
    cannot be read; CapabilityError for a peer that is missing or does not start.
    """
    config = read_config(setting.model)
    longest = config.max_positions - positions_behind(Speculation().depth)
    for context in matrix.contexts:
        if context > longest:
            raise ConfigError(
                f"--contexts {context}: {setting.model} has positions for at most {longest} tokens "
                "and what is decoded behind them"
            )
    if setting.assistant is not None:
        found = read_json(setting.assistant / "config.json").get("vocab_size")
        if found != config.vocab_size:
            raise ConfigError(
                f"--assistant {setting.assistant}: has {found} token ids and the model "
                f"{config.vocab_size}; give a model with the same tokenizer"
            )
    cells = _Cells(results, setting)
    measured = [
        cell
        for group, cases in matrix.groups(setting).items()
        for cell in _measured(cells, group, cases, say)
    ]
    switches = []
    if longest >= SWITCH_CONTEXT:
        switches = [_switch(cells, threads, say) for threads in matrix.threads]
    return {**summarise(setting, measured, switches), "provenance": provenance(0)}


def _measured(cells: _Cells, group: Group, cases: Sequence[Case], say: Say) -> list[dict[str, Any]]:
    """All cases of a group; its process holds prompts for the missing ones."""
    missing = [case for case in cases if not cells.file(case._asdict()).exists()]
    if missing:
        group = group._replace(max_live=max(case.live_batch for case in missing))
        with worker_pool(threads=group.threads) as pool:
            for number, case in enumerate(missing, start=1):
                cell = pool.submit(measure, group, case).result()
                cells.store(case._asdict(), cell)
                say(f"{number} of {len(missing)}: {_told(cell)}")
    return [cells.stored(case._asdict()) for case in cases]


def _switch(cells: _Cells, threads: int, say: Say) -> dict[str, Any]:
    group = Group(cells.setting, threads, SWITCH_CONTEXT, SWITCH_LIVE)
    name = {"switch": group[1:]}
    if not cells.file(name).exists():
        with worker_pool(threads=threads) as pool:
            cells.store(name, pool.submit(measure_switch, group).result())
        say(f"threads {threads}: from plain to speculative decoding")
    return cells.stored(name)


def _told(cell: dict[str, Any]) -> str:
    case = ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in cell["case"].items())
    rates = cell["rates"]
    shown = ", ".join(
        f"{name} {sorted(rates[name])[len(rates[name]) // 2]:.0f}"
        for name in rates
        if name != "read"
    )
    return f"{case}: {shown} tokens/s"


class _Cells:
    """A folder of measured cases, each under a hash of all that it depends on."""

    def __init__(self, folder: Path, setting: Setting) -> None:
        origin = provenance(0)
        self.setting = setting
        self._folder = folder
        self._depends = {
            **asdict(setting),
            "tokens": TOKENS,
            "files": [
                [] if path is None else files_of(path)
                for path in (setting.model, setting.drafter, setting.assistant)
            ],
            **{name: origin[name] for name in ("code", "versions", "machine")},
        }
        folder.mkdir(parents=True, exist_ok=True)

    def file(self, case: dict[str, Any]) -> Path:
        """Where a case is stored."""
        return self._folder / f"case-{digest({**self._depends, 'case': case})[:12]}.json"

    def store(self, case: dict[str, Any], cell: dict[str, Any]) -> None:
        """Keep what was measured."""
        write_atomically(self.file(case), json.dumps(cell) + "\n")

    def stored(self, case: dict[str, Any]) -> dict[str, Any]:
        """What was measured."""
        cell: dict[str, Any] = json.loads(self.file(case).read_text(encoding="utf-8"))
        return cell
