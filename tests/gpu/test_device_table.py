"""The script that measures a device runs, and leaves one table."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "device_table.py"


def test_the_table_of_a_device_is_made(tmp_path: Path) -> None:
    out = tmp_path / "table.json"
    subprocess.run([sys.executable, SCRIPT, "--tiny", "--out", out], check=True, cwd=tmp_path)
    table = json.loads(out.read_text(encoding="utf-8"))
    assert {row["live_batch"] for row in table["plain_steps"]} == {1, 4, 16, 64}
    assert len(table["forward_passes"]) == 12
    assert table["policy_update"]["tokens_per_s"] > 0
    assert [row["stage"] for row in table["pretraining"]] == ["1", "2", "full"]
