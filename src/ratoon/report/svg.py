"""Charts as plain SVG text: lines over steps, stacked columns, lanes of spans.

Colours come from the page's style sheet (`var(--c-...)`), so that one picture serves light and
dark. Charts are drawn at phone width and scaled up by at most a half, so that their text stays
readable.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Series:
    """One line or one layer of columns. `colour` is a name of the palette, as in `rollout`."""

    name: str
    colour: str
    points: Sequence[Point]
    dots: bool = False


@dataclass(frozen=True, slots=True)
class Frame:
    """Maps data to pixels. `x` and `y` are the (lowest, highest) values shown."""

    width: float
    height: float
    x: Point
    y: Point
    left: float = 44
    right: float = 12
    top: float = 10
    bottom: float = 24

    def px(self, value: float) -> float:
        """Pixel of a value on the horizontal axis."""
        share = (value - self.x[0]) / ((self.x[1] - self.x[0]) or 1)
        return round(self.left + share * (self.width - self.left - self.right), 2)

    def py(self, value: float) -> float:
        """Pixel of a value on the vertical axis, which points up."""
        share = (value - self.y[0]) / ((self.y[1] - self.y[0]) or 1)
        return round(self.height - self.bottom - share * (self.height - self.top - self.bottom), 2)


def nice_ticks(low: float, high: float, count: int = 4) -> list[float]:
    """About `count` round values that span `low` to `high`; at least two."""
    if high <= low:
        high = low + (abs(low) or 1.0)
    raw = (high - low) / count
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if raw <= m * magnitude * 1.0001)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def number(value: float, digits: int = 3) -> str:
    """A number as people write it: `0.25`, `1.4k`, `2.1M`."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.{digits}g}{unit}"
    if value == int(value):
        return str(int(value))
    return f"{value:.{digits}g}" if abs(value) < 1000 else f"{value:.0f}"


def line_chart(
    series: Sequence[Series],
    *,
    label: str,
    zero: bool = True,
    width: float = 380,
    across: str = "step",
) -> str:
    """Lines over steps; a series of `dots` is drawn as points joined by a thin line.

    `across` says what the horizontal axis counts where it is not steps. `zero` keeps zero on the
    vertical axis. `label` is what a screen reader says.
    """
    drawn = [s for s in series if s.points]
    values = [y for s in drawn for _, y in s.points]
    steps = [x for s in drawn for x, _ in s.points]
    ticks = nice_ticks(min([0.0, *values] if zero else values), max(values))
    frame = Frame(width, 210, (min(steps), max(steps)), (ticks[0], ticks[-1]))
    parts = [_axes(frame, ticks, _whole_ticks(frame.x))]
    parts += [_line(frame, s) for s in drawn]
    return _svg(frame, parts, label, drawn, across)


def column_chart(layers: Sequence[Series], *, label: str, width: float = 380) -> str:
    """Stacked columns, one per step; the first layer lies at the bottom."""
    totals: dict[float, float] = {}
    for layer in layers:
        for x, y in layer.points:
            totals[x] = totals.get(x, 0.0) + y
    steps = sorted(totals)
    ticks = nice_ticks(0.0, max(totals.values()))
    frame = Frame(width, 210, (steps[0] - 0.5, steps[-1] + 0.5), (0.0, ticks[-1]))
    thick = max(0.6, (frame.px(1) - frame.px(0)) * 0.82)
    parts = [_axes(frame, ticks, _whole_ticks((steps[0], steps[-1])))]
    base = dict.fromkeys(steps, 0.0)
    for layer in layers:
        bars = []
        for x, y in layer.points:
            top, bottom = frame.py(base[x] + y), frame.py(base[x])
            left = round(frame.px(x) - thick / 2, 2)
            bars.append(f"M{left} {bottom}V{top}h{thick:.2f}V{bottom}z")
            base[x] += y
        parts.append(f'<path class="f-{layer.colour}" d="{"".join(bars)}"/>')
    return _svg(frame, parts, label, list(layers))


def lane_chart(
    lanes: Sequence[tuple[str, Sequence[tuple[str, float, float, str]]]],
    *,
    start: float,
    end: float,
    label: str,
) -> str:
    """Horizontal lanes of coloured spans over seconds.

    A lane is `(name, spans)`, a span `(colour, start, end, tooltip)`. The axis counts from `start`.
    """
    lane_height, gap, top = 32, 8, 8
    height = top + len(lanes) * (lane_height + gap) + 22
    frame = Frame(1000, height, (start, end), (0, 1), left=70, right=16, top=top)
    bottom = height - 22
    parts = []
    for second in _time_ticks(end - start):
        x = frame.px(start + second)
        parts.append(f'<line class="grid" x1="{x}" x2="{x}" y1="{top - 4}" y2="{bottom}"/>')
        text = _clock(second)
        parts.append(f'<text x="{x}" y="{height - 6}" text-anchor="middle">{text}</text>')
    for i, (name, spans) in enumerate(lanes):
        y = top + i * (lane_height + gap)
        parts.append(f'<text x="0" y="{y + lane_height / 2 + 4}">{escape(name)}</text>')
        for colour, first, last, tip in spans:
            x, width = frame.px(first), max(frame.px(last) - frame.px(first), 0.4)
            parts.append(
                f'<rect class="f-{colour}" x="{x}" y="{y}" width="{width:.2f}" '
                f'height="{lane_height}"><title>{escape(tip)}</title></rect>'
            )
    return (
        f'<svg viewBox="0 0 {frame.width:g} {height}" role="img" aria-label="{escape(label)}">'
        f"{''.join(parts)}</svg>"
    )


def _time_ticks(seconds: float) -> list[float]:
    """Round times from 0 to at most `seconds`: whole minutes where the run is long."""
    for step in (0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600):
        if seconds / step <= 10:
            return [i * step for i in range(int(seconds / step + 1e-9) + 1)]
    return [i * seconds / 8 for i in range(9)]


def _clock(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.3g} s"
    hours, rest = divmod(round(seconds), 3600)
    minutes = f"{rest // 60}:{rest % 60:02d}"
    return f"{hours}:{minutes:0>5}" if hours else minutes


def _whole_ticks(bounds: Point) -> list[float]:
    inside = [t for t in nice_ticks(*bounds, 5) if bounds[0] <= t <= bounds[1]]
    return [t for t in inside if t == int(t)] or [bounds[0]]


def _axes(frame: Frame, y_ticks: Sequence[float], x_ticks: Sequence[float]) -> str:
    right, bottom = frame.width - frame.right, frame.height - frame.bottom
    parts = []
    for tick in y_ticks:
        y = frame.py(tick)
        parts.append(f'<line class="grid" x1="{frame.left}" x2="{right}" y1="{y}" y2="{y}"/>')
        text = number(tick)
        parts.append(f'<text x="{frame.left - 6}" y="{y + 4}" text-anchor="end">{text}</text>')
    for tick in x_ticks:
        x = frame.px(tick)
        parts.append(f'<text x="{x}" y="{bottom + 17}" text-anchor="middle">{number(tick)}</text>')
    return "".join(parts)


def _line(frame: Frame, series: Series) -> str:
    pixels = [(frame.px(x), frame.py(y)) for x, y in series.points]
    path = "M" + "L".join(f"{x} {y}" for x, y in pixels)
    dots = ""
    if series.dots or len(pixels) == 1:
        dots = "".join(
            f'<circle class="f-{series.colour}" cx="{x}" cy="{y}" r="4"/>' for x, y in pixels
        )
    return f'<path class="line s-{series.colour}" d="{path}"/>{dots}'


def _svg(
    frame: Frame, parts: Sequence[str], label: str, series: Sequence[Series], across: str = "step"
) -> str:
    """Wrap a chart; its numbers travel along for the read-out under the pointer."""
    data = {
        "left": frame.left,
        "right": frame.right,
        "width": frame.width,
        "x": frame.x,
        "across": across,
        "series": [
            {"name": s.name, "points": [[x, number(y)] for x, y in s.points]} for s in series
        ],
    }
    packed = escape(json.dumps(data, separators=(",", ":")))
    return (
        f'<svg class="chart" viewBox="0 0 {frame.width:g} {frame.height:g}" role="img" '
        f'aria-label="{escape(label)}" data-chart="{packed}">{"".join(parts)}'
        f'<line class="cursor" y1="{frame.top}" y2="{frame.height - frame.bottom}"/></svg>'
    )
