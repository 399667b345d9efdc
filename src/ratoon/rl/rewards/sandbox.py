"""Running untrusted code in a process that can do nothing but compute, and no longer than allowed.

What is enforced, by the kernel: see `confined`. What is not: the code may read whatever files this
user may read (it cannot send them anywhere), and share processor and caches with everything else.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ratoon.errors import CapabilityError
from ratoon.rl.rewards import confined


def passes(code: str, tests: str, *, timeout_s: float, memory_bytes: int) -> bool:
    """Whether `code` and then `tests` run to their end without an error.

    Both run as one module in an empty folder, with a cleared environment and the
    installed packages.

    Args:
        code: Python source from a response.
        tests: Python source that raises if `code` is wrong.
        timeout_s: longest time, the interpreter's start included. Seconds.
        memory_bytes: largest address space.

    Raises:
        CapabilityError: the system has no such filter, or refuses it.
    """
    if not confined.is_supported():
        raise CapabilityError(
            "Running code from responses needs seccomp filters, here written for Linux on x86-64; "
            "score it elsewhere, or by a function of your own (kind python)."
        )
    token = secrets.token_hex(16)
    task = {
        "code": code,
        "tests": tests,
        "token": token,
        "timeout_s": timeout_s,
        "memory_bytes": memory_bytes,
    }
    with tempfile.TemporaryDirectory(prefix="ratoon-code-") as folder:
        answer = _run(json.dumps(task).encode(), Path(folder), timeout_s, len(token))
    if answer.startswith(b"refused"):
        raise CapabilityError(f"Code from responses cannot be run here: {answer.decode()}.")
    return answer == token.encode()


def _run(task: bytes, folder: Path, timeout_s: float, length: int) -> bytes:
    """The first bytes that the confined process answers; it is over when this returns."""
    process = subprocess.Popen(
        # Isolated: no user site, no environment, no folder of the caller's on the path.
        [sys.executable, "-I", str(Path(confined.__file__))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=folder,
        # Libraries that start threads when they are imported must not try.
        env={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    deadline = time.monotonic() + timeout_s
    answer = b""
    try:
        process.stdin.write(task)
        process.stdin.close()
        # What it writes beyond the token is never read: it cannot fill memory here.
        while len(answer) < max(length, 200):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([process.stdout], [], [], left)[0]:
                return b""
            part = os.read(process.stdout.fileno(), 200)
            if not part:
                return answer
            answer += part
        return answer
    except BrokenPipeError:
        return b""
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
