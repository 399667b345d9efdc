"""The page of a simulation: what each planner gains against the data split in advance."""

from __future__ import annotations

import math
from html import escape
from typing import Any

from ratoon.report.page import document, section
from ratoon.report.parts import figure, legend
from ratoon.report.svg import Series, line_chart

_COLOURS = {
    "longest_first": "rollout",
    "first_come": "drafter_training",
    "static": "idle",
    "known": "reward",
}
_AXES = (
    ("gain", "times as fast as static", "Step time of `static` over the planner's."),
    ("to_bound", "of the best possible", "Step time over what no order could beat; 1 is best."),
    ("idle_frac", "share", "Workers' time with nothing to decode; it can train the drafter."),
)
_COLUMNS = {
    "step_s": ",.1f",
    "to_bound": ".3f",
    "gain": ".3f",
    "idle_frac": ".1%",
    "trained_tokens": ",.0f",
    "messages_per_s": ",.1f",
}


def render_simulation(record: dict[str, Any]) -> str:
    """The page of what `ratoon.simulate.study.run_study` returned."""
    lead = f"{record['meaning'][0].upper()}{record['meaning'][1:]}."
    about = (
        f"{record['responses_per_worker']} responses a worker, {record['slots']} at once; means "
        f"over steps 2 to {record['steps']}, in which all planners draw the same lengths."
    )
    charts = "".join(_chart(record["rows"], *axis) for axis in _AXES)
    body = (
        section("", f'<p class="lead">{escape(lead)}</p><p>{escape(about)}</p>')
        + section(
            "Planners by log2 of the number of workers",
            f'<div class="grid-3">{charts}</div>',
        )
        + section("All figures", _table(record["rows"]))
    )
    return document(
        f"Simulated rollouts: {record['scenario']}",
        "ratoon simulate",
        body,
        "Written by Ratoon; times are those of a simulated clock.",
    )


def _chart(rows: list[dict[str, Any]], key: str, unit: str, caption: str) -> str:
    series = []
    for planner, colour in _COLOURS.items():
        points = [
            (math.log2(row["workers"]), row[key])
            for row in rows
            if row["planner"] == planner and row[key] is not None
        ]
        if points:
            series.append(Series(planner, colour, points, dots=True))
    if not series:
        return ""
    chart = line_chart(series, label=f"{key} by workers", across="log2 of workers")
    swatches = legend([(one.colour, one.name) for one in series])
    return figure(key.replace("_", " "), unit, chart, escape(caption), key=swatches)


def _table(rows: list[dict[str, Any]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in ("planner", "workers", *_COLUMNS))
    lines = []
    for row in rows:
        cells = [str(row["workers"])]
        cells += ["–" if row[k] is None else format(row[k], style) for k, style in _COLUMNS.items()]
        tail = "".join(f"<td>{cell}</td>" for cell in cells)
        lines.append(f"<tr><td>{escape(row['planner'])}</td>{tail}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
