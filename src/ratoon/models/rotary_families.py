"""Llama, Mistral, Qwen2 and Qwen3: RMS norms, rotary positions, grouped queries, SwiGLU.

They differ in biases, in norms of queries and keys, in windows, and in defaults. Settings and names
of tensors are those of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ratoon.errors import CapabilityError, CheckpointError
from ratoon.models.decoder import DecoderConfig
from ratoon.models.hf_fields import (
    Family,
    Json,
    TensorNames,
    positive_int,
    positive_number,
    refuse_other_values,
    special_ids,
)

_LLAMA3_ROPE = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
)
# Settings that change what the model computes, with the only values that the decoder computes.
_ONLY: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("hidden_act", ("silu",)),
    ("attention_bias", (False,)),
    ("mlp_bias", (False,)),
    ("partial_rotary_factor", (1.0,)),
    ("quantization_config", (None,)),
)
_QWEN2: Json = {"qkv_bias": True}
_QWEN3: Json = {"qk_norm": True}
_FULL, _SLIDING = "full_attention", "sliding_attention"
# Old files store the rotation's frequencies, a constant of the configuration.
_CONSTANTS = ("rotary_emb.inv_freq",)


def _read_rope(raw: Mapping[str, Any], path: Path) -> tuple[float, Json | None]:
    """Base and scaling of the rotary embedding.

    transformers 5 keeps both in `rope_parameters`; older files hold `rope_theta` and
    `rope_scaling`, whose kind is called `type` in the oldest.
    """
    rope = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    refuse_other_values(rope, path, [("partial_rotary_factor", (1.0,))])
    theta = positive_number(
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
        scaling[key] = positive_number(rope, key, path, default=0.0)
    scaling["original_max_position_embeddings"] = int(scaling["original_max_position_embeddings"])
    if scaling["high_freq_factor"] <= scaling["low_freq_factor"]:
        raise CheckpointError(
            f"{path}: rope scaling needs high_freq_factor > low_freq_factor, found {scaling}."
        )
    return theta, scaling


def _read_heads(
    raw: Mapping[str, Any], path: Path, kv_heads: int | None, head_dim: int | None
) -> tuple[int, int, int]:
    """Query heads, key/value heads and head width.

    `kv_heads` and `head_dim` are what the family takes where the file is silent; None stands for
    as many as query heads, and for the width divided by them.
    """
    width, heads = positive_int(raw, "hidden_size", path), _num_heads(raw, path)
    shared = positive_int(raw, "num_key_value_heads", path, default=kv_heads or heads)
    if raw.get("head_dim") is None and head_dim is None and width % heads:
        raise CheckpointError(
            f"{path}: hidden_size = {width} is no multiple of num_attention_heads = {heads}, and "
            "there is no head_dim; the file does not belong to these weights or is damaged."
        )
    size = positive_int(raw, "head_dim", path, default=head_dim or width // heads)
    if heads % shared:
        raise CheckpointError(
            f"{path}: {heads} attention heads cannot share {shared} key/value heads evenly."
        )
    if size % 2:
        raise CheckpointError(f"{path}: head_dim is {size}; rotary embeddings need an even one.")
    return heads, shared, size


def _num_heads(raw: Mapping[str, Any], path: Path) -> int:
    return positive_int(raw, "num_attention_heads", path)


def _read(
    family: str,
    raw: Json,
    path: Path,
    *,
    max_positions: int,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    traits: Json | None = None,
) -> DecoderConfig:
    refuse_other_values(raw, path, _ONLY)
    heads, shared, size = _read_heads(raw, path, kv_heads, head_dim)
    theta, scaling = _read_rope(raw, path)
    return DecoderConfig(
        family=family,
        vocab_size=positive_int(raw, "vocab_size", path),
        hidden_size=positive_int(raw, "hidden_size", path),
        intermediate_size=positive_int(raw, "intermediate_size", path),
        num_layers=positive_int(raw, "num_hidden_layers", path),
        num_heads=heads,
        num_kv_heads=shared,
        head_dim=size,
        norm_eps=positive_number(raw, "rms_norm_eps", path, 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        max_positions=positive_int(raw, "max_position_embeddings", path, default=max_positions),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        **(traits or {}),
        **special_ids(raw, path),
    )


def _refuse_window(
    raw: Mapping[str, Any], path: Path, config: DecoderConfig, default: int | None = None
) -> None:
    """Refuse a sliding window that hides any token of the model's context."""
    window = raw.get("sliding_window", default)
    if window is not None and window < config.max_positions:
        raise CapabilityError(
            f"{path}: sliding_window = {window} is not supported: it is shorter than "
            f"max_position_embeddings = {config.max_positions}. For documents of at most {window} "
            f"tokens set max_position_embeddings to {window}: then the window hides nothing."
        )


def _refuse_qwen_window(raw: Mapping[str, Any], path: Path, config: DecoderConfig) -> None:
    kinds = raw.get("layer_types") or [_FULL]
    refuse_other_values(
        {"layer_types": next((kind for kind in kinds if kind not in (_FULL, _SLIDING)), _FULL)},
        path,
        [("layer_types", (_FULL, _SLIDING))],
    )
    if raw.get("use_sliding_window", False):
        _refuse_window(raw, path, config, default=4096)


def _read_llama(raw: Json, path: Path) -> DecoderConfig:
    return _read("llama", raw, path, max_positions=2048)


def _read_mistral(raw: Json, path: Path) -> DecoderConfig:
    config = _read("mistral", raw, path, max_positions=131_072, kv_heads=8)
    _refuse_window(raw, path, config, default=4096)
    return config


def _read_qwen2(raw: Json, path: Path) -> DecoderConfig:
    config = _read("qwen2", raw, path, max_positions=32_768, kv_heads=32, traits=_QWEN2)
    _refuse_qwen_window(raw, path, config)
    return config


def _read_qwen3(raw: Json, path: Path) -> DecoderConfig:
    config = _read(
        "qwen3", raw, path, max_positions=32_768, kv_heads=32, head_dim=128, traits=_QWEN3
    )
    _refuse_qwen_window(raw, path, config)
    return config


def _write(config: DecoderConfig) -> Json:
    """Settings that all four families have."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": config.rope_scaling,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": config.tie_word_embeddings,
    }


def _write_llama(config: DecoderConfig) -> Json:
    return _write(config) | {"attention_bias": False, "mlp_bias": False}


def _write_mistral(config: DecoderConfig) -> Json:
    return _write(config) | {"sliding_window": None}


def _write_qwen2(config: DecoderConfig) -> Json:
    return _write(config) | {
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": config.num_layers,
        "layer_types": [_FULL] * config.num_layers,
    }


def _write_qwen3(config: DecoderConfig) -> Json:
    return _write_qwen2(config) | {"attention_bias": False}


def _tensors(config: DecoderConfig) -> TensorNames:
    names: TensorNames = {
        "embed_tokens.weight": ("model.embed_tokens.weight",),
        "norm.weight": ("model.norm.weight",),
    }
    if not config.tie_word_embeddings:
        names["lm_head.weight"] = ("lm_head.weight",)
    for index in range(config.num_layers):
        ours, theirs = f"layers.{index}", f"model.layers.{index}"
        attention = f"{theirs}.self_attn"
        names |= {
            f"{ours}.input_norm.weight": (f"{theirs}.input_layernorm.weight",),
            f"{ours}.qkv_proj.weight": tuple(f"{attention}.{part}_proj.weight" for part in "qkv"),
            f"{ours}.o_proj.weight": (f"{attention}.o_proj.weight",),
            f"{ours}.post_norm.weight": (f"{theirs}.post_attention_layernorm.weight",),
            f"{ours}.gate_up_proj.weight": (
                f"{theirs}.mlp.gate_proj.weight",
                f"{theirs}.mlp.up_proj.weight",
            ),
            f"{ours}.down_proj.weight": (f"{theirs}.mlp.down_proj.weight",),
        }
        if config.qkv_bias:
            names[f"{ours}.qkv_proj.bias"] = tuple(
                f"{attention}.{part}_proj.bias" for part in "qkv"
            )
        if config.qk_norm:
            names |= {
                f"{ours}.{part}_norm.weight": (f"{attention}.{part}_norm.weight",) for part in "qk"
            }
    return names


LLAMA = Family(
    "llama", "LlamaForCausalLM", "llama", _read_llama, _write_llama, _tensors, constants=_CONSTANTS
)
MISTRAL = Family(
    "mistral", "MistralForCausalLM", "mistral", _read_mistral, _write_mistral, _tensors
)
QWEN2 = Family("qwen2", "Qwen2ForCausalLM", "qwen2", _read_qwen2, _write_qwen2, _tensors, _QWEN2)
QWEN3 = Family("qwen3", "Qwen3ForCausalLM", "qwen3", _read_qwen3, _write_qwen3, _tensors, _QWEN3)
