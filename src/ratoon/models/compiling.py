"""Whether torch.compile can work here, and layers that it makes."""

from __future__ import annotations

import os
import shutil
from typing import Any

import torch

from ratoon.errors import ConfigError
from ratoon.models.decoder import Decoder

# A stage needs a graph for training and one for evaluation, and an adaptive schedule tries stages
# that it does not enter. torch gives up at 8 and computes as written from there on.
_MOST_GRAPHS = 64


def has_compiler() -> bool:
    """Whether torch.compile finds a C++ compiler for loops on the CPU."""
    return shutil.which(os.environ.get("CXX", "g++")) is not None


def compile_layers(decoder: Decoder, setting: str, backend: str = "inductor") -> None:
    """Let each layer be compiled when it first computes, once for each shape and kind of draw.

    Layers share what is compiled, and it is kept: a stage that comes back, or that a probe has
    tried, is not compiled again. `setting` is what the user has set, for the error.

    Raises: ConfigError if there is nothing to compile with on the decoder's device.
    """
    device = decoder.head_weight.device
    if device.type == "cpu" and not has_compiler():
        raise ConfigError(
            f"{setting} needs a C++ compiler: none is at $CXX or g++; install one, or set it to "
            "false"
        )
    if device.type == "cuda" and not _has_triton():
        raise ConfigError(
            f"{setting} needs triton for the GPU at hand: it is not installed, or the GPU is older "
            "than it knows; install it, or set it to false"
        )
    limits: Any = torch._dynamo.config  # noqa: SLF001
    limits.recompile_limit = max(limits.recompile_limit, _MOST_GRAPHS)
    for layer in decoder.layers:
        # Other sizes are other graphs: kernels for any size are slower.
        layer.compile(backend=backend, dynamic=False)


def _has_triton() -> bool:
    from torch.utils._triton import has_triton

    return bool(has_triton())
