r"""Finding the final answer in a response, and numbers in text.

A response says its final answer in an `<answer>` element, in a `\boxed{}`, or behind `Answer:`.
"""

from __future__ import annotations

import re
from fractions import Fraction

MARKER = "Answer:"
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_BRACES = re.compile(r"(?P<box>\\f?box(?:ed)?\s*\{)|\\.|[{}]", re.DOTALL)
# A sign counts unless it stands behind a digit or a bracket, where it is an operation ("10-3").
_SIGN = r"(?:(?<![\w.)\]])[-+\u2212])?"
_UNSIGNED = r"(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d+)(?:\.\d+)?"
_NUMBER = re.compile(
    rf"(?P<above>{_SIGN}{_UNSIGNED}|{_SIGN}\.\d+)(?:/(?P<below>{_UNSIGNED}))?(?P<percent>\s?\\?%)?"
)


def numbers_in(text: str, *, percent: bool = False) -> list[Fraction]:
    """All numbers in `text`, exactly: signs, decimals, fractions, commas between thousands.

    A percent sign is a unit like any other; with `percent` it divides by a hundred.

    Example: `"from -3 to 1,250.50"` gives -3 and 1250.5; `"10-3"` gives 10 and 3; `"3/4"` gives
    one number.
    """
    found: list[Fraction] = []
    for match in _NUMBER.finditer(text.replace("{,}", ",").replace("\\!", "")):
        above, below = match["above"], match["below"]
        values = [_exact(above)]
        if below is not None:
            divisor = _exact(below)
            values = [values[0] / divisor] if divisor else [*values, divisor]
        if percent and match["percent"]:
            values[-1] /= 100
        found += values
    return found


def _exact(digits: str) -> Fraction:
    whole, _, decimals = digits.replace(",", "").replace("\u2212", "-").partition(".")
    # Longer ones are no answers, and Python refuses to convert them.
    whole, decimals = whole[:4000], decimals[:4000]
    negative = whole.startswith("-")
    value = Fraction(int(whole.lstrip("+-") or "0"))
    if decimals:
        value += Fraction(int(decimals), 10 ** len(decimals))
    return -value if negative else value


def last_box(text: str) -> str | None:
    r"""What the last `\boxed{}` that is not inside another holds, boxes inside it opened; or None.

    A box that is never closed is none: the response was cut.

    Example: `"\boxed{1} or \boxed{\boxed{2} + x}"` gives `"2 + x"`.
    """
    opened: list[re.Match[str] | None] = []
    boxes: list[tuple[re.Match[str], int]] = []
    for found in _BRACES.finditer(text):
        if found["box"] or found[0] == "{":
            opened.append(found if found["box"] else None)
        elif found[0] == "}" and opened and (box := opened.pop()) is not None:
            boxes.append((box, found.start()))
    if not boxes:
        return None
    # What closes last is in no other.
    outer, end = boxes.pop()
    inside = [(box, close) for box, close in boxes if box.start() > outer.start()]
    cuts = [box.span() for box, _ in inside] + [(close, close + 1) for _, close in inside]
    kept, position = [], outer.end()
    for start, stop in sorted(cuts):
        kept.append(text[position:start])
        position = stop
    return "".join([*kept, text[position:end]]).strip()


def marked_answer(text: str) -> str | None:
    r"""The last `<answer>` element, else the last `\boxed{}`, else what follows the last `Answer:`.

    A box inside an element is opened. None if the response has none of them.
    """
    tagged = _TAGGED.findall(text)
    if tagged:
        inner = last_box(tagged[-1])
        return (tagged[-1] if inner is None else inner).strip()
    if (box := last_box(text)) is not None:
        return box
    _, found, rest = text.rpartition(MARKER)
    return rest.strip() if found else None


def final_answer(text: str) -> str:
    """The marked answer, else all of `text`."""
    marked = marked_answer(text)
    return text.strip() if marked is None else marked


def reference_answer(text: str) -> str:
    """The answer in a data set's column, which may explain itself.

    What follows the last `####` (GSM8K), else the last box (MATH's solutions), else all of it.
    """
    _, found, rest = text.rpartition("####")
    if found:
        return rest.strip()
    return last_box(text) or text.strip()
