"""Hugging Face's `config.json` <-> `DecoderConfig`, one entry of `FAMILIES` per model family.

A family says which architectures it reads, how its settings map, and under which names its
tensors are stored. What a family cannot compute faithfully is refused here, by name, before any
weight is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ratoon.errors import CapabilityError
from ratoon.models.decoder import DecoderConfig
from ratoon.models.gpt2_family import GPT2
from ratoon.models.hf_fields import Family, Json, read_json, token_ids, write_json
from ratoon.models.rotary_families import LLAMA, MISTRAL, QWEN2, QWEN3

__all__ = [
    "FAMILIES",
    "Json",
    "family_config",
    "family_of",
    "read_config",
    "read_json",
    "write_config",
    "write_json",
]

FAMILIES: dict[str, Family] = {
    family.name: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3, GPT2)
}


def family_config(family: str, **shape: Any) -> DecoderConfig:
    """The configuration of a new model: a family's traits, and the fields given for its shape."""
    return DecoderConfig(family=family, **FAMILIES[family].traits, **shape)


def read_config(directory: Path) -> DecoderConfig:
    """Read `config.json` (and the end-of-sequence ids of `generation_config.json`).

    Raises:
        CapabilityError: if the architecture, or a setting of it, is not supported.
        CheckpointError: if a file or a setting is missing or malformed.
    """
    path = directory / "config.json"
    raw = read_json(path)
    generation = directory / "generation_config.json"
    if generation.exists():
        raw["eos_token_id"] = [
            *token_ids(read_json(generation), "eos_token_id", generation),
            *token_ids(raw, "eos_token_id", path),
        ]
    return family_of(raw, path).read(raw, path)


def family_of(raw: Mapping[str, Any], path: Path) -> Family:
    """Find the family of a parsed `config.json`.

    Raises:
        CapabilityError: naming the supported architectures, if there is none.
    """
    named = raw.get("architectures") or []
    for family in FAMILIES.values():
        if family.architecture in named or (
            not named and raw.get("model_type") == family.model_type
        ):
            return family
    found = ", ".join(map(str, named)) or f"model_type {raw.get('model_type')!r}"
    supported = ", ".join(family.architecture for family in FAMILIES.values())
    raise CapabilityError(f"{path}: architecture {found} is not supported; supported: {supported}.")


def write_config(config: DecoderConfig, dtype_name: str) -> Json:
    """The content of `config.json`, readable by transformers 4 and 5."""
    family = FAMILIES[config.family]
    eos = list(config.eos_ids)
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **family.write(config),
        "bos_token_id": config.bos_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "pad_token_id": config.pad_id,
        "torch_dtype": dtype_name,
    }
