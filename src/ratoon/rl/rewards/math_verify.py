"""An answer that is mathematically the same, by the package math-verify (extra `math`).

The answer of a response may hang any algebra system (`10^10^10`), beyond the reach of a signal. So
answers are compared in a child process: it dies for the answer, and the answer counts as wrong.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import re
import signal
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal

from ratoon.errors import CapabilityError, DataError, RewardError
from ratoon.records import Prompt
from ratoon.rl.rewards.answers import marked_answer, reference_answer
from ratoon.rl.rewards.base import Reward

_MEMORY_BYTES = 2 << 30
_DELIMITED = re.compile(r"(?<!\\)\$[^$]+(?<!\\)\$|\\\(|\\\[")
_Verdict = Literal["equal", "different", "unreadable", "ended"]


@dataclass(frozen=True, slots=True)
class MathVerifyReward(Reward):
    r"""1 if the response's answer is symbolically equal to the reference, else 0.

    The answer is the marked one (`<answer>`, `\boxed{}`, `Answer:`), else what math-verify finds.
    One that takes longer than `timeout_s` seconds, or 2 GiB of memory, counts as wrong.
    """

    timeout_s: float = 5.0

    def load(self) -> None:
        """Import math-verify, which takes half a second."""
        _library()

    def check(self, prompt: Prompt) -> None:
        """Refuse a prompt without an answer."""
        if not (prompt.answer or "").strip():
            raise DataError(
                f"{prompt.dataset}, row {prompt.row}: the reward `math_verify` needs an answer, "
                f"found {prompt.answer!r}."
            )

    def __call__(self, prompt: Prompt, text: str) -> float:
        """Compare in the child process."""
        global _child
        if _child is None:
            _child = _Child()
        verdict = _child.ask(reference_answer(prompt.answer or ""), text, self.timeout_s)
        if verdict == "ended":
            _child = None
        elif verdict == "unreadable":
            raise RewardError(
                f"math-verify finds no mathematics in the answer {prompt.answer!r:.100} of "
                f"{prompt.dataset}, row {prompt.row}"
            )
        return float(verdict == "equal")


class _Child:
    """A forked process that compares answers; it has imported what this one has."""

    def __init__(self) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                self._connection.close()
                _limit_memory()
                _serve(theirs)
            finally:
                # Nothing of the parent's may be flushed or cleaned up here.
                os._exit(0)
        theirs.close()

    def ask(self, reference: str, text: str, timeout_s: float) -> _Verdict:
        """Compare; after `ended` this child is gone."""
        try:
            self._connection.send((reference, text))
            if self._connection.poll(timeout_s):
                verdict: _Verdict = self._connection.recv()
                return verdict
        except (EOFError, OSError):
            pass
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        self._connection.close()
        return "ended"


# One in each process that scores; it ends when its pipe does.
_child: _Child | None = None


def _serve(connection: Connection) -> None:
    while True:
        try:
            reference, text = connection.recv()
        except EOFError:
            return
        try:
            verdict = _compare(reference, text)
        except (MemoryError, RecursionError, OverflowError):
            verdict = "different"
        connection.send(verdict)


def _limit_memory() -> None:
    import resource

    import psutil

    limit = psutil.Process().memory_info().vms + _MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _compare(reference: str, text: str) -> _Verdict:
    library = _library()
    # Not by its own clock, which needs the main thread and cannot interrupt long arithmetic.
    golds = library.parse(_latex(reference), parsing_timeout=None)
    if not golds:
        return "unreadable"
    answers = library.parse(_answer(text), parsing_timeout=None)
    return "equal" if library.verify(golds, answers, timeout_seconds=None) else "different"


def _answer(text: str) -> str:
    marked = marked_answer(text)
    if marked is None:
        return text
    first_line = marked.partition("\n")[0]
    return first_line if _delimited(first_line) else _latex(marked)


def _latex(expression: str) -> str:
    return expression if _delimited(expression) else f"\\boxed{{{expression}}}"


def _delimited(text: str) -> bool:
    """Whether text says itself where its mathematics begins."""
    return _DELIMITED.search(text) is not None


def _library() -> Any:
    """The package, which has no types."""
    try:
        import math_verify
    except ImportError:
        raise CapabilityError(
            "The reward `math_verify` needs the package math-verify, which is not installed: "
            'pip install "ratoon[math]".'
        ) from None
    # It warns at each call that its clock is off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return math_verify
