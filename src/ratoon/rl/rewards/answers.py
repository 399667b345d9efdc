"""Finding the final answer in a response, and numbers in text."""

from __future__ import annotations

import re
from decimal import Decimal

MARKER = "Answer:"
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
# A sign counts unless it stands behind a digit or a bracket, where it is an operation ("10-3").
_NUMBER = re.compile(
    r"(?:(?<![\w.)\]])[-+\u2212])?"
    r"(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d+)(?:\.\d+)?"
    r"|(?:(?<![\w.)\]])[-+\u2212])?\.\d+"
)


def numbers_in(text: str) -> list[Decimal]:
    """All numbers in `text`, exactly: signs, decimals, and commas between thousands.

    Example: `"from -3 to 1,250.50"` gives -3 and 1250.50; `"10-3"` gives 10 and 3.
    """
    return [
        Decimal(found.group().replace(",", "").replace("\u2212", "-"))
        for found in _NUMBER.finditer(text)
    ]


def after_marker(text: str) -> str | None:
    """What follows the last `Answer:`, or None."""
    _, found, rest = text.rpartition(MARKER)
    return rest if found else None


def final_answer(text: str) -> str:
    """The last `<answer>` element, else what follows the last `Answer:`, else all of `text`."""
    tagged = _TAGGED.findall(text)
    answer = tagged[-1] if tagged else after_marker(text)
    return (text if answer is None else answer).strip()
