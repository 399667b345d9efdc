"""The sections of the page. Each takes a run and gives HTML, or says why it is left out."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from ratoon.observe.metrics import metric
from ratoon.observe.timeline import ACTIVITIES
from ratoon.report.load import Run, Sample, Span
from ratoon.report.parts import figure, left_out, legend
from ratoon.report.pretraining import is_pretraining, pretraining
from ratoon.report.svg import Series, column_chart, lane_chart, line_chart, number

WORDS: dict[str, str] = {str(name): name.replace("_", " ") for name in ACTIVITIES} | {
    "drafter_training": "drafter training",
    "update": "policy update",
    "weights": "weight transfer",
}
_NUM_SAMPLES = 6


def timeline(run: Run) -> str:
    """Who did what when: the whole run, and one step in close-up."""
    if not run.spans:
        return left_out("timeline.json is missing or empty")
    used = {span.activity for span in run.spans}
    key = legend([(a, WORDS[a]) for a in ACTIVITIES if a in used])
    end = max(span.end_s for span in run.spans)
    whole = _lanes(run.spans, 0.0, end, "Timeline of the whole run")
    parts = [key, f'<figure class="wide"><h3>The whole run</h3>{whole}</figure>']
    step = _telling_step(run.spans)
    if step is not None:
        inside = [span for span in run.spans if span.step == step]
        first, last = min(s.start_s for s in inside), max(s.end_s for s in inside)
        close = _lanes(inside, first, last, f"Timeline of step {step}")
        parts.append(
            f'<figure class="wide"><h3>Step {step} in close-up</h3>{close}'
            "<figcaption>The step whose idle time was best used. A worker that has nothing left "
            "to decode trains the drafter until the last response is done.</figcaption></figure>"
        )
    return "".join(parts)


def _telling_step(spans: Sequence[Span]) -> int | None:
    """The step with most drafter training; None if there is none."""
    seconds: dict[int, float] = {}
    for span in spans:
        if span.activity == "drafter_training":
            seconds[span.step] = seconds.get(span.step, 0.0) + span.end_s - span.start_s
    return max(seconds, key=seconds.__getitem__) if seconds else None


def _lanes(spans: Sequence[Span], start: float, end: float, label: str) -> str:
    lanes: dict[str, list[tuple[str, float, float, str]]] = {}
    for span in spans:
        tip = (
            f"{span.worker}: {WORDS.get(span.activity, span.activity)}, "
            f"{span.end_s - span.start_s:.2f} s, step {span.step}"
        )
        lane = lanes.setdefault(span.worker, [])
        lane.append((span.activity, span.start_s, span.end_s, tip))
    return lane_chart(sorted(lanes.items()), start=start, end=end, label=label)


def _curve(
    run: Run, title: str, lines: Sequence[tuple[str, str, str, bool]], caption: str
) -> str | None:
    """One chart of several metrics: `(metric, word, colour, dots)` each; None without data."""
    series = [Series(word, c, run.series(name), dots) for name, word, c, dots in lines]
    series = [s for s in series if s.points]
    if not series:
        return None
    last = " · ".join(f"{s.name} <b>{number(s.points[-1][1])}</b>" for s in series)
    chart = line_chart(series, label=f"{title} over steps")
    key = legend([(s.colour, s.name) for s in series]) if len(series) > 1 else ""
    unit = metric(lines[0][0]).unit
    return figure(title, unit, chart, caption, key=key, resting=f"last: {last}")


def curves(run: Run) -> str:
    """What changed over the steps; of pretraining, over tokens, time and operations."""
    if is_pretraining(run):
        return pretraining(run)
    charts = [
        _curve(
            run,
            "Reward",
            [
                ("reward/mean", "training", "evaluation", False),
                ("eval/reward", "held out", "weights", True),
            ],
            "Held-out prompts keep their noise, so differences are paired.",
        ),
        _curve(
            run,
            "Loss on completions",
            [
                ("sft/loss", "training", "evaluation", False),
                ("sft/eval_loss", "held out", "weights", True),
            ],
            "Of supervised fine-tuning; prompts are read, not learned.",
        ),
        _curve(
            run,
            "Response length",
            [
                ("response/tokens_max", "longest", "weights", False),
                ("response/tokens_mean", "mean", "rollout", False),
            ],
            "The gap between the two is the tail that idle workers wait for.",
        ),
        _curve(
            run,
            "Tokens per verification",
            [("speculation/acceptance_length", "acceptance length", "drafter_training", False)],
            "1 is plain decoding. It grows as the drafter learns from idle time.",
        ),
        _curve(
            run,
            "Entropy",
            [("policy/entropy", "entropy", "update", False)],
            "The less certain the policy, the harder it is to guess ahead.",
        ),
        _curve(
            run,
            "Idle time",
            [
                ("idle/frac", "idle in rollouts", "loading", False),
                ("idle/filled_frac", "filled by drafter training", "drafter_training", False),
            ],
            "Share of worker time with nothing to decode, and share of that put to use.",
        ),
        _curve(
            run,
            "Gradient norm",
            [("policy/grad_norm", "before clipping", "reward", False)],
            "Of the policy update, before clipping.",
        ),
    ]
    shown = [chart for chart in charts if chart]
    if not shown:
        return left_out("metrics.jsonl is missing or holds none of these metrics")
    return f'<div class="grid-3">{"".join(shown)}</div>'


_STEP_PARTS = (
    ("time/rollout_s", "generation", "rollout"),
    ("time/reward_s", "reward", "reward"),
    ("time/update_s", "policy update", "update"),
    ("time/weights_s", "weight transfer", "weights"),
    ("time/evaluation_s", "evaluation", "evaluation"),
)
# Of runs whose steps have no parts.
_WHOLE_STEP = (("time/step_s", "update", "update"),)


def step_time(run: Run) -> str:
    """Where the time of a step goes."""
    layers: list[Series] = []
    for parts in (_STEP_PARTS, _WHOLE_STEP):
        series = [Series(word, colour, run.series(name)) for name, word, colour in parts]
        layers = layers or [layer for layer in series if any(y > 0 for _, y in layer.points)]
    if not layers:
        return left_out("metrics.jsonl holds no step times")
    totals = {layer.name: sum(y for _, y in layer.points) for layer in layers}
    everything = sum(totals.values())
    bars = "".join(
        f'<div title="{layer.name}" style="flex:{totals[layer.name] / everything:.4f};'
        f'background:var(--c-{layer.colour})"></div>'
        for layer in layers
    )
    words = [(la.colour, f"{la.name} {totals[la.name] / everything:.0%}") for la in layers]
    chart = column_chart(layers, label="Seconds of each step by activity", width=1040)
    caption = "Rewards count only while nothing else is running."
    chart_figure = figure("Each step", "s", chart, caption, wide=True)
    return f'<div class="share">{bars}</div>{legend(words)}{chart_figure}'


def speed(run: Run) -> str:
    """Replayed cases with and without speculation, losses included."""
    cases = (run.summary or {}).get("replays")
    if not cases:
        return left_out("no step was replayed without speculation")
    longest = max(max(case["plain_s"], case["ratoon_s"]) for case in cases)
    rows = []
    for case in cases:
        ratio = case["plain_s"] / case["ratoon_s"]
        kind = "good" if ratio >= 1 else "bad"
        bars = "".join(
            f'<div class="bar" style="width:{100 * case[key] / longest:.1f}%"></div>'
            for key in ("ratoon_s", "plain_s")
        )
        same = "yes" if case["identical"] else '<b class="bad">no</b>'
        rows.append(
            f"<tr><td>{escape(str(case['case']))}</td>"
            f'<td style="width:32%">{bars}</td>'
            f'<td class="num">{case["ratoon_s"]:.2f} s</td>'
            f'<td class="num">{case["plain_s"]:.2f} s</td>'
            f'<td class="num {kind}"><b>{ratio:.2f}×</b></td>'
            f'<td class="num">{case["tokens"]:,}</td><td>{same}</td></tr>'
        )
    return (
        legend([("rollout", "as trained"), ("idle", "plain decoding")])
        + '<div class="table cases"><table><tr><th>case</th><th></th>'
        '<th class="num">as trained</th>'
        '<th class="num">plain</th><th class="num">speed-up</th><th class="num">tokens</th>'
        f"<th>same tokens</th></tr>{''.join(rows)}</table></div>"
        '<p class="small muted">Both arms start from the drafter, suffix index and calibration as '
        "they were before the recorded step. A speed-up below 1 is a loss and is shown as one.</p>"
    )


def samples(run: Run) -> str:
    """Answers to held-out prompts before and after: gains, losses, and what stayed."""
    if not run.samples:
        return left_out("completions/ holds fewer than two held-out evaluations")
    gained = [s for s in run.samples if s.reward_after > s.reward_before]
    lost = [s for s in run.samples if s.reward_after < s.reward_before]
    same = [s for s in run.samples if s.reward_after == s.reward_before]
    picked = [*gained[:3], *lost[:2], *same[:_NUM_SAMPLES]][:_NUM_SAMPLES]
    count = f"{len(gained)} improved, {len(lost)} became worse, {len(same)} stayed"
    cards = "".join(_sample(sample) for sample in picked)
    return (
        f'<p class="muted">Of {len(run.samples)} held-out responses {count}. Drawn with the same '
        f"noise before and after; the first of each kind are shown.</p>{cards}"
    )


def _sample(sample: Sample) -> str:
    answer = ""
    if sample.answer is not None:
        answer = f'<span class="pill muted">answer {escape(sample.answer[:60])}</span>'
    sides = (
        ("before", sample.before, sample.reward_before),
        ("after", sample.after, sample.reward_after),
    )
    best = max(sample.reward_before, sample.reward_after)
    pair = "".join(
        f'<div class="side"><h3 class="muted">{name} <span class="pill '
        f'{"good" if reward == best and reward > 0 else "muted"}">reward {number(reward)}</span>'
        f"</h3><pre>{escape(text) or '(empty)'}</pre></div>"
        for name, text, reward in sides
    )
    prompt = escape(sample.prompt)
    return (
        f'<div class="card sample"><div class="prompt">{prompt} {answer}</div>'
        f'<div class="pair">{pair}</div></div>'
    )


def origin(run: Run) -> str:
    """Configuration, provenance, and what each metric means."""
    parts = []
    if run.provenance:
        rows = "".join(
            f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>"
            for name, text in _facts(run.provenance)
        )
        parts.append(f'<div class="table"><table>{rows}</table></div>')
    else:
        parts.append(left_out("provenance.json is missing"))
    if run.config_yaml:
        config = escape(run.config_yaml)
        parts.append(f"<details><summary>Configuration</summary><pre>{config}</pre></details>")
    else:
        parts.append(left_out("config.resolved.yaml is missing"))
    names = sorted({n for values in run.metrics.values() for n in values if n != "time_s"})
    if names:
        rows = "".join(
            f"<tr><td>{escape(n)}</td><td>{escape(metric(n).unit)}</td>"
            f"<td>{escape(metric(n).meaning)}</td></tr>"
            for n in names
        )
        parts.append(
            f'<details><summary>What the metrics mean</summary><div class="table"><table>'
            f"<tr><th>metric</th><th>unit</th><th>meaning</th></tr>{rows}</table></div></details>"
        )
    return "".join(parts)


def _facts(provenance: dict[str, Any]) -> list[tuple[str, str]]:
    facts = []
    for name, value in provenance.items():
        if isinstance(value, dict):
            text = ", ".join(
                f"{k} {('no', 'yes')[v] if isinstance(v, bool) else v}"
                for k, v in value.items()
                if v is not None
            )
        elif isinstance(value, list):
            text = " ".join(str(item) for item in value)
        else:
            text = str(value)
        facts.append((name, text or "unknown"))
    return facts
