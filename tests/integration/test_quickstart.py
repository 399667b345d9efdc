"""The quickstart on its tiny model, with fewer steps and shorter responses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lab import StopAt

from ratoon.cli import running
from ratoon.cli.main import app
from ratoon.loop import quickstart
from ratoon.observe.summary import SUMMARY


def test_one_command_trains_replays_and_reports_also_when_it_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], exact: bool
) -> None:
    sft, rl = quickstart.TINY_SFT, quickstart.TINY_RL
    short = {"steps": 15, "workers": {"count": 1}}
    monkeypatch.setattr(quickstart, "TINY_SFT", sft | short)
    shorter = {
        "steps": 2,
        "sampling": {"max_tokens": 32},
        "algorithm": {"prompts_per_step": 4, "group_size": 4},
        "evaluation": {"prompts": 8},
        "workers": {"count": 1},
    }
    monkeypatch.setattr(quickstart, "TINY_RL", rl | shorter)
    command = ["quickstart", "--tiny", "--output", str(tmp_path / "run")]
    with monkeypatch.context() as patch:
        patch.setattr(running, "Stop", lambda notify: StopAt(tmp_path / "run", 1, 2))
        with pytest.raises(SystemExit) as left:
            app(args=command)
    assert left.value.code == 75
    assert "stopped after step 1, which is saved" in capsys.readouterr().err
    warm_start = tmp_path / "run" / "warm-start" / "model"
    trained = warm_start.stat().st_mtime_ns
    with pytest.raises(SystemExit) as left:
        app(args=[*command, "--resume"])
    assert left.value.code == 0
    assert warm_start.stat().st_mtime_ns == trained
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary.keys() >= SUMMARY.keys()
    assert summary["tokens_identical"] is True or not exact
    assert summary["responses_compared"] == 16
    assert summary["rollout_speedup"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    shown = capsys.readouterr().out
    assert "tokens_identical" in shown
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "<svg" in page
    assert "http://" not in page.replace("http://www.w3.org", "")
