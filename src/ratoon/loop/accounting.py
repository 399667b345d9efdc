"""What a pretraining run has cost so far, counted and measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ratoon.est.flops import layer_ratio, optimizer_flops, token_flops
from ratoon.est.subnetwork import Subnetwork
from ratoon.models.decoder import DecoderConfig


class StepCost:
    """Operations of one optimizer step, by subnetwork."""

    def __init__(
        self,
        config: DecoderConfig,
        full: Subnetwork,
        *,
        tokens: int,
        length: int,
        parameters: Iterable[tuple[int, ...]],
        optimizer: Literal["adamw", "muon"],
    ) -> None:
        self._config, self._full = config, full
        self._tokens, self._length = tokens, length
        self._optimizer = optimizer_flops(parameters, optimizer)

    def flops(self, subnetwork: Subnetwork) -> float:
        """Forward, backward and optimizer; the optimizer counts in full in every stage."""
        per_token = token_flops(self._config, subnetwork, self._length).training
        return self._tokens * per_token + self._optimizer

    def forward(self, subnetwork: Subnetwork, tokens: int) -> float:
        """Of an evaluation."""
        return tokens * token_flops(self._config, subnetwork, self._length).forward

    def paper(self, subnetwork: Subnetwork) -> float:
        """The paper's count of a step, as a share of a whole model's step."""
        return layer_ratio(self._config, subnetwork, self._full)


@dataclass(slots=True)
class Account:
    """Sums over the run so far, kept in checkpoints.

    `full_flops` is what the whole model would have cost on the same tokens; `paper_steps` is the
    run in steps of the whole model, as the paper counts. `train_s` leaves evaluation out.
    """

    steps: int = 0
    tokens: int = 0
    flops: float = 0.0
    full_flops: float = 0.0
    paper_steps: float = 0.0
    train_s: float = 0.0

    def metrics(self) -> dict[str, float]:
        """As recorded."""
        return {
            "pretrain/tokens": self.tokens,
            "pretrain/train_s": self.train_s,
            "pretrain/flops": self.flops,
            "pretrain/saved_frac": 1.0 - self.flops / self.full_flops if self.full_flops else 0.0,
            "pretrain/saved_frac_paper": 1.0 - self.paper_steps / self.steps if self.steps else 0.0,
        }

    def state(self) -> dict[str, Any]:
        """Plain values that `Account(**state)` continues from."""
        return asdict(self)
