"""A decoder with fresh weights, the same bits for the same seed.

Norms begin as the identity, biases at zero; matrices are normal.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ratoon.models.decoder import Decoder, DecoderConfig

# Parameters whose product is added to the residual stream.
_RESIDUAL = ("o_proj.weight", "down_proj.weight")


def new_decoder(config: DecoderConfig, seed: int) -> Decoder:
    """A decoder to pretrain, initialised as is usual for its family, in float32.

    GPT-2: standard deviation 0.02, and 0.02 / sqrt(2 L) for what writes to the residual stream.
    The others: sqrt(2 / (5 D)), and 1 / (L sqrt(D)) for what writes to the residual stream.

    Source: Radford et al. 2019, section 2.3, as in nanoGPT (model.py); for the others Nguyen &
    Salazar 2019, https://arxiv.org/abs/1910.05895, section 2.2, and GPT-NeoX-20B (Black et al.
    2022, https://arxiv.org/abs/2204.06745, section 2), as in TinyLlama (lit_gpt/model.py).
    """
    num_layers, width = config.num_layers, config.hidden_size

    def gpt2(_: Tensor, is_residual: bool) -> float:
        return 0.02 / math.sqrt(2 * num_layers) if is_residual else 0.02

    def small(_: Tensor, is_residual: bool) -> float:
        return 1 / (num_layers * math.sqrt(width)) if is_residual else math.sqrt(2 / (5 * width))

    return normal_decoder(config, seed, gpt2 if config.family == "gpt2" else small)


def normal_decoder(
    config: DecoderConfig, seed: int, deviation: Callable[[Tensor, bool], float]
) -> Decoder:
    """A float32 decoder on the CPU whose matrices are normal, drawn in the order of its parameters.

    Args:
        config: the decoder's.
        seed: of the weights.
        deviation: standard deviation of a matrix `[out, in]`, given whether its product is added
            to the residual stream.
    """
    with torch.device("meta"):
        decoder = Decoder(config)
    decoder = decoder.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(0.0 if name.endswith(".bias") else 1.0)
            else:
                std = deviation(parameter, name.endswith(_RESIDUAL))
                parameter.normal_(0.0, std, generator=generator)
    return decoder
