"""The loss and its gradient do not depend on how a step is cut, ordered, padded or shared out."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from algorithm_cases import CASES, algorithm, learn, make_decoder
from torch import Tensor

from ratoon.models.packing import PackedBatch
from ratoon.training import shared_memory
from ratoon.training.core import TrainerCore
from ratoon.training.data_parallel import DataParallel
from ratoon.training.lora import LoRASettings
from ratoon.training.optimizer import OptimizerSettings
from ratoon.training.policy_metrics import PolicyMetrics
from ratoon.training.policy_trainer import PolicyLossSettings, PolicyTrainer
from ratoon.training.samples import Sample
from ratoon.training.sft import SFTTrainer

# Plain gradient descent as far as a step can be: one huge epsilon makes AdamW linear in gradients.
SETTINGS = OptimizerSettings(lr=1e-2, eps=1.0, max_grad_norm=1e9)
LORA = LoRASettings(rank=2, alpha=4.0)


def make_samples(seed: int = 0, count: int = 8) -> list[Sample]:
    source = random.Random(seed)

    def ids(low: int, high: int) -> tuple[int, ...]:
        return tuple(source.randrange(61) for _ in range(source.randint(low, high)))

    prompts = [ids(1, 6) for _ in range(-(-count // 2))]
    return [
        Sample(
            prompt_ids=prompts[index // 2],
            token_ids=ids(1, 20),
            advantage=source.gauss(0, 1),
            group=index // 2,
        )
        for index in range(count)
    ]


def make_core(
    budget: int = 10_000, workers: DataParallel | None = None, **kwargs: Any
) -> TrainerCore:
    settings = kwargs.pop("settings", SETTINGS)
    return TrainerCore(
        make_decoder(), settings, compute_dtype=torch.float64, micro_batch_tokens=budget,
        workers=workers, **kwargs,
    )  # fmt: skip


LOSS = PolicyLossSettings(
    clip_low=0.2, clip_high=0.28, kl_coef=0.1, kl_estimator="k3", reduction="token_mean"
)


def update(
    core: TrainerCore, samples: Sequence[Sample], loss: PolicyLossSettings = LOSS, **kwargs: Any
) -> tuple[dict[str, float], list[Tensor]]:
    """Metrics and parameters after an update against another policy as the reference."""
    metrics = PolicyTrainer(core, loss, reference=make_decoder(seed=9)).update(samples, **kwargs)
    return metrics, [parameter.detach().clone() for parameter in core.decoder.parameters()]


def assert_same(
    found: tuple[dict[str, float], list[Tensor]], expected: tuple[dict[str, float], list[Tensor]]
) -> None:
    names = ("loss", "kl", "grad_norm", "clip_frac", "ratio_max", "approx_kl", "entropy")
    for name in (f"policy/{name}" for name in names if f"policy/{name}" in expected[0]):
        assert found[0][name] == pytest.approx(expected[0][name], abs=1e-10, rel=1e-10), name
    for mine, other in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-10)


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "constant"])
def test_cutting_a_step_into_micro_batches_changes_nothing(reduction: str) -> None:
    samples = make_samples()
    loss = PolicyLossSettings(kl_coef=0.1, reduction=reduction, max_tokens=32)  # type: ignore[arg-type]
    sizes = {}
    results = {}
    for budget in (10_000, 60, 1):
        core = make_core(budget)
        examples = [(sample.prompt_ids, sample.token_ids) for sample in samples]
        groups = [sample.group for sample in samples]
        sizes[budget] = len(list(core.micro_batches(examples, groups)))
        results[budget] = update(core, samples, loss)
    assert sizes[10_000] == 1
    assert 1 < sizes[60] < 8
    assert sizes[1] == 8
    assert_same(results[60], results[10_000])
    assert_same(results[1], results[10_000])


@pytest.mark.parametrize(("pieces", "size"), [(1, 8), (2, 4), (8, 1)])
def test_loss_and_gradient_equal_a_naive_padded_batch(pieces: int, size: int) -> None:
    samples = make_samples()
    core = make_core()
    # The naive loss: one padded batch, masked, formula as in the papers.
    decoder, reference = make_decoder(), make_decoder(seed=9)
    width = max(len(s.prompt_ids) + len(s.token_ids) for s in samples)
    total, count = torch.zeros((), dtype=torch.float64), 0
    for sample in samples:
        whole = [*sample.prompt_ids, *sample.token_ids]
        packed = PackedBatch.of([whole + [0] * (width - len(whole))])
        rows = slice(len(sample.prompt_ids) - 1, len(whole) - 1)
        targets = torch.tensor(sample.token_ids)[:, None]
        both = [
            torch.log_softmax(m(packed)[0][rows] @ m.head_weight.t(), -1).gather(1, targets)[:, 0]
            for m in (decoder, reference)
        ]
        difference = both[0] - both[1].detach()
        ratio = (both[0] - both[0].detach()).exp()
        total = total - (ratio * sample.advantage).sum()
        total = total + 0.1 * ((-difference).exp() - 1 + difference).sum()
        count += len(sample.token_ids)
    (total / count).backward()

    trainer = PolicyTrainer(core, LOSS, reference=reference)
    seen = 0.0
    for piece in range(pieces):
        part = samples[piece * size : (piece + 1) * size]
        ((chosen, batch),) = core.micro_batches([(s.prompt_ids, s.token_ids) for s in part])
        item = trainer._tensors(batch, [(part[index], 1.0 / count) for index in chosen])
        trainer._add_fixed_logprobs([[item]])
        metrics = PolicyMetrics(core.device)
        trainer._backward(item, metrics)
        seen += metrics.summary(core.workers, 1)["policy/loss"]
    assert seen == pytest.approx(total.item() / count, abs=1e-10)
    for mine, other in zip(core.decoder.parameters(), decoder.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=0, atol=1e-10)


def test_order_of_samples_changes_nothing() -> None:
    samples = make_samples()
    assert_same(update(make_core(60), samples[::-1]), update(make_core(60), samples))


def test_sharing_a_prompt_within_its_group_changes_nothing() -> None:
    samples = make_samples()
    alone = [dataclasses.replace(s, group=index) for index, s in enumerate(samples)]
    assert_same(update(make_core(), samples), update(make_core(), alone))


def test_responses_with_advantage_zero_count_in_the_denominator_only() -> None:
    samples = make_samples()
    samples[3] = dataclasses.replace(samples[3], advantage=0.0)
    plain = PolicyLossSettings()
    with_divergence = PolicyLossSettings(kl_coef=1e-300)  # computes them, adds nothing
    skipped, computed = (update(make_core(), samples, loss) for loss in (plain, with_divergence))
    for mine, other in zip(skipped[1], computed[1], strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-12)
    assert skipped[0]["policy/tokens"] < computed[0]["policy/tokens"]


@pytest.mark.parametrize("case", CASES)
def test_neither_cuts_nor_order_change_what_an_algorithm_learns(case: str) -> None:
    """In two passes: in the second, ratios are not 1."""
    settings = algorithm(case)
    expected = learn(make_core(), settings)
    assert expected[0]["policy/ratio_max"] > 1.001
    assert_same(learn(make_core(30), settings), expected)
    assert_same(learn(make_core(1), settings, backwards=True), expected)


def _worker(rank: int, size: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    workers = DataParallel(dist.group.WORLD)
    assert shared_memory.shared_tensors(workers, 3, torch.float64) is not None
    samples = make_samples()
    result = {}
    for minibatches in (1, 2):
        result[minibatches] = update(make_core(30, workers), samples, minibatches=minibatches)
    core = make_core(30, workers)
    metrics = SFTTrainer(core).step([(s.prompt_ids, s.token_ids) for s in samples])
    result["sft"] = metrics, [p.detach().clone() for p in core.decoder.parameters()]
    result["lora"] = update(make_core(30, workers, lora=LORA), samples)
    # One sample for two workers: one of them has nothing to do.
    result["idle"] = update(make_core(30, workers), samples[:1])
    for case in CASES:
        result[case] = learn(make_core(30, workers), algorithm(case))
    shared_memory._FOLDER = Path(folder) / "absent"
    result["apart"] = update(make_core(30, workers), samples)
    torch.save(result, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_two_workers_do_what_one_does_and_end_with_the_same_bits(tmp_path: Path) -> None:
    mp.spawn(_worker, args=(2, str(tmp_path)), nprocs=2)  # type: ignore[no-untyped-call]
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    for key, (metrics, parameters) in first.items():
        timeless = {k: v for k, v in metrics.items() if not k.endswith("_per_s")}
        assert timeless == {k: second[key][0][k] for k in timeless}
        assert all(map(torch.equal, parameters, second[key][1]))
    samples = make_samples()
    for minibatches in (1, 2):
        assert_same(first[minibatches], update(make_core(30), samples, minibatches=minibatches))
    for case in CASES:
        assert_same(first[case], learn(make_core(), algorithm(case)))
    assert_same(first["apart"], update(make_core(30), samples))
    assert_same(first["lora"], update(make_core(30, lora=LORA), samples))
    assert_same(first["idle"], update(make_core(30), samples[:1]))
    core = make_core(30)
    metrics = SFTTrainer(core).step([(s.prompt_ids, s.token_ids) for s in samples])
    assert first["sft"][0]["sft/loss"] == pytest.approx(metrics["sft/loss"], abs=1e-10)
    for mine, other in zip(first["sft"][1], core.decoder.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-10)
