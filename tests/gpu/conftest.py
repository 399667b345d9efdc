"""The device that everything here runs on: a GPU where there is one, else the CPU."""

from __future__ import annotations

import os

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    """`RATOON_TEST_DEVICE`, or cuda where it is available. Products are in true float32."""
    torch.set_float32_matmul_precision("highest")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(os.environ.get("RATOON_TEST_DEVICE", default))
