"""Each algorithm's loss and gradient against its formula, written out with autograd alone."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from algorithm_cases import (
    CASES,
    MAX_TOKENS,
    algorithm,
    make_decoder,
    make_step,
    make_trainer,
    samples_of,
)
from torch import Tensor

from ratoon.models.packing import PackedBatch
from ratoon.records import Completion
from ratoon.training.core import TrainerCore
from ratoon.training.optimizer import OptimizerSettings
from ratoon.training.policy_metrics import PolicyMetrics

SETTINGS = OptimizerSettings(lr=1e-2, eps=1.0, max_grad_norm=1e9)


@dataclass
class Response:
    """What a formula speaks of; all tensors have one value for each token."""

    reward: float
    group: int
    is_cut: bool
    p: Tensor
    old: Tensor
    reference: Tensor
    entropy: Tensor
    weight: Tensor


def surrogate(ratio: Tensor, advantage: float | Tensor, low: float, high: float) -> Tensor:
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def others(response: Response, all_: list[Response]) -> list[Response]:
    return [r for r in all_ if r.group == response.group]


def ppo(r: Response, advantage: float | Tensor) -> Tensor:
    return r.weight * surrogate((r.p - r.old).exp(), advantage, 0.2, 0.28)


def of_group(r: Response, all_: list[Response], divisor: float | None = None) -> float:
    rewards = [o.reward for o in others(r, all_)]
    return (r.reward - statistics.mean(rewards)) / (divisor or statistics.stdev(rewards) + 1e-4)


def grpo(all_: list[Response]) -> Tensor:
    losses = [ppo(r, of_group(r, all_)) for r in all_]
    return torch.cat(losses).sum() / sum(len(r.p) for r in all_)


def grpo_of_the_paper(all_: list[Response]) -> Tensor:
    total = torch.zeros(())
    for r in all_:
        d = r.reference - r.p
        total = total + (ppo(r, of_group(r, all_)) + 0.1 * (d.exp() - d - 1)).sum() / len(r.p)
    return total / len(all_)


def grpo_kl_in_reward(all_: list[Response]) -> Tensor:
    for r in all_:
        r.reward -= 0.2 * float((0.5 * (r.p - r.reference).detach() ** 2).sum())
    divisor = statistics.stdev([r.reward for r in all_]) + 1e-4
    losses = [ppo(r, of_group(r, all_, divisor)) for r in all_]
    return torch.cat(losses).sum() / sum(len(r.p) for r in all_)


def dr_grpo(all_: list[Response]) -> Tensor:
    losses = [ppo(r, of_group(r, all_, 1.0)) for r in all_]
    return torch.cat(losses).sum() / (len(all_) * MAX_TOKENS)


def dapo(all_: list[Response]) -> Tensor:
    kept = [r for r in all_ if not r.is_cut]
    losses = [ppo(r, of_group(r, all_)) for r in kept]
    return torch.cat(losses).sum() / sum(len(r.p) for r in kept)


def gspo(all_: list[Response]) -> Tensor:
    total = torch.zeros(())
    for r in all_:
        ratio = ((r.p - r.old).sum() / len(r.p)).exp()
        loss = surrogate(ratio, of_group(r, all_), 0.01, 0.02)
        total = total + (r.weight * loss).sum() / len(r.p)
    return total / len(all_)


def rloo(all_: list[Response]) -> Tensor:
    total = torch.zeros(())
    for r in all_:
        rest = [o.reward for o in others(r, all_) if o is not r]
        total = total + ppo(r, r.reward - statistics.mean(rest)).sum()
        total = total + 0.1 * (r.p - r.reference).sum()
    return total / (len(all_) * MAX_TOKENS)


def reinforce_plus_plus(all_: list[Response]) -> Tensor:
    returns = []
    for r in all_:
        kl = (r.p - r.reference).detach()
        returns.append(torch.stack([r.reward - 0.1 * kl[t:].sum() for t in range(len(kl))]))
    everything = torch.cat(returns)
    mean, std = everything.mean(), everything.std()
    losses = [ppo(r, (g - mean) / (std + 1e-4)) for r, g in zip(all_, returns, strict=True)]
    return torch.cat(losses).sum() / len(everything)


def raft(all_: list[Response]) -> Tensor:
    best = [max(others(r, all_), key=lambda o: o.reward) for r in all_ if others(r, all_)[0] is r]
    losses = [ppo(r, 1.0) - 0.01 * r.entropy for r in best]
    return torch.cat(losses).sum() / sum(len(r.p) for r in best)


FORMULAS: dict[str, Callable[[list[Response]], Tensor]] = {
    "grpo": grpo,
    "grpo of the paper": grpo_of_the_paper,
    "grpo, batch scale, KL in reward": grpo_kl_in_reward,
    "dr_grpo": dr_grpo,
    "dapo": dapo,
    "gspo": gspo,
    "rloo": rloo,
    "reinforce_plus_plus": reinforce_plus_plus,
    "raft": raft,
}
TEMPERATURE = 0.8


def responses(
    completions: list[Completion], rewards: list[float], noise: list[Tensor]
) -> tuple[list[Response], list[Tensor]]:
    """One padded forward for each response; also the parameters that gradients go to."""
    decoder, reference = make_decoder(), make_decoder(seed=9)
    found = []
    for done, reward, shift in zip(completions, rewards, noise, strict=True):
        whole = [*done.prompt_ids, *done.token_ids]
        packed = PackedBatch.of([whole + [0] * 7])
        rows = slice(len(done.prompt_ids) - 1, len(whole) - 1)
        targets = torch.tensor(done.token_ids)[:, None]
        p, q = (
            torch.log_softmax(m(packed)[0][rows] @ m.head_weight.t() / TEMPERATURE, -1)
            for m in (decoder, reference)
        )
        mine = p.gather(1, targets)[:, 0]
        old = mine.detach() + shift
        engine = torch.tensor(done.logprobs, dtype=torch.float64)
        found.append(
            Response(
                reward=reward,
                group=done.key.row,
                is_cut=done.finish == "length",
                p=mine,
                old=old,
                reference=q.gather(1, targets)[:, 0].detach(),
                entropy=-(p.exp() * p).sum(-1),
                weight=torch.minimum((old - engine).exp(), torch.tensor(2.0, dtype=torch.float64)),
            )
        )
    return found, list(decoder.parameters())


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_equal_the_formula(case: str) -> None:
    """Old log-probabilities lie off the current ones, so that ratios differ and some are cut."""
    settings = algorithm(case)
    completions, rewards = make_step(settings, seed=3)
    torch.manual_seed(5)
    noise = [0.3 * torch.randn(len(c.token_ids), dtype=torch.float64) for c in completions]
    naive, parameters = responses(completions, rewards, noise)
    loss = FORMULAS[case](naive)
    expected = torch.autograd.grad(loss, parameters)

    core = TrainerCore(
        make_decoder(), SETTINGS, compute_dtype=torch.float64, temperature=TEMPERATURE
    )
    trainer = make_trainer(core, settings)
    samples = samples_of(trainer, settings, completions, rewards)
    (item,) = trainer._prepare(samples)
    trainer._add_fixed_logprobs([[item]])
    by_tokens = {c.token_ids: shift for c, shift in zip(completions, noise, strict=True)}
    shifts = [
        by_tokens[tuple(ids.tolist())] for ids in item.batch.targets.split(item.batch.lengths)
    ]
    with torch.no_grad():
        item.old_logprobs = core.log_probs(item.batch) + torch.cat(shifts)
    metrics = PolicyMetrics(core.device)
    trainer._backward(item, metrics)
    summary = metrics.summary(core.workers, 1)
    assert summary["policy/loss"] == pytest.approx(loss.item(), abs=1e-10)
    for mine, other in zip(core.decoder.parameters(), expected, strict=True):
        torch.testing.assert_close(mine.grad, other, rtol=0, atol=1e-10)
    assert 0 < summary["policy/clip_frac"] < 0.9
    assert 0 < summary["policy/mismatch_capped_frac"] < 1
