"""The page of a pretraining run: charts, switches and the bill follow from what was recorded."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml

from ratoon.observe.observer import Observer
from ratoon.observe.run_folder import RunFolder
from ratoon.report import write_report

CONFIG = "name: run\nenergy: {watts_per_process: 400.0, kg_co2_per_kwh: 0.5}\n"


def make_run(path: Path, config: str = CONFIG) -> RunFolder:
    folder = RunFolder.create(path, config_yaml=config, provenance={"seed": 0}, free_bytes=0)
    with Observer(folder) as observer:
        observer.metrics(0, {"pretrain/eval_loss": 8.3})
        for step in (10, 20, 30):
            observer.metrics(
                step,
                {
                    "pretrain/loss": 8 - step / 10,
                    "pretrain/tokens": step * 4096,
                    "pretrain/tokens_per_s": 9000.0,
                    "pretrain/train_s": step * 120.0,
                    "pretrain/processes": 2,
                    "pretrain/flops": step * 1e12,
                    "pretrain/saved_frac": 0.25,
                    "pretrain/saved_frac_paper": 0.375,
                },
            )
        stage = {"switch/stage": 1, "switch/layers": 1, "switch/heads": 0.5, "switch/neurons": 0.75}
        losses = {"switch/drop": 0.0625, "switch/subnetwork_loss_before": 6.5}
        observer.metrics(20, {**stage, **losses})
        observer.metrics(30, {"pretrain/eval_loss": 5.125})
    return folder


def test_the_page_shows_losses_savings_and_switches(tmp_path: Path) -> None:
    page = write_report(make_run(tmp_path / "run").path).read_text(encoding="utf-8")
    for axis in ("tokens", "time of training", "counted operations"):
        assert f"Loss against {axis}" in page
    assert "&quot;across&quot;:&quot;step&quot;" not in page
    assert "<small>8.300 →</small> 5.125" in page
    assert "25.0%" in page
    assert "37.5% as the paper" in page
    assert "0.0625" in page
    assert "Switches of stages" in page


def test_the_page_says_what_was_decided_and_gives_it_as_settings(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    first = {"step": 0, "layers": 0.5, "heads": 1.0, "neurons": 1.0}
    growth = {
        "steps": 30,
        "stages": [first, {**first, "step": 20, "layers": 1.0}],
        "decisions": [
            {
                "step": 20,
                "rates": [0.5, 1, 1],
                "new_rates": [1, 1, 1],
                "reason": "slope",
                "own_slope": 2e-12,
                "slopes": [{"rates": [1, 1, 1], "slope": 3e-12}],
            }
        ],
    }
    folder.growth.write_text(json.dumps(growth), encoding="utf-8")
    page = write_report(folder.path).read_text(encoding="utf-8")
    assert "3e-12 at 1 / 1 / 1" in page
    pasted = re.search(r"<pre>(stages:.*?)</pre>", page, re.DOTALL)
    assert pasted is not None
    stages = yaml.safe_load(pasted[1])["stages"]
    assert [round(stage["start"] * 30) for stage in stages] == [0, 20]
    assert [stage["layers"] for stage in stages] == [0.5, 1]
    silent = write_report(make_run(tmp_path / "fixed").path).read_text(encoding="utf-8")
    assert "Decisions about growth" not in silent


def test_the_bill_follows_from_stated_factors(tmp_path: Path) -> None:
    """An hour of two devices of 400 W, at 0.5 kg per kWh."""
    page = write_report(make_run(tmp_path / "run").path).read_text(encoding="utf-8")
    assert "2.000, evaluation left out" in page
    assert "0.8 kWh at 400 W per device" in page
    assert "0.4 kg CO2 at 0.5 kg per kWh" in page
    silent = write_report(make_run(tmp_path / "silent", "name: silent\n").path)
    assert "energy.watts_per_process is null" in silent.read_text(encoding="utf-8")
