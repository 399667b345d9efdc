"""A tiny target with prompts, for benchmarks that record its responses."""

from __future__ import annotations

import torch

from ratoon.models.decoder import DecoderConfig
from ratoon.models.tiny import random_decoder
from ratoon.offline.recorded import Source
from ratoon.rollout.native.forward import InferenceModel

VOCAB = 60
MAX_TOKENS = 57


def tiny_source(num_layers: int = 4) -> Source:
    """40 prompts of three tokens; states of the layers from 1 on."""
    config = DecoderConfig(
        "llama", VOCAB, 32, 64, num_layers, num_heads=4, num_kv_heads=2, head_dim=8
    )
    decoder = random_decoder(config, seed=0)
    model = InferenceModel(decoder, num_positions=512, dtype=torch.float32, taps=(1, 2, 3))
    prompts = [(row % VOCAB, 7, 3) for row in range(40)]
    return Source(decoder, model, prompts, (), VOCAB, MAX_TOKENS)
