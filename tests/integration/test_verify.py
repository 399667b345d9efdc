"""`ratoon verify` passes honest runs of every kind, and finds whatever was altered."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lab import Lab

from ratoon.cli.main import app
from ratoon.loop import certificate
from ratoon.loop.checkpoints import SUMS
from ratoon.observe.completions import completions_path, read_completions, stored_steps
from ratoon.observe.files import read_lines, write_lines
from ratoon.observe.rollouts import read_rollouts
from ratoon.observe.run_folder import RunFolder

Row = dict[str, Any]


def verify(folder: RunFolder, *options: str) -> int:
    """Exit code of the verb."""
    with pytest.raises(SystemExit) as left:
        app(args=["verify", str(folder.path), *options])
    assert isinstance(left.value.code, int)
    return left.value.code


def certified(folder: RunFolder) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(folder.certificate.read_text(encoding="utf-8"))
    return found


@pytest.fixture
def run(reference: RunFolder, tmp_path: Path) -> RunFolder:
    """A copy of the reference run, to be altered."""
    return RunFolder(Path(shutil.copytree(reference.path, tmp_path / "run")))


def alter(folder: RunFolder, step: int, change: Callable[[list[Row]], None]) -> None:
    path = completions_path(folder.completions, "train", step)
    rows = list(read_lines(path))
    change(rows)
    write_lines(path, rows)


def longest(rows: list[Row]) -> int:
    return max(range(len(rows)), key=lambda index: len(rows[index]["token_ids"]))


def test_a_run_with_speculation_and_spot_training_is_verified(run: RunFolder, exact: bool) -> None:
    assert verify(run) == 0
    found = certified(run)
    assert found["verdict"] == "verified"
    assert found["unchecked"] == []
    steps = [(item["split"], item["step"]) for item in found["checked"]]
    assert steps == [("eval", 0), ("train", 1), ("train", 2), ("train", 3), ("eval", 3)]
    assert found["responses"] == 3 * 16 + 2 * 6
    assert found["flips"] == 0 or not exact
    if exact:
        assert found["equal_bits"] == found["tokens"]
        assert {item["numerics"] for item in found["checked"]} == {"the same bits"}
    # Held-out prompts have the same keys both times and count once.
    again = found["checked"][-1]["tokens"]
    assert found["uniformity"]["tokens"] == found["tokens"] - again
    sums = [item["weights"]["sha256"] for item in found["checked"]]
    assert sums[0] == sums[1]
    assert len(set(sums)) == 4
    card = (run.model / "README.md").read_text(encoding="utf-8")
    assert f"**Certificate:** verified: {found['tokens']:,} tokens of 60 stored responses" in card
    assert card.count("**Certificate:**") == 1


def test_a_resumed_run_of_adapters_is_verified_as_far_as_weights_are_kept(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    """On one worker, with a stop string and a cut evaluation; checkpoints hold adapters alone."""
    options = ["workers.count=1", "checkpoint.keep=2", "speculation.tuner=cost_model"]
    options += ["lora.rank=4", "lora.alpha=64", "evaluation.sampling.top_k=5"]
    options += ["sampling.stop_strings=['7']", "sampling.keep_stop_string=true"]
    lab.rl("one", *options, "steps=1")
    folder = lab.rl("one", *options, "steps=3", resume=True)
    rows = read_completions(folder.completions, "train", 3)
    assert any(row.response.endswith("7") for row in rows)
    told = [(record.split, record.step) for record in read_rollouts(folder.rollouts)]
    assert told == [*stored_steps(folder.completions)]
    assert verify(folder) == 0
    found = certified(folder)
    checked = [(item["split"], item["step"]) for item in found["checked"]]
    assert checked == [("eval", 0), ("train", 1), ("train", 3), ("eval", 3)]
    unchecked = [(item["split"], item["step"]) for item in found["unchecked"]]
    assert unchecked == [("eval", 1), ("train", 2)]
    output = capsys.readouterr().out
    assert "not checked: eval 1: the weights after step 1 are not stored\n" in output
    assert "not checked: train 2: the weights after step 1 are not stored\n" in output
    assert output.endswith("VERIFIED\n")
    assert verify(folder, "--step", "3", "--limit", "2") == 0
    assert certified(folder)["responses"] == 4
    assert verify(folder, "--step", "2") == 2
    assert "nothing in" in capsys.readouterr().err


def another_token(rows: list[Row]) -> None:
    ids = rows[longest(rows)]["token_ids"]
    # A neighbour that ends nothing.
    ids[3] += 1 if ids[3] < 20 else -1


def another_logprob(rows: list[Row]) -> None:
    logprobs = rows[longest(rows)]["logprobs"]
    place = min(range(len(logprobs)), key=logprobs.__getitem__)
    logprobs[place] *= 1.001


def another_round(rows: list[Row]) -> None:
    rows[longest(rows)]["round"] = 1


def another_sample(rows: list[Row]) -> None:
    one, other = rows[0], rows[1]
    assert one["row"] == other["row"]
    one["sample"], other["sample"] = other["sample"], one["sample"]


def twice(rows: list[Row]) -> None:
    rows[3] = rows[2]


def cut(rows: list[Row]) -> None:
    row = rows[longest(rows)]
    for name in ("token_ids", "logprobs"):
        row[name] = row[name][:5]


ALTERED = [another_token, another_logprob, another_round, another_sample, twice, cut]
WORDS = ["token should be", "log-probability", "round", "token should be", "key", "reason|length"]


@pytest.mark.parametrize(("change", "words"), list(zip(ALTERED, WORDS, strict=True)))
def test_what_was_altered_is_found(
    run: RunFolder,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[list[Row]], None],
    words: str,
) -> None:
    alter(run, 2, change)
    assert verify(run, "--step", "2") == 1
    output = capsys.readouterr().out
    assert output.endswith("NOT VERIFIED\n")
    wrong = next(line for line in output.splitlines() if line.startswith("wrong: train 2"))
    assert any(word in wrong for word in words.split("|"))
    found = certified(run)
    assert found["verdict"] == "not verified"
    rows = list(read_lines(run.path / found["first_wrong"]["file"]))
    position = found["first_wrong"]["position"]
    if words == "token should be" and position is not None:
        row = rows[found["first_wrong"]["line"] - 1]
        assert row["token_ids"][position] == found["first_wrong"]["stored"]
    assert "NOT VERIFIED" in (run.model / "README.md").read_text(encoding="utf-8")


def test_weights_of_another_step_are_found(run: RunFolder) -> None:
    first, second = run.checkpoints / "step_000001", run.checkpoints / "step_000002"
    shutil.rmtree(first / "policy")
    shutil.copytree(second / "policy", first / "policy")
    assert verify(run, "--step", "2") == 2
    # Whoever makes the checksums fit is found by the tokens.
    sums = [
        f"{hashlib.sha256((first / name).read_bytes()).hexdigest()}  {name}\n"
        for line in (first / SUMS).read_text(encoding="utf-8").splitlines()
        for name in [line.split("  ", 1)[1]]
    ]
    (first / SUMS).write_text("".join(sums), encoding="utf-8")
    assert verify(run, "--step", "2") == 1
    assert verify(run, "--step", "3") == 0


def test_without_proven_bits_rounding_is_measured_and_nothing_larger_passes(
    run: RunFolder,
) -> None:
    """As for a run of another machine: no record says that bits must agree."""
    run.rollouts.unlink()
    assert verify(run, "--step", "3") == 0
    for item in certified(run)["checked"]:
        assert item["numerics"] == "within rounding"
        assert 0 < item["tolerance"]["measured"] < 0.1
        assert item["largest_difference"] <= item["tolerance"]["logprob"]
        assert item["largest_gap"] <= item["tolerance"]["gap"]
    for change in (another_token, another_logprob):
        copied = run.completions / "kept"
        path = completions_path(run.completions, "train", 2)
        shutil.copyfile(path, copied)
        alter(run, 2, change)
        assert verify(run, "--step", "2") == 1
        copied.replace(path)


def test_tokens_of_another_temperature_are_not_uniform(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Even if nothing is selected again: as for a run whose noise is not ours."""
    text = run.config.read_text(encoding="utf-8")
    assert "temperature: 1.0" in text
    run.config.write_text(text.replace("temperature: 1.0", "temperature: 0.4"), encoding="utf-8")
    real = certificate.check_step

    def blind(*arguments: Any) -> Any:
        check = real(*arguments)
        check.wrong.clear()
        return check

    monkeypatch.setattr(certificate, "check_step", blind)
    assert verify(run) == 1
    found = certified(run)
    assert found["first_wrong"] is None
    assert found["uniformity"]["p_value"] < found["uniformity"]["significance"]
    assert "below 1e-05" in capsys.readouterr().out


def test_what_cannot_be_checked_is_said(
    run: RunFolder, fine_tuned: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(folder: Path, *options: str) -> str:
        assert verify(RunFolder(folder), *options) == 2
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return captured.err

    assert "holds no run" in refused(tmp_path)
    assert "holds no responses" in refused(fine_tuned.path)
    assert "those of steps 0 to 3" in refused(run.path, "--step", "9")
    path = completions_path(run.completions, "train", 1)
    rows = list(read_lines(path))
    del rows[0]["round"]
    write_lines(path, rows)
    assert "missing values ['round']" in refused(run.path, "--step", "1")
    path.write_text('{"half a li')
    assert "train_000001.jsonl holds 0 responses" in refused(run.path, "--step", "1")
    run.summary.write_text("{")
    assert "summary.json: must hold a JSON object" in refused(run.path, "--step", "1")
    shutil.rmtree(run.checkpoints)
    shutil.rmtree(run.model)
    message = refused(run.path, "--step", "2")
    assert "the weights after step 1 are not stored" in message
    assert "checkpoint.keep" in message


def test_a_file_that_was_cut_is_not_verified(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    def drop_the_last(rows: list[Row]) -> None:
        del rows[-1]

    alter(run, 2, drop_the_last)
    assert verify(run, "--step", "2") == 2
    assert "holds 15 responses, but the run drew at least 16" in capsys.readouterr().err
