"""Pieces of HTML that several sections use."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape


def left_out(reason: str) -> str:
    """A line in place of a section that cannot be shown."""
    return f'<p class="left-out">Left out: {escape(reason)}.</p>'


def legend(names: Sequence[tuple[str, str]]) -> str:
    """Swatches: `(colour, word)` each."""
    items = (f'<span style="--swatch:var(--c-{c})">{escape(word)}</span>' for c, word in names)
    return f'<div class="legend">{"".join(items)}</div>'


def card(title: str, value: str, text: str) -> str:
    """A figure of the headline; all three are HTML."""
    return (
        f'<div class="card"><h3 class="muted">{title}</h3>'
        f'<div class="value">{value}</div><div class="small muted">{text}</div></div>'
    )


def figure(
    title: str,
    unit: str,
    chart: str,
    caption: str,
    *,
    key: str = "",
    resting: str = "",
    wide: bool = False,
) -> str:
    """A chart in its frame: title and unit above, read-out and caption below."""
    opening = '<figure class="wide">' if wide else "<figure>"
    shown = f' <span class="unit">{escape(unit)}</span>' if unit else ""
    return (
        f"{opening}<h3>{escape(title)}{shown}</h3>{key}{chart}"
        f'<div class="readout">{resting}</div><figcaption>{caption}</figcaption></figure>'
    )
