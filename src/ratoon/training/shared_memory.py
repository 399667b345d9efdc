"""Tensors that the workers of one machine see together.

Summing gradients by way of memory is several times as fast as by way of sockets, and what all
workers hold alike needs to be held once.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path

import torch
from torch import Tensor

from ratoon.training.data_parallel import DataParallel

# A folder in memory; Linux has it. Elsewhere nothing is shared.
_FOLDER = Path("/dev/shm")


def shared_tensors(workers: DataParallel, numel: int, dtype: torch.dtype) -> list[Tensor] | None:
    """One zero tensor `[numel]` per worker, each visible to all; None on all where that fails.

    It fails without memory to share (containers often have little), or between machines. Files
    vanish with the processes that map them, however these end.
    """
    token = workers.broadcast(uuid.uuid4().hex)
    paths = [_FOLDER / f"ratoon-{token}-{rank}" for rank in range(workers.size)]
    tensors: list[Tensor] = []
    try:
        is_mine = workers.all_true(_reserve(paths[workers.rank], numel * dtype.itemsize))
        if is_mine and workers.all_true(all(path.is_file() for path in paths)):
            tensors = [
                torch.from_file(str(path), shared=True, size=numel, dtype=dtype) for path in paths
            ]
        workers.barrier()
    finally:
        paths[workers.rank].unlink(missing_ok=True)
    return tensors or None


def _reserve(path: Path, size: int) -> bool:
    """Make a file of zeros whose memory is reserved; writing to it later cannot fail."""
    try:
        with path.open("xb") as file:
            os.posix_fallocate(file.fileno(), 0, size)
    except (OSError, AttributeError):  # No such folder or call, or no memory.
        return False
    return True
