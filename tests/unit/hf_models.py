"""Small random models of transformers, one or more for each family, to compare with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from ratoon.models.decoder import Decoder
from ratoon.models.packing import PackedBatch

DOCUMENTS = [[5, 9, 2, 7, 7, 30, 1], [3], list(range(40, 0, -1)), [8, 8, 8]]
_CONFIGS = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
}


def make_theirs(family: str, **changes: Any) -> Any:
    """A model of transformers in float32; norms and biases are drawn at random too."""
    torch.manual_seed(len(family + str(changes)))
    config: Any
    if family == "gpt2":
        shape = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
        config = GPT2Config(**{"vocab_size": 61, "initializer_range": 0.3, **shape, **changes})
    else:
        shape = {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
        }
        config = _CONFIGS[family](
            **{"vocab_size": 64, "initializer_range": 0.3, **shape, **changes}
        )
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(0.0 if name.endswith("bias") else 1.0, 0.2)
    return model


@torch.no_grad()
def our_logits(decoder: Decoder, documents: list[list[int]]) -> list[Tensor]:
    hidden, _ = decoder(PackedBatch.of(documents))
    return list((hidden @ decoder.head_weight.T).split([len(document) for document in documents]))


def padded_logits(model: Any, documents: list[list[int]], side: str) -> list[Tensor]:
    """Logits of a padded batch without the padding."""
    width = max(map(len, documents))
    ids, mask = (
        torch.zeros(len(documents), width, dtype=torch.long),
        torch.zeros(len(documents), width, dtype=torch.long),
    )
    places = []
    for row, document in enumerate(documents):
        start = width - len(document) if side == "left" else 0
        places.append(slice(start, start + len(document)))
        ids[row, places[-1]] = torch.tensor(document)
        mask[row, places[-1]] = 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(ids, attention_mask=mask, position_ids=positions).logits
    return [logits[row, place] for row, place in enumerate(places)]
