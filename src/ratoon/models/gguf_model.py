"""A GGUF file of the Llama family -> a Hugging Face model directory.

Quantised weights are dequantised: the result holds the values that the GGUF file stands for, not
those of the model that was quantised. Needs the package `gguf` (extra `gguf`).
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ratoon.errors import CapabilityError, CheckpointError
from ratoon.models.decoder import Decoder, DecoderConfig
from ratoon.models.hf_config import write_json
from ratoon.models.hf_io import save_decoder, stored_views

if TYPE_CHECKING:
    from gguf import GGUFReader

_CONTROL, _USER_DEFINED = 3, 4  # Token types of the GGUF specification.

_GLOBAL_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def convert_gguf(file: Path, directory: Path, dtype: torch.dtype = torch.bfloat16) -> str:
    """Write the model and tokenizer of a GGUF file into an empty or new directory.

    Returns:
        How the weights were stored, e.g. `"Q4_1 (210x), F32 (61x), Q8_0 (1x)"`.

    Raises:
        CapabilityError: if `gguf` is not installed, or the file's architecture or tokenizer is
            not supported.
        CheckpointError: if the file is damaged, or a tensor is missing.
    """
    reader = _open(file)
    config = _read_config(reader, file)
    decoder, storage = _read_decoder(reader, config, file)
    save_decoder(decoder, directory, dtype=dtype)
    _write_tokenizer(reader, config, file, directory)
    return storage


def _open(file: Path) -> GGUFReader:
    try:
        from gguf import GGUFReader
    except ImportError:
        raise CapabilityError(
            "Reading GGUF files needs the package gguf, which is not installed: "
            'pip install "ratoon[gguf]".'
        ) from None
    try:
        return GGUFReader(file)
    except (OSError, ValueError, IndexError) as error:
        raise CheckpointError(f"{file}: missing, damaged or no GGUF file ({error}).") from error


def _field(reader: GGUFReader, key: str, file: Path, default: Any = None) -> Any:
    """A metadata value of the file, of any type that GGUF knows."""
    field = reader.get_field(key)
    value = default if field is None else field.contents()
    if value is None:
        raise CheckpointError(f"{file}: has no {key}.")
    return value


def _read_config(reader: GGUFReader, file: Path) -> DecoderConfig:
    architecture = _field(reader, "general.architecture", file)
    tensors = {tensor.name for tensor in reader.tensors}
    # Llama 3 files carry their rope scaling as a tensor of factors.
    if architecture != "llama" or "rope_freqs.weight" in tensors:
        scaled = " with rope scaling" if architecture == "llama" else ""
        raise CapabilityError(
            f"{file}: architecture {architecture!r}{scaled} is not supported from GGUF; "
            "supported: 'llama' without rope scaling."
        )
    width = _field(reader, "llama.embedding_length", file)
    heads = _field(reader, "llama.attention.head_count", file)
    eos = _field(reader, "tokenizer.ggml.eos_token_id", file)
    return DecoderConfig(
        family="llama",
        vocab_size=len(_field(reader, "tokenizer.ggml.tokens", file)),
        hidden_size=width,
        intermediate_size=_field(reader, "llama.feed_forward_length", file),
        num_layers=_field(reader, "llama.block_count", file),
        num_heads=heads,
        num_kv_heads=_field(reader, "llama.attention.head_count_kv", file, default=heads),
        head_dim=_field(reader, "llama.rope.dimension_count", file, default=width // heads),
        # GGUF stores float32; the shortest decimal of the same float32 is the value meant.
        norm_eps=_shortest(_field(reader, "llama.attention.layer_norm_rms_epsilon", file)),
        rope_theta=_shortest(_field(reader, "llama.rope.freq_base", file, default=10_000.0)),
        max_positions=_field(reader, "llama.context_length", file),
        tie_word_embeddings="output.weight" not in tensors,
        bos_id=_field(reader, "tokenizer.ggml.bos_token_id", file),
        eos_ids=(eos,),
        pad_id=_field(reader, "tokenizer.ggml.padding_token_id", file, default=eos),
    )


def _shortest(value: float) -> float:
    return float(f"{value:.7g}")


def _gguf_name(name: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` -> `blk.3.ffn_up.weight`."""
    stem, kind = name.rsplit(".", 1)
    if stem in _GLOBAL_NAMES:
        return f"{_GLOBAL_NAMES[stem]}.{kind}"
    _, _, index, part = stem.split(".", 3)
    return f"blk.{index}.{_LAYER_NAMES[part]}.{kind}"


def _read_decoder(reader: GGUFReader, config: DecoderConfig, file: Path) -> tuple[Decoder, str]:
    from gguf.quants import dequantize

    with torch.device("meta"):
        decoder = Decoder(config)
    state = {name: torch.empty(p.shape) for name, p in decoder.named_parameters()}
    stored = {tensor.name: tensor for tensor in reader.tensors}
    storage: Counter[str] = Counter()
    for name, view in stored_views(config, state).items():
        found = stored.get(_gguf_name(name))
        if found is None:
            raise CheckpointError(f"{file}: has no tensor {_gguf_name(name)}.")
        values = torch.from_numpy(dequantize(found.data, found.tensor_type).copy())
        storage[found.tensor_type.name] += 1
        if name.endswith("q_proj.weight"):
            values = _half_split(values, config.num_heads)
        elif name.endswith("k_proj.weight"):
            values = _half_split(values, config.num_kv_heads)
        if values.shape != view.shape:
            raise CheckpointError(
                f"{file}: {found.name} is {list(values.shape)}, expected {list(view.shape)}."
            )
        view.copy_(values)
    decoder.load_state_dict(state, strict=True, assign=True)
    return decoder, ", ".join(f"{kind} ({count}x)" for kind, count in storage.most_common())


def _half_split(weight: Tensor, num_heads: int) -> Tensor:
    """Rows of `weight [heads * E, D]` from adjacent-pair to half-split rotation order.

    GGUF rotates rows (0, 1), (2, 3), ... of a head; the decoder rotates (0, E/2), (1, E/2 + 1), ...
    """
    rows, width = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, width)
    return pairs.transpose(1, 2).reshape(rows, width)


def _write_tokenizer(
    reader: GGUFReader, config: DecoderConfig, file: Path, directory: Path
) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`.

    Written by hand, because transformers' own reader of GGUF tokenizers is slow and stores the
    class in a form that older versions do not know.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind = (
        _field(reader, "tokenizer.ggml.model", file),
        _field(reader, "tokenizer.ggml.pre", file, default="default"),
    )
    if kind != ("gpt2", "smollm"):
        raise CapabilityError(
            f"{file}: tokenizer {'/'.join(kind)} is not supported from GGUF; "
            "supported: gpt2/smollm."
        )
    tokens = _field(reader, "tokenizer.ggml.tokens", file)
    types = _field(reader, "tokenizer.ggml.token_type", file)
    merges = _field(reader, "tokenizer.ggml.merges", file)
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ", 1)) for merge in merges],
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, type_ in zip(tokens, types, strict=True)
            if type_ in (_CONTROL, _USER_DEFINED)
        ]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[config.bos_id or 0],
        "eos_token": tokens[config.eos_ids[0]],
        "pad_token": tokens[config.pad_id or 0],
        "unk_token": tokens[_field(reader, "tokenizer.ggml.unknown_token_id", file, default=0)],
        "model_max_length": config.max_positions,
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
    }
    template = reader.get_field("tokenizer.chat_template")
    if template is not None:
        settings["chat_template"] = template.contents()
    write_json(directory / "tokenizer_config.json", settings)
