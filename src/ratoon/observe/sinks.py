"""Where records of steps go: one line a record, flushed at once. `metrics.jsonl` is the truth."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ratoon.errors import NumericsError
from ratoon.observe.files import read_lines, to_json, write_lines
from ratoon.observe.metrics import metric

Values = Mapping[str, float | None]


def read_steps(path: Path) -> dict[int, dict[str, Any]]:
    """The records of `metrics.jsonl` by step, in order; those of one step complete each other.

    Raises: DataError if a line is damaged.
    """
    merged: dict[int, dict[str, Any]] = {}
    for row in read_lines(path, "step"):
        record = merged.setdefault(row["step"], {})
        record |= {k: v for k, v in row.items() if v is not None or k not in record}
    return dict(sorted(merged.items()))


class StepsFile:
    """Appends records, each of which names its step."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("a", encoding="utf-8")

    def append(self, record: Mapping[str, Any]) -> None:
        """Append one record and flush it."""
        self._file.write(to_json(record) + "\n")
        self._file.flush()

    def truncate_after(self, step: int) -> None:
        """Drop all records later than `step`, and a torn last line: the run resumes there."""
        self._file.close()
        rows = [row for row in read_lines(self.path, "step") if row["step"] <= step]
        write_lines(self.path, rows)
        self._file = self.path.open("a", encoding="utf-8")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class MetricsFile(StepsFile):
    """Appends to `metrics.jsonl`. Several records of one step complement each other.

    Example of a line: `{"step": 3, "time_s": 41.2, "reward/mean": 0.25, "policy/kl": null}`;
    null means not measured in this step, `time_s` is seconds since the run began, those in which
    it was interrupted not counted.
    """

    def write(self, step: int, time_s: float, values: Values) -> None:
        """Append one record and flush it.

        Raises:
            ValueError: a metric is not registered.
            NumericsError: a value is NaN or infinite.
        """
        for name, value in values.items():
            metric(name)
            if value is not None and not math.isfinite(value):
                raise NumericsError(
                    f"metric `{name}` is {value} at step {step}; it must be finite, or None "
                    "where nothing was measured"
                )
        self.append({"step": step, "time_s": round(time_s, 3), **values})

    def last_time_s(self) -> float:
        """The time of the last record, or 0."""
        return max((float(row["time_s"]) for row in read_lines(self.path, "time_s")), default=0.0)
