"""`ratoon eval` on a tiny model: an evaluation that is cut ends as a whole one does."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ratoon.errors import ConfigError
from ratoon.evals.plan import EvalPlan
from ratoon.evals.tasks import TASKS
from ratoon.loop.eval_run import Machine, run_eval
from ratoon.models.tiny import make_tiny_model
from ratoon.observe.files import read_lines
from ratoon.observe.observer import Observer
from ratoon.records import SamplingParams

ROWS = [{"question": f"{n} + 1", "answer": f"#### {n + 1}"} for n in range(4)]


def _responses(folder: Path) -> list[Any]:
    rows = read_lines(folder / "model" / "gsm8k.jsonl")
    return [(row["row"], row["sample"], row["token_ids"], row["reward"]) for row in rows]


def test_a_cut_evaluation_goes_on_and_ends_as_a_whole_one(tmp_path: Path) -> None:
    model, data, output = tmp_path / "tiny", tmp_path / "data", tmp_path / "out"
    make_tiny_model(model, hidden_size=32, intermediate_size=32, num_layers=2)
    (data / "gsm8k").mkdir(parents=True)
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    (data / "gsm8k" / "test.jsonl").write_text(lines)
    plan = EvalPlan(
        tasks=(TASKS["gsm8k"],),
        data=data,
        samples=2,
        ks=(2,),
        params=SamplingParams(temperature=1.0, top_p=0.95),
        max_tokens=12,
        system_prompt="add",
    )
    with Observer() as observer:
        record = run_eval([model], plan, output, observer, Machine(workers=1, batch=2))
        whole = _responses(output)
        assert [(row, sample) for row, sample, _, _ in whole] == [
            (row, sample) for row in range(4) for sample in range(2)
        ]
        (figures,) = record["tasks"]
        assert (figures["prompts"], figures["responses"]) == (4, 8)
        assert figures["pass@2"] >= figures["pass@1"]
        assert json.loads((output / "summary.json").read_text()) == record

        file = output / "model" / "gsm8k.jsonl"
        kept = file.read_text().splitlines(keepends=True)[:3]
        file.with_suffix(".partial.jsonl").write_text("".join(kept) + '{"row": 3, "sa')
        file.unlink()
        assert run_eval([model], plan, output, observer, Machine(workers=1, batch=4)) == record
        assert _responses(output) == whole
        assert not file.with_suffix(".partial.jsonl").exists()

        with pytest.raises(ConfigError, match="an evaluation with other limit"):
            run_eval([model], replace(plan, limit=1), output, observer, Machine())
        (model / "config.json").touch()
        with pytest.raises(ConfigError, match="an evaluation with other models"):
            run_eval([model], plan, output, observer, Machine())
