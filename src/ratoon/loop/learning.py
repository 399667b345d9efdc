"""What the policy learns from: responses with their advantages, by the configured algorithm."""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Sequence
from dataclasses import replace

from ratoon.config.algorithm import Algorithm
from ratoon.observe.sinks import Values
from ratoon.records import Completion
from ratoon.rl import advantages as estimators
from ratoon.training.samples import Sample

# One value for each token of each response.
TokenValues = Sequence[Sequence[float]]


def make_samples(completions: Sequence[Completion], algorithm: Algorithm) -> list[Sample]:
    """Samples in the order of the completions, without advantages yet."""
    return [
        Sample(
            prompt_ids=completion.prompt_ids,
            token_ids=completion.token_ids,
            advantage=0.0,
            group=group_of(completion, algorithm.group_size),
            engine_logprobs=completion.logprobs,
            is_masked=algorithm.mask_truncated_completions and completion.finish == "length",
        )
        for completion in completions
    ]


def group_of(completion: Completion, group_size: int) -> Hashable:
    """Which responses share a draw of a prompt, which may be drawn several times in a step."""
    key = completion.key
    return key.dataset, key.row, key.attempt, key.sample // group_size


def with_advantages(
    samples: Sequence[Sample],
    rewards: Sequence[float],
    algorithm: Algorithm,
    divergences: TokenValues | None = None,
) -> list[Sample]:
    """The samples with the advantages that their rewards give.

    `divergences` from the first policy are taken from the rewards where the algorithm has it so.

    Raises: RewardError if a reward is not finite.
    """
    coef = algorithm.kl_coef if divergences is not None else 0.0
    values = divergences or [(0.0,) * len(sample.token_ids) for sample in samples]
    penalties = [[coef * value for value in of_tokens] for of_tokens in values]
    advantages = _advantages(rewards, penalties, [sample.group for sample in samples], algorithm)
    learned = [replace(s, advantage=a) for s, a in zip(samples, advantages, strict=True)]
    if algorithm.name == "raft":
        return [replace(s, is_masked=s.is_masked or s.advantage == 0) for s in learned]
    return learned


def _advantages(
    rewards: Sequence[float],
    penalties: TokenValues,
    groups: Sequence[Hashable],
    algorithm: Algorithm,
) -> Sequence[float | tuple[float, ...]]:
    """Advantages of responses, or of their tokens."""
    if algorithm.name == "reinforce_plus_plus":
        return estimators.batch_normalised(rewards, penalties)
    totals = [
        reward - math.fsum(of_tokens) for reward, of_tokens in zip(rewards, penalties, strict=True)
    ]
    if algorithm.name == "rloo":
        return estimators.leave_one_out(totals, groups)
    if algorithm.name == "raft":
        return estimators.best_of_group(totals, groups)
    return estimators.group_relative(totals, groups, scale=algorithm.scale_rewards)


def learning_metrics(samples: Sequence[Sample], divergences: TokenValues | None) -> Values:
    """How far advantages lie apart, how many responses are masked, and the divergence if known."""
    values = [statistics.fmean(sample.advantages) for sample in samples]
    metrics = {
        "advantage/std": statistics.pstdev(values),
        "advantage/min": min(values),
        "advantage/max": max(values),
        "advantage/masked_frac": statistics.fmean(sample.is_masked for sample in samples),
    }
    if divergences is not None:
        metrics["policy/kl"] = statistics.fmean(v for of_tokens in divergences for v in of_tokens)
    return metrics
