"""Nested state of tensors and plain values on disk: safetensors and JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

_SEPARATOR = "."


def save_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write `path` with the suffixes `.safetensors` and `.json`.

    Keys are words; what is no tensor and no mapping must be what JSON gives back.
    """
    save_file(dict(_tensors("", state)), path.with_suffix(".safetensors"))
    values = json.dumps(_values(state), allow_nan=False)
    path.with_suffix(".json").write_text(values + "\n", encoding="utf-8")


def load_state(path: Path) -> dict[str, Any]:
    """What `save_state` wrote there."""
    state: dict[str, Any] = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    for name, tensor in load_file(path.with_suffix(".safetensors")).items():
        *folders, last = name.split(_SEPARATOR)
        part = state
        for folder in folders:
            part = part[folder]
        part[last] = tensor
    return state


def _tensors(prefix: str, state: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for key, value in state.items():
        if isinstance(value, Tensor):
            yield prefix + key, value.contiguous()
        elif isinstance(value, Mapping):
            yield from _tensors(prefix + key + _SEPARATOR, value)


def _values(state: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _values(value) if isinstance(value, Mapping) else value
        for key, value in state.items()
        if not isinstance(value, Tensor)
    }
