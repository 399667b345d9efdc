"""Pretraining on the page: losses against tokens, time and operations, switches, and the bill."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ratoon.config.load import parse_yaml
from ratoon.report.load import Run
from ratoon.report.parts import card, figure, legend
from ratoon.report.svg import Series, line_chart, number

_AXES = (
    ("pretrain/tokens", "tokens", "tokens"),
    ("pretrain/train_s", "time of training", "s"),
    ("pretrain/flops", "counted operations", "FLOP"),
)
_LINES = (
    ("pretrain/loss", "training, subnetwork", "evaluation"),
    ("pretrain/eval_loss", "held out, whole model", "weights"),
    ("pretrain/eval_subnetwork_loss", "held out, subnetwork", "update"),
)
_PREFIXES = {0: "", 1: "k", 2: "M", 3: "G", 4: "T", 5: "P", 6: "E", 7: "Z"}
_SWITCH = (
    ("switch/layers", "layers"),
    ("switch/heads", "heads"),
    ("switch/neurons", "neurons"),
    ("switch/subnetwork_loss_before", "subnetwork before"),
    ("switch/subnetwork_loss_after", "after"),
    ("switch/drop", "drop"),
    ("switch/predicted_drop", "predicted"),
    ("switch/full_loss_before", "whole model before"),
    ("switch/full_loss_after", "after"),
)


def is_pretraining(run: Run) -> bool:
    """Whether the run recorded anything of pretraining."""
    return any("pretrain/tokens" in values for values in run.metrics.values())


def pretraining_cards(run: Run) -> str:
    """Loss, saving and speed; empty for any other run."""
    if not is_pretraining(run):
        return ""
    cards = []
    for title, name in (("Held-out loss", "pretrain/eval_loss"), ("Loss", "pretrain/loss")):
        if points := run.series(name):
            value = f"<small>{points[0][1]:.3f} →</small> {points[-1][1]:.3f}"
            cards.append(card(title, value, "nats per token, first and last record"))
    last = _last(run)
    saved, paper = last["pretrain/saved_frac"], last["pretrain/saved_frac_paper"]
    text = f"of operations, against the whole model on the same tokens; {paper:.1%} as the paper "
    cards.append(card("Saved", f"{saved:.1%}", text + "counts"))
    speeds = sorted(speed for _, speed in run.series("pretrain/tokens_per_s"))
    cards.append(card("Speed", number(speeds[len(speeds) // 2]), "tokens per second, median"))
    return f'<div class="cards">{"".join(cards)}</div>'


def pretraining(run: Run) -> str:
    """What the losses did, the switches, and what the run has cost."""
    charts = [_chart(run, *axis) for axis in _AXES]
    return (
        f'<div class="grid-3">{"".join(charts)}</div>{_switches(run)}{_decisions(run)}{_bill(run)}'
    )


def _chart(run: Run, axis: str, words: str, unit: str) -> str:
    places = dict(run.series(axis))
    # An evaluation stands where the last record before it stood.
    xs = {step: _at(places, step) for step in run.metrics}
    power = _power(max(places.values()))
    series = [
        Series(word, colour, [(xs[int(s)] / 1000**power, y) for s, y in run.series(name)])
        for name, word, colour in _LINES
    ]
    drawn = [s for s in series if s.points]
    title = f"Loss against {words}"
    across = f"{_PREFIXES[power]}{unit}"
    chart = line_chart(drawn, label=title, zero=False, across=across)
    key = legend([(s.colour, s.name) for s in drawn])
    caption = f"Across: {words} in {across}. Down: nats per token."
    return figure(title, "nats/token", chart, caption, key=key)


def _at(places: dict[float, float], step: float) -> float:
    before = [place for place in places if place <= step]
    return places[max(before)] if before else 0.0


def _power(largest: float) -> int:
    """The power of a thousand that leaves at least two digits before the point."""
    return max(0, math.floor(math.log10(max(largest, 10.0) / 10) / 3))


def _switches(run: Run) -> str:
    rows = []
    for step, values in sorted(run.metrics.items()):
        if "switch/stage" in values:
            cells = "".join(f'<td class="num">{_cell(values, name)}</td>' for name, _ in _SWITCH)
            rows.append(f'<tr><td class="num">{step}</td>{cells}</tr>')
    if not rows:
        return ""
    heads = "".join(f'<th class="num">{word}</th>' for _, word in _SWITCH)
    return (
        '<h3>Switches of stages</h3><div class="table"><table><tr><th class="num">step</th>'
        f"{heads}</tr>{''.join(rows)}</table></div>"
        '<p class="small muted">Held-out losses in nats per token, of subnetworks the mean over '
        "draws. Predicted is the drop by the second-order expansion in the units' outputs: that "
        "part is not learning, it comes of larger subnetworks alone.</p>"
    )


def _cell(values: dict[str, float], name: str) -> str:
    if name not in values:
        return "–"
    return f"{values[name]:.4f}" if "loss" in name or "drop" in name else f"{values[name]:g}"


def _decisions(run: Run) -> str:
    """What an adaptive schedule decided, and its stages as settings."""
    if run.growth is None:
        return ""
    rows = []
    for decision in run.growth["decisions"]:
        slopes = [f"{each['slope']:.3g} at {_rates(each['rates'])}" for each in decision["slopes"]]
        own = decision["own_slope"]
        rows.append(
            f'<tr><td class="num">{decision["step"]}</td><td>{decision["reason"]}</td>'
            f"<td>{_rates(decision['rates'])}</td><td>{_rates(decision['new_rates'])}</td>"
            f'<td class="num">{"–" if own is None else f"{own:.3g}"}</td>'
            f"<td>{', '.join(slopes) or '–'}</td></tr>"
        )
    heads = "<th>why</th><th>from</th><th>to</th><th>own slope</th><th>larger ones' slopes</th>"
    return (
        '<h3>Decisions about growth</h3><div class="table"><table><tr><th class="num">step</th>'
        f"{heads}</tr>{''.join(rows)}</table></div>"
        '<p class="small muted">Rates of layers, heads and neurons. Slopes are falls of the '
        "held-out loss in nats per token and operation. The same stages as settings:</p>"
        f"<pre>{_stages(run.growth)}</pre>"
    )


def _rates(values: Sequence[float]) -> str:
    return " / ".join(f"{value:g}" for value in values)


def _stages(growth: dict[str, Any]) -> str:
    """The stages, ready to be pasted under `evolve`; shares round to the same steps."""
    lines = ["stages:"]
    for stage in growth["stages"]:
        rates = ", ".join(f"{axis}: {stage[axis]!r}" for axis in ("layers", "heads", "neurons"))
        lines.append(f"  - {{start: {stage['step'] / growth['steps']!r}, {rates}}}")
    return "\n".join(lines)


def _bill(run: Run) -> str:
    last = _last(run)
    hours = last["pretrain/train_s"] / 3600 * last.get("pretrain/processes", 1.0)
    facts = [
        ("Tokens", f"{last['pretrain/tokens']:,.0f}"),
        ("Operations", f"{last['pretrain/flops']:.3e} FLOP, head and optimizer included"),
        ("Device-hours", f"{hours:.3f}, evaluation left out"),
        *_energy(run, hours),
    ]
    if "pretrain/probe_flops" in last:
        probes = f"{last['pretrain/probe_flops']:.3e} FLOP in {last['pretrain/probe_s']:,.0f} s"
        facts.append(("Of this, deciding when to grow", probes))
    rows = "".join(f"<tr><td>{name}</td><td>{value}</td></tr>" for name, value in facts)
    return f'<h3>What it cost</h3><div class="table"><table>{rows}</table></div>'


def _energy(run: Run, hours: float) -> Sequence[tuple[str, str]]:
    config: Any = parse_yaml(run.config_yaml, "config") if run.config_yaml else {}
    energy = (config or {}).get("energy") or {}
    watts, factor = energy.get("watts_per_process"), energy.get("kg_co2_per_kwh")
    if watts is None or factor is None:
        return [("Energy", "not reported: energy.watts_per_process is null")]
    kwh = hours * watts / 1000
    return [
        ("Energy", f"{kwh:.3g} kWh at {watts:g} W per device"),
        ("Emissions", f"{kwh * factor:.3g} kg CO2 at {factor:g} kg per kWh"),
    ]


def _last(run: Run) -> dict[str, float]:
    return [v for _, v in sorted(run.metrics.items()) if "pretrain/tokens" in v][-1]
