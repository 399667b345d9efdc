"""GPT-2: layer norms, learned positions, biases everywhere, GELU in its tanh form.

Matrices are stored transposed, `[in, out]`, queries, keys and values in one (`c_attn`). Files of
the hub often leave the prefix `transformer.` out and hold the causal mask of each layer.

Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"; settings and
names of tensors are those of transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ratoon.errors import CheckpointError
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

# Settings that change what the model computes, with the values that the decoder computes: the two
# names of the activation are one function.
_ONLY: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("activation_function", ("gelu_new", "gelu_pytorch_tanh")),
    ("scale_attn_weights", (True,)),
    ("scale_attn_by_inverse_layer_idx", (False,)),
    ("add_cross_attention", (False,)),
    ("quantization_config", (None,)),
)

_TRAITS: Json = {
    "norm": "layer",
    "positions": "learned",
    "activation": "gelu_tanh",
    "qkv_bias": True,
    "out_bias": True,
    "mlp_bias": True,
}


def _read(raw: Json, path: Path) -> DecoderConfig:
    refuse_other_values(raw, path, _ONLY)
    width = positive_int(raw, "n_embd", path, default=768)
    heads = positive_int(raw, "n_head", path, default=12)
    if width % heads:
        raise CheckpointError(
            f"{path}: a width (n_embd) of {width} cannot be cut into {heads} heads evenly."
        )
    return DecoderConfig(
        family="gpt2",
        vocab_size=positive_int(raw, "vocab_size", path),
        hidden_size=width,
        intermediate_size=positive_int(raw, "n_inner", path, default=4 * width),
        num_layers=positive_int(raw, "n_layer", path, default=12),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=width // heads,
        norm_eps=positive_number(raw, "layer_norm_epsilon", path, 1e-5),
        max_positions=positive_int(raw, "n_positions", path, default=1024),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", True)),
        **_TRAITS,
        **special_ids(raw, path),
    )


def _write(config: DecoderConfig) -> Json:
    return {
        "vocab_size": config.vocab_size,
        "n_embd": config.hidden_size,
        "n_inner": config.intermediate_size,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_positions": config.max_positions,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": config.norm_eps,
        "scale_attn_weights": True,
        "tie_word_embeddings": config.tie_word_embeddings,
    }


_LAYER_NAMES = {
    "input_norm": "ln_1",
    "qkv_proj": "attn.c_attn",
    "o_proj": "attn.c_proj",
    "post_norm": "ln_2",
    "up_proj": "mlp.c_fc",
    "down_proj": "mlp.c_proj",
}


def _tensors(config: DecoderConfig) -> TensorNames:
    names: TensorNames = {
        "embed_tokens.weight": ("transformer.wte.weight",),
        "embed_positions.weight": ("transformer.wpe.weight",),
    }
    if not config.tie_word_embeddings:
        names["lm_head.weight"] = ("lm_head.weight",)
    for kind in ("weight", "bias"):
        names[f"norm.{kind}"] = (f"transformer.ln_f.{kind}",)
        for index in range(config.num_layers):
            for ours, theirs in _LAYER_NAMES.items():
                names[f"layers.{index}.{ours}.{kind}"] = (f"transformer.h.{index}.{theirs}.{kind}",)
    return names


GPT2 = Family(
    "gpt2",
    "GPT2LMHeadModel",
    "gpt2",
    _read,
    _write,
    _tensors,
    traits=_TRAITS,
    transposed=tuple(f"{name}_proj.weight" for name in ("qkv", "o", "up", "down")),
    optional_prefix="transformer.",
    constants=(".attn.bias", ".attn.masked_bias"),
)
