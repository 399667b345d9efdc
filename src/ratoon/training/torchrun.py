"""The processes that torchrun starts, as workers of one update."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from ratoon.training.data_parallel import DataParallel


@contextmanager
def torchrun_workers() -> Iterator[tuple[DataParallel, torch.device]]:
    """The workers, and the device of this process; alone where torchrun did not start it.

    A device is the process's CUDA device where there is one, else the CPU.
    """
    local = int(os.environ.get("LOCAL_RANK", "0"))
    is_cuda = torch.cuda.is_available()
    device = torch.device("cuda", local) if is_cuda else torch.device("cpu")
    if is_cuda:
        torch.cuda.set_device(device)
    if "WORLD_SIZE" not in os.environ:
        yield DataParallel(), device
        return
    if dist.is_initialized():
        yield DataParallel(dist.group.WORLD), device
        return
    dist.init_process_group("cpu:gloo,cuda:nccl" if is_cuda else "gloo")
    try:
        yield DataParallel(dist.group.WORLD), device
    finally:
        dist.destroy_process_group()
