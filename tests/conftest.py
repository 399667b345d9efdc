"""Shared set-up: one computing thread a process, no network, fixed seeds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Keep torch on one thread, so that parallel test processes do not fight for cores."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture
def shared_data() -> Path:
    """The folder of data sets beside the checkout; tests that need it are skipped without it."""
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("needs the data sets in ../shared/data")
    return folder


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The converted SmolLM2-135M-Instruct; tests that need it are skipped without it."""
    folder = Path(os.environ.get("RATOON_SMOLLM2", ROOT / "models" / "smollm2-135m"))
    if not (folder / "config.json").is_file():
        pytest.skip(
            "needs SmolLM2: `ratoon models fetch smollm2-135m`, or its folder in RATOON_SMOLLM2"
        )
    return folder
