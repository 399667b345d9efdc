"""The figures and the picture of the README, from a run that was measured.

    python docs/figures.py runs/quickstart    # take them from this run
    python docs/figures.py                    # write README and picture again

The first form writes `benchmarks/results/quickstart_summary.json`, which is committed; README.md
and `docs/images/timeline.svg` follow from that file alone. A test holds the three together.
"""

from __future__ import annotations

import json
import statistics
import sys
from html import escape
from pathlib import Path
from typing import Any

from ratoon.report.load import load_run

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "benchmarks" / "results" / "quickstart_summary.json"
PICTURE = ROOT / "docs" / "images" / "timeline.svg"
README = ROOT / "README.md"
BEGIN, END = "<!-- figures: written by docs/figures.py -->", "<!-- end of figures -->"

MODELS = {
    "quickstart": "SmolLM2-135M-Instruct on generated sums",
    "quickstart-tiny": "a tiny model, trained in place, on generated sums",
}
# Light, dark, and the words of the legend.
COLOURS = {
    "rollout": ("#0072b2", "#4aa3dd", "generating"),
    "drafter_training": ("#e69f00", "#f0b429", "training the drafter"),
    "idle": ("#c9c6bd", "#5d6863", "idle"),
    "update": ("#a8568f", "#d58bbf", "policy update"),
    "weights": ("#d55e00", "#ff8a4c", "new weights to the engines"),
}
WIDTH, LEFT, LANE, GAP = 860, 170, 30, 10
SHORTEST_S = 0.005

Record = dict[str, Any]


def make_record(path: Path) -> Record:
    """What the README shows of a run: its summary, its machine, and the spans of its last step.

    Spans are `[worker, activity, start_s, end_s]`, counted from the first one.
    """
    run = load_run(path)
    if run.summary is None or run.provenance is None:
        sys.exit(f"{path} holds no finished run: summary.json or provenance.json is missing")
    last = max(span.step for span in run.spans if span.activity == "rollout")
    spans = [span for span in run.spans if span.step == last and span.activity in COLOURS]
    start = min(span.start_s for span in spans if span.activity == "rollout")
    # Evaluations and replays of the last step follow its last phase, and have idle times too.
    end = max(span.end_s for span in spans if span.activity != "idle")
    return {
        "run": run.name,
        "title": run.summary.get("title") or MODELS.get(run.name, run.name),
        "summary": run.summary,
        "provenance": {key: value for key, value in run.provenance.items() if key != "command"},
        "step": last,
        "spans": [
            [s.worker, s.activity, round(s.start_s - start, 3), round(s.end_s - start, 3)]
            for s in spans
            if start <= s.start_s < end and s.end_s - s.start_s > SHORTEST_S
        ],
    }


def figures(record: Record | None) -> str:
    """The README's part between the two marks."""
    if record is None:
        return (
            "Nothing is claimed here that was not measured: `make quickstart` prints the figures "
            "of your machine\nand writes them to `runs/quickstart/report.html`."
        )
    s = record["summary"]
    rows = "\n".join(f"| {name} | {value} |" for name, value in _rows(s))
    return (
        "![One step of reinforcement learning on two cores](docs/images/timeline.svg)\n\n"
        f"| `make {record['run']}`: {record['title']} | |\n| --- | --- |\n{rows}\n\n"
        f"{_measured(record)}"
    )


def _rows(s: Record) -> list[tuple[str, str]]:
    replayed = f"{s['tokens_compared']:,} tokens of {s['responses_compared']:,} responses"
    same = "all the same" if s["tokens_identical"] else f"**{s['flips']} responses differ**"
    gain = s["reward_after"] - s["reward_before"]
    return [
        (
            "held-out reward",
            f"{s['reward_before']:.3f} → **{s['reward_after']:.3f}** "
            f"(paired difference {gain:+.3f}, standard error {s['reward_diff_stderr']:.3f})",
        ),
        (
            "last rollout, with speculation against without",
            f"**{_ratio(s['rollout_speedup'])}**, whole step {_ratio(s['step_speedup'])}; "
            f"{replayed} compared, {same}",
        ),
        (
            "workers with nothing to generate",
            f"{s['idle_fraction']:.0%} of rollout time, **{s['idle_fraction_filled']:.0%}** of it "
            f"spent training the drafter: {s['acceptance_length_first']:.2f} → "
            f"{s['acceptance_length_last']:.2f} tokens per verification",
        ),
    ]


def _ratio(value: float) -> str:
    return f"{value:.2f}× as fast" if value >= 1 else f"{value:.2f}× as fast (slower)"


def _measured(record: Record) -> str:
    s, source = record["summary"], record["provenance"]
    machine, versions = source["machine"], source["versions"]
    commit = source["code"]["commit"]
    return (
        f"Measured on {source['started'][:10]}: {machine['processor']}, {machine['cores']} cores, "
        f"{machine['memory_gb']:.0f} GB, torch {versions['torch']}; {s['steps']} steps in "
        f"{s['seconds'] / 60:.1f} minutes, {s['numerics']} numerics, "
        f"{s['entropy_per_token']:.2f} nats of entropy per token"
        + (f", commit {commit[:10]}." if commit else ".")
    )


def draw(record: Record) -> str:
    """The last step of the run as SVG: a lane per worker, and the replays of its rollout below."""
    spans, summary = record["spans"], record["summary"]
    workers = sorted({span[0] for span in spans})
    bars = [
        (label, statistics.median(replay[key] for replay in summary["replays"]))
        for label, key in (("plain, replayed", "plain_s"), ("speculative, replayed", "ratoon_s"))
        if summary.get("replays")
    ]
    longest = max([span[3] for span in spans] + [seconds for _, seconds in bars])
    scale = (WIDTH - LEFT - 20) / longest
    parts, y = [_legend({span[1] for span in spans})], 44
    for worker in workers:
        parts.append(_text(LEFT - 10, y + LANE / 2 + 5, worker, "end"))
        for _, activity, start, end in (span for span in spans if span[0] == worker):
            x, width = LEFT + start * scale, max((end - start) * scale, 0.5)
            parts.append(_bar(x, y, width, LANE, activity))
        y += LANE + GAP
    y += GAP
    for label, seconds in bars:
        parts.append(_text(LEFT - 10, y + 13, label, "end"))
        parts.append(_bar(LEFT, y, seconds * scale, 16, "rollout"))
        parts.append(_text(LEFT + seconds * scale - 6, y + 12, f"{seconds:.1f} s", "end", "inside"))
        y += 16 + GAP
    parts += _axis(longest, scale, y)
    return _svg(y + 24, parts, record)


def _axis(longest: float, scale: float, y: float) -> list[str]:
    step = next(s for s in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300) if longest / s <= 10)
    ticks = [index * step for index in range(int(longest / step) + 1)]
    return [_text(LEFT + tick * scale, y + 14, f"{tick:g} s", "middle") for tick in ticks]


def _legend(used: set[str]) -> str:
    parts, x = [], float(LEFT)
    for activity, (_, _, words) in COLOURS.items():
        if activity in used:
            parts += [_bar(x, 12, 12, 12, activity), _text(x + 18, 23, words, "start")]
            x += 40 + 6.6 * len(words)
    return "".join(parts)


def _bar(x: float, y: float, width: float, height: float, activity: str) -> str:
    return (
        f'<rect class="{activity}" x="{x:.1f}" y="{y:g}" width="{width:.1f}" height="{height:g}"/>'
    )


def _text(x: float, y: float, words: str, anchor: str, kind: str = "words") -> str:
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{y:g}" text-anchor="{anchor}">{escape(words)}</text>'
    )


def _svg(height: float, parts: list[str], record: Record) -> str:
    light = "".join(f".{name}{{fill:{colour[0]}}}" for name, colour in COLOURS.items())
    dark = "".join(f".{name}{{fill:{colour[1]}}}" for name, colour in COLOURS.items())
    title = f"Step {record['step']} of {record['run']}: what each worker did, in seconds"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" '
        f'width="{WIDTH}" height="{height:g}" role="img">\n<title>{escape(title)}</title>\n'
        f"<style>text{{font:13px system-ui,sans-serif}}.words{{fill:#5d6964}}"
        f".inside{{fill:#fff}}{light}"
        f"@media(prefers-color-scheme:dark){{.words{{fill:#9ba8a2}}{dark}}}</style>\n"
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def with_figures(readme: str, record: Record | None) -> str:
    """The README with its figures replaced."""
    before, _, rest = readme.partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}\n{figures(record)}\n{END}{after}"


def read_record() -> Record | None:
    """The committed record; None before the first run was taken."""
    if not RECORD.is_file():
        return None
    record: Record = json.loads(RECORD.read_text(encoding="utf-8"))
    return record


def main() -> None:
    """See the top of this file."""
    if len(sys.argv) > 1:
        text = json.dumps(make_record(Path(sys.argv[1])), indent=1, ensure_ascii=False)
        RECORD.parent.mkdir(parents=True, exist_ok=True)
        RECORD.write_text(text + "\n", encoding="utf-8")
    record = read_record()
    if record is not None:
        PICTURE.parent.mkdir(parents=True, exist_ok=True)
        PICTURE.write_text(draw(record), encoding="utf-8")
    readme = README.read_text(encoding="utf-8")
    README.write_text(with_figures(readme, record), encoding="utf-8")


if __name__ == "__main__":
    main()
