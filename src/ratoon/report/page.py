"""The page: one file, no network, readable on a phone, in light and in dark."""

from __future__ import annotations

from html import escape
from importlib import resources
from pathlib import Path

from ratoon.observe.files import write_atomically
from ratoon.observe.run_folder import RunFolder
from ratoon.observe.timeline import ACTIVITIES
from ratoon.report import sections
from ratoon.report.headline import headline
from ratoon.report.load import Run, load_run

_SPROUT = (
    '<svg viewBox="0 0 48 48" aria-hidden="true"><g fill="none" stroke="var(--accent)" '
    'stroke-width="3" stroke-linecap="round"><path d="M4 41h40" opacity=".35"/>'
    '<path d="M24 41V17M24 27c-1-8-6-12-13-12 0 8 5 12 13 12M24 22c1-9 6-13 13-14 1 9-4 14-13 14"/>'
    '<path d="M12 41v-5M36 41v-7" opacity=".6"/></g></svg>'
)


def write_report(path: Path) -> Path:
    """Write `report.html` into the run folder `path` and return its path.

    Raises:
        DataError: the folder holds no run, or a file in it is damaged.
    """
    target = RunFolder(path).report
    write_atomically(target, render(load_run(path)))
    return target


def render(run: Run) -> str:
    """The whole page as text."""
    title = (run.summary or {}).get("title") or run.name
    parts = [
        section("", headline(run)),
        section("Who did what when", sections.timeline(run)),
        section("What changed", sections.curves(run)),
        section("Where the time goes", sections.step_time(run)),
    ]
    if run.draws_responses:
        parts.append(section("With and without speculation", sections.speed(run)))
        parts.append(section("Before and after", sections.samples(run)))
    parts.append(section("Where this comes from", sections.origin(run)))
    return document(
        str(title),
        f"run {run.name}",
        "".join(parts),
        "Written by Ratoon from the run's folder; metrics.jsonl is the truth.",
    )


def document(title: str, subtitle: str, body: str, footer: str) -> str:
    """A whole page around `body`, which is HTML; the other texts are plain."""
    files = resources.files("ratoon.report")
    style = files.joinpath("style.css").read_text(encoding="utf-8") + _palette()
    script = files.joinpath("page.js").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)} · Ratoon</title><style>{style}</style></head><body><main>"
        f"<header>{_SPROUT}<div><h1>{escape(title)}</h1>"
        f'<div class="muted">{escape(subtitle)}</div></div></header>'
        f"{body}<footer>{escape(footer)}</footer></main><script>{script}</script></body></html>\n"
    )


def section(title: str, body: str) -> str:
    """A part of the page under a heading, which may be empty."""
    heading = f"<h2>{escape(title)}</h2>" if title else '<div style="height:22px"></div>'
    return f"<section>{heading}{body}</section>"


def _palette() -> str:
    """Fill and stroke classes for each colour of the palette."""
    return "".join(
        f".f-{name}{{fill:var(--c-{name})}}.s-{name}{{stroke:var(--c-{name})}}"
        for name in ACTIVITIES
    )
