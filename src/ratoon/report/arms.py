"""The page of `ratoon bench rl`: what each way of decoding makes of the same steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from html import escape
from typing import Any

from ratoon.report.page import document, section
from ratoon.report.parts import figure, legend
from ratoon.report.svg import Series, line_chart, number

_COLOURS = ("rollout", "update", "drafter_training", "reward", "weights", "evaluation", "loading")
_CHARTS = (
    ("rollout_s", "Rollout", "seconds", "Time from the first to the last token of a step."),
    (
        "acceptance_length",
        "Acceptance",
        "tokens per verification",
        "A frozen drafter beside one that is trained on: how far the policy leaves it behind.",
    ),
    ("kl", "The policy's distance", "nats per token", "From the policy of the first step."),
    ("entropy_per_token", "Entropy", "nats per token", "A sure policy is easier to guess."),
)


def render_arms(record: dict[str, Any]) -> str:
    """The page of what `ratoon.bench.rl.run` returned; curves are those of the first round."""
    names = [row["arm"] for row in record["rows"]]
    colours = dict(zip(names, _COLOURS, strict=False))
    curves = {curve["arm"]: curve["points"] for curve in record["curves"]}
    charts = "".join(_chart(*chart, curves, colours) for chart in _CHARTS)
    body = section("", f'<p class="lead">{escape(_lead(record))}</p>')
    body += section("Step by step", f'<div class="grid-3">{charts}</div>')
    body += section("Every arm", _table(record["rows"]))
    title = "The same steps, decoded in different ways"
    return document(title, "ratoon bench rl", body, "Written by Ratoon from finished runs.")


def _lead(record: dict[str, Any]) -> str:
    """What came out, in a sentence."""
    same = "the same tokens in all arms" if record["tokens_identical"] else "other tokens in some"
    what = f"{record['steps']} steps, {record['rounds']} times, {same}: "
    guessing = [row for row in record["rows"] if row["arm"] != "plain"]
    best = max(guessing, key=lambda row: float(row["rollout"]), default=None)
    if best is None or best["rollout"] <= 1:
        return what + "no arm rolls out faster than plain decoding."
    return what + (
        f"{best['arm']} rolls out {best['rollout']:.2f} times as fast as plain decoding "
        f"({best['rollout_low']:.2f} to {best['rollout_high']:.2f}), and whole steps take "
        f"{1 / best['step']:.0%} of the time."
    )


def _chart(
    key: str,
    title: str,
    unit: str,
    caption: str,
    curves: dict[str, list[dict[str, Any]]],
    colours: dict[str, str],
) -> str:
    """One line an arm, or one for all that are alike; nothing where nothing was measured."""
    series = [
        Series(arm, colours[arm], [(p["step"], p[key]) for p in points if p[key] is not None])
        for arm, points in curves.items()
    ]
    series = [one for one in series if one.points]
    if not series:
        return ""
    if len(series) == len(curves) and all(one.points == series[0].points for one in series):
        series = [replace(series[0], name="all")]
    resting = " · ".join(f"{s.name} <b>{number(s.points[-1][1])}</b>" for s in series)
    chart = line_chart(series, label=f"{title} by step")
    key_of_colours = legend([(s.colour, s.name) for s in series])
    return figure(title, unit, chart, caption, key=key_of_colours, resting=resting)


def _table(rows: Sequence[dict[str, Any]]) -> str:
    columns = {
        "rollout": "rollout ×",
        "step": "step ×",
        "amdahl_share": "of Amdahl",
        "rollout_s": "rollout s",
        "update_s": "update s",
        "step_s": "step s",
        "idle": "idle",
        "idle_filled": "filled",
        "acceptance_length": "tokens / verification",
        "cpu_s": "CPU s",
    }
    head = "".join(f"<th>{escape(name)}</th>" for name in ("arm", *columns.values()))
    lines = [
        f"<tr><td>{escape(row['arm'])}</td>"
        + "".join(f"<td>{_cell(row[key])}</td>" for key in columns)
        + "</tr>"
        for row in rows
    ]
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _cell(value: float | None) -> str:
    return "–" if value is None else number(value)
