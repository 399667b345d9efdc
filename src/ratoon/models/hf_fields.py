"""What model families share in reading and writing a `config.json`.

Each reader takes the parsed file and its path, for messages.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ratoon.errors import CapabilityError, CheckpointError
from ratoon.models.decoder import DecoderConfig

# Values are whatever JSON holds.
Json = dict[str, Any]
# Name of a parameter of `Decoder` -> names of the stored tensors, stacked along the rows.
TensorNames = dict[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Family:
    """What one model family computes, and how it is written on disk.

    `traits` are the fields of `DecoderConfig` that are the same in all models of the family.
    `transposed` are the parameters (ends of their names in `Decoder`) that are stored as
    `[in, out]`. `optional_prefix` is a beginning of stored names that some files leave out.
    `constants` are the ends of stored names that hold no weights, and are not read.
    """

    name: str
    architecture: str
    model_type: str
    read: Callable[[Json, Path], DecoderConfig]
    write: Callable[[DecoderConfig], Json]
    tensor_names: Callable[[DecoderConfig], TensorNames]
    traits: Json = field(default_factory=dict)
    transposed: tuple[str, ...] = ()
    optional_prefix: str = ""
    constants: tuple[str, ...] = ()


def read_json(path: Path) -> Json:
    """Read one JSON object.

    Raises:
        CheckpointError: if the file is missing, is no JSON or holds no object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path}: no such file. A model directory holds config.json and *.safetensors."
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({error}).") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}).") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a {type(value).__name__}, expected an object.")
    return value


def write_json(path: Path, value: Json) -> None:
    """Write one JSON object, readable by people."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def token_ids(raw: Mapping[str, Any], key: str, path: Path) -> tuple[int, ...]:
    """The ids under `key`: none, one, or a list of them."""
    value = raw.get(key)
    values = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(item) is int and item >= 0 for item in values):
        raise CheckpointError(f"{path}: {key} is {value!r}, expected token ids.")
    return tuple(dict.fromkeys(values))


def special_ids(raw: Mapping[str, Any], path: Path) -> Json:
    """`bos_id`, `eos_ids` and `pad_id` of a `DecoderConfig`."""
    bos, pad = token_ids(raw, "bos_token_id", path), token_ids(raw, "pad_token_id", path)
    return {
        "bos_id": bos[0] if bos else None,
        "eos_ids": token_ids(raw, "eos_token_id", path),
        "pad_id": pad[0] if pad else None,
    }


def positive_int(raw: Mapping[str, Any], key: str, path: Path, default: int | None = None) -> int:
    """A positive integer, which must be there unless there is a default."""
    value = raw.get(key)
    value = default if value is None else value
    if type(value) is not int or value <= 0:
        raise CheckpointError(f"{path}: {key} is {value!r}, expected a positive integer.")
    return value


def positive_number(raw: Mapping[str, Any], key: str, path: Path, default: float) -> float:
    """A positive number."""
    value = raw.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise CheckpointError(f"{path}: {key} is {value!r}, expected a positive number.")
    return float(value)


def refuse_other_values(
    raw: Mapping[str, Any], path: Path, allowed: Iterable[tuple[str, tuple[Any, ...]]]
) -> None:
    """Refuse settings that change what the model computes.

    Args:
        raw: the parsed file.
        path: its place.
        allowed: keys with the values that the decoder computes; the first is the default.

    Raises:
        CapabilityError: naming the setting, its value, and the values that are supported.
    """
    for key, values in allowed:
        value = raw.get(key, values[0])
        if value is not None and value not in values:
            supported = ", ".join(map(repr, values))
            raise CapabilityError(
                f"{path}: {key} = {value!r} is not supported; supported: {supported}."
            )
