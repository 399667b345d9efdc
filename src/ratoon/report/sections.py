"""The sections of the page. Each takes a run and gives HTML, or says why it is left out."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from ratoon.observe.metrics import metric
from ratoon.observe.timeline import ACTIVITIES
from ratoon.report.load import Run, Sample, Span
from ratoon.report.svg import Series, column_chart, lane_chart, line_chart, number

WORDS: dict[str, str] = {str(name): name.replace("_", " ") for name in ACTIVITIES} | {
    "drafter_training": "drafter training",
    "update": "policy update",
    "weights": "weight transfer",
}
_NUM_SAMPLES = 6


def left_out(reason: str) -> str:
    """A line in place of a section that cannot be shown."""
    return f'<p class="left-out">Left out: {escape(reason)}.</p>'


def headline(run: Run) -> str:
    """The figures that the run is judged by, as cards."""
    if run.summary is None:
        return left_out("summary.json is missing, so the run has not ended")
    s = run.summary
    cards = [
        _reward_card(s),
        _ratio_card("Rollout, with speculation", s["rollout_speedup"], "the same step replayed"),
        _ratio_card("Whole step", s["step_speedup"], "generation, reward and update together"),
        _tokens_card(s),
        _idle_card(s),
        _acceptance_card(s),
    ]
    notes = "".join(f"<li>{escape(note)}</li>" for note in s.get("notes", []))
    return (
        f'<p class="lead">{_lead(s)}</p><div class="cards">{"".join(cards)}</div>'
        + _run_line(s)
        + (f'<ul class="notes small muted">{notes}</ul>' if notes else "")
    )


def _lead(s: dict[str, Any]) -> str:
    """The result in two sentences, losses said as plainly as gains."""
    sentences = []
    before, after, error = s["reward_before"], s["reward_after"], s["reward_diff_stderr"]
    if before is not None and after is not None and error is not None:
        word = "rose" if after > before else "fell"
        if abs(after - before) <= 2 * error:
            word = "did not change by more than the noise:"
        sentences.append(f"Reward on held-out prompts {word} from {before:.3f} to {after:.3f}.")
    ratio, same = s["rollout_speedup"], s["tokens_identical"]
    if ratio is not None and same is not None:
        words = (
            f"in {ratio:.2f} times the time" if ratio >= 1 else f"in only {ratio:.2f} of the time"
        )
        tokens = "exactly the same tokens" if same else "other tokens, which must never happen,"
        sentences.append(f"The same rollout without speculation gave {tokens} {words}.")
    return escape(" ".join(sentences))


def _run_line(s: dict[str, Any]) -> str:
    facts = []
    if isinstance(seconds := s["seconds"], int | float):
        facts.append(f"{seconds / 60:.1f} minutes")
    for key, word in (("steps", "RL steps"), ("workers", "workers")):
        if s.get(key) is not None:
            facts.append(f"{s[key]} {word}")
    if s["numerics"]:
        flips = f", {s['flips']} flips" if s["flips"] else ""
        facts.append(f"numerics {s['numerics']}{flips}")
    if isinstance(entropy := s["entropy_per_token"], int | float):
        facts.append(f"entropy {number(entropy)} nats per token")
    return f'<p class="small muted">{escape(" · ".join(facts))}</p>'


def _card(title: str, value: str, text: str) -> str:
    return (
        f'<div class="card"><h3 class="muted">{title}</h3>'
        f'<div class="value">{value}</div><div class="small muted">{text}</div></div>'
    )


def _reward_card(s: dict[str, Any]) -> str:
    before, after, error = s["reward_before"], s["reward_after"], s["reward_diff_stderr"]
    if not isinstance(before, int | float) or not isinstance(after, int | float):
        return _card("Held-out reward", "–", "not measured")
    value = f"<small>{number(before)} →</small> {number(after)}"
    gain = after - before
    if not isinstance(error, int | float):
        return _card("Held-out reward", value, "no standard error")
    clear = abs(gain) > 2 * error
    kind = ("good" if gain > 0 else "bad") if clear else "muted"
    verdict = "clear of noise" if clear else "within noise"
    text = f'<span class="{kind}">{gain:+.3f} ± {number(error, 2)}</span>, paired: {verdict}'
    return _card("Held-out reward", value, text)


def _ratio_card(title: str, ratio: object, text: str) -> str:
    if not isinstance(ratio, int | float):
        return _card(title, "–", "not measured")
    word = "faster" if ratio >= 1 else "slower"
    kind = "good" if ratio >= 1 else "bad"
    factor = ratio if ratio >= 1 else 1 / ratio
    return _card(title, f'<span class="{kind}">{factor:.2f}×</span> <small>{word}</small>', text)


def _tokens_card(s: dict[str, Any]) -> str:
    same, tokens, responses = (
        s["tokens_identical"],
        s.get("tokens_compared"),
        s.get("responses_compared"),
    )
    if same is None:
        return _card("Tokens, against plain decoding", "–", "not compared")
    compared = f"{tokens:,} tokens" if isinstance(tokens, int) else "one step"
    compared += f" of {responses:,} responses" if isinstance(responses, int) else ""
    value = '<span class="good">identical</span>' if same else '<span class="bad">differ</span>'
    return _card("Tokens, against plain decoding", value, f"{compared} compared")


def _idle_card(s: dict[str, Any]) -> str:
    idle, filled, tokens = s["idle_fraction"], s["idle_fraction_filled"], s["spot_tokens"]
    if not isinstance(idle, int | float):
        return _card("Idle in rollouts", "–", "not measured")
    text = "of worker time"
    if isinstance(filled, int | float) and isinstance(tokens, int | float):
        text += f"; {filled:.0%} of it trained the drafter, {number(tokens)} tokens"
    return _card("Idle in rollouts", f"{idle:.0%}", text)


def _acceptance_card(s: dict[str, Any]) -> str:
    first, last = s["acceptance_length_first"], s["acceptance_length_last"]
    if not isinstance(first, int | float) or not isinstance(last, int | float):
        return _card("Tokens per verification", "–", "not measured")
    value = f"<small>{first:.2f} →</small> {last:.2f}"
    return _card("Tokens per verification", value, "first and last step; 1 is plain decoding")


def legend(names: Sequence[tuple[str, str]]) -> str:
    """Swatches: `(colour, word)` each."""
    items = (f'<span style="--swatch:var(--c-{c})">{escape(word)}</span>' for c, word in names)
    return f'<div class="legend">{"".join(items)}</div>'


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


def _figure(
    title: str,
    unit: str,
    chart: str,
    caption: str,
    *,
    key: str = "",
    resting: str = "",
    wide: bool = False,
) -> str:
    opening = '<figure class="wide">' if wide else "<figure>"
    shown = f' <span class="unit">{escape(unit)}</span>' if unit else ""
    return (
        f"{opening}<h3>{escape(title)}{shown}</h3>{key}{chart}"
        f'<div class="readout">{resting}</div><figcaption>{caption}</figcaption></figure>'
    )


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
    return _figure(title, unit, chart, caption, key=key, resting=f"last: {last}")


def curves(run: Run) -> str:
    """What changed over the steps."""
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


def step_time(run: Run) -> str:
    """Where the time of a step goes."""
    layers = [Series(word, colour, run.series(name)) for name, word, colour in _STEP_PARTS]
    layers = [layer for layer in layers if any(y > 0 for _, y in layer.points)]
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
    figure = _figure("Each step", "s", chart, caption, wide=True)
    return f'<div class="share">{bars}</div>{legend(words)}{figure}'


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
        + '<div class="table cases"><table><tr><th>case</th><th></th><th class="num">as trained</th>'
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
            text = ", ".join(f"{k} {v}" for k, v in value.items() if v is not None)
        elif isinstance(value, list):
            text = " ".join(str(item) for item in value)
        else:
            text = str(value)
        facts.append((name, text or "unknown"))
    return facts
