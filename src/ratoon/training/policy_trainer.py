"""The policy update of reinforcement learning.

Shape letters: N tokens of the loss in one micro-batch.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ratoon.models.decoder import Decoder
from ratoon.rl.kl import KLEstimator, kl_divergence
from ratoon.rl.losses import clipped_surrogate, mismatch_weights
from ratoon.rl.reduction import Reduction, response_means, response_weights, weighted_sum
from ratoon.training.core import TrainerCore
from ratoon.training.policy_metrics import PolicyMetrics
from ratoon.training.samples import Sample, TokenBatch, trained_length


@dataclass(frozen=True, slots=True)
class PolicyLossSettings:
    """The loss of a policy update.

    `ratio` is that of a token's probabilities, or of its response's per token (GSPO). `max_tokens`
    is the response limit of a constant reduction. `mismatch_cap` bounds the weights by which
    engine and trainer differ; None = no weights.
    """

    ratio: Literal["token", "sequence"] = "token"
    clip_low: float = 0.2
    clip_high: float = 0.28
    reduction: Reduction = "token_mean"
    max_tokens: int | None = None
    kl_coef: float = 0.0
    kl_estimator: KLEstimator = "k3"
    entropy_coef: float = 0.0
    mismatch_cap: float | None = 2.0


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

    The log-probabilities before the update ("old") are the trainer's own, from the same kernels and
    the same micro-batches as the training forward, so a learning rate of 0 gives ratios of exactly
    1. Those of the first minibatch are those of its first pass, without another forward.

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

    def update(
        self, samples: Sequence[Sample], *, minibatches: int = 1, epochs: int = 1
    ) -> dict[str, float]:
        """One RL step: as many optimizer steps as minibatches times epochs.

        Same arguments on all workers. Responses that can contribute no gradient (advantage 0, no KL
        term, no entropy bonus) count in every denominator but are not computed; means over tokens
        are over the others. A prompt is computed once for its group, and counted in `policy/tokens`
        for each response and epoch. Metrics with nothing to measure are left out.

        Raises: ValueError for unusable samples; NumericsError if a gradient is not finite.
        """
        started = time.perf_counter()
        parts = [self._prepare(part) for part in split_by_group(samples, minibatches)]
        self._add_fixed_logprobs(parts)
        metrics = PolicyMetrics(self.core.device)
        steps = []
        for part in itertools.chain.from_iterable(itertools.repeat(parts, epochs)):
            for item in part:
                self._backward(item, metrics)
            steps.append(self.core.step())
        summary = metrics.summary(self.core.workers, len(steps))
        summary["policy/tokens_per_s"] = summary["policy/tokens"] / (time.perf_counter() - started)
        summary["policy/grad_norm"] = max(step.grad_norm for step in steps)
        summary["policy/lr"] = steps[-1].lr
        return summary

    @torch.no_grad()
    def divergences(
        self, samples: Sequence[Sample], estimator: KLEstimator
    ) -> list[tuple[float, ...]]:
        """Divergence of the policy from the reference at each token of each response.

        Same arguments and result on all workers. Raises: ValueError if there is no reference.
        """
        if self.reference is None:
            raise ValueError("a divergence needs a reference decoder")
        cut = self.core.micro_batches(
            [(sample.prompt_ids, sample.token_ids) for sample in samples],
            [sample.group for sample in samples],
        )
        lengths = [len(sample.token_ids) for sample in samples]
        values = torch.zeros(sum(lengths), dtype=torch.float64, device=self.core.device)
        places = values.split(lengths)
        for chosen, batch in cut:
            logprobs, reference = (
                self.core.log_probs(batch, decoder) for decoder in (None, self.reference)
            )
            parts = kl_divergence(logprobs, reference, estimator).split(batch.lengths)
            for index, part in zip(chosen, parts, strict=True):
                places[index].copy_(part)
        self.core.workers.sum_(values)
        return [tuple(place.tolist()) for place in places]

    def _prepare(self, samples: Sequence[Sample]) -> list[_MicroBatch]:
        """This worker's micro-batches of one minibatch, weighted by the whole minibatch."""
        learned = [sample for sample in samples if not sample.is_masked]
        if not learned:
            return []
        weights = response_weights(
            [len(sample.token_ids) for sample in learned],
            self.loss.reduction,
            max_tokens=self.loss.max_tokens,
        )
        always = self.loss.kl_coef > 0 or self.loss.entropy_coef > 0
        pairs = [
            (sample, weight)
            for sample, weight in zip(learned, weights, strict=True)
            if always or any(sample.advantages)
        ]
        cut = self.core.micro_batches(
            [(sample.prompt_ids, sample.token_ids) for sample, _ in pairs],
            [sample.group for sample, _ in pairs],
        )
        return [self._tensors(batch, [pairs[index] for index in chosen]) for chosen, batch in cut]

    def _tensors(self, batch: TokenBatch, pairs: Sequence[tuple[Sample, float]]) -> _MicroBatch:
        samples = [sample for sample, _ in pairs]
        dtype, device = self.core.sum_dtype, self.core.device
        advantages = [value for sample in samples for value in sample.advantages]
        engine_logprobs = None
        if any(sample.engine_logprobs is not None for sample in samples):
            values = [
                value
                for sample in samples
                for value in sample.engine_logprobs or (float("nan"),) * len(sample.token_ids)
            ]
            engine_logprobs = torch.tensor(values, dtype=torch.float32, device=device)
        return _MicroBatch(
            batch=batch,
            advantages=torch.tensor(advantages, dtype=dtype, device=device),
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
        settings = self.loss
        entropies = None
        if settings.entropy_coef > 0:
            logprobs, entropies = self.core.log_probs_and_entropies(item.batch)
        else:
            logprobs = self.core.log_probs(item.batch)
        if item.old_logprobs is None:
            item.old_logprobs = logprobs.detach()
        log_ratios = logprobs - item.old_logprobs
        if settings.ratio == "sequence":
            log_ratios = response_means(log_ratios, item.batch.lengths)
        policy = clipped_surrogate(
            log_ratios, item.advantages, clip_low=settings.clip_low, clip_high=settings.clip_high
        )
        losses = policy.losses
        if item.engine_logprobs is not None:
            metrics.compare(item.old_logprobs, item.engine_logprobs)
            if settings.mismatch_cap is not None:
                weights = mismatch_weights(
                    item.old_logprobs, item.engine_logprobs, settings.mismatch_cap
                )
                losses = losses * weights
                metrics.add_mismatch(weights, settings.mismatch_cap)
        if item.reference_logprobs is not None:
            divergence = kl_divergence(logprobs, item.reference_logprobs, settings.kl_estimator)
            losses = losses + settings.kl_coef * divergence
            metrics.add_divergence(divergence)
        if entropies is not None:
            losses = losses - settings.entropy_coef * entropies
        loss = weighted_sum(losses, item.weights)
        loss.backward()
        metrics.add(policy, loss, item.num_tokens)
        metrics.add_distribution(logprobs, item.old_logprobs, entropies)


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
