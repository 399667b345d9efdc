"""Checkpoints of the drafter and its training: complete, refused when damaged, never in part."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from drafter_toy import OPTIONS, TARGET, WIDTH, Toy, steps_of
from safetensors.torch import load_file, save_file
from torch import Tensor

from ratoon.drafter.checkpoint import (
    apply_weights,
    load_buffer,
    load_checkpoint,
    load_drafter,
    save_buffer,
    save_checkpoint,
    weights_checksum,
)
from ratoon.drafter.data_buffer import DataBuffer
from ratoon.drafter.model import DrafterConfig, Eagle3Drafter
from ratoon.drafter.trainer import DrafterTrainer
from ratoon.errors import CheckpointError, StaleVersionError


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
