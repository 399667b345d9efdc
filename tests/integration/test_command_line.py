"""Bad input on the command line: one clear message, exit code 2, nothing made or overwritten."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
from lab import Lab

from ratoon.cli.main import app
from ratoon.observe.run_folder import RunFolder


def command_line(*arguments: str) -> int:
    """Run `ratoon` in this process; its exit code."""
    with pytest.raises(SystemExit) as left:
        app(args=[str(argument) for argument in arguments])
    assert isinstance(left.value.code, int)
    return left.value.code


def refused(capsys: pytest.CaptureFixture[str], lab: Lab, *overrides: str, verb: str = "rl") -> str:
    """The message with which a run is refused that would be fine without the overrides."""
    config = lab.sft_config("run") if verb == "sft" else lab.rl_config("run")
    file = lab.file(config)
    assert command_line(verb, str(file), *overrides) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    assert captured.err.count("error: ") == 1
    assert not (lab.folder / "run").exists()
    return captured.err.partition("error: ")[2]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("rollout.max_batchs=1", ["rollout.max_batchs", "unknown key", "max_batch"]),
        ("optimizer.lr=fast", ["optimizer.lr", "'fast'", "number"]),
        ("data.train.path=/not/there.jsonl", ["data.train.path", "/not/there.jsonl"]),
        ("model.path=/not/there", ["model.path", "/not/there", "ratoon models fetch"]),
        ("sampling.max_tokens=0", ["sampling.max_tokens", "0", "1"]),
        ("sampling.temperature=0", ["sampling.temperature", "group_size", "> 0"]),
        ("rollout.max_length=256", ["rollout.max_length", "256", "128 positions"]),
        (
            "rollout.max_length=48",
            ["arithmetic/train", "more than 8 tokens", "rollout.max_length - sampling.max_tokens"],
        ),
        ("evaluation.prompts=7", ["evaluation.prompts = 7", "holds 6 prompts"]),
        (
            "rewards=[{kind: python, function: 'no.such.module:score'}]",
            ["no.such.module", "cannot be imported"],
        ),
    ],
)
def test_wrong_settings_are_refused(
    capsys: pytest.CaptureFixture[str], lab: Lab, override: str, words: list[str]
) -> None:
    more = ["data.train={kind: jsonl, path: x}"] if "train.path" in override else []
    message = refused(capsys, lab, *more, override, "update.micro_batch_tokens=256")
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["holds no rows"]),
        ('{"question": "1 + 1", "answer": "2"}\n', ["row 0", "'prompt'", "'question'"]),
        ('{"prompt": "1 + 1"}\n', ["row 0", "'answer'"]),
        ('{"prompt": "1 + 1", "answer": "2"}\n{"prompt"\n', ["row 1", "line 2", "not valid JSON"]),
        ('{"prompt": "1 + 1", "answer": "two"}\n', ["row 0", "'two'", "number"]),
        (f'{{"prompt": "{"1 + " * 99}1", "answer": "2"}}\n', ["1 of 1 rows", "row 0"]),
    ],
)
def test_wrong_data_is_refused(
    capsys: pytest.CaptureFixture[str], lab: Lab, text: str, words: list[str]
) -> None:
    file = lab.folder / "rows.jsonl"
    file.write_text(text, encoding="utf-8")
    message = refused(capsys, lab, f"data.train={{kind: jsonl, path: '{file}'}}")
    for word in ["rows", *words]:
        assert word in message


def test_a_model_that_is_not_supported_is_refused(
    capsys: pytest.CaptureFixture[str], lab: Lab
) -> None:
    model = Path(shutil.copytree(lab.model, lab.folder / "model"))
    config = json.loads((model / "config.json").read_text())
    config |= {"architectures": ["MambaForCausalLM"], "model_type": "mamba"}
    (model / "config.json").write_text(json.dumps(config))
    for verb in ("rl", "sft"):
        message = refused(capsys, lab, f"model.path={model}", verb=verb)
        assert "MambaForCausalLM is not supported" in message
        assert "LlamaForCausalLM" in message


def test_what_does_not_belong_to_the_model_is_refused(
    capsys: pytest.CaptureFixture[str], lab: Lab
) -> None:
    message = refused(capsys, lab, f"drafter.path={lab.model}")
    assert message.startswith(f"drafter.path = {lab.model}: ")
    model = Path(shutil.copytree(lab.model, lab.folder / "model"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"vocab_size": 8}))
    for verb in ("rl", "sft"):
        message = refused(capsys, lab, f"model.path={model}", verb=verb)
        assert "config.json says vocab_size = 8" in message


def test_a_truncated_checkpoint_is_refused(capsys: pytest.CaptureFixture[str], lab: Lab) -> None:
    model = Path(shutil.copytree(lab.model, lab.folder / "model"))
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    message = refused(capsys, lab, f"model.path={model}", "workers.count=1")
    assert str(weights) in message
    assert "damaged" in message


def test_no_run_is_overwritten(
    capsys: pytest.CaptureFixture[str], lab: Lab, reference: RunFolder
) -> None:
    before = {path: path.stat().st_mtime_ns for path in reference.path.rglob("*")}
    where = (f"output_dir={reference.path.parent}", f"name={reference.path.name}")
    assert "holds another run" in refused(capsys, lab, *where)
    assert "`optimizer.lr` is 0.5 but was 0.001" in refused(
        capsys, lab, *where, "--resume", "steps=4", "optimizer.lr=0.5"
    )
    assert "has done 3 steps already" in refused(capsys, lab, *where, "--resume", "steps=3")
    after = {path: path.stat().st_mtime_ns for path in reference.path.rglob("*")}
    assert before == after
    assert "holds no run to resume" in refused(capsys, lab, "--resume")
    occupied = lab.folder / "file"
    occupied.write_text("mine")
    assert "cannot be made" in refused(capsys, lab, f"output_dir={occupied}")
    assert occupied.read_text() == "mine"


def test_a_full_disk_is_noticed_before_the_work_starts(
    capsys: pytest.CaptureFixture[str], lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 1000, 1000))
    message = refused(capsys, lab)
    assert "0.00 GB free" in message
    assert "output_dir" in message


def test_a_quickstart_never_overwrites(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("mine")
    assert command_line("quickstart", "--tiny", "--output", str(tmp_path / "mine")) == 2
    message = capsys.readouterr().err
    assert "mine holds something" in message
    assert "--resume" not in message
    assert command_line("quickstart", "--tiny", "--output", str(tmp_path / "mine"), "--resume") == 2
    assert "mine holds no run to resume" in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob("*")] == ["mine", "file"]
