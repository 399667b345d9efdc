"""Checkpoints: whole, checked file by file before anything is loaded, and kept by count."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ratoon.cluster.stored_state import load_state, save_state
from ratoon.errors import CheckpointError
from ratoon.loop.checkpoints import SUMS, latest_checkpoint, whole_checkpoint
from ratoon.observe.run_folder import RunFolder


def write(folder: RunFolder, step: int, keep: int = 10) -> Path:
    with whole_checkpoint(folder, step, keep, workers=2) as draft:
        (draft / "policy").mkdir()
        (draft / "policy" / "weights").write_bytes(bytes(range(200)) * step)
        (draft / "empty").write_bytes(b"")
    return folder.checkpoints / f"step_{step:06d}"


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path)
    folder.checkpoints.mkdir()
    return folder


def test_the_newest_is_read_and_the_last_few_are_kept(folder: RunFolder) -> None:
    for step in (1, 2, 10):
        write(folder, step, keep=2)
    found = latest_checkpoint(folder)
    assert found is not None
    assert (found.path.name, found.step, found.state["workers"]) == ("step_000010", 10, 2)
    assert sorted(p.name for p in folder.checkpoints.iterdir()) == ["step_000002", "step_000010"]
    shutil.rmtree(found.path)
    previous = latest_checkpoint(folder)
    assert previous is not None
    assert previous.step == 2


def test_without_a_checkpoint_there_is_none(folder: RunFolder) -> None:
    (folder.checkpoints / "step_of_mine").mkdir()
    (folder.checkpoints / ".step_000001-ab.part").mkdir()
    assert latest_checkpoint(folder) is None


def test_the_sums_are_those_of_sha256sum(folder: RunFolder) -> None:
    checked = subprocess.run(["sha256sum", "--check", "--strict", SUMS], cwd=write(folder, 3))
    assert checked.returncode == 0


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


DAMAGES: list[tuple[str, Callable[[Path], object], str]] = [
    ("policy/weights", flip, "has another checksum"),
    ("policy/weights", cut, "has another checksum"),
    ("policy/weights", Path.unlink, "is missing"),
    ("state.json", flip, "has another checksum"),
    ("state.json", Path.unlink, "is missing"),
    ("policy/more", lambda path: path.write_text("x"), "has another checksum"),
    (SUMS, Path.unlink, "cannot be read"),
    (SUMS, lambda path: path.write_bytes(b""), ""),
    (SUMS, lambda path: path.write_bytes(b"\xff\n"), "cannot be read"),
    (SUMS, cut, ""),
    (SUMS, flip, ""),
]


@pytest.mark.parametrize(("name", "damage", "words"), DAMAGES)
def test_damage_is_refused_by_name_and_the_one_before_is_still_there(
    folder: RunFolder, name: str, damage: Callable[[Path], object], words: str
) -> None:
    write(folder, 1)
    newest = write(folder, 2)
    damage(newest / name)
    with pytest.raises(CheckpointError) as refused:
        latest_checkpoint(folder)
    message = str(refused.value)
    assert words in message
    assert f"remove {newest} to resume from the checkpoint before it" in message
    if name != SUMS:
        assert message.startswith(str(newest / name))
    shutil.rmtree(newest)
    before = latest_checkpoint(folder)
    assert before is not None
    assert before.step == 1


def test_every_byte_counts(folder: RunFolder) -> None:
    """Mutation of any byte of any file, the sums included, is found."""
    checkpoint = write(folder, 1)
    for path in (checkpoint / "state.json", checkpoint / SUMS):
        content = path.read_bytes()
        for place in range(len(content)):
            path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
            with pytest.raises(CheckpointError):
                latest_checkpoint(folder)
        path.write_bytes(content)
    assert latest_checkpoint(folder) is not None


def fail(draft: Path) -> None:
    (draft / "half").write_text("x")
    raise ZeroDivisionError


def test_a_write_that_fails_leaves_the_ones_before(folder: RunFolder) -> None:
    write(folder, 1, keep=1)
    with pytest.raises(ZeroDivisionError), whole_checkpoint(folder, 2, 1) as draft:
        fail(draft)
    assert [path.name for path in folder.checkpoints.iterdir()] == ["step_000001"]


def test_nested_states_come_back_as_they_were(tmp_path: Path) -> None:
    state = {
        "counts": [1, [2.5, None]],
        "index": {"head": 3, "store": torch.arange(4)[::2], "empty": torch.zeros(0, 2)},
        "nothing": {},
    }
    save_state(tmp_path / "state", state)
    loaded = load_state(tmp_path / "state")
    assert loaded["counts"] == [1, [2.5, None]]
    assert loaded["nothing"] == {}
    assert loaded["index"]["head"] == 3
    assert loaded["index"]["store"].tolist() == [0, 2]
    assert loaded["index"]["empty"].shape == (0, 2)
    save_state(tmp_path / "none", {})
    assert load_state(tmp_path / "none") == {}
