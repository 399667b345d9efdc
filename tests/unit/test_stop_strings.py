"""Stop strings: found where the whole text first contains one, from a window of it."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from ratoon.errors import ConfigError
from ratoon.sampling.stop_strings import StopWatch, check_stop_strings, text_before

PIECES = (b"a", b"b", b"ab", b"ba", b"\xc3", b"\xa9", b"b\xe2\x82", b"\xac", b"", b" a")
STOPS = ("\u00e9\u00e9", "\u20ac a", "babbab", "a a a")


def text_of(ids: Sequence[int]) -> str:
    return b"".join(PIECES[token] for token in ids).decode(errors="replace")


def text_without_leading_space(ids: Sequence[int]) -> str:
    """As tokenizers of the SentencePiece kind show it."""
    return text_of(ids).removeprefix(" ")


def naive_end(ids: Sequence[int], stops: Sequence[str], decode=text_of) -> int | None:  # type: ignore[no-untyped-def]
    """How many tokens the response has: the first after which its text holds a stop string."""
    return next(
        (n for n in range(1, len(ids) + 1) if any(s in decode(ids[:n]) for s in stops)), None
    )


def watched_end(
    ids: Sequence[int], watch: StopWatch, blocks: random.Random
) -> tuple[int, str] | None:
    """The same from a watch that is shown blocks, of which only a part may become final."""
    place = 0
    while place < len(ids):
        block = ids[place : place + blocks.randint(1, 9)]
        final = blocks.randint(1, len(block))
        found = watch.first_end(block)
        if found is not None and found[0] <= final:
            return place + found[0], found[1]
        watch.append(block[:final])
        place += final
    return None


@pytest.mark.parametrize("decode", [text_of, text_without_leading_space])
def test_a_response_ends_where_its_text_first_holds_a_stop_string(decode) -> None:  # type: ignore[no-untyped-def]
    draw = random.Random(0)
    ends = []
    for _ in range(300):
        ids = draw.choices(range(len(PIECES)), k=200)
        expected = naive_end(ids, STOPS, decode)
        found = watched_end(ids, StopWatch(STOPS, decode), draw)
        assert (None if found is None else found[0]) == expected
        if found is not None:
            ends.append(found)
            kept = text_before(decode, ids[: found[0]], found[1])
            assert not any(stop in kept for stop in STOPS)
            assert decode(ids[: found[0]]).startswith(kept + found[1])
    # Many lie behind the first window of tokens, and each string comes.
    assert sum(count > 60 for count, _ in ends) > 50
    assert {string for _, string in ends} == set(STOPS)


def test_a_window_of_tokens_without_text_is_kept_as_long_as_it_must() -> None:
    ids = [0, 1, *([8] * 500), 1, *([8] * 500), 0, 1]
    found = watched_end(ids, StopWatch(("abbab",), text_of), random.Random(1))
    assert found == (len(ids), "abbab")


def test_a_watch_keeps_few_tokens() -> None:
    watch = StopWatch(STOPS, text_of)
    for _ in range(2_000):
        assert watch.first_end((0, 1)) is None
        watch.append((0, 1))
        assert len(watch._ids) < 100


def test_strings_that_are_complete_too_early_do_not_count() -> None:
    ids = [2, 2, 1, 0, 2]  # ab|ab|b|a|ab
    for immune, end in ((0, 1), (1, 2), (2, 5), (5, None)):
        found = StopWatch(("ab",), text_of, immune).first_end(ids)
        assert (None if found is None else found[0]) == end
    # One that begins early and is complete later does.
    assert StopWatch(("abba",), text_of, 3).first_end(ids) == (4, "abba")


def test_of_strings_that_one_token_completes_the_one_that_begins_first_is_reported() -> None:
    assert StopWatch(("b", "ab"), text_of).first_end([8, 2]) == (2, "ab")
    assert text_before(text_of, [8, 2], "ab") == ""
    assert text_before(text_of, [1, 2, 2], "ab") == "bab"


@pytest.mark.parametrize("string", ["", "a\ufffd"])
def test_strings_that_end_nothing_are_refused(string: str) -> None:
    with pytest.raises(ConfigError, match="stop string"):
        check_stop_strings(["a", string])
