"""The workers' folder in memory: private, locked while its run lives, and swept when it is dead."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ratoon.cluster.local import SHARED_PREFIX, shared_folder, sweep_orphans
from ratoon.observe.files import FolderLock


def test_a_folder_vanishes_with_its_block_and_is_no_orphan_before() -> None:
    with shared_folder() as folder:
        assert folder.name.startswith(SHARED_PREFIX)
        (folder / "published_0").write_text("weights")
        sweep_orphans(folder.parent)
        assert (folder / "published_0").is_file()
        with shared_folder() as other:
            assert other != folder
        assert folder.is_dir()
    assert not folder.exists()


def test_orphans_are_swept_and_nothing_else(tmp_path: Path) -> None:
    names = [f"{SHARED_PREFIX}dead", f"{SHARED_PREFIX}alive", f".{SHARED_PREFIX}born", "ratoon-x"]
    folders = [tmp_path / name for name in names]
    for folder in folders:
        (folder / "deep").mkdir(parents=True)
        (folder / "deep" / "file").write_text("x")
    lock = FolderLock(folders[1])
    sweep_orphans(tmp_path)
    assert [folder.exists() for folder in folders] == [False, True, True, True]
    lock.release()
    sweep_orphans(tmp_path)
    assert not folders[1].exists()


def test_what_a_killed_process_left_is_gone_at_the_next_start() -> None:
    code = (
        "import os, signal\n"
        "from ratoon.cluster.local import shared_folder\n"
        "with shared_folder() as folder:\n"
        "    print(folder, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    orphan = Path(done.stdout.strip())
    assert done.returncode == -9
    assert orphan.is_dir()
    with shared_folder():
        assert not orphan.exists()
