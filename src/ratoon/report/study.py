"""The page of a pretraining study: losses against seconds, operations and tokens."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from ratoon.report.page import document, section
from ratoon.report.parts import figure, legend
from ratoon.report.svg import Series, line_chart, number

# Colours that the eye tells apart, given to arms in the order of their loss; the rest are faint.
_COLOURS = ("weights", "drafter_training", "reward", "update", "evaluation", "loading")
_FULL_COLOUR, _REST_COLOUR = "rollout", "idle"
# Losses of the first tokens would leave no room for the differences at the end.
_SHOWN_FROM = 0.25
# Arms that never train the whole model.
_CONTROLS = ("half_depth",)

_AXES = (
    ("seconds", "seconds", 1.0, "Steps of each stage times the median seconds of such a step."),
    ("flops", "operations", 1e-12, "In 10^12, counted: head, attention and optimizer included."),
    ("tokens", "tokens", 1e-6, "In millions. A cheaper stage reads more of them in a second."),
)


def render_study(record: dict[str, Any]) -> str:
    """The page of what `ratoon.bench.study_summary.summarise` returned.

    The curves are those of the first seed and the largest budget that arms are compared at.
    """
    rows: list[dict[str, Any]] = record["rows"]
    compared = [row["budget"] for row in rows if row["arm"] != "full"]
    largest = max(compared or [row["budget"] for row in rows], default=1.0)
    order = [row["arm"] for row in rows if row["budget"] == largest]
    others = [arm for arm in order if arm != "full"]
    colours = dict(zip(others, _COLOURS, strict=False)) | {"full": _FULL_COLOUR}
    curves = {
        curve["arm"]: curve["points"] for curve in record["curves"] if curve["budget"] == largest
    }
    charts = "".join(_chart(*axis, curves, order, colours) for axis in _AXES) if order else ""
    body = section("", f'<p class="lead">{escape(_lead(record, largest))}</p>') + section(
        "Held-out loss of the whole model", f'<div class="grid-3">{charts}</div>'
    )
    body += section("Every arm at its best learning rate", _table(rows))
    title = "Pretraining on subnetworks that grow"
    return document(title, "ratoon bench pretrain", body, "Written by Ratoon from finished runs.")


def _lead(record: dict[str, Any], largest: float) -> str:
    """What the study found, in a sentence."""
    rows = [
        row for row in record["rows"] if row["budget"] == largest and row["arm"] not in _CONTROLS
    ]
    if not rows:
        return "No run is finished."
    best = rows[0]
    if best["arm"] == "full":
        return "At equal seconds no arm ends below the full model."
    below = -(best["against_full"] or 0.0)
    text = f"At equal seconds {best['arm']} ends {below:.3f} nats below the full model"
    share = record["seconds_to_full_loss"].get(best["arm"])
    if share is None or share >= 1:
        return text + "."
    return text + f", and reaches the loss of its longest run in {share:.0%} of the seconds."


def _chart(
    key: str,
    unit: str,
    factor: float,
    caption: str,
    curves: dict[str, list[dict[str, float]]],
    order: Sequence[str],
    colours: dict[str, str],
) -> str:
    series = []
    for arm in order:
        last = curves[arm][-1][key]
        points = [
            (point[key] * factor, point["loss"])
            for point in curves[arm]
            if point[key] >= _SHOWN_FROM * last
        ]
        series.append(Series(arm, colours.get(arm, _REST_COLOUR), points))
    resting = " · ".join(f"{s.name} <b>{number(s.points[-1][1], 4)}</b>" for s in series[:3])
    named = [(colours[arm], arm) for arm in order if arm in colours]
    key_of_colours = legend(
        [*named, *([(_REST_COLOUR, "others")] if len(order) > len(named) else [])]
    )
    chart = line_chart(series, label=f"Held-out loss against {unit}", zero=False, across=unit)
    return figure(
        f"Loss against {unit}",
        "nats per token",
        chart,
        caption,
        key=key_of_colours,
        resting=resting,
    )


def _table(rows: Sequence[dict[str, Any]]) -> str:
    head = ("arm", "seconds", "lr", "seeds", "Mtokens", "TFLOP", "loss", "against full", "± se")
    lines = []
    for row in rows:
        cells = (
            f"{row['budget']:.0%}",
            f"{row['lr']:g}",
            str(row["seeds"]),
            f"{row['tokens'] / 1e6:.1f}",
            f"{row['flops'] / 1e12:.0f}",
            f"{row['loss']:.4f}",
            "–" if row["against_full"] is None else f"{row['against_full']:+.4f}",
            "–" if row["stderr"] is None else f"{row['stderr']:.4f}",
        )
        lines.append(
            f"<tr><td>{escape(row['arm'])}</td>" + "".join(f"<td>{c}</td>" for c in cells) + "</tr>"
        )
    titles = "".join(f"<th>{escape(name)}</th>" for name in head)
    return f"<table><thead><tr>{titles}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
