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
    for steps in ("plain_steps", "speculative_steps"):
        assert {row["live_batch"] for row in table[steps]} == {1, 4, 16, 64}
    settings = {"off", "on"} if table["device"] != "CPU" else {"off"}
    assert {row["cuda_graphs"] for row in table["rollouts"]} == settings
    for row in table["rollouts"]:
        assert row["cuda_graphs"] == "off" or 0 < row["num_bytes"] < row["naive_bytes"]
    assert len(table["forward_passes"]) == 12
    assert table["policy_update"]["tokens_per_s"] > 0
    assert [row["stage"] for row in table["pretraining"]] == ["1", "2", "full"]
