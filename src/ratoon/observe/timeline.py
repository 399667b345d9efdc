"""Who did what when: spans per worker in Chrome's trace format (open it in Perfetto).

`timeline.json` is a list of complete events and is valid JSON after every save.
Format: Trace Event Format, "X" (complete) and "M" (metadata) events, times in microseconds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, get_args

from ratoon.clock import Clock
from ratoon.errors import DataError
from ratoon.observe.files import to_json, write_atomically

Activity = Literal[
    "loading", "rollout", "idle", "drafter_training", "reward", "update", "weights", "evaluation"
]
ACTIVITIES: tuple[Activity, ...] = get_args(Activity)
_END = "\n]\n"


class Timeline:
    """Collects spans and appends them to `timeline.json`.

    Times given to `span` are seconds of the injected clock, which all workers of a machine share.
    """

    def __init__(self, path: Path, clock: Clock) -> None:
        self.path = path
        self._origin_s = clock.now()
        self._lanes: dict[str, int] = {}
        self._pending: list[dict[str, Any]] = []
        if path.exists():
            self._continue(clock.now())
        else:
            write_atomically(path, "[" + _END)

    def _continue(self, now_s: float) -> None:
        """Go on after the last span of an earlier process."""
        events = read_events(self.path)
        _rewrite(self.path, events)
        self._lanes = {e["args"]["name"]: e["tid"] for e in events if e["ph"] == "M"}
        self._origin_s = now_s - _end_s(events)

    def span(
        self, worker: str, activity: Activity, start_s: float, end_s: float, *, step: int
    ) -> None:
        """Record that `worker` did `activity` from `start_s` to `end_s` in RL step `step`.

        Raises:
            ValueError: unknown activity, or an end before the start.
        """
        if activity not in ACTIVITIES:
            raise ValueError(f"activity {activity!r} must be one of {', '.join(ACTIVITIES)}")
        if end_s < start_s:
            raise ValueError(f"{activity} of {worker} ends before it starts: {start_s} > {end_s}")
        if worker not in self._lanes:
            self._lanes[worker] = len(self._lanes) + 1
            self._pending.append(
                {
                    "name": "thread_name",
                    "ph": "M",
                    "pid": 1,
                    "tid": self._lanes[worker],
                    "args": {"name": worker},
                }
            )
        self._pending.append(
            {
                "name": activity,
                "cat": "worker",
                "ph": "X",
                "ts": round((start_s - self._origin_s) * 1e6),
                "dur": round((end_s - start_s) * 1e6),
                "pid": 1,
                "tid": self._lanes[worker],
                "args": {"step": step},
            }
        )

    def save(self) -> None:
        """Append what was recorded since the last save. Cost does not grow with the run."""
        if not self._pending:
            return
        lines = ",\n".join(to_json(event) for event in self._pending)
        with self.path.open("r+b") as file:
            size = file.seek(0, 2)
            file.seek(size - len(_END))
            separator = "\n" if size == 1 + len(_END) else ",\n"
            file.write((separator + lines + _END).encode())
        self._pending.clear()

    def truncate_after(self, step: int) -> None:
        """Drop all spans of later steps: the run resumes there."""
        events = read_events(self.path)
        kept = [e for e in events if e["ph"] == "M" or e["args"]["step"] <= step]
        _rewrite(self.path, kept)
        self._pending.clear()
        self._origin_s += _end_s(events) - _end_s(kept)


def _end_s(events: list[dict[str, Any]]) -> float:
    """End of the last span."""
    return max(((e["ts"] + e["dur"]) / 1e6 for e in events if e["ph"] == "X"), default=0.0)


def read_events(path: Path) -> list[dict[str, Any]]:
    """All events of a timeline; one cut short by a crash in the middle of a save is left out.

    Raises:
        DataError: any other line is not an event.
    """
    lines = [
        line for line in path.read_text(encoding="utf-8").splitlines() if line not in ("", "[", "]")
    ]
    events: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            event = json.loads(line.rstrip(","))
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise DataError(f"{path}, event {number}: not JSON ({error})") from None
            continue
        if not isinstance(event, dict) or not event.keys() >= {"ph", "tid", "args"}:
            raise DataError(f"{path}, event {number}: no event of a timeline, but {line[:60]!r}")
        events.append(event)
    return events


def _rewrite(path: Path, events: list[dict[str, Any]]) -> None:
    body = "\n" + ",\n".join(to_json(event) for event in events) if events else ""
    write_atomically(path, "[" + body + _END)
