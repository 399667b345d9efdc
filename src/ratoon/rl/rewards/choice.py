"""The right letter of a multiple choice."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from ratoon.errors import DataError
from ratoon.records import Prompt
from ratoon.rl.rewards.answers import marked_answer
from ratoon.rl.rewards.base import Reward


@dataclass(frozen=True, slots=True)
class ChoiceReward(Reward):
    r"""1 if the response chooses the answer's letter, else 0.

    The chosen letter stands in the marked answer (`<answer>`, `\boxed{}`, `Answer:`); else it is
    the last one behind "answer is", "option", "choose" and the like; else the response begins
    with it, as in `(B)` or `B. because`. Letters are capitals.
    """

    letters: str = "ABCDE"

    def check(self, prompt: Prompt) -> None:
        """Refuse a prompt whose answer does not begin with a letter."""
        if self._reference(prompt) is None:
            raise DataError(
                f"{prompt.dataset}, row {prompt.row}: the reward `choice` needs an answer that is "
                f"one of the letters {', '.join(self.letters)}, found {prompt.answer!r}."
            )

    def __call__(self, prompt: Prompt, text: str) -> float:
        """Compare the letters."""
        chosen = _chosen(text, self.letters)
        return float(chosen is not None and chosen == self._reference(prompt))

    def _reference(self, prompt: Prompt) -> str | None:
        found = _patterns(self.letters)[2].match(prompt.answer or "")
        return found[1] if found else None


@cache
def _patterns(letters: str) -> tuple[re.Pattern[str], re.Pattern[str], re.Pattern[str]]:
    """A letter alone, a letter behind a phrase, a letter at the beginning."""
    # "A" before another word is mostly an article.
    article = r"(?!\s+(?!is\b|as\b|because\b|since\b|and\b)[a-z])"
    letter = rf"([{letters}])(?![\w'])" + article
    wrapped = r"[\s\"'`(\[{*$]*(?:\\(?:text|mathrm|textbf)\{[\s(]*)?"
    phrase = (
        r"(?i:\b(?:answer|options?|choices?|choose|chose|pick|select)\b"
        r"(?:\s*(?:is|should be|would be|must be|[:=]))*"
        r"(?:\s+(?:the\s+)?(?:letter|option|choice))?)"
    )
    return (
        re.compile(r"(?<![\w'])" + letter),
        re.compile(phrase + wrapped + letter),
        re.compile(rf"{wrapped}([{letters}])(?=[\s\"'`)\]}}*$.:,]|$)" + article),
    )


def _chosen(text: str, letters: str) -> str | None:
    alone, behind_phrase, beginning = _patterns(letters)
    marked = marked_answer(text)
    if marked is not None:
        found = alone.search(marked)
        return found[1] if found else None
    phrases = behind_phrase.findall(text)
    if phrases:
        return str(phrases[-1])
    found = beginning.match(text)
    return found[1] if found else None
