"""Memory that all workers of a machine share: drafter weights, published and in training.

Files of a private folder, mapped by every process: no copies through pipes, no pickles. Two slots
take turns for published weights; what is read is checked against the announced checksum. A reader
that is slower than two publications finds a newer version than it was told of.

Shape letters: P trainable numbers of the drafter.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ratoon.drafter.flat import FlatLayout
from ratoon.drafter.model import DrafterConfig, Eagle3Drafter
from ratoon.drafter.trainer import DrafterTrainer
from ratoon.errors import CapabilityError

NUM_SLOTS = 2
MOMENTS = ("exp_avg", "exp_avg_sq")


def exchange_bytes(config: DrafterConfig, dtype: torch.dtype) -> int:
    """Size of the shared files for a drafter of this shape that computes in `dtype`."""
    with torch.device("meta"):
        size = FlatLayout(Eagle3Drafter(config)).size
    training = (1 + len(MOMENTS)) * torch.float32.itemsize
    return size * (NUM_SLOTS * dtype.itemsize + training)


class DrafterExchange:
    """Maps (and, the first time, makes) the shared files in `folder`; published is in `dtype`.

    Raises: CapabilityError if the folder's file system is too full.
    """

    def __init__(self, folder: Path, drafter: Eagle3Drafter, dtype: torch.dtype) -> None:
        self._layout = FlatLayout(drafter)
        size = self._layout.size
        self._slots = [
            _mapped(folder / f"published_{slot}", size, dtype) for slot in range(NUM_SLOTS)
        ]
        self._training = _mapped(folder / "training", 3 * size, torch.float32).view(3, size)
        self._counters = _mapped(folder / "counters", 2, torch.int64)
        self._versions = _mapped(folder / "versions", NUM_SLOTS, torch.int64)

    def publish(self, version: int, weights: Mapping[str, Tensor]) -> int:
        """Write weights to the older slot; returns the slot."""
        slot = version % NUM_SLOTS
        self._versions[slot] = version
        for name, view in self._layout.named(self._slots[slot]).items():
            view.copy_(weights[name])
        return slot

    def version(self, slot: int) -> int:
        """The version that a slot holds, or is about to."""
        return int(self._versions[slot])

    def read(self, slot: int) -> dict[str, Tensor]:
        """A copy of a slot's weights."""
        return self._layout.named(self._slots[slot].clone())

    def store_training(self, trainer: DrafterTrainer) -> None:
        """Leave weights, moments and counters for whoever trains next.

        Nobody takes over what a process that dies in here leaves.
        """
        self._counters[0] = -1
        named = dict(trainer.drafter.named_parameters())
        for name, view in self._layout.named(self._training[0]).items():
            view.copy_(named[name].detach())
        state = trainer.optimizer_state()
        for moment, flat in zip(MOMENTS, self._training[1:], strict=True):
            for name, view in self._layout.named(flat).items():
                view.copy_(state[f"{moment}.{name}"])
        self._counters.copy_(torch.tensor([trainer.step, trainer.tokens]))

    def load_training(self, trainer: DrafterTrainer) -> None:
        """Take over what the last session left, if it was another worker's and of this run.

        After a resume there is nothing yet: the trainer is ahead of the empty files.
        """
        step, tokens = self._counters.tolist()
        if step <= trainer.step:
            return
        named = dict(trainer.drafter.named_parameters())
        with torch.no_grad():
            for name, view in self._layout.named(self._training[0]).items():
                named[name].copy_(view)
        moments = {
            f"{moment}.{name}": view
            for moment, flat in zip(MOMENTS, self._training[1:], strict=True)
            for name, view in self._layout.named(flat).items()
        }
        trainer.load_optimizer_state(moments, step, tokens)


def _mapped(path: Path, size: int, dtype: torch.dtype) -> Tensor:
    """A file as a tensor. Its space is taken at once: a mapping kills whoever finds no more."""
    if hasattr(os, "posix_fallocate"):
        needed = size * dtype.itemsize
        try:
            with path.open("ab") as file:
                os.posix_fallocate(file.fileno(), 0, needed)
        except OSError as error:
            raise CapabilityError(
                f"{path}: the drafter's shared memory needs {needed / 1e6:,.0f} MB, but "
                f"{error.strerror}; free some, or lower drafter.draft_vocab_size"
            ) from None
    return torch.from_file(str(path), shared=True, size=size, dtype=dtype)
