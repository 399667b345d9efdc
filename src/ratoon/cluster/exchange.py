"""Memory that all workers of a machine share: drafter weights, published and in training.

Files of a private folder, mapped by every process: no copies through pipes, no pickles. Two slots
take turns for published weights; what is read is checked against the announced checksum.

Shape letters: P trainable numbers of the drafter.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ratoon.drafter.flat import FlatLayout
from ratoon.drafter.model import Eagle3Drafter
from ratoon.drafter.trainer import DrafterTrainer

NUM_SLOTS = 2
MOMENTS = ("exp_avg", "exp_avg_sq")


class DrafterExchange:
    """Maps (and, the first time, makes) the shared files in `folder`."""

    def __init__(self, folder: Path, drafter: Eagle3Drafter) -> None:
        self._layout = FlatLayout(drafter)
        size = self._layout.size
        self._slots = [
            _mapped(folder / f"published_{slot}", size, torch.bfloat16) for slot in range(NUM_SLOTS)
        ]
        self._training = _mapped(folder / "training", 3 * size, torch.float32).view(3, size)
        self._counters = _mapped(folder / "counters", 2, torch.int64)

    def publish(self, slot: int, weights: Mapping[str, Tensor]) -> None:
        """Write weights, rounded to bfloat16, to a slot."""
        for name, view in self._layout.named(self._slots[slot]).items():
            view.copy_(weights[name])

    def read(self, slot: int) -> dict[str, Tensor]:
        """A copy of a slot's weights."""
        return self._layout.named(self._slots[slot].clone())

    def store_training(self, trainer: DrafterTrainer) -> None:
        """Leave weights, moments and counters for whoever trains next."""
        named = dict(trainer.drafter.named_parameters())
        for name, view in self._layout.named(self._training[0]).items():
            view.copy_(named[name].detach())
        state = trainer.optimizer_state()
        for moment, flat in zip(MOMENTS, self._training[1:], strict=True):
            for name, view in self._layout.named(flat).items():
                view.copy_(state[f"{moment}.{name}"])
        self._counters.copy_(torch.tensor([trainer.step, trainer.tokens]))

    def load_training(self, trainer: DrafterTrainer) -> None:
        """Take over what the last session left, if it was another worker's."""
        step, tokens = self._counters.tolist()
        if step == trainer.step:
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
    return torch.from_file(str(path), shared=True, size=size, dtype=dtype)
