"""Hugging Face's `config.json` <-> `DecoderConfig`, one entry of `FAMILIES` per model family.

A family says which architectures it reads, how its settings map, and under which names its
tensors are stored. What a family cannot compute faithfully is refused here, by name, before any
weight is read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
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
    """How one model family is written on disk."""

    name: str
    architecture: str
    model_type: str
    read: Callable[[Json, Path], DecoderConfig]
    write: Callable[[DecoderConfig], Json]
    tensor_names: Callable[[DecoderConfig], TensorNames]


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
            *_ids(read_json(generation), "eos_token_id", generation),
            *_ids(raw, "eos_token_id", path),
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


def _ids(raw: Mapping[str, Any], key: str, path: Path) -> tuple[int, ...]:
    value = raw.get(key)
    values = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(item) is int and item >= 0 for item in values):
        raise CheckpointError(f"{path}: {key} is {value!r}, expected token ids.")
    return tuple(dict.fromkeys(values))


def _positive(raw: Mapping[str, Any], key: str, path: Path, default: int | None = None) -> int:
    value = raw.get(key)
    value = default if value is None else value
    if type(value) is not int or value <= 0:
        raise CheckpointError(f"{path}: {key} is {value!r}, expected a positive integer.")
    return value


def _number(raw: Mapping[str, Any], key: str, path: Path, default: float) -> float:
    value = raw.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise CheckpointError(f"{path}: {key} is {value!r}, expected a positive number.")
    return float(value)


_LLAMA3_ROPE = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
)


def _read_rope(raw: Mapping[str, Any], path: Path) -> tuple[float, Json | None]:
    """Base and scaling of the rotary embedding.

    transformers 5 keeps both in `rope_parameters`; older files hold `rope_theta` and
    `rope_scaling`, whose kind is called `type` in the oldest.
    """
    rope = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    theta = _number(
        {"rope_theta": rope.get("rope_theta", raw.get("rope_theta"))}, "rope_theta", path, 1e4
    )
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise CapabilityError(
            f"{path}: rope scaling {kind!r} is not supported; supported: 'default', 'llama3'."
        )
    scaling: Json = {"rope_type": "llama3"}
    for key in _LLAMA3_ROPE:
        scaling[key] = _number(rope, key, path, default=0.0)
    scaling["original_max_position_embeddings"] = int(scaling["original_max_position_embeddings"])
    if scaling["high_freq_factor"] <= scaling["low_freq_factor"]:
        raise CheckpointError(
            f"{path}: rope scaling needs high_freq_factor > low_freq_factor, found {scaling}."
        )
    return theta, scaling


# Settings that change what the model computes, with the only values that the decoder computes.
_LLAMA_ONLY: tuple[tuple[str, Any], ...] = (
    ("hidden_act", "silu"),
    ("attention_bias", False),
    ("mlp_bias", False),
    ("partial_rotary_factor", 1.0),
    ("quantization_config", None),
)


def _refuse_other_values(
    raw: Mapping[str, Any], path: Path, allowed: Iterable[tuple[str, Any]]
) -> None:
    for key, only in allowed:
        value = raw.get(key, only)
        if value is not None and value != only:
            raise CapabilityError(
                f"{path}: {key} = {value!r} is not supported; supported: {only!r}."
            )


def _read_llama(raw: Json, path: Path) -> DecoderConfig:
    _refuse_other_values(raw, path, _LLAMA_ONLY)
    rope = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    _refuse_other_values(rope, path, [("partial_rotary_factor", 1.0)])
    width, heads = _positive(raw, "hidden_size", path), _positive(raw, "num_attention_heads", path)
    kv_heads = _positive(raw, "num_key_value_heads", path, default=heads)
    head_dim = _positive(raw, "head_dim", path, default=width // heads)
    if heads % kv_heads:
        raise CheckpointError(
            f"{path}: {heads} attention heads cannot share {kv_heads} key/value heads evenly."
        )
    if head_dim % 2:
        raise CheckpointError(
            f"{path}: head_dim is {head_dim}; rotary embeddings need an even one."
        )
    theta, scaling = _read_rope(raw, path)
    bos, pad = _ids(raw, "bos_token_id", path), _ids(raw, "pad_token_id", path)
    return DecoderConfig(
        family="llama",
        vocab_size=_positive(raw, "vocab_size", path),
        hidden_size=width,
        intermediate_size=_positive(raw, "intermediate_size", path),
        num_layers=_positive(raw, "num_hidden_layers", path),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=_number(raw, "rms_norm_eps", path, 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        max_positions=_positive(raw, "max_position_embeddings", path, default=2048),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        bos_id=bos[0] if bos else None,
        eos_ids=_ids(raw, "eos_token_id", path),
        pad_id=pad[0] if pad else None,
    )


def _write_llama(config: DecoderConfig) -> Json:
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": config.rope_scaling,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": config.tie_word_embeddings,
    }


def _llama_tensors(config: DecoderConfig) -> TensorNames:
    names: TensorNames = {
        "embed_tokens.weight": ("model.embed_tokens.weight",),
        "norm.weight": ("model.norm.weight",),
    }
    if not config.tie_word_embeddings:
        names["lm_head.weight"] = ("lm_head.weight",)
    for index in range(config.num_layers):
        ours, theirs = f"layers.{index}", f"model.layers.{index}"
        names |= {
            f"{ours}.input_norm.weight": (f"{theirs}.input_layernorm.weight",),
            f"{ours}.qkv_proj.weight": tuple(
                f"{theirs}.self_attn.{part}_proj.weight" for part in "qkv"
            ),
            f"{ours}.o_proj.weight": (f"{theirs}.self_attn.o_proj.weight",),
            f"{ours}.post_norm.weight": (f"{theirs}.post_attention_layernorm.weight",),
            f"{ours}.gate_up_proj.weight": (
                f"{theirs}.mlp.gate_proj.weight",
                f"{theirs}.mlp.up_proj.weight",
            ),
            f"{ours}.down_proj.weight": (f"{theirs}.mlp.down_proj.weight",),
        }
    return names


FAMILIES: dict[str, Family] = {
    "llama": Family(
        "llama", "LlamaForCausalLM", "llama", _read_llama, _write_llama, _llama_tensors
    ),
}
