"""Strings that end a response: found in its text as soon as a token completes one.

A response ends with its first token after which the text of all its tokens contains a stop string.
That is a function of the tokens alone, wherever their borders lie and however many become known
in one step.

Text comes from a `decode` of the caller's, to which further tokens only add: it may turn an
unfinished character at the end, shown as U+FFFD, into a whole one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ratoon.errors import ConfigError

Decode = Callable[[Sequence[int]], str]

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"

# What the start of a window may spoil of its text: a leading space, parts of one character.
_SPOILT = 8
_LEAST_WINDOW = 16


def check_stop_strings(strings: Sequence[str]) -> None:
    """Raise `ConfigError` for strings that no response could be ended by."""
    for text in strings:
        if not text or _UNFINISHED in text:
            raise ConfigError(
                f"stop string {text!r} is empty, or holds the sign of unfinished characters; give "
                "text that a response can contain"
            )


def text_before(decode: Decode, ids: Sequence[int], stop_string: str) -> str:
    """The text of a response that `stop_string` ended, without it and what follows it."""
    found = _find(decode, ids, len(ids) - 1, (stop_string,))
    return decode(ids) if found is None else decode(ids)[: found[0]]


class StopWatch:
    """Watches one response for the strings that end it, keeping no more tokens than it needs.

    Strings that the first `min_new_tokens` tokens complete do not count.
    """

    def __init__(self, strings: Sequence[str], decode: Decode, min_new_tokens: int = 0) -> None:
        self._strings = strings
        self._decode = decode
        self._ids: list[int] = []
        self._immune = min_new_tokens
        longest = max(map(len, strings))
        self._reach = longest + _SPOILT
        self._window = longest + _LEAST_WINDOW

    def first_end(self, block: Sequence[int]) -> tuple[int, str] | None:
        """How many of the tokens that may follow end the response, and the string they complete.

        None if it goes on. Of strings that one token completes, the one that begins first.
        Cost: two texts of a few tokens; some more where a string is found.
        """
        ids = [*self._ids, *block]
        before = max(len(self._ids), self._immune)
        if _find(self._decode, ids, before, self._strings) is None:
            return None
        for count in range(before + 1, len(ids) + 1):
            found = _find(self._decode, ids[:count], before, self._strings)
            if found is not None:
                return count - len(self._ids), found[1]
        return None

    def append(self, block: Sequence[int]) -> None:
        """These tokens are final, and the response goes on."""
        self._ids += block
        if len(self._ids) < 2 * self._window:
            return
        kept = self._ids[-self._window :]
        # Tokens may have no text of their own: special ones, or parts of a character.
        if len(self._decode(kept)) >= self._reach:
            self._immune -= len(self._ids) - len(kept)
            self._ids = kept


def _find(
    decode: Decode, ids: Sequence[int], before: int, strings: Sequence[str]
) -> tuple[int, str] | None:
    """The string that begins first in the text of `ids`, and where; None if there is none.

    Those that the first `before` ids complete do not count.
    """
    text = decode(ids)
    # A stop string holds no unfinished character, so those at the end belong to what follows.
    complete = len(decode(ids[:before]).rstrip(_UNFINISHED))
    places = [(text.find(s, max(0, complete - len(s) + 1)), s) for s in strings]
    return min((place for place in places if place[0] >= 0), default=None)
