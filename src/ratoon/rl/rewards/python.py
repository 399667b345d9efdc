"""A function of the user's."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from ratoon.errors import ConfigError
from ratoon.records import Prompt
from ratoon.rl.rewards.base import Reward
from ratoon.rl.rewards.signatures import Judge, judge_of


@dataclass(frozen=True, slots=True)
class PythonReward(Reward):
    """A function of a file or an importable module; see `signatures` for what it may take.

    Attributes:
        function: `path/to/file.py:name` (its folder becomes importable) or `package.module:name`.
    """

    function: str

    def load(self) -> None:
        """Import the function.

        Raises:
            ConfigError: if that fails, or it cannot be called with a response, with the reason.
        """
        _import_judge(self.function)

    def __call__(self, prompt: Prompt, text: str) -> float:
        """Call the function; its value is returned as it is."""
        value: float = _import_judge(self.function)(prompt, text)
        return value


@cache
def _import_judge(target: str) -> Judge:
    where, _, name = target.rpartition(":")
    if not where or not name.isidentifier():
        raise ConfigError(
            f"Reward function {target!r}: expected path/to/file.py:function or "
            "package.module:function."
        )
    try:
        module = _import_file(Path(where)) if where.endswith(".py") else _import_module(where)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"Reward function {target!r}: {where} cannot be imported "
            f"({type(error).__name__}: {error})."
        ) from error
    function: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(function):
        found = "is no function" if hasattr(module, name) else "does not exist"
        raise ConfigError(f"Reward function {target!r}: {name} {found} in {where}.")
    return judge_of(function, target)


def _import_module(name: str) -> ModuleType:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    return importlib.import_module(name)


def _import_file(path: Path) -> ModuleType:
    path = path.resolve()
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    name = f"_ratoon_reward_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"not a Python file: {path}")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickling look a class's module up by name.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
