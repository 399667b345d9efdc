"""The number format is named once, by what the machine multiplies."""

from __future__ import annotations

from pathlib import Path

import pytest

from ratoon.config import SFTConfig, build_config
from ratoon.models import compute_dtype
from ratoon.models.compute_dtype import DTYPES, fast_dtype, with_dtype


def make_config(tmp_path: Path, dtype: str) -> SFTConfig:
    values = {
        "name": "demo",
        "output_dir": str(tmp_path),
        "model": {"path": str(tmp_path), "dtype": dtype},
        "data": {"train": {"kind": "arithmetic"}},
        "epochs": 1,
    }
    return build_config(SFTConfig, values)


@pytest.mark.parametrize(("multiplies", "expected"), [(True, "bfloat16"), (False, "float32")])
def test_auto_becomes_what_the_machine_is_fast_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, multiplies: bool, expected: str
) -> None:
    monkeypatch.setattr(compute_dtype, "prepacking_available", lambda: multiplies)
    assert fast_dtype() == expected
    assert with_dtype(make_config(tmp_path, "auto")).model.dtype == expected


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_was_asked_for_stays(tmp_path: Path, dtype: str) -> None:
    config = make_config(tmp_path, dtype)
    assert with_dtype(config) is config
