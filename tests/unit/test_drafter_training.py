"""Training the drafter: what it learns, when it stops, what it leaves alone, what it keeps."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ratoon.drafter.checkpoint import (
    apply_weights,
    load_buffer,
    load_checkpoint,
    load_drafter,
    save_buffer,
    save_checkpoint,
    weights_checksum,
)
from ratoon.drafter.data_buffer import DataBuffer, Sample, Slice
from ratoon.drafter.losses import ROWS, TV
from ratoon.drafter.micro_batch import MicroBatch
from ratoon.drafter.model import DrafterConfig, Eagle3Drafter
from ratoon.drafter.spot_trainer import SpotTrainer
from ratoon.drafter.trainer import DrafterTrainer, TrainerOptions
from ratoon.errors import CheckpointError, ConfigError, NumericsError, StaleVersionError
from ratoon.models.decoder import Decoder, DecoderConfig

VOCABULARY, WIDTH = 24, 32
TARGET = DecoderConfig("llama", VOCABULARY, WIDTH, 48, 8, 4, 2, 8)
OPTIONS = TrainerOptions(
    learning_rate=3e-3,
    warmup_steps=5,
    micro_tokens=40,
    batch_tokens=80,
    unroll=2,
    deep_stride=1,
    compute_dtype=torch.float32,
)


class Toy:
    """A target whose next token depends on the last one alone, so that a drafter can learn it."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.embedding = torch.randn(VOCABULARY, WIDTH, generator=generator)
        self.hidden = 0.5 * torch.randn(VOCABULARY, WIDTH, generator=generator)
        self.head = torch.randn(VOCABULARY, WIDTH, generator=generator)

    def sample(self, uid: int, version: int = 1, length: int = 24) -> Sample:
        generator = torch.Generator().manual_seed(uid)
        table = (self.hidden @ self.head.T).softmax(-1)
        ids = [uid % VOCABULARY]
        while len(ids) < length:
            ids.append(int(torch.multinomial(table[ids[-1]], 1, generator=generator)))
        tokens = torch.tensor(ids)
        states = self.embedding[tokens[:-1]].repeat(1, 3)
        return Sample((uid,), tokens, states, self.hidden[tokens[:-1]], 4, version)

    def buffer(self, num_samples: int = 40) -> DataBuffer:
        buffer = DataBuffer(10_000, seed=3)
        buffer.begin_step(1, self.head)
        for uid in range(num_samples):
            buffer.add(self.sample(uid))
        return buffer

    def trainer(self, options: TrainerOptions = OPTIONS) -> DrafterTrainer:
        torch.manual_seed(0)
        drafter = Eagle3Drafter.from_target(
            DrafterConfig.for_target(TARGET, VOCABULARY, 16),
            Decoder(TARGET),
            torch.arange(VOCABULARY),
        )
        trainer = DrafterTrainer(drafter, options)
        trainer.set_embedding(self.embedding)
        return trainer

    def batch(self, uid: int = 0) -> MicroBatch:
        sample = self.sample(uid)
        piece = Slice(sample, sample.first_query, sample.num_queries)
        return MicroBatch.build([piece], OPTIONS.unroll, 16)


def ignore(weights: dict[str, Tensor], version: int, checksum: str) -> None:
    """A publication that nobody reads."""


def steps_of(trainer: DrafterTrainer, buffer: DataBuffer, steps: int, **spot: int) -> SpotTrainer:
    session_of = SpotTrainer(
        trainer, buffer, ignore, publish_every=1000, deterministic_steps=steps, **spot
    )
    session_of.start(lambda: True).run()
    return session_of


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


# Checkpoints.


def test_half_the_steps_twice_with_a_checkpoint_between_equal_all_steps(tmp_path: Path) -> None:
    toy = Toy()
    whole, buffer = toy.trainer(), toy.buffer()
    steps_of(whole, buffer, 3)
    steps_of(whole, buffer, 3)

    first, buffer = toy.trainer(), toy.buffer()
    steps_of(first, buffer, 3)
    save_checkpoint(tmp_path / "drafter", first, version=4)
    save_buffer(tmp_path / "buffer", buffer)
    second, version = load_checkpoint(tmp_path / "drafter", OPTIONS)
    second.set_embedding(toy.embedding)
    restored = DataBuffer(10_000, seed=0)
    load_buffer(tmp_path / "buffer", restored)
    steps_of(second, restored, 3)

    assert (version, second.step, second.tokens) == (4, whole.step, whole.tokens)
    assert weights_checksum(second.drafter.state_dict()) == weights_checksum(
        whole.drafter.state_dict()
    )


def test_a_drafter_comes_back_with_its_vocabulary_and_configuration(tmp_path: Path) -> None:
    drafter = Eagle3Drafter(replace(DrafterConfig.for_target(TARGET, 24, 9), draft_vocab_size=5))
    drafter.set_vocabulary(torch.tensor([1, 4, 5, 11, 23]))
    checksum = save_checkpoint(tmp_path / "d", DrafterTrainer(drafter, OPTIONS), 0)
    loaded = load_drafter(tmp_path / "d")
    assert loaded.config == drafter.config
    assert loaded.draft_ids.tolist() == [1, 4, 5, 11, 23]
    assert loaded.d2t.tolist() == [1, 3, 3, 8, 19]
    assert loaded.t2d.nonzero()[:, 0].tolist() == [1, 4, 5, 11, 23]
    assert weights_checksum(loaded.state_dict()) == checksum
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    toy = Toy()
    trainer = toy.trainer()
    steps_of(trainer, toy.buffer(), 1)
    folder = tmp_path_factory.mktemp("saved") / "drafter"
    save_checkpoint(folder, trainer, 1)
    return folder


def broken(saved: Path, tmp_path: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    folder = tmp_path / "broken"
    shutil.copytree(saved, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("lm_head.weight"), r"missing tensors \['lm_head.weight'\]"),
        (lambda t: t.update(extra=torch.zeros(1)), r"unknown tensors \['extra'\]"),
        (lambda t: t.update({"fc.weight": torch.zeros(WIDTH, 2 * WIDTH)}), "EAGLE-1"),
        (lambda t: t.update({"norm.weight": torch.zeros(3)}), r"norm.weight has shape \(3,\)"),
        (lambda t: t.update(d2t=t["d2t"] - 1), "d2t is damaged"),
        (lambda t: t.update(t2d=~t["t2d"]), "t2d and d2t"),
        (lambda t: t["norm.weight"].add_(1), "do not belong together"),
    ],
)
def test_a_damaged_drafter_is_refused_by_name(
    saved: Path, tmp_path: Path, change: Callable[[dict[str, Tensor]], object], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(broken(saved, tmp_path, change), OPTIONS)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "trainer.json"])
@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_missing_and_cut_files_are_refused_by_name(
    saved: Path, tmp_path: Path, name: str, damage: str
) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(saved, folder)
    content = (folder / name).read_bytes()
    (folder / name).unlink()
    if damage == "cut":
        (folder / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=name):
        load_checkpoint(folder, OPTIONS)


def test_a_checkpoint_is_never_written_over_another(saved: Path) -> None:
    with pytest.raises(CheckpointError, match="exists"):
        save_checkpoint(saved, Toy().trainer(), 1)


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise OSError("no room left")

    monkeypatch.setattr(json, "dumps", fail)
    with pytest.raises(OSError, match="no room"):
        save_checkpoint(tmp_path / "d", Toy().trainer(), 1)
    assert list(tmp_path.iterdir()) == []


def test_weights_that_changed_on_the_way_are_refused() -> None:
    trainer = Toy().trainer()
    weights = trainer.weights()
    checksum = weights_checksum(weights)
    weights["norm.weight"][0] += 1
    with pytest.raises(StaleVersionError, match=checksum[:12]):
        apply_weights(trainer.drafter, weights, checksum)
