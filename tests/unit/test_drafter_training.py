"""Training the drafter: what it learns, when it stops, what it leaves alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from drafter_toy import OPTIONS, Toy, ignore, steps_of
from torch import Tensor, nn

from ratoon.drafter.checkpoint import apply_weights, weights_checksum
from ratoon.drafter.flat_adamw import FlatAdamW
from ratoon.drafter.losses import ROWS, TV
from ratoon.drafter.spot_trainer import SpotTrainer
from ratoon.drafter.trainer import DrafterTrainer
from ratoon.errors import ConfigError, NumericsError
from ratoon.models.compiling import has_compiler


def held_out_acceptance(toy: Toy, trainer: DrafterTrainer) -> Tensor:
    totals = sum(trainer.evaluate(toy.batch(uid), toy.head) for uid in range(1000, 1010))
    assert isinstance(totals, Tensor)
    return 1 - totals[:, TV] / totals[:, ROWS]


@pytest.mark.parametrize(
    ("dtype", "stride"), [(torch.float32, 1), (torch.float32, 2), (torch.bfloat16, 2)]
)
def test_acceptance_rises_on_a_learnable_target_at_every_depth(
    dtype: torch.dtype, stride: int
) -> None:
    toy = Toy()
    options = replace(OPTIONS, compute_dtype=dtype, learning_rate=1e-2, deep_stride=stride)
    trainer = toy.trainer(options)
    before = held_out_acceptance(toy, trainer)
    steps_of(trainer, toy.buffer(), 80)
    after = held_out_acceptance(toy, trainer)
    assert (before < 0.35).all()
    assert (after > 0.58).all()


def test_without_a_second_unroll_step_the_second_draft_is_worse() -> None:
    toy = Toy()
    unrolled, single = toy.trainer(), toy.trainer(replace(OPTIONS, unroll=1))
    steps_of(unrolled, toy.buffer(), 60)
    steps_of(single, toy.buffer(), 60)
    for name, parameter in unrolled.drafter.named_parameters():
        parameter.data.copy_(dict(single.drafter.named_parameters())[name])
    measured = held_out_acceptance(toy, unrolled)
    unrolled.load_optimizer_state({}, 0, 0)
    assert held_out_acceptance(toy, unrolled)[1] < measured[1] - 0.1


def test_the_target_receives_no_gradient_and_stays_bit_equal() -> None:
    toy = Toy()
    for name in ("embedding", "hidden", "head"):
        setattr(toy, name, nn.Parameter(getattr(toy, name)))
    parameters = (toy.embedding, toy.hidden, toy.head)
    before = [parameter.detach().clone() for parameter in parameters]
    steps_of(toy.trainer(), toy.buffer(8), 5)
    assert all(parameter.grad is None for parameter in parameters)
    assert all(torch.equal(a, b) for a, b in zip(before, parameters, strict=True))


def test_an_optimizer_step_follows_adamw_with_clipping() -> None:
    toy = Toy()
    options = replace(OPTIONS, clip_norm=0.01, warmup_steps=1)
    trainer = toy.trainer(options)
    names = dict(trainer.drafter.named_parameters())
    twin = {name: nn.Parameter(p.detach().clone()) for name, p in names.items()}
    reference = torch.optim.AdamW(
        twin.values(), lr=options.learning_rate, betas=options.betas, weight_decay=0.0
    )
    for uid in range(3):
        trainer.micro_step(toy.batch(uid), toy.head)
        metrics = trainer.optimizer_step()
        assert metrics.grad_norm > options.clip_norm
        clipped = trainer._layout.named(trainer._gradient)
        norm = torch.stack([g.norm() for g in clipped.values()]).norm()
        assert float(norm) == pytest.approx(options.clip_norm, rel=1e-5)
        for name, parameter in twin.items():
            parameter.grad = clipped[name].clone()
        reference.step()
        for name, parameter in twin.items():
            torch.testing.assert_close(names[name], parameter, rtol=1e-6, atol=1e-8)


@pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")
def test_a_compiled_optimizer_step_equals_the_other_up_to_rounding() -> None:
    generator = torch.Generator().manual_seed(0)
    masters = [torch.randn(1000, generator=generator)]
    masters.append(masters[0].clone())
    copies = [master.bfloat16() for master in masters]
    eager, compiled = (
        FlatAdamW(master, copy, (0.9, 0.95), 0.01, compiled=compiled)
        for master, copy, compiled in zip(masters, copies, (False, True), strict=True)
    )
    assert torch.equal(masters[1], masters[0])
    assert torch.equal(copies[1], copies[0])
    for rate in (1e-2, 2e-2, 3e-2):
        gradient = torch.randn(1000, generator=generator).bfloat16()
        assert compiled.norm(gradient) == pytest.approx(eager.norm(gradient), rel=1e-5)
        compiled.step(gradient, 0.3, rate)
        eager.step(gradient, 0.3, rate)
        torch.testing.assert_close(masters[1], masters[0], rtol=1e-6, atol=1e-7)
        assert torch.equal(copies[1], masters[1].bfloat16())
    for ours, theirs in zip(compiled.moments.values(), eager.moments.values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-8)


def test_without_a_compiler_a_compiled_optimizer_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match="C\\+\\+ compiler"):
        Toy().trainer(replace(OPTIONS, compiled=True))


def test_metrics_name_what_was_trained() -> None:
    toy = Toy()
    trainer = toy.trainer()
    trainer.micro_step(toy.batch(0), toy.head)
    trainer.micro_step(toy.batch(1), toy.head)
    metrics = trainer.optimizer_step()
    assert metrics.step == trainer.step == 1
    assert metrics.tokens == trainer.tokens == 40
    assert metrics.learning_rate == pytest.approx(OPTIONS.learning_rate / 5)
    assert len(metrics.acceptance) == len(metrics.kl) == len(metrics.top1) == OPTIONS.unroll
    assert all(0 <= value <= 1 for value in (*metrics.acceptance, *metrics.top1))
    mixed = sum(
        weight * (kl + OPTIONS.tv_weight * (1 - accepted)) * rows
        for weight, kl, accepted, rows in zip(
            (1, 0.8), metrics.kl, metrics.acceptance, (40, 38), strict=True
        )
    ) / (40 + 0.8 * 38)
    assert metrics.loss == pytest.approx(mixed, rel=1e-5)


def test_broken_states_stop_training_and_leave_the_weights() -> None:
    toy = Toy()
    trainer = toy.trainer()
    before = trainer.weights()
    trainer.micro_step(toy.batch(), toy.head * torch.nan)
    with pytest.raises(NumericsError, match="step 0"):
        trainer.optimizer_step()
    assert weights_checksum(before) == weights_checksum(trainer.weights())


@pytest.mark.parametrize("name", ["learning_rate", "temperature", "unroll", "batch_tokens"])
def test_options_that_cannot_train_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        replace(OPTIONS, **{name: 0})


# Spot training: any moment may be the last.


def stop_after(asked: int) -> Callable[[], bool]:
    """False for `asked` questions, then True."""
    left = iter(range(asked))
    return lambda: next(left, None) is None


def test_a_session_stops_within_one_piece_of_work_and_resumes() -> None:
    toy = Toy()
    # A sample has 20 queries, so a micro-step takes one sample and an optimizer step two.
    trainer = toy.trainer(replace(OPTIONS, micro_tokens=21, batch_tokens=40))
    spot = SpotTrainer(trainer, toy.buffer(), ignore, publish_every=1000)
    for pieces in range(8):
        step, before = spot.trainer.step, spot.trainer.weights()
        report = spot.start(stop_after(pieces)).run()
        assert report.steps + report.micro_steps == pieces
        assert report.steps == pieces // 3
        assert spot.trainer.step == step + report.steps
        assert report.lost_tokens == 20 * (pieces % 3)
        assert report.tokens == 40 * report.steps
        assert spot.trainer.pending_tokens == 0
        unchanged = weights_checksum(before) == weights_checksum(spot.trainer.weights())
        assert unchanged == (report.steps == 0)


def test_a_closed_session_does_nothing_more() -> None:
    toy = Toy()
    spot = SpotTrainer(toy.trainer(), toy.buffer(), ignore, publish_every=1000)
    session = spot.start(lambda: False)
    assert session.run_once()
    assert not session.is_closed
    report = session.close()
    assert session.is_closed
    assert not session.run_once()
    assert session.close() == report
    assert report.micro_steps == 1


def test_without_data_a_session_waits_and_goes_on_when_data_comes() -> None:
    toy = Toy()
    buffer = toy.buffer(0)
    session = SpotTrainer(toy.trainer(), buffer, ignore, publish_every=1000).start(lambda: False)
    assert not session.run_once()
    assert not session.is_closed
    buffer.add(toy.sample(1))
    assert session.run_once()


def test_publications_come_every_n_steps_with_rising_versions_and_true_checksums() -> None:
    toy = Toy()
    seen: list[tuple[int, int]] = []
    served = toy.trainer().drafter

    def publish(weights: dict[str, Tensor], version: int, checksum: str) -> None:
        seen.append((version, spot.trainer.step))
        apply_weights(served, weights, checksum)

    spot = SpotTrainer(
        toy.trainer(), toy.buffer(), publish, publish_every=2, deterministic_steps=5, version=7
    )
    report = spot.start(lambda: True).run()
    assert seen == [(8, 2), (9, 4)]
    assert (report.published, report.steps, spot.unpublished_steps) == (2, 5, 1)
    spot.publish()
    assert seen[-1] == (10, 5)
    assert spot.unpublished_steps == 0
    for name, parameter in served.named_parameters():
        assert torch.equal(parameter, dict(spot.trainer.drafter.named_parameters())[name])


def test_published_weights_do_not_change_afterwards() -> None:
    toy = Toy()
    trainer = toy.trainer()
    weights = trainer.weights()
    checksum = weights_checksum(weights)
    steps_of(trainer, toy.buffer(), 2)
    assert weights_checksum(weights) == checksum != weights_checksum(trainer.weights())


def test_a_failure_in_training_or_publication_reaches_the_caller() -> None:
    toy = Toy()

    def fail(weights: dict[str, Tensor], version: int, checksum: str) -> None:
        raise OSError("no room left")

    spot = SpotTrainer(toy.trainer(), toy.buffer(), fail, publish_every=1)
    with pytest.raises(OSError, match="no room"):
        spot.start(lambda: False).run()
    buffer = toy.buffer()
    buffer.head_rows(1).fill_(torch.nan)
    with pytest.raises(NumericsError):
        SpotTrainer(toy.trainer(), buffer, ignore, publish_every=1).start(lambda: False).run()


def test_deterministic_steps_give_the_same_weights_whatever_the_signal_says() -> None:
    toy = Toy()
    checksums = set()
    for should_stop in (lambda: True, lambda: False):
        trainer = toy.trainer()
        spot = SpotTrainer(trainer, toy.buffer(), ignore, publish_every=3, deterministic_steps=4)
        assert spot.start(should_stop).run().steps == 4
        checksums.add(weights_checksum(trainer.weights()))
    assert len(checksums) == 1
