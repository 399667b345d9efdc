"""Pretraining from end to end, whole and on subnetworks that grow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lab import metrics_of
from pretraining import EVOLVE, CutShort, EndsAt, make_config, make_data, open_folder, run

from ratoon.errors import ConfigError
from ratoon.loop.pretrain_run import pretrain
from ratoon.models.hf_io import load_decoder
from ratoon.models.packing import PackedBatch
from ratoon.models.tokenizer import Tokenizer
from ratoon.observe.observer import Observer
from ratoon.observe.run_folder import RunFolder

NESTED = {
    "method": "nested",
    "stages": [{"start": 0, "layers": 0.5, "heads": 0.5, "neurons": 0.5}, {"start": 0.5}],
}
ADAPTIVE = {
    "method": "nested",
    "new_layers": "zero_output",
    "adaptive": {
        "min_frac": 0.1,
        "deadline_frac": 0.8,
        "observe_every": 1,
        "check_every": 2,
        "probe_steps": 1,
        "window": 2,
    },
}
KINDS = {
    "whole": {},
    "random": {"evolve": EVOLVE},
    "nested": {"evolve": NESTED},
    "adaptive": {"evolve": ADAPTIVE},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pretraining") / "data"
    make_data(folder)
    return folder


def same_weights(one: RunFolder, other: RunFolder) -> bool:
    first, second = (load_decoder(each.model).state_dict() for each in (one, other))
    return all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_falls_and_transformers_loads_the_model(data: Path, kind: str) -> None:
    from transformers import AutoModelForCausalLM

    config = make_config(data, f"falls-{kind}", "steps=60", "log_every=10", **KINDS[kind])
    folder, result = run(config)
    assert result.evaluations[60] < result.evaluations[0] - 0.7
    metrics = metrics_of(folder)
    assert metrics[60]["pretrain/tokens"] == 60 * 256
    saved = metrics[60]["pretrain/saved_frac"]
    # So short a run does not earn the adaptive schedule's probes back.
    assert saved == 0 if kind == "whole" else saved > 0.1 or kind == "adaptive"
    tokenizer = Tokenizer.load(folder.model)
    decoder = load_decoder(folder.model)
    theirs = AutoModelForCausalLM.from_pretrained(folder.model, dtype=torch.float32)
    ids = list(tokenizer.encode("ab ba"))
    with torch.no_grad():
        hidden, _ = decoder(PackedBatch.of([ids]))
        expected = theirs(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(hidden @ decoder.head_weight.t(), expected, rtol=1e-4, atol=1e-4)
    card = (folder.model / "README.md").read_text()
    assert f"{60 * 256:,}" in card
    assert "library_name: transformers" in card


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("end", [4, 9])
def test_a_run_that_was_cut_short_ends_with_the_same_bits(data: Path, kind: str, end: int) -> None:
    """It ends before or after its first checkpoint, inside a stage; steps are done anew."""
    whole, _ = run(make_config(data, f"whole-{kind}-{end}", **KINDS[kind]))
    config = make_config(data, f"cut-{kind}-{end}", **KINDS[kind])
    with pytest.raises(CutShort), EndsAt(open_folder(config), end) as observer:
        pretrain(config, RunFolder(config.output_dir / config.name), observer)
    resumed, _ = run(config, resume=True)
    assert same_weights(whole, resumed)
    timed = ("_s", "time/")
    for step, values in metrics_of(whole).items():
        again = metrics_of(resumed)[step]
        assert values.keys() == again.keys()
        for name, value in values.items():
            if not name.endswith(timed) and not name.startswith(timed):
                assert again[name] == value, (step, name)


@pytest.mark.parametrize("method", ["nested", "random"])
def test_a_replay_trains_the_weights_of_the_adaptive_run_without_its_probes(
    data: Path, method: str
) -> None:
    evolve = {**ADAPTIVE, "method": method}
    if method == "random":
        del evolve["new_layers"]
    adaptive, decided = run(make_config(data, f"decides-{method}", evolve=evolve))
    assert len(decided.stages) > 1
    assert decided.probe_flops > 0
    replay = {k: v for k, v in evolve.items() if k != "adaptive"} | {"replay": str(adaptive.growth)}
    replayed, followed = run(make_config(data, f"follows-{method}", evolve=replay))
    assert same_weights(adaptive, replayed)
    assert followed.stages == decided.stages
    assert followed.losses == decided.losses
    assert followed.evaluations == decided.evaluations
    saved = decided.metrics["pretrain/flops"] - followed.metrics["pretrain/flops"]
    assert saved == pytest.approx(decided.probe_flops, rel=1e-12)
    assert followed.probe_flops == 0
    for folder in (adaptive, replayed):
        begun = {s: v for s, v in metrics_of(folder).items() if "switch/stage" in v}
        assert list(begun) == [stage.start for stage in decided.stages]
        assert begun[max(begun)]["switch/layers"] == 1


def test_what_a_cut_run_decided_after_its_checkpoint_is_decided_anew(data: Path) -> None:
    config = make_config(data, "regrows", evolve=ADAPTIVE)
    with pytest.raises(CutShort), EndsAt(open_folder(config), 9) as observer:
        pretrain(config, RunFolder(config.output_dir / config.name), observer)
    resumed, result = run(config, resume=True)
    record = json.loads(resumed.growth.read_text())
    assert [stage["step"] for stage in record["stages"]] == [s.start for s in result.stages]
    assert record["probe_flops"] == result.probe_flops


def test_a_run_without_a_folder_gives_the_same_numbers(data: Path) -> None:
    config = make_config(data, "folderless")
    _, expected = run(config)
    with Observer() as observer:
        found = pretrain(config, None, observer)
    assert found.evaluations == expected.evaluations
    assert found.losses == expected.losses


@pytest.mark.parametrize(
    ("evolve", "decay", "words"),
    [(None, 0.9, "learning rate of the last step was"), (EVOLVE, 0.5, "stages was")],
)
def test_a_run_is_not_resumed_into_another_past(
    data: Path, evolve: dict[str, Any] | None, decay: float, words: str
) -> None:
    """The decay of wsd had begun, and would not have; stages would have begun later."""
    wsd = ("optimizer.schedule=wsd", f"optimizer.decay_frac={decay}")
    name = words.split()[0]
    config = make_config(data, name, *wsd, evolve=evolve)
    with pytest.raises(CutShort), EndsAt(open_folder(config), 9) as observer:
        pretrain(config, RunFolder(config.output_dir / config.name), observer)
    longer = make_config(data, name, *wsd, "steps=24", evolve=evolve)
    with pytest.raises(ConfigError, match=words):
        run(longer, resume=True)


def test_the_drop_at_a_switch_is_measured_and_predicted(data: Path) -> None:
    """How close the expansion is has a law of its own; halves of everything are far from small."""
    evolve = EVOLVE | {"switch_sequences": 8, "switch_draws": 4}
    folder, _ = run(make_config(data, "switches", evolve=evolve))
    for step in (3, 6):
        values = metrics_of(folder)[step]
        assert values["switch/full_loss_before"] == values["switch/full_loss_after"]
        drop = values["switch/subnetwork_loss_before"] - values["switch/subnetwork_loss_after"]
        assert values["switch/drop"] == pytest.approx(drop)
        assert "switch/predicted_drop" in values
    assert values["switch/subnetwork_loss_after"] == values["switch/full_loss_after"]
