"""What an update may and may not do to the policy."""

from __future__ import annotations

import copy
import dataclasses
import io
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from algorithm_cases import CASES, CONFIG, algorithm, learn

from ratoon.errors import CheckpointError, NumericsError
from ratoon.models.decoder import Decoder
from ratoon.models.packing import PackedBatch
from ratoon.rl.advantages import group_relative
from ratoon.training.core import TrainerCore
from ratoon.training.optimizer import OptimizerSettings, learning_rate
from ratoon.training.policy_metrics import PolicyMetrics
from ratoon.training.policy_trainer import PolicyLossSettings, PolicyTrainer, split_by_group
from ratoon.training.samples import Sample
from ratoon.training.sft import SFTTrainer


def make_decoder(seed: int) -> Decoder:
    torch.manual_seed(seed)
    decoder = Decoder(CONFIG)
    torch.nn.init.normal_(decoder.embed_tokens.weight, std=0.3)
    return decoder


def make_core(
    lr: float = 1e-3,
    compute_dtype: torch.dtype = torch.bfloat16,
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> TrainerCore:
    return TrainerCore(
        make_decoder(0).to(dtype),
        OptimizerSettings(lr=lr, **settings),
        compute_dtype=compute_dtype,
        micro_batch_tokens=40,
        temperature=0.8,
    )


def make_samples(seed: int = 0, num_groups: int = 6) -> list[Sample]:
    source = random.Random(seed)

    def ids(low: int, high: int) -> tuple[int, ...]:
        return tuple(source.randrange(61) for _ in range(source.randint(low, high)))

    prompts = [ids(1, 6) for _ in range(num_groups)]
    return [
        Sample(prompts[index // 2], ids(1, 20), source.gauss(0, 1), group=index // 2)
        for index in range(2 * num_groups)
    ]


def parameters(core: TrainerCore) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in core.decoder.parameters()]


@pytest.mark.parametrize("minibatches", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_learning_rate_zero_gives_ratios_of_exactly_one(
    dtype: torch.dtype, minibatches: int
) -> None:
    core = make_core(lr=0.0, compute_dtype=dtype, weight_decay=0.1)
    before = parameters(core)
    metrics = PolicyTrainer(core, PolicyLossSettings()).update(
        make_samples(), minibatches=minibatches
    )
    assert metrics["policy/ratio_mean"] == 1.0
    assert metrics["policy/ratio_max"] == 1.0
    assert metrics["policy/clip_frac"] == 0.0
    assert metrics["policy/grad_norm"] > 0
    assert all(map(torch.equal, before, parameters(core)))


@pytest.mark.parametrize("case", CASES)
def test_learning_rate_zero_gives_ratios_of_exactly_one_for_each_algorithm(case: str) -> None:
    """In two passes over two minibatches."""
    core = make_core(lr=0.0)
    before = parameters(core)
    metrics, after = learn(core, algorithm(case, minibatches=2))
    assert metrics["policy/ratio_mean"] == 1.0
    assert metrics["policy/ratio_max"] == 1.0
    assert metrics["policy/clip_frac"] == 0.0
    assert metrics["policy/approx_kl"] == 0.0
    assert metrics["policy/grad_norm"] > 0
    assert all(map(torch.equal, before, after))


def test_several_passes_compare_with_the_policy_before_the_first() -> None:
    """One response, learned from twice without momentum: the second ratio is the first's effect."""
    settings = {"betas": (0.0, 0.0), "eps": 1.0, "max_grad_norm": 1e9}
    sample = Sample((1, 2), (3, 4, 5), 1.0, group=0)
    once, twice = (
        make_core(lr=0.1, compute_dtype=torch.float64, dtype=torch.float64, **settings)
        for _ in range(2)
    )
    ((_, batch),) = once.micro_batches([(sample.prompt_ids, sample.token_ids)])
    before = once.log_probs(batch).detach()
    loss = PolicyLossSettings(clip_high=1e9)
    PolicyTrainer(once, loss).update([sample])
    ratios = (once.log_probs(batch).detach() - before).exp()
    metrics = PolicyTrainer(twice, loss).update([sample], epochs=2)
    assert metrics["policy/ratio_max"] == pytest.approx(float(ratios.max()), rel=1e-12)
    assert metrics["policy/ratio_mean"] == pytest.approx(float(ratios.mean() + 1) / 2, rel=1e-12)
    assert twice.steps_done == 2


def test_a_step_of_masked_responses_alone_moves_nothing() -> None:
    core = make_core()
    before = parameters(core)
    samples = [dataclasses.replace(sample, is_masked=True) for sample in make_samples()]
    metrics = PolicyTrainer(core, PolicyLossSettings()).update(samples, minibatches=2)
    assert metrics["policy/tokens"] == 0
    assert all(map(torch.equal, before, parameters(core)))


def test_a_masked_response_is_as_if_it_had_not_been_drawn() -> None:
    samples = make_samples()
    masked = [dataclasses.replace(sample, is_masked=n % 5 == 2) for n, sample in enumerate(samples)]
    results = []
    for part in (masked, [sample for sample in masked if not sample.is_masked]):
        core = make_core()
        PolicyTrainer(core, PolicyLossSettings(entropy_coef=0.1)).update(part)
        results.append(parameters(core))
    assert all(map(torch.equal, *results))


def test_an_entropy_bonus_makes_the_policy_less_sure() -> None:
    core = make_core(compute_dtype=torch.float32)
    samples = [dataclasses.replace(sample, advantage=0.0) for sample in make_samples()]
    trainer = PolicyTrainer(core, PolicyLossSettings(entropy_coef=1.0))
    entropies = [trainer.update(samples)["policy/entropy"] for _ in range(5)]
    assert entropies == sorted(entropies)
    assert entropies[-1] > entropies[0] + 0.05


def test_a_later_minibatch_is_compared_with_the_policy_before_the_update() -> None:
    core = make_core(lr=0.05, compute_dtype=torch.float32)
    metrics = PolicyTrainer(core, PolicyLossSettings()).update(make_samples(), minibatches=2)
    assert metrics["policy/ratio_max"] > 1.01


def test_constant_rewards_leave_the_policy_as_it_is() -> None:
    samples = make_samples()
    advantages = group_relative([0.1] * 12, [s.group for s in samples], scale="group")
    samples = [
        Sample(s.prompt_ids, s.token_ids, a, s.group)
        for s, a in zip(samples, advantages, strict=True)
    ]
    core = make_core()
    before = parameters(core)
    metrics = PolicyTrainer(core, PolicyLossSettings()).update(samples)
    assert metrics["policy/grad_norm"] == 0.0
    assert metrics["policy/tokens"] == 0
    assert all(map(torch.equal, before, parameters(core)))


def test_the_gradient_is_the_slope_of_the_loss() -> None:
    """Central differences along random directions, with clipping and divergence active."""
    torch.manual_seed(1)
    core = make_core(compute_dtype=torch.float64, dtype=torch.float64)
    reference = make_decoder(9).double()
    loss = PolicyLossSettings(clip_low=0.05, clip_high=0.05, kl_coef=0.3, kl_estimator="k3")
    trainer = PolicyTrainer(core, loss, reference=reference)
    samples = make_samples()
    items = trainer._prepare(samples)
    trainer._add_fixed_logprobs([items])
    for item in items:
        noise = torch.randn(item.weights.shape, dtype=torch.float64)
        with torch.no_grad():
            item.old_logprobs = core.log_probs(item.batch) + 0.1 * noise

    def total() -> float:
        metrics = PolicyMetrics(core.device)
        core.discard_gradients()
        for item in items:
            trainer._backward(item, metrics)
        summary = metrics.summary(core.workers, 1)
        assert 0.1 < summary["policy/clip_frac"] < 0.9
        return summary["policy/loss"]

    total()
    masters = list(core.decoder.parameters())
    gradients = [p.grad.clone() for p in masters if p.grad is not None]
    for _ in range(3):
        directions = [torch.randn_like(p) for p in masters]
        slope = sum(float((g * d).sum()) for g, d in zip(gradients, directions, strict=True))
        values = []
        for sign in (1, -2):
            with torch.no_grad():
                for p, d in zip(masters, directions, strict=True):
                    p.add_(d, alpha=sign * 1e-6)
            values.append(total())
        with torch.no_grad():
            for p, d in zip(masters, directions, strict=True):
                p.add_(d, alpha=1e-6)
        assert (values[0] - values[1]) / 2e-6 == pytest.approx(slope, rel=1e-4)


def _through_bytes(state: dict[str, Any]) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    loaded: dict[str, Any] = torch.load(buffer)
    return loaded


def test_stopping_and_resuming_changes_no_bit() -> None:
    settings: dict[str, Any] = {
        "schedule": "cosine", "total_steps": 4, "warmup_steps": 1, "weight_decay": 0.1,
    }  # fmt: skip
    batches = [make_samples(seed) for seed in range(4)]

    def run(core: TrainerCore, part: Sequence[list[Sample]]) -> None:
        for samples in part:
            PolicyTrainer(core, PolicyLossSettings()).update(samples, minibatches=1)

    whole = make_core(**settings)
    run(whole, batches)
    first = make_core(**settings)
    run(first, batches[:2])
    state = _through_bytes(first.state_dict())
    second = TrainerCore(
        make_decoder(99),
        OptimizerSettings(lr=1e-3, **settings),
        micro_batch_tokens=40,
        temperature=0.8,
    )
    second.load_state_dict(state)
    run(second, batches[2:])
    assert second.steps_done == whole.steps_done == 4
    assert all(map(torch.equal, parameters(second), parameters(whole)))
    copies = [list(core.compute.parameters()) for core in (second, whole)]
    assert all(map(torch.equal, *copies))


def test_a_state_of_another_model_is_refused() -> None:
    state = copy.deepcopy(make_core().state_dict())
    state["tensors"]["master"]["norm.weight"] = torch.ones(3)
    with pytest.raises(CheckpointError, match=r"norm\.weight"):
        make_core().load_state_dict(state)


def test_broken_gradients_stop_the_run_before_weights_change() -> None:
    core = make_core()
    before = parameters(core)
    samples = [*make_samples(), Sample((1,), (2, 3), float("inf"), group="broken")]
    with pytest.raises(NumericsError, match="gradient norm"):
        PolicyTrainer(core, PolicyLossSettings()).update(samples)
    assert all(map(torch.equal, before, parameters(core)))


def test_the_compute_copy_is_the_rounded_master_after_each_step() -> None:
    core = make_core()
    PolicyTrainer(core, PolicyLossSettings()).update(make_samples())
    for master, copied in zip(core.decoder.parameters(), core.compute.parameters(), strict=True):
        assert master.dtype == torch.float32
        assert torch.equal(master.to(torch.bfloat16), copied)


def test_engine_log_probabilities_are_compared_where_given() -> None:
    core = make_core(lr=0.0, compute_dtype=torch.float32)
    samples = make_samples()
    ((_, batch),) = core.micro_batches([(samples[0].prompt_ids, samples[0].token_ids)])
    with torch.no_grad():
        exact = core.log_probs(batch).tolist()
    shifted = (exact[0] + 0.5, *exact[1:])
    samples[0] = Sample(samples[0].prompt_ids, samples[0].token_ids, 1.0, samples[0].group, shifted)
    metrics = PolicyTrainer(core, PolicyLossSettings()).update(samples)
    count = len(exact)
    assert metrics["policy/engine_logprob_diff_max"] == pytest.approx(0.5, abs=1e-5)
    assert metrics["policy/engine_logprob_diff_mean"] == pytest.approx(0.5 / count, abs=1e-5)
    assert metrics["policy/engine_logprob_equal_frac"] <= 1 - 1 / count


def test_minibatches_hold_whole_groups() -> None:
    samples = make_samples()
    parts = split_by_group(samples, 4)
    assert [s for part in parts for s in part] == samples
    seen = [{s.group for s in part} for part in parts]
    assert all(not a & b for i, a in enumerate(seen) for b in seen[:i])
    with pytest.raises(ValueError, match="a group is never split"):
        split_by_group(samples, 7)


def test_fine_tuning_minimises_the_mean_over_all_completion_tokens() -> None:
    core = make_core(compute_dtype=torch.float64, dtype=torch.float64, max_grad_norm=1e9)
    core.temperature = 1.0
    examples = [(s.prompt_ids, s.token_ids) for s in make_samples()]
    plain = copy.deepcopy(core.decoder)
    total, count = torch.zeros((), dtype=torch.float64), 0
    for prompt, completion in examples:
        hidden, _ = plain(PackedBatch.of([[*prompt, *completion]]))
        logits = hidden[len(prompt) - 1 : -1] @ plain.head_weight.t()
        total = total + F.cross_entropy(logits, torch.tensor(completion), reduction="sum")
        count += len(completion)
    loss = total / count
    trainer = SFTTrainer(core)
    assert trainer.evaluate(examples) == pytest.approx(loss.item(), abs=1e-10)
    metrics = trainer.step(examples)
    assert metrics["sft/loss"] == pytest.approx(loss.item(), abs=1e-10)
    gradients = torch.autograd.grad(loss, list(plain.parameters()))
    norm = torch.stack([g.norm() for g in gradients]).norm()
    assert metrics["sft/grad_norm"] == pytest.approx(float(norm), rel=1e-10)
    for _ in range(20):
        trainer.step(examples)
    assert trainer.evaluate(examples) < loss.item() - 0.1


def test_the_rate_warms_up_then_falls_to_zero_at_the_end() -> None:
    constant = OptimizerSettings(lr=1.0, warmup_steps=3)
    assert [learning_rate(constant, step) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    for schedule in ("linear", "cosine"):
        falling = OptimizerSettings(lr=1.0, warmup_steps=2, schedule=schedule, total_steps=10)  # type: ignore[arg-type]
        rates = [learning_rate(falling, step) for step in range(11)]
        assert rates[2] == 1.0
        assert rates[2:] == sorted(rates[2:], reverse=True)
        assert rates[6] == pytest.approx(0.5)
        assert rates[10] == pytest.approx(0.0)
    with pytest.raises(ValueError, match="needs total_steps"):
        OptimizerSettings(lr=1.0, schedule="cosine")
