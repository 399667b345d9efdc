"""The trainer's state on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ratoon.errors import CheckpointError
from ratoon.models.decoder import Decoder, DecoderConfig
from ratoon.training.checkpoint import load_trainer, save_trainer
from ratoon.training.core import TrainerCore
from ratoon.training.optimizer import OptimizerSettings
from ratoon.training.sft import SFTTrainer

EXAMPLES = [((1, 2), (3, 4, 5)), ((6,), (7, 8))]


def make_core(seed: int, hidden_size: int = 16) -> TrainerCore:
    torch.manual_seed(seed)
    config = DecoderConfig(
        family="llama", vocab_size=31, hidden_size=hidden_size, intermediate_size=24, num_layers=1,
        num_heads=2, num_kv_heads=1, head_dim=8,
    )  # fmt: skip
    return TrainerCore(Decoder(config), OptimizerSettings(lr=1e-2, weight_decay=0.1))


def weights(core: TrainerCore) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in core.decoder.parameters()]


def test_a_trainer_read_from_disk_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    whole = make_core(0)
    SFTTrainer(whole).step(EXAMPLES)
    save_trainer(tmp_path / "state", whole)
    resumed = make_core(1)
    load_trainer(tmp_path / "state", resumed)
    assert resumed.steps_done == 1
    for core in (whole, resumed):
        SFTTrainer(core).step(EXAMPLES)
    assert all(map(torch.equal, weights(whole), weights(resumed)))


def test_a_state_that_is_missing_damaged_or_of_another_model_changes_nothing(
    tmp_path: Path,
) -> None:
    save_trainer(tmp_path / "state", make_core(0))
    other = make_core(1, hidden_size=32)
    before = weights(other)
    with pytest.raises(CheckpointError, match="of another model"):
        load_trainer(tmp_path / "state", other)
    with pytest.raises(CheckpointError, match="no whole trainer state"):
        load_trainer(tmp_path / "absent", other)
    file = tmp_path / "state" / "trainer.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="no whole trainer state"):
        load_trainer(tmp_path / "state", other)
    assert all(map(torch.equal, before, weights(other)))
