"""Supervised fine-tuning: the trainer's core with the loss on completions.

Shape letters: N completion tokens.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from ratoon.rl.reduction import response_weights, weighted_sum
from ratoon.training.core import TrainerCore
from ratoon.training.samples import Example, TokenBatch


class SFTTrainer:
    """Maximises the likelihood of completions; each completion token of a step counts the same."""

    def __init__(self, core: TrainerCore) -> None:
        self.core = core

    def step(self, examples: Sequence[Example]) -> dict[str, float]:
        """One optimizer step on pairs of prompt and completion ids. Same arguments on all workers.

        Raises: ValueError for unusable examples; NumericsError if a gradient is not finite.
        """
        started = time.perf_counter()
        totals = torch.zeros(2, dtype=torch.float64, device=self.core.device)
        for batch, weights in self._micro_batches(examples):
            loss = self._loss(batch, weights)
            loss.backward()
            totals[0] += loss.detach()
            totals[1] += len(batch.packed.ids)
        step = self.core.step()
        loss_sum, tokens = self.core.workers.sum_(totals).tolist()
        return {
            "sft/loss": loss_sum,
            "sft/tokens": tokens,
            "sft/tokens_per_s": tokens / (time.perf_counter() - started),
            "sft/grad_norm": step.grad_norm,
            "sft/lr": step.lr,
        }

    @torch.no_grad()
    def evaluate(self, examples: Sequence[Example]) -> float:
        """Mean loss per completion token. Same arguments on all workers."""
        total = torch.zeros((), dtype=torch.float64, device=self.core.device)
        for batch, weights in self._micro_batches(examples):
            total += self._loss(batch, weights)
        return float(self.core.workers.sum_(total))

    def _micro_batches(self, examples: Sequence[Example]) -> list[tuple[TokenBatch, Tensor]]:
        """This worker's micro-batches, each with the weights `[N]` of its tokens."""
        weights = response_weights([len(completion) for _, completion in examples], "token_mean")
        batches = []
        for chosen, batch in self.core.micro_batches(examples):
            per_token = batch.per_token([weights[index] for index in chosen], self.core.sum_dtype)
            batches.append((batch, per_token))
        return batches

    def _loss(self, batch: TokenBatch, weights: Tensor) -> Tensor:
        return weighted_sum(-self.core.log_probs(batch), weights)
