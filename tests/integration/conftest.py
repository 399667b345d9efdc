"""A start model and a reference run, made once for all test processes; nothing may be left behind.

Modules beside this file can be imported by name, here and in worker processes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parent))

import faults as faulty_worker
from lab import Faults, Lab

from ratoon.cluster import local
from ratoon.loop import eval_run, rl_run, sft_run
from ratoon.models.compute_dtype import DTYPES, fast_dtype
from ratoon.models.hf_io import load_decoder
from ratoon.models.tiny import make_tiny_model
from ratoon.observe.run_folder import RunFolder
from ratoon.rollout.native.forward import InferenceModel
from ratoon.rollout.native.numerics import check_invariance


@pytest.fixture(scope="session")
def shared_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all processes of this test session share."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def once(shared_base: Path) -> Callable[[str, Callable[[Path], object]], Path]:
    """`once(name, make)` calls `make(path)` in the first process that asks; others wait for it."""

    def get(name: str, make: Callable[[Path], object]) -> Path:
        path, done = shared_base / name, shared_base / f"{name}.done"
        with (shared_base / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                make(path)
                done.touch()
        return path

    return get


@pytest.fixture(scope="session")
def untrained(once: Callable[..., Path]) -> Path:
    """A tiny model with random weights, wide enough for numerics that keep their bits."""
    return once("untrained", lambda path: make_tiny_model(path, num_layers=6, max_positions=128))


@pytest.fixture(scope="session")
def dtype() -> str:
    """What this machine is fast in."""
    return fast_dtype()


@pytest.fixture(scope="session")
def exact(untrained: Path, dtype: str) -> bool:
    """Whether this machine's kernels give the same bits for any batch."""
    decoder = load_decoder(untrained)
    model = InferenceModel(decoder, num_positions=96, dtype=DTYPES[dtype], taps=())
    return check_invariance(model).holds


@pytest.fixture(scope="session")
def fine_tuned(once: Callable[..., Path], untrained: Path, dtype: str) -> RunFolder:
    """A run of supervised fine-tuning on two workers."""
    return RunFolder(
        once("fine-tuned", lambda path: Lab(path.parent, untrained, dtype).sft(path.name))
    )


@pytest.fixture
def lab(tmp_path: Path, fine_tuned: RunFolder, dtype: str) -> Lab:
    """Runs of this test, from the fine-tuned model."""
    return Lab(tmp_path, fine_tuned.model, dtype)


@pytest.fixture(scope="session")
def reference(
    once: Callable[..., Path], shared_base: Path, fine_tuned: RunFolder, dtype: str
) -> RunFolder:
    """Three steps on two workers with both drafters; spot training happens in each rollout."""

    def make(path: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            install(Faults(path.parent), patch).hold_tail()
            Lab(path.parent, fine_tuned.model, dtype).rl(path.name, "steps=3")

    return RunFolder(once("reference", make))


@pytest.fixture
def faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Faults:
    """What is to go wrong in the workers of this test; see `faults.py`."""
    return install(Faults(tmp_path), monkeypatch)


def install(faults: Faults, monkeypatch: pytest.MonkeyPatch) -> Faults:
    """Make workers that are started from here on read `faults`."""
    monkeypatch.setattr(local, "worker", faulty_worker)
    monkeypatch.setenv(faulty_worker.VARIABLE, str(faults.file))
    return faults


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever a test does to its runs: no process and no shared folder survives it."""
    folders: list[Path] = []

    @contextlib.contextmanager
    def recorded(*args: int) -> Iterator[Path]:
        with local.shared_folder(*args) as folder:
            folders.append(folder)
            yield folder

    for module in (rl_run, sft_run, eval_run):
        monkeypatch.setattr(module, "shared_folder", recorded)
    before = children()
    yield
    assert not [folder for folder in folders if folder.exists()]
    assert not children() - before


def children() -> set[int]:
    """Processes that this one started, but for Python's own helper."""
    found = set()
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "resource_tracker" not in " ".join(child.cmdline()):
                found.add(child.pid)
    return found
