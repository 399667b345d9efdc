"""One checksum of many tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor


def tensors_checksum(named: Iterable[tuple[str, Tensor]]) -> str:
    """SHA-256 over names, types, shapes and bytes of tensors, in the order given."""
    digest = hashlib.sha256()
    for name, value in named:
        tensor = value.detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
