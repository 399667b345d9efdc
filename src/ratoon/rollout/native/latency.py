"""What a forward pass costs by its rows, measured on the machine and the model at hand."""

from __future__ import annotations

import time

import torch

from ratoon.rollout.native.forward import InferenceModel
from ratoon.rollout.native.numerics import decode

_CONTEXT = 128
_MAX_SEQUENCES = 16
_ROUNDS = 2


@torch.inference_mode()
def forward_seconds(model: InferenceModel, max_rows: int) -> list[tuple[int, float]]:
    """(rows, seconds) of decode passes with 1, 2, 4, ... and `max_rows` rows; the faster of two.

    Up to 16 sequences behind short contexts, beyond that more tokens of each.
    """
    context = min(_CONTEXT, model.num_positions // 2)
    sizes = [2**power for power in range(max_rows.bit_length()) if 2**power < max_rows]
    points = []
    _seconds(model, 1, context)
    for size in (*sizes, max_rows):
        points.append((size, min(_seconds(model, size, context) for _ in range(_ROUNDS))))
    return points


def _seconds(model: InferenceModel, num_rows: int, context: int) -> float:
    sequences = min(num_rows, _MAX_SEQUENCES)
    new = min(-(-num_rows // sequences), model.num_positions - context)
    cache = model.make_cache(sequences, context + new)
    tokens = torch.zeros(sequences, new, dtype=torch.long, device=model.embedding.device)
    started = time.perf_counter()
    decode(model, cache, tokens, [context] * sequences).sum().item()
    return time.perf_counter() - started
