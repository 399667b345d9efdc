"""What cannot be trained is one clear error before the first step."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from pretraining import (
    EVOLVE,
    VALUES,
    CutShort,
    EndsAt,
    change_header,
    make_config,
    make_data,
    open_folder,
    run,
)
from typer.testing import CliRunner

from ratoon.cli.main import app
from ratoon.data.prepare import HELD_OUT, TRAIN, tokenizer_hash
from ratoon.errors import CapabilityError, ConfigError, RatoonError
from ratoon.est.sliced_forward import hidden_states
from ratoon.est.subnetwork import Shape, Subnetwork
from ratoon.loop.memory import activation_bytes
from ratoon.loop.pretrain_plan import plan_run
from ratoon.loop.pretrain_run import pretrain
from ratoon.models.decoder import Decoder
from ratoon.models.hf_config import family_config
from ratoon.models.packing import PackedBatch
from ratoon.observe.observer import Observer
from ratoon.observe.run_folder import RunFolder
from ratoon.training import update_checks


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pretraining") / "data"
    make_data(folder)
    return folder


def refused(data: Path, *overrides: str, match: str, **sections: Any) -> None:
    """A run and its dry run say the same, and nothing is trained."""
    with pytest.raises(RatoonError, match=match):
        plan_run(make_config(data, "refused", *overrides, **sections))
    seen: list[int] = []

    class Watching(Observer):
        """Sees whether anything is recorded."""

        def metrics(self, step: int, values: Any) -> None:
            seen.append(step)

    with pytest.raises(RatoonError, match=match), Watching() as observer:
        pretrain(make_config(data, "refused", *overrides, **sections), None, observer)
    assert not seen


def stages(*entries: dict[str, float]) -> dict[str, Any]:
    return {"method": "random", "stages": list(entries)}


@pytest.mark.parametrize(
    ("evolve", "match"),
    [
        (stages({"start": 0, "heads": 0}, {"start": 0.5}), "heads.*must be greater than 0"),
        (
            stages({"start": 0, "layers": 1.5}, {"start": 0.5}),
            "layers.*must be less than or equal to 1",
        ),
        (stages({"start": 0, "heads": 0.1}, {"start": 0.5}), "stages, stage 0: .* none of 4 heads"),
        (stages({"start": 0, "layers": 0.1}, {"start": 0.5}), "0.1 leaves none of 4 layers"),
        (stages({"start": 0, "layers": 0.5}, {"start": 1.0}), "start.*must be less than 1"),
        (stages({"start": 0.1, "layers": 0.5}, {"start": 0.5}), "the first must start at 0"),
        (
            stages({"start": 0, "layers": 0.5}, {"start": 0.6, "layers": 0.75}, {"start": 0.4}),
            "each must start later",
        ),
        (stages({"start": 0, "layers": 0.5}, {"start": 0.01}), "short runs round fractions"),
        (stages({"start": 0}, {"start": 0.5, "heads": 0.5}), "never shrinks"),
        (stages({"start": 0, "heads": 0.5}, {"start": 0.5, "heads": 0.75}), "give 1, 1, 1"),
        ({"neuron_block": 7, **EVOLVE}, "neuron_block = 7 does not divide the 64 neurons"),
        ({"random": {"pinned_layers": [9]}, **EVOLVE}, "pinned layer 9 does not exist"),
        ({"method": "nested"}, "give one of stages, adaptive and replay"),
        (
            {"method": "nested", "stages": EVOLVE["stages"], "adaptive": {}},
            "give one of stages, adaptive and replay",
        ),
        (
            {"method": "nested", "adaptive": {"layers": 1.0, "heads": 1.0, "neurons": 1.0}},
            "begins with the whole model",
        ),
        ({"method": "nested", "adaptive": {"min_frac": 0.7}}, "min_frac = 0.7 must be <="),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(
    data: Path, evolve: dict[str, Any], match: str
) -> None:
    refused(data, match=match, evolve=evolve)


def test_growth_past_the_decay_of_the_learning_rate_is_refused(data: Path) -> None:
    optimizer = {"schedule": "wsd", "decay_frac": 0.5}
    late = stages({"start": 0, "layers": 0.5}, {"start": 0.75})
    refused(data, match="after the learning rate begins to decay", evolve=late, optimizer=optimizer)
    adaptive = {"adaptive": {"deadline_frac": 0.75}}
    refused(data, match="deadline_frac = 0.75 is step 9", evolve=adaptive, optimizer=optimizer)


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        (["update.batch_tokens=100"], "must be a multiple of data.sequence_length = 32"),
        (["optimizer.warmup_steps=12"], "warmup_steps = 12 must be < steps"),
        (["model.shape.heads=5"], "no multiple of heads = 5"),
        (["model.shape.positions=16"], "positions = 16 must be >= data.sequence_length"),
        (["model.shape.family=bert"], "family"),
        (["optimizer.kind=muon", "update.shard=true"], "muon needs whole matrices"),
        (["update.compile=true", "update.shard=true"], "has not been tried with"),
        (["evaluation.sequences=9999"], "sequences = 9999, but .* holds out"),
        (["evolve={stages: [{start: 0, layers: 0.5}, {start: 0.5}], switch_sequences: 9999}"],
         "switch_sequences = 9999, but"),
        (["data.sequence_length=8192", "update.batch_tokens=8192",
          "update.micro_batch_tokens=8192"], "fewer than one sequence"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_each_other_are_refused(
    data: Path, overrides: list[str], match: str
) -> None:
    refused(data, *overrides, match=match)


def test_an_old_torch_without_muon_is_refused(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(update_checks.torch.optim, "Muon", raising=False)
    refused(data, "optimizer.kind=muon", match=r"needs torch 2\.9 or later")


def damaged(data: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    shutil.copytree(data, folder)
    return folder


def test_a_damaged_data_file_is_refused(data: Path, tmp_path: Path) -> None:
    folder = damaged(data, tmp_path)
    whole = (folder / TRAIN).read_bytes()
    for broken, match in (
        (whole[:-100], "is truncated or has been changed"),
        (whole + b"\0\0", "is truncated or has been changed"),
        (b"\0" * 4096 + whole[4096:], "was not written to its end"),
        (whole[:100], "is no token file"),
    ):
        (folder / TRAIN).write_bytes(broken)
        refused(folder, match=match)
    (folder / TRAIN).unlink()
    refused(folder, match="cannot be read")


@pytest.mark.parametrize("name", [TRAIN, HELD_OUT])
@pytest.mark.parametrize(
    ("header", "match"),
    [
        ({"count": "x"}, "count 'x', expected a whole number >= 0"),
        ({"vocab_size": "many"}, "vocab_size 'many', expected a whole number >= 1"),
        ({"vocab_size": 0}, "vocab_size 0, expected a whole number >= 1"),
        ({"document_end": 300}, "document_end 300, expected less than vocab_size 300"),
        ({"sha256": None}, "sha256 None, expected text"),
        ({"dtype": []}, r"dtype \[\]"),
        ({"vocab_size": 50}, "header promises ids below vocab_size = 50"),
        ({"tokenizer": "ab" * 32}, "was not made with the tokenizer in"),
    ],
)
def test_a_header_that_does_not_fit_is_refused(
    data: Path, tmp_path: Path, name: str, header: dict[str, Any], match: str
) -> None:
    folder = damaged(data, tmp_path)
    change_header(folder / name, **header)
    refused(folder, match=f"{name}: .*{match}")


@pytest.mark.parametrize("name", [TRAIN, HELD_OUT])
def test_an_id_beyond_the_vocabulary_is_refused(data: Path, tmp_path: Path, name: str) -> None:
    folder = damaged(data, tmp_path)
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[:4106] + b"\xff\xff" + whole[4108:])
    refused(folder, match=f"{name}: token 5 has the id 65535.*below vocab_size = 300")


def test_held_out_tokens_of_another_vocabulary_are_refused(data: Path, tmp_path: Path) -> None:
    folder = damaged(data, tmp_path)
    change_header(folder / HELD_OUT, vocab_size=400)
    refused(folder, match="a vocabulary of 400 tokens, train.tokens one of 300")


def test_data_without_its_tokenizer_are_refused(data: Path, tmp_path: Path) -> None:
    folder = damaged(data, tmp_path)
    with (folder / "tokenizer.json").open("a") as file:
        file.write("\n")
    refused(folder, match="was not made with the tokenizer in")
    (folder / "tokenizer.json").unlink()
    refused(folder, match="holds no tokenizer")


def test_a_model_that_memory_cannot_hold_is_refused(data: Path) -> None:
    huge = make_config(data, "huge", "model.shape.width=65536", "model.shape.layers=8")
    with pytest.raises(CapabilityError, match=r"need about .* GB of memory, and .* GB are free"):
        pretrain(huge, None, Observer())


def test_text_that_is_not_utf8_makes_no_data(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes(b"No\xebl, p\xe2te " * 50)
    command = ["data", "prepare", str(tmp_path / "out"), str(tmp_path / "text.txt")]
    result = CliRunner().invoke(app, [*command, "--train-bpe", "300"])
    assert result.exit_code == 2
    assert "UTF-8" in result.output
    assert not (tmp_path / "out" / TRAIN).exists()


def test_a_tokenizer_that_did_not_make_the_data_is_refused(data: Path, tmp_path: Path) -> None:
    """A model to go on with brings its own tokenizer."""
    folder, _ = run(make_config(data, "goes-on", "steps=3"))
    model = {"path": str(folder.model), "dtype": "float32"}
    assert plan_run(make_config(data, "same-tokenizer", model=model)).model.vocab_size == 300
    other = damaged(data, tmp_path)
    with (other / "tokenizer.json").open("a") as file:
        file.write("\n")
    for name in (TRAIN, HELD_OUT):
        change_header(other / name, tokenizer=tokenizer_hash(other))
    with pytest.raises(ConfigError, match="was not made with the tokenizer of model"):
        plan_run(make_config(other, "other-tokenizer", model=model))


def cut(data: Path, name: str, **sections: Any) -> None:
    config = make_config(data, name, **sections)
    with pytest.raises(CutShort), EndsAt(open_folder(config), 9) as observer:
        pretrain(config, RunFolder(config.output_dir / config.name), observer)


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        (["model.shape.layers=3"], "model.shape.layers"),
        (["optimizer.schedule=linear"], "optimizer.schedule"),
        (["evolve.stages.1.start=0.3"], "evolve.stages"),
        (["seed=4"], "seed"),
    ],
)
def test_a_run_is_not_resumed_with_another_model_or_schedule(
    data: Path, overrides: list[str], match: str
) -> None:
    name = f"resumes-{match}"
    cut(data, name, evolve=EVOLVE)
    with pytest.raises(ConfigError, match=f"{match}.*but was.*only `steps` may grow"):
        run(make_config(data, name, *overrides, evolve=EVOLVE), resume=True)


def test_a_replay_of_something_else_is_refused(data: Path, tmp_path: Path) -> None:
    path = tmp_path / "growth.json"
    evolve = {"method": "nested", "replay": str(path)}
    refused(data, match="is no record of growth", evolve=evolve)
    path.write_text("{}")
    refused(data, match="is no record of growth", evolve=evolve)
    first = {"step": 0, "layers": 0.5, "heads": 1.0, "neurons": 1.0}
    record = {"format": "ratoon-growth-1", "steps": 24, "stages": [first]}
    path.write_text(json.dumps(record))
    refused(data, match="is of a run of 24 steps, and `steps` is 12", evolve=evolve)
    path.write_text(json.dumps(record | {"steps": 12}))
    refused(data, match="must end with the whole model", evolve=evolve)


def test_a_dry_run_says_what_would_be_trained(data: Path) -> None:
    plan = plan_run(make_config(data, "planned", evolve=EVOLVE), processes=2)
    _, result = run(make_config(data, "planned", evolve=EVOLVE))
    assert [stage.start for stage in plan.stages] == [stage.start for stage in result.stages]
    assert plan.flops == pytest.approx(result.metrics["pretrain/flops"])
    assert plan.saved_frac == pytest.approx(result.metrics["pretrain/saved_frac"])
    assert plan.tokens == result.metrics["pretrain/tokens"]
    width, inner, vocabulary = 32, 64, plan.model.vocab_size
    assert plan.layer_parameters == 4 * (4 * width**2 + 3 * width * inner + 2 * width)
    assert plan.parameters == plan.layer_parameters + vocabulary * width + width
    assert plan.memory.optimizer == 16 * plan.parameters
    assert plan.epochs == pytest.approx(12 * 8 / (6000 // 32), rel=0.02)


def test_a_dry_run_of_an_adaptive_schedule_names_its_rungs(data: Path) -> None:
    plan = plan_run(make_config(data, "rungs", evolve={"adaptive": {"quantum": 0.5}}))
    assert [stage.rates.values for stage in plan.stages] == [(0.5,) * 3, (1, 0.5, 0.5), (1, 1, 1)]
    assert plan.flops is None
    assert [stage.share < 1 for stage in plan.stages] == [True, True, False]


def test_a_dry_run_needs_data_or_the_size_of_a_tokenizer(data: Path, tmp_path: Path) -> None:
    missing = make_config(tmp_path / "data", "planned")
    with pytest.raises(ConfigError, match="give the tokenizer's size with --vocabulary"):
        plan_run(missing)
    plan = plan_run(missing, vocab_size=1000)
    assert plan.model.vocab_size == 1000
    assert plan.epochs is None
    with pytest.raises(ConfigError, match="--vocabulary 1000 would have no effect"):
        plan_run(make_config(data, "planned"), vocab_size=1000)


@pytest.mark.parametrize("size", ["gpt2_117m 50257 124", "tinyllama_1b 32000 1100"])
def test_the_large_recipes_run_dry(size: str) -> None:
    name, vocabulary, millions = size.split()
    recipe = Path(__file__).parents[2] / "recipes" / f"pretrain_{name}.yaml"
    command = ["pretrain", str(recipe), "--dry-run", "--vocabulary", vocabulary]
    result = CliRunner().invoke(app, [*command, "--processes", "8"], env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    found = int(result.output.split(" parameters")[0].rpartition(" ")[2].replace(",", ""))
    assert found == pytest.approx(int(millions) * 1e6, rel=0.01)
    assert "does not exist yet" in result.output
    assert not Path("runs", f"pretrain_{name}").exists()


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2", "qwen2", "qwen3"])
def test_every_family_is_planned(data: Path, family: str) -> None:
    model = VALUES["model"] | {"shape": VALUES["model"]["shape"] | {"family": family}}
    plan = plan_run(make_config(data, "family", model=model))
    assert plan.model.family == family


@pytest.mark.parametrize("option", ["--vocabulary", "--processes"])
def test_options_of_a_dry_run_are_refused_without_it(option: str) -> None:
    result = CliRunner().invoke(app, ["pretrain", "no-such-file.yaml", option, "5"])
    assert result.exit_code == 2
    assert f"{option} has an effect with --dry-run only" in result.output


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("recompute", [False, True])
def test_the_memory_of_a_micro_batch_is_about_what_is_kept(family: str, recompute: bool) -> None:
    """Of wide layers, where what is estimated is most of what is kept."""
    model = family_config(
        family, vocab_size=64, hidden_size=64, intermediate_size=256, num_layers=3, num_heads=4,
        num_kv_heads=4, head_dim=16, max_positions=64,
    )  # fmt: skip
    decoder = Decoder(model)
    kept: dict[int, int] = {}
    known = {p.untyped_storage().data_ptr() for p in decoder.parameters()}
    held = []

    def pack(value: torch.Tensor) -> torch.Tensor:
        storage = value.untyped_storage()
        held.append(value)
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return value

    batch = PackedBatch.of([[1] * 64] * 4)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        hidden_states(decoder, batch, Subnetwork.full(Shape.of(model)))
    whole = activation_bytes(model, 256, 4, recompute=False)
    assert whole == pytest.approx(sum(kept.values()), rel=0.25)
    if recompute:
        layers = model.num_layers
        assert activation_bytes(model, 256, 4, recompute=True) < 1.6 * whole / layers
