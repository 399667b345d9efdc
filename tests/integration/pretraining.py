"""Tiny pretraining runs: data, configurations, and runs that are cut short."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np

from ratoon.config import PretrainConfig, build_config, resolved_yaml
from ratoon.config.load import apply_overrides
from ratoon.data.prepare import HELD_OUT, TRAIN, tokenizer_hash, train_tokenizer
from ratoon.data.token_file import TokenWriter
from ratoon.loop.pretrain_run import PretrainResult, pretrain
from ratoon.observe.observer import Observer
from ratoon.observe.run_folder import RunFolder
from ratoon.observe.sinks import Values

VOCABULARY = 300
VALUES: dict[str, Any] = {
    "seed": 3,
    "model": {
        "shape": {"width": 32, "layers": 4, "heads": 4, "mlp_width": 64, "vocab_multiple": 4},
        "dtype": "float32",
    },
    "steps": 12,
    "optimizer": {"lr": 3e-3, "warmup_steps": 2},
    "update": {"batch_tokens": 256, "micro_batch_tokens": 128},
    "evaluation": {"every": 6, "sequences": 8},
    "log_every": 3,
    "checkpoint": {"every": 5},
}
EVOLVE: dict[str, Any] = {
    "method": "random",
    "stages": [
        {"start": 0, "layers": 0.5, "heads": 0.5, "neurons": 0.5},
        {"start": 0.25, "heads": 0.5, "neurons": 0.5},
        {"start": 0.5},
    ],
}


def make_data(folder: Path) -> None:
    """Token files of a language of few rules, with a tokenizer of bytes and some pairs."""
    folder.mkdir()
    words = [f"{a}{b}" for a in "abcdefghijklmnopqrst" for b in "aeiou"]
    generator = np.random.default_rng(0)
    train_tokenizer([" ".join(generator.choice(words, 4000))], VOCABULARY, folder)
    for name, count in ((TRAIN, 6000), (HELD_OUT, 600)):
        with TokenWriter(
            folder / name,
            vocab_size=VOCABULARY,
            document_end=0,
            tokenizer=tokenizer_hash(folder) or "",
        ) as writer:
            ids = np.cumsum(generator.integers(1, 4, count)) % (VOCABULARY - 1) + 1
            writer.add(ids.tolist())


def change_header(file: Path, **values: Any) -> None:
    """Write other values into a token file's header; its ids stay."""
    whole = file.read_bytes()
    header = json.dumps(json.loads(whole[:4096]) | values).encode()
    file.write_bytes(header.ljust(4095) + b"\n" + whole[4096:])


def make_config(data: Path, name: str, *overrides: str, **sections: Any) -> PretrainConfig:
    values = {**VALUES, **sections, "name": name, "output_dir": str(data.parent / "runs")}
    values["data"] = {"path": str(data), "sequence_length": 32}
    values = copy.deepcopy(values)
    apply_overrides(PretrainConfig, values, overrides)
    return build_config(PretrainConfig, values)


class CutShort(Exception):
    """Stands for whatever ends a process."""


class EndsAt(Observer):
    """An observer in whose hands a run ends when it records `step`."""

    def __init__(self, folder: RunFolder, step: int) -> None:
        super().__init__(folder)
        self._last = step

    def metrics(self, step: int, values: Values) -> None:
        super().metrics(step, values)
        if step >= self._last:
            raise CutShort


def run(config: PretrainConfig, *, resume: bool = False) -> tuple[RunFolder, PretrainResult]:
    folder = open_folder(config, resume)
    with Observer(folder) as observer:
        return folder, pretrain(config, folder, observer)


def open_folder(config: PretrainConfig, resume: bool = False) -> RunFolder:
    path, text = config.output_dir / config.name, resolved_yaml(config)
    if resume:
        return RunFolder.resume(path, config_yaml=text)
    return RunFolder.create(path, config_yaml=text, provenance={}, free_bytes=0)
