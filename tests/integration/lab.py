"""Whole runs on a tiny model: how they are configured, run and looked at."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml
from faults import PATIENCE_S, VARIABLE
from safetensors.torch import load_file
from torch import Tensor

from ratoon.config import build_config, resolved_yaml
from ratoon.config.load import apply_overrides
from ratoon.config.rl import RLConfig
from ratoon.config.sft import SFTConfig
from ratoon.loop.rl_run import run_rl
from ratoon.loop.sft_run import run_sft
from ratoon.observe.files import read_lines
from ratoon.observe.observer import Observer
from ratoon.observe.run_folder import RunFolder
from ratoon.stopping import Stop

HERE = Path(__file__).parent
TASK = {"kind": "arithmetic", "max_terms": 3, "max_value": 9}
SFT = {
    "seed": 1,
    "data": {
        "train": TASK | {"size": 300, "seed": 1},
        "eval": TASK | {"size": 16, "seed": 1},
        "chat_template": False,
    },
    "steps": 40,
    "max_length": 64,
    "optimizer": {"lr": 3e-3, "warmup_steps": 4, "schedule": "constant"},
    "update": {"batch_tokens": 512, "micro_batch_tokens": 256},
    "workers": {"count": 2},
    "checkpoint": {"every": 1000},
}
RL = {
    "seed": 5,
    "steps": 2,
    "data": {
        "train": TASK | {"size": 60, "seed": 2},
        "eval": TASK | {"size": 6, "seed": 3},
        "chat_template": False,
    },
    "rewards": [{"kind": "number"}, {"kind": "python", "function": f"{HERE}/scores.py:varied"}],
    "sampling": {"max_tokens": 40},
    "algorithm": {"prompts_per_step": 4, "group_size": 4},
    "optimizer": {"lr": 1e-3},
    "update": {"micro_batch_tokens": 256},
    "rollout": {"max_length": 64, "max_batch": 8},
    # What is guessed must not depend on how fast this machine is.
    "speculation": {"tuner": "table"},
    "drafter": {"window": 32, "batch_tokens": 64},
    "spot": {"publish_every_steps": 1},
    "evaluation": {"prompts": 6},
    "workers": {"count": 2},
    "checkpoint": {"every": 1, "keep": 10},
}


@dataclass
class Faults:
    """What is to go wrong in workers, in a file that they read; see `faults.py`."""

    folder: Path
    values: dict[str, Any] = field(default_factory=dict)

    @property
    def file(self) -> Path:
        return self.folder / "faults.json"

    @property
    def log(self) -> Path:
        return self.folder / "faults.jsonl"

    def add(self, phase: str, action: str, worker: int | None = 1) -> None:
        """Let `action` happen whenever a worker (None: any) enters `phase`."""
        fault = {"phase": phase, "action": action, "worker": worker}
        self._write(faults=[*self.values.get("faults", ()), fault])

    def hold_tail(self) -> None:
        """Make spot training happen in every rollout; see `faults.hold_tail`."""
        self._write(hold_tail=True)

    def clear(self) -> None:
        """Let nothing go wrong any more."""
        self._write(faults=[], hold_tail=False)

    def events(self, name: str) -> list[dict[str, Any]]:
        """What workers noted so far under this name."""
        rows = read_lines(self.log) if self.log.exists() else ()
        return [row for row in rows if name in row]

    def _write(self, **values: object) -> None:
        self.values |= values
        self.file.write_text(json.dumps({"log": str(self.log), **self.values}), encoding="utf-8")


@dataclass
class Lab:
    """Runs below one folder, all from the same start model."""

    folder: Path
    model: Path
    dtype: str

    def rl_config(self, name: str, *overrides: str) -> RLConfig:
        values = self._values(RL, name)
        apply_overrides(RLConfig, values, overrides)
        return build_config(RLConfig, values)

    def sft_config(self, name: str, *overrides: str) -> SFTConfig:
        values = self._values(SFT, name)
        apply_overrides(SFTConfig, values, overrides)
        return build_config(SFTConfig, values)

    def rl(
        self, name: str, *overrides: str, resume: bool = False, stop: Stop | None = None
    ) -> RunFolder:
        config = self.rl_config(name, *overrides)
        folder = self._open(config, resume)
        with Observer(folder) as observer:
            run_rl(config, folder, observer, stop)
        return folder

    def sft(self, name: str, *overrides: str, resume: bool = False) -> RunFolder:
        config = self.sft_config(name, *overrides)
        folder = self._open(config, resume)
        with Observer(folder) as observer:
            run_sft(config, folder, observer)
        return folder

    def file(self, config: RLConfig | SFTConfig) -> Path:
        path = self.folder / f"{config.name}.yaml"
        path.write_text(resolved_yaml(config), encoding="utf-8")
        return path

    def _values(self, values: Mapping[str, Any], name: str) -> dict[str, Any]:
        model = {"path": str(self.model), "dtype": self.dtype}
        fresh: dict[str, Any] = yaml.safe_load(yaml.safe_dump(dict(values)))
        return fresh | {"name": name, "output_dir": str(self.folder), "model": model}

    def _open(self, config: RLConfig | SFTConfig, resume: bool) -> RunFolder:
        path, text = self.folder / config.name, resolved_yaml(config)
        if resume:
            return RunFolder.resume(path, config_yaml=text)
        return RunFolder.create(path, config_yaml=text, provenance={})


class StopAt(Stop):
    """Asks for a stop when it is looked at for the `count`-th time from `step` on."""

    def __init__(self, folder: Path, step: int, count: int) -> None:
        super().__init__()
        self._records, self._step, self._count = folder / "metrics.jsonl", step, count

    def check(self, message: str = "") -> None:
        done = max((row["step"] for row in read_lines(self._records, "step")), default=0)
        self._count -= done >= self._step
        if not self.is_asked and self._count <= 0:
            self.ask()
        super().check(message)


def metrics_of(folder: RunFolder) -> dict[int, dict[str, Any]]:
    """All metrics of each step; a metric given twice for a step fails."""
    steps: dict[int, dict[str, Any]] = {}
    for row in read_lines(folder.metrics):
        known = steps.setdefault(row.pop("step"), {})
        del row["time_s"]
        assert not known.keys() & row.keys()
        known |= row
    return steps


def responses_of(folder: RunFolder, step: int, split: str = "train") -> list[dict[str, Any]]:
    """A step's stored responses, without what depends on which policy version drew them."""
    rows = list(read_lines(folder.completions / f"{split}_{step:06d}.jsonl"))
    assert rows
    return rows


def parameters_of(folder: RunFolder, step: int) -> dict[str, Tensor]:
    """Master weights of the policy after a step."""
    path = folder.checkpoints / f"step_{step:06d}" / "policy" / "trainer.safetensors"
    tensors = load_file(path)
    return {name: value for name, value in tensors.items() if name.startswith("master.")}


def equal_bits(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


class Driver:
    """`ratoon` as a process group of its own, as a terminal would start it, with faulty workers.

    Use as a context manager: whatever is left of the group at its end is killed.
    """

    def __init__(self, faults: Faults, *arguments: str) -> None:
        self._faults = faults
        environment = os.environ | {VARIABLE: str(faults.file)}
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "faults.py"), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )

    def wait_for(self, event: str) -> dict[str, Any]:
        """The first event of this name in the log; fails if the process ends before."""
        deadline = time.monotonic() + PATIENCE_S
        while not (found := self._faults.events(event)):
            assert self._process.poll() is None, self._process.communicate()[1]
            assert time.monotonic() < deadline, f"no {event} in {PATIENCE_S} s"
            time.sleep(0.02)
        return found[0]

    def family(self) -> list[psutil.Process]:
        """All processes that it started, and those that they started."""
        found: list[psutil.Process] = psutil.Process(self._process.pid).children(recursive=True)
        return found

    def signal(self, number: int = signal.SIGINT) -> None:
        """Press Ctrl-C, or end the whole group, as a system does that shuts down."""
        os.killpg(self._process.pid, number)

    def hears(self, words: str) -> None:
        """Wait until the process says so on its error output."""
        assert self._process.stderr is not None
        while words not in (line := self._process.stderr.readline()):
            assert line, f"it ended without saying {words!r}"

    def kill(self) -> None:
        """End the driver alone, as a machine that runs out of memory would."""
        self._process.kill()

    def result(self) -> tuple[int, str, str]:
        """Exit code, output and error output."""
        out, err = self._process.communicate(timeout=PATIENCE_S)
        return self._process.returncode, out, err

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def all_gone(processes: Sequence[psutil.Process], limit_s: float) -> bool:
    """Whether all have ended within the limit; nobody waits for an orphan but the system."""
    _, alive = psutil.wait_procs(processes, timeout=limit_s)
    return all(process.status() == psutil.STATUS_ZOMBIE for process in alive)
