"""The number format that a model computes in, chosen for the machine where the user did not."""

from __future__ import annotations

from typing import TypeVar

import torch

from ratoon.config.pretrain import PretrainConfig
from ratoon.config.rl import RLConfig
from ratoon.config.sft import SFTConfig
from ratoon.models.prepacked import prepacking_available

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}

Config = TypeVar("Config", RLConfig, SFTConfig, PretrainConfig)


def fast_dtype(*, cuda: bool = False) -> str:
    """`bfloat16` where the CPU, or the GPU, multiplies it, else `float32`.

    A CPU without such instructions emulates them at a tenth of its float32 speed.
    """
    if cuda:
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    return "bfloat16" if prepacking_available() else "float32"


def with_dtype(config: Config) -> Config:
    """The configuration with `model.dtype` named where it was `auto`.

    A run's folder keeps the name: on another kind of machine a run is not resumed by accident.
    """
    if config.model.dtype != "auto":
        return config
    # Only pretraining leaves the CPU.
    cuda = isinstance(config, PretrainConfig) and torch.cuda.is_available()
    model = config.model.model_copy(update={"dtype": fast_dtype(cuda=cuda)})
    return config.model_copy(update={"model": model})
