"""Code that passes the unit tests of its row."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ratoon.errors import ConfigError, DataError
from ratoon.records import Prompt
from ratoon.rl.rewards.base import Reward
from ratoon.rl.rewards.sandbox import passes

_FENCED = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
_NOTHING = "pass"


@dataclass(frozen=True, slots=True)
class CodeReward(Reward):
    """1 if the response's code passes the tests of its row, else 0.

    The code is the last fenced block, else the whole response. It runs as `sandbox` says.

    Attributes:
        allow_code_execution: must be True: the choice is the user's.
        tests: column with Python source, or a list of sources, that raises if the code is wrong;
            or several such columns, in this order.
        timeout_s: longest time. Seconds.
        memory_mb: largest address space. MB.
    """

    allow_code_execution: bool = False
    tests: str | Sequence[str] = "tests"
    timeout_s: float = 5.0
    memory_mb: int = 512

    def load(self) -> None:
        """Try the sandbox.

        Raises:
            ConfigError: the user did not allow it.
            CapabilityError: the system cannot confine the code.
        """
        if not self.allow_code_execution:
            raise ConfigError(
                "The reward `code` runs what the model writes; say allow_code_execution: true to "
                "have that."
            )
        if not self._passes(_NOTHING, _NOTHING):
            raise ConfigError(
                f"The reward `code` could not run an empty program within timeout_s = "
                f"{self.timeout_s:g} and memory_mb = {self.memory_mb}; raise them."
            )

    def check(self, prompt: Prompt) -> None:
        """Refuse a prompt without tests."""
        if not row_tests(prompt.fields, self.tests).strip():
            raise DataError(
                f"{prompt.dataset}, row {prompt.row}: the reward `code` needs tests (text or a "
                f"list of texts) in the column {self.tests!r}; columns found: "
                f"{', '.join(prompt.fields) or 'none'}."
            )

    def __call__(self, prompt: Prompt, text: str) -> float:
        """Run the code, then the tests."""
        return float(self._passes(code_of(text), row_tests(prompt.fields, self.tests)))

    def _passes(self, code: str, tests: str) -> bool:
        memory = self.memory_mb * 1_000_000
        return passes(code, tests, timeout_s=self.timeout_s, memory_bytes=memory)


def code_of(text: str) -> str:
    """The last fenced block of a response, also one that was cut, else all of it."""
    blocks = _FENCED.findall(text)
    return str(blocks[-1]) if blocks else text


def row_tests(fields: Mapping[str, Any], columns: str | Sequence[str]) -> str:
    """The tests as one source; empty if there are none."""
    sources: list[str] = []
    for column in [columns] if isinstance(columns, str) else columns:
        value = fields.get(column)
        parts = [value] if isinstance(value, str) else value
        if not isinstance(parts, list | tuple) or not all(isinstance(part, str) for part in parts):
            return ""
        sources += parts
    return "\n".join(sources)
