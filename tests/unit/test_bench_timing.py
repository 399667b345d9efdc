from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

PROGRAM = """
import time
from ratoon.bench.neighbour import _neighbour
from ratoon.bench.timing import worker_pool

if __name__ == "__main__":
    with _neighbour(1.0, 0), worker_pool():
        print("ready", flush=True)
        time.sleep(600)
"""


def test_no_measuring_process_outlives_a_killed_benchmark(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PROGRAM)
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        family = psutil.Process(parent.pid).children(recursive=True)
    finally:
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
    assert len(family) >= 2
    deadline = time.monotonic() + 60.0
    while any(_is_alive(process) for process in family) and time.monotonic() < deadline:
        time.sleep(0.01)
    left = [process for process in family if _is_alive(process)]
    for process in left:
        process.kill()
    assert not left


def _is_alive(process: psutil.Process) -> bool:
    """Whether it runs; one that has ended waits for the system to notice."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
