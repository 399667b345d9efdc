"""How fast this process reads memory, and how much a decode step must read."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from ratoon.rollout.native.forward import InferenceModel

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
# A buffer that is read again and again must leave the last cache in between.
_TIMES_CACHE = 4
_LEAST_BYTES = 256 * 2**20
_READS = 3


class Reader:
    """Adds up a buffer of float32 several times as large as the last cache; reads it once."""

    def __init__(self) -> None:
        size = max(_LEAST_BYTES, _TIMES_CACHE * last_cache_bytes())
        self._buffer = torch.ones(size // 4)

    def bytes_per_s(self) -> float:
        """The best of three readings by the threads of this process."""
        seconds = []
        for _ in range(_READS):
            started = time.perf_counter()
            self._buffer.sum()
            seconds.append(time.perf_counter() - started)
        return 4 * len(self._buffer) / min(seconds)


def last_cache_bytes() -> int:
    """Size of the largest cache; 0 where the system does not tell."""
    sizes = [path.read_text(encoding="utf-8").strip() for path in _CACHES.glob("index*/size")]
    units = {"K": 2**10, "M": 2**20}
    return max((int(size[:-1]) * units[size[-1]] for size in sizes if size[-1] in units), default=0)


def step_bytes(model: InferenceModel, context: int) -> int:
    """What a plain step of one sequence must read: every matrix, and its keys and values.

    Norms, biases and one row of the embedding are left out.
    """
    config = model.config
    width, inner = config.hidden_size, config.intermediate_size
    heads_width = config.num_heads * config.head_dim
    kv_width = 2 * config.num_kv_heads * config.head_dim
    ups = 2 if config.activation == "swiglu" else 1
    layer = width * (heads_width + kv_width) + heads_width * width + (ups + 1) * width * inner
    values = config.num_layers * (layer + kv_width * context) + config.vocab_size * width
    return values * model.dtype.itemsize
