"""Read what a run folder holds; a missing piece is None, not an error."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ratoon.errors import DataError
from ratoon.observe.files import read_lines
from ratoon.observe.run_folder import RunFolder
from ratoon.observe.sinks import read_steps
from ratoon.observe.timeline import read_events


@dataclass(frozen=True, slots=True)
class Span:
    """One activity of one worker; times in seconds since the run began."""

    worker: str
    activity: str
    start_s: float
    end_s: float
    step: int


@dataclass(frozen=True, slots=True)
class Sample:
    """The answers to one held-out prompt before and after training."""

    prompt: str
    answer: str | None
    before: str
    after: str
    reward_before: float
    reward_after: float


@dataclass(frozen=True, slots=True)
class Run:
    """All that a report shows. `metrics` maps a step to the values measured in it."""

    name: str
    summary: dict[str, Any] | None
    metrics: dict[int, dict[str, float]]
    spans: list[Span]
    samples: list[Sample]
    config_yaml: str | None
    provenance: dict[str, Any] | None
    growth: dict[str, Any] | None
    certificate: dict[str, Any] | None

    @property
    def draws_responses(self) -> bool:
        """Whether the run draws what it learns from, and is not given it."""
        names = {name for values in self.metrics.values() for name in values}
        return not any(name.startswith(("sft/", "pretrain/")) for name in names)

    def series(self, name: str) -> list[tuple[float, float]]:
        """`(step, value)` of one metric, where it was measured."""
        return [(s, v[name]) for s, v in sorted(self.metrics.items()) if name in v]


def load_run(path: Path) -> Run:
    """Read a run folder.

    Raises:
        DataError: the folder does not exist, holds no run, or a file in it is damaged.
    """
    folder = RunFolder(path)
    if not path.is_dir():
        found = "is no folder" if path.exists() else "does not exist"
        raise DataError(f"run folder {path} {found}; give the folder that a run made")
    if not (folder.metrics.is_file() or folder.summary.is_file() or folder.config.is_file()):
        raise DataError(
            f"{path} holds no run: there is no metrics.jsonl, summary.json or config.resolved.yaml"
        )
    return Run(
        name=path.resolve().name,
        summary=_json(folder.summary),
        metrics=_metrics(folder.metrics),
        spans=_spans(folder.timeline),
        samples=_samples(folder.completions),
        config_yaml=folder.config.read_text(encoding="utf-8") if folder.config.is_file() else None,
        provenance=_json(folder.provenance),
        growth=_json(folder.growth),
        certificate=_json(folder.certificate),
    )


def _json(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise DataError(f"{path}: not JSON ({error})") from None
    if not isinstance(value, dict):
        raise DataError(f"{path}: must hold an object")
    return value


def _metrics(path: Path) -> dict[int, dict[str, float]]:
    """What was measured, by step."""
    if not path.is_file():
        return {}
    return {
        step: {k: v for k, v in row.items() if k != "step" and v is not None}
        for step, row in read_steps(path).items()
    }


def _spans(path: Path) -> list[Span]:
    if not path.is_file():
        return []
    events = read_events(path)
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    spans = [
        Span(
            worker=names[e["tid"]],
            activity=e["name"],
            start_s=e["ts"] / 1e6,
            end_s=(e["ts"] + e["dur"]) / 1e6,
            step=e["args"]["step"],
        )
        for e in events
        if e["ph"] == "X"
    ]
    return sorted(spans, key=lambda span: (span.worker, span.start_s))


def _samples(folder: Path) -> list[Sample]:
    """Pair the first and the last held-out evaluation by prompt and sample."""
    files = sorted(folder.glob("eval_*.jsonl"))
    if len(files) < 2:
        return []
    before, after = ({_uid(row): row for row in read_lines(path)} for path in (files[0], files[-1]))
    return [
        Sample(
            prompt=row["prompt"],
            answer=row["answer"],
            before=row["response"],
            after=after[uid]["response"],
            reward_before=row["reward"],
            reward_after=after[uid]["reward"],
        )
        for uid, row in before.items()
        if uid in after
    ]


def _uid(row: dict[str, Any]) -> tuple[str, int, int]:
    return row["dataset"], row["row"], row["sample"]
