"""Pretraining in several processes is pretraining in one."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing
from pretraining import EVOLVE, VALUES, make_config, make_data

from ratoon.errors import ConfigError
from ratoon.loop.pretrain_run import pretrain
from ratoon.observe.observer import Observer
from ratoon.observe.run_folder import RunFolder
from ratoon.training.checkpoint import load_state

PROCESSES = 2
RANDOM: dict[str, Any] = EVOLVE | {"random": {"every": "micro_batch", "depth": "layers"}}


def part_of_a_run(rank: int, port: int, data: Path, name: str, sections: dict[str, Any]) -> None:
    """What one process of torchrun does."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(PROCESSES),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    config = make_config(data, name, **sections)
    folder = RunFolder(config.output_dir / name) if rank == 0 else None
    with Observer(folder) as observer:
        result = pretrain(config, folder, observer)
    torch.save((result.losses, result.evaluations), data.parent / f"{name}.{rank}")


def run_alone(data: Path, name: str, **sections: Any) -> RunFolder:
    config = make_config(data, name, **sections)
    folder = made(config.output_dir / name)
    with Observer(folder) as observer:
        result = pretrain(config, folder, observer)
    torch.save((result.losses, result.evaluations), data.parent / name)
    return folder


def run_together(data: Path, name: str, **sections: Any) -> RunFolder:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = made(data.parent / "runs" / name)
    arguments = (port, data, name, sections)
    torch.multiprocessing.spawn(part_of_a_run, arguments, nprocs=PROCESSES)
    return folder


def made(path: Path) -> RunFolder:
    return RunFolder.create(path, config_yaml="steps: 12\n", provenance={}, free_bytes=0)


@pytest.mark.parametrize("shard", [False, True], ids=["each holds all", "shards"])
@pytest.mark.parametrize(
    ("family", "evolve"),
    [("llama", None), ("llama", RANDOM), ("gpt2", RANDOM)],
    ids=["whole", "random", "random with biases"],
)
def test_two_processes_learn_what_one_does(
    tmp_path: Path, family: str, evolve: dict[str, Any] | None, shard: bool
) -> None:
    """Equal draws, skipped layers and their biases, and gradients that agree to 1e-6."""
    data = tmp_path / "data"
    make_data(data)
    # A micro-batch is a draw's unit: both have as many sequences in it, and one a step.
    sections: dict[str, Any] = {} if evolve is None else {"evolve": evolve}
    shape = VALUES["model"]["shape"] | {"family": family}
    sections["model"] = VALUES["model"] | {"shape": shape}
    sections |= {"steps": 8, "checkpoint": {"every": 1, "keep": 8}, "log_every": 1}
    sections["evaluation"] = {"every": 4, "sequences": 7}
    alone = sections | {"update": {"batch_tokens": 256, "micro_batch_tokens": 256}}
    update = {"batch_tokens": 256, "micro_batch_tokens": 128, "shard": shard}
    shared = sections | {"update": update}
    one, two = run_alone(data, "one", **alone), run_together(data, "two", **shared)
    for step in (1, 3, 7):
        first, second = (
            load_state(run.checkpoints / f"step_{step:06d}" / "trainer")[0] for run in (one, two)
        )
        for name, value in first["exp_avg"].items():
            torch.testing.assert_close(second["exp_avg"][name], value, rtol=1e-4, atol=1e-6)
    losses, evaluations = torch.load(tmp_path / "one")
    for rank in range(PROCESSES):
        theirs, their_evaluations = torch.load(tmp_path / f"two.{rank}")
        assert theirs == pytest.approx(losses, abs=1e-5)
        assert their_evaluations == pytest.approx(evaluations, abs=1e-5)


def test_a_batch_that_processes_cannot_share_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data"
    make_data(data)
    update = {"batch_tokens": 96, "micro_batch_tokens": 32}
    config = make_config(data, "odd", update=update)
    from ratoon.loop import pretrain_run
    from ratoon.training.data_parallel import DataParallel

    class Two(DataParallel):
        """Two workers that never speak."""

        size = 2  # type: ignore[assignment]

    with pytest.raises(ConfigError, match="3 sequences, which 2 processes cannot share out"):
        pretrain_run._Run(config, None, Observer(), Two(), torch.device("cpu"))
