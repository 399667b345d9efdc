from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ratoon.bench import study, study_arms
from ratoon.bench.study import Cell, Study, cell_config, load_results, run_cell
from ratoon.bench.study_arms import ARMS, arm_config
from ratoon.bench.study_summary import summarise
from ratoon.bench.study_times import Times, num_steps, seconds_until
from ratoon.cli.main import app
from ratoon.data.prepare import HELD_OUT, TRAIN, tokenizer_hash
from ratoon.data.token_file import TokenWriter
from ratoon.errors import ConfigError
from ratoon.est.schedule import Stage
from ratoon.est.subnetwork import Rates
from ratoon.report.study import render_study

TIMES: Times = {
    "full": [(1, 1, 1, 0.4)],
    "random_staged": [(0.5, 0.5, 0.5, 0.16), (1, 0.5, 0.5, 0.28), (1, 1, 1, 0.4)],
    "nested_stacked": [(0.5, 1, 1, 0.2), (1, 1, 1, 0.4)],
}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "tokens"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    made_with = tokenizer_hash(folder) or ""
    for name, count in ((TRAIN, 6000), (HELD_OUT, 900)):
        with TokenWriter(
            folder / name, vocab_size=270, document_end=0, tokenizer=made_with
        ) as writer:
            writer.add([1 + i * i % 200 for i in range(count)])
    return folder


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {"family": "gpt2", "layers": 2, "heads": 2}
    monkeypatch.setitem(study_arms.BASE, "model", {"shape": shape})
    update = {"batch_tokens": 64, "micro_batch_tokens": 64}
    monkeypatch.setitem(study_arms.BASE, "update", update)
    monkeypatch.setitem(study_arms.BASE, "evaluation", {"sequences": 4})
    monkeypatch.setattr(study_arms, "SEQUENCE", 32)
    monkeypatch.setattr(study, "BATCH_TOKENS", 64)


def make_study(data: Path, tmp_path: Path, **changes: Any) -> Study:
    values: dict[str, Any] = {
        "width": 32,
        "data": data,
        "results": tmp_path / "results",
        "work": tmp_path / "work",
        "arms": ("full", "random_staged"),
        "budgets": (1.0,),
        "lrs": (1e-3,),
        "seeds": 1,
        "tokens": 640,
    }
    return Study(**{**values, **changes})


@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_is_a_valid_configuration_that_ends_with_its_whole_model(
    arm: str, data: Path, tmp_path: Path
) -> None:
    config = arm_config(
        arm,
        data,
        width=128,
        steps=1000,
        lr=1e-3,
        seed=0,
        name="x",
        output_dir=tmp_path / "runs",
    )
    if config.evolve is not None and config.evolve.adaptive is None:
        assert config.evolve.stages[-1].rates == (1.0, 1.0, 1.0)


def test_arms_of_one_budget_take_the_same_seconds(data: Path, tmp_path: Path) -> None:
    for arm, times in TIMES.items():
        draft = arm_config(
            arm, data, width=128, steps=1000, lr=1e-3, seed=0, name="x", output_dir=tmp_path
        )
        steps = num_steps(draft, times, 400.0)
        starts = [0.0] if draft.evolve is None else [s.start for s in draft.evolve.stages]
        stages = [
            Stage(round(start * steps), Rates(*rates))
            for start, (*rates, _) in zip(starts, times, strict=True)
        ]
        assert seconds_until(steps, stages, times) == pytest.approx(400.0, rel=0.01)
        assert seconds_until(0, stages, times) == 0.0


@pytest.mark.usefixtures("small")
def test_a_cell_is_named_by_all_it_depends_on(data: Path, tmp_path: Path) -> None:
    plan = make_study(data, tmp_path)
    names = {
        cell_config(one, TIMES, cell).name
        for one in (plan, make_study(data, tmp_path, tokens=1280))
        for cell in (Cell("full", 1.0, 1e-3, 0), Cell("full", 1.0, 1e-3, 1))
    }
    assert len(names) == 4
    moved = make_study(data, tmp_path, work=tmp_path / "elsewhere")
    cell = Cell("full", 1.0, 1e-3, 0)
    assert cell_config(moved, TIMES, cell).name == cell_config(plan, TIMES, cell).name


def test_an_unknown_arm_or_a_study_without_the_full_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nonsense"):
        make_study(tmp_path, tmp_path, arms=("full", "nonsense"))
    with pytest.raises(ConfigError, match="full is missing"):
        make_study(tmp_path, tmp_path, arms=("random_staged",))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--lrs", "abc"], "--lrs abc: must be numbers"),
        (["--lrs", "0"], "lrs: 0 must be a learning rate > 0"),
        (["--budgets", "1,x"], "--budgets 1,x: must be numbers"),
        (["--budgets", "0"], "budgets: 0 must be a share > 0"),
        (["--budgets", "inf"], "--budgets inf: must be numbers"),
        ([], "cannot be read"),
        (["--show"], "holds no finished run"),
    ],
)
def test_a_study_that_cannot_be_is_refused_before_anything_is_timed(
    tmp_path: Path, options: list[str], words: str
) -> None:
    command = ["bench", "pretrain", str(tmp_path / "data"), "--results", str(tmp_path / "results")]
    result = CliRunner().invoke(app, [*command, *options])
    assert result.exit_code == 2
    assert words in result.output.replace("\n", " ")
    assert "timing" not in result.output
    assert not (tmp_path / "results").exists()


@pytest.mark.usefixtures("small")
def test_cells_are_stored_compared_and_shown(data: Path, tmp_path: Path) -> None:
    plan = make_study(data, tmp_path)
    plan.results.mkdir()
    for arm in plan.arms:
        cell = Cell(arm, 1.0, 1e-3, 0)
        run_cell(cell, cell_config(plan, TIMES, cell), TIMES, plan.results)
    assert not any(plan.work.iterdir())
    record = summarise(load_results(plan.results))
    rows = {row["arm"]: row for row in record["rows"]}
    assert rows["full"]["against_full"] == 0.0
    assert rows["random_staged"]["tokens"] > rows["full"]["tokens"] == 640
    assert rows["random_staged"]["seconds"] == pytest.approx(rows["full"]["seconds"], rel=0.1)
    assert "random_staged" in render_study(record)


def test_the_best_rate_is_used_for_the_difference_and_its_error() -> None:
    def result(arm: str, lr: float, seed: int, loss: float, budget: float = 1.0) -> dict[str, Any]:
        point = {"step": 1, "tokens": 1, "flops": 1.0, "seconds": budget, "loss": loss}
        return {
            "arm": arm,
            "budget": budget,
            "lr": lr,
            "seed": seed,
            "loss": loss,
            "data": "d",
            "curve": [point],
        }

    record = summarise(
        [
            result("full", 1e-3, 0, 4.0),
            result("full", 2e-3, 0, 4.2),
            result("full", 1e-3, 1, 4.1),
            result("nested_stacked", 2e-3, 0, 3.9),
            result("nested_stacked", 2e-3, 1, 3.8),
            result("nested_stacked", 2e-3, 0, 4.0, budget=0.75),
        ]
    )
    best = record["rows"][1]
    assert (best["arm"], best["lr"], best["seeds"]) == ("nested_stacked", 2e-3, 2)
    assert best["against_full"] == pytest.approx(-0.2)
    assert best["stderr"] == pytest.approx(0.1)
    assert record["seconds_to_full_loss"] == {"full": 1.0, "nested_stacked": 0.75}


@pytest.mark.parametrize(
    ("full_loss", "words"),
    [(3.95, "0.200 nats below the full model, and reaches the loss of its longest run in 75%"),
     (3.8, "0.200 nats below the full model.")],
)  # fmt: skip
def test_the_page_shows_the_budget_that_arms_are_compared_at(full_loss: float, words: str) -> None:
    def result(arm: str, budget: float, loss: float) -> dict[str, Any]:
        points = [
            {"step": step, "tokens": step, "flops": step, "seconds": budget * step, "loss": loss}
            for step in (1, 2)
        ]
        common = {"lr": 1e-3, "seed": 0, "data": "d", "curve": points}
        return {"arm": arm, "budget": budget, "loss": loss, **common}

    page = render_study(
        summarise(
            [
                result("full", 0.75, 4.1),
                result("full", 1.0, full_loss),
                result("nested_stacked", 0.75, 3.9),
            ]
        )
    )
    assert words in page
    assert page.count('class="grid-3"') == 1


def test_an_arm_that_ends_elsewhere_is_compared_with_the_full_model_there() -> None:
    def result(arm: str, budget: float, seconds: float, loss: float) -> dict[str, Any]:
        point = {"step": 1, "tokens": 1, "flops": 1.0, "seconds": seconds, "loss": loss}
        common = {"lr": 1e-3, "seed": 0, "data": "d", "curve": [point]}
        return {"arm": arm, "budget": budget, "loss": loss, **common}

    full = [result("full", 0.25, 100.0, 4.0), result("full", 1.0, 400.0, 3.0)]
    for seconds, expected in ((200.0, 3.5), (800.0, 2.5), (401.0, 3.0)):
        rows = summarise([*full, result("adaptive", 0.5, seconds, 3.1)])["rows"]
        row = next(row for row in rows if row["arm"] == "adaptive")
        assert row["against_full"] == pytest.approx(3.1 - expected)
