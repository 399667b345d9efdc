"""The policy update of reinforcement learning.

Shape letters: N tokens of the loss in one micro-batch.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ratoon.models.decoder import Decoder
from ratoon.rl.kl import KLEstimator, kl_divergence
from ratoon.rl.losses import clipped_surrogate
from ratoon.rl.reduction import Reduction, response_weights, weighted_sum
from ratoon.training.core import TrainerCore
from ratoon.training.policy_metrics import PolicyMetrics
from ratoon.training.samples import Sample, TokenBatch, trained_length


@dataclass(frozen=True, slots=True)
class PolicyLossSettings:
    """The loss of a policy update; `max_tokens` is the response limit of a constant reduction."""

    clip_low: float = 0.2
    clip_high: float = 0.28
    reduction: Reduction = "token_mean"
    max_tokens: int | None = None
    kl_coef: float = 0.0
    kl_estimator: KLEstimator = "k3"


@dataclass(slots=True)
class _MicroBatch:
    """What one forward and backward needs; all per-token values are `[N]`."""

    batch: TokenBatch
    advantages: Tensor
    weights: Tensor
    num_tokens: int
    engine_logprobs: Tensor | None
    old_logprobs: Tensor | None = None
    reference_logprobs: Tensor | None = None


class PolicyTrainer:
    """Clipped policy-gradient updates of `core`'s decoder.

    With several minibatches the log-probabilities before the update ("old") are the trainer's own,
    from the same kernels and the same micro-batches as the training forward, so a learning rate
    of 0 gives ratios of exactly 1. For the first minibatch they are the current ones, without a
    second forward.

    `reference` is the frozen policy of the KL term, in the compute type.
    """

    def __init__(
        self, core: TrainerCore, loss: PolicyLossSettings, *, reference: Decoder | None = None
    ) -> None:
        if loss.kl_coef > 0 and reference is None:
            raise ValueError(f"kl_coef = {loss.kl_coef} needs a reference decoder")
        self.core = core
        self.loss = loss
        self.reference = reference

    def update(self, samples: Sequence[Sample], *, minibatches: int = 1) -> dict[str, float]:
        """One RL step: as many optimizer steps as minibatches. Same arguments on all workers.

        Responses that can contribute no gradient (advantage 0 and no KL term) count in every
        denominator but are not computed; means over tokens are over the others. A prompt is
        computed once for its group, and counted in `policy/tokens` for each response. Metrics with
        nothing to measure are left out.

        Raises: ValueError for unusable samples; NumericsError if a gradient is not finite.
        """
        started = time.perf_counter()
        parts = [self._prepare(part) for part in split_by_group(samples, minibatches)]
        self._add_fixed_logprobs(parts)
        metrics = PolicyMetrics(self.core.device)
        steps = []
        for part in parts:
            for item in part:
                self._backward(item, metrics)
            steps.append(self.core.step())
        summary = metrics.summary(self.core.workers, len(steps))
        summary["policy/tokens_per_s"] = summary["policy/tokens"] / (time.perf_counter() - started)
        summary["policy/grad_norm"] = max(step.grad_norm for step in steps)
        summary["policy/lr"] = steps[-1].lr
        return summary

    def _prepare(self, samples: Sequence[Sample]) -> list[_MicroBatch]:
        """This worker's micro-batches of one minibatch, weighted by the whole minibatch."""
        weights = response_weights(
            [len(sample.token_ids) for sample in samples],
            self.loss.reduction,
            max_tokens=self.loss.max_tokens,
        )
        pairs = [
            (sample, weight)
            for sample, weight in zip(samples, weights, strict=True)
            if sample.advantage != 0 or self.loss.kl_coef > 0
        ]
        cut = self.core.micro_batches(
            [(sample.prompt_ids, sample.token_ids) for sample, _ in pairs],
            [sample.group for sample, _ in pairs],
        )
        return [self._tensors(batch, [pairs[index] for index in chosen]) for chosen, batch in cut]

    def _tensors(self, batch: TokenBatch, pairs: Sequence[tuple[Sample, float]]) -> _MicroBatch:
        samples = [sample for sample, _ in pairs]
        dtype = self.core.sum_dtype
        engine_logprobs = None
        if any(sample.engine_logprobs is not None for sample in samples):
            values = [
                value
                for sample in samples
                for value in sample.engine_logprobs or (float("nan"),) * len(sample.token_ids)
            ]
            engine_logprobs = torch.tensor(values, dtype=torch.float32, device=self.core.device)
        return _MicroBatch(
            batch=batch,
            advantages=batch.per_token([sample.advantage for sample in samples], dtype),
            weights=batch.per_token([weight for _, weight in pairs], dtype),
            num_tokens=sum(trained_length(s.prompt_ids, s.token_ids) for s in samples),
            engine_logprobs=engine_logprobs,
        )

    @torch.no_grad()
    def _add_fixed_logprobs(self, parts: Sequence[Sequence[_MicroBatch]]) -> None:
        """Log-probabilities that no optimizer step of this update may change."""
        for index, part in enumerate(parts):
            for item in part:
                if index > 0:
                    item.old_logprobs = self.core.log_probs(item.batch)
                if self.loss.kl_coef > 0:
                    item.reference_logprobs = self.core.log_probs(item.batch, self.reference)

    def _backward(self, item: _MicroBatch, metrics: PolicyMetrics) -> None:
        """Add one micro-batch's share of the loss's gradient."""
        logprobs = self.core.log_probs(item.batch)
        old_logprobs = logprobs if item.old_logprobs is None else item.old_logprobs
        policy = clipped_surrogate(
            logprobs,
            old_logprobs,
            item.advantages,
            clip_low=self.loss.clip_low,
            clip_high=self.loss.clip_high,
        )
        losses = policy.losses
        if item.reference_logprobs is not None:
            divergence = kl_divergence(logprobs, item.reference_logprobs, self.loss.kl_estimator)
            losses = losses + self.loss.kl_coef * divergence
            metrics.add_divergence(divergence)
        loss = weighted_sum(losses, item.weights)
        loss.backward()
        metrics.add(logprobs, policy, loss, item.num_tokens)
        if item.engine_logprobs is not None:
            metrics.compare(logprobs, item.engine_logprobs)


def split_by_group(samples: Sequence[Sample], parts: int) -> list[list[Sample]]:
    """Cut samples into `parts` of whole groups, about as many groups each, in the order given.

    Raises: ValueError if there are fewer groups than parts.
    """
    groups: dict[object, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.group, []).append(sample)
    if not 1 <= parts <= len(groups):
        raise ValueError(
            f"minibatches = {parts} must lie between 1 and the number of groups, {len(groups)}: "
            "a group is never split"
        )
    members = list(groups.values())
    bounds = [part * len(members) // parts for part in range(parts + 1)]
    return [
        [sample for group in members[low:high] for sample in group]
        for low, high in itertools.pairwise(bounds)
    ]
