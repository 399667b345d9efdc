"""Where a result comes from: command, code, versions, machine, seed."""

from __future__ import annotations

import datetime
import os
import platform
import shutil
import subprocess
import sys
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

_PACKAGES = ("ratoon", "torch", "transformers", "safetensors", "numpy", "pydantic")


def provenance(seed: int) -> dict[str, Any]:
    """Gather what is needed to repeat a run; imports none of the packages it names."""
    return {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "seed": seed,
        "code": _code(),
        "versions": {"python": platform.python_version()} | versions(),
        "machine": {
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
            "processor": _processor(),
            "cores": usable_cores(),
            "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        },
    }


def usable_cores() -> int:
    """Number of cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@cache
def kernels() -> str:
    """What decides how sums are rounded: torch's version and the processor."""
    return f"torch {versions()['torch']} on {_processor()}"


def versions() -> dict[str, str]:
    """Installed versions of the packages that a result depends on."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _processor() -> str:
    listing = Path("/proc/cpuinfo")
    if listing.is_file():
        for line in listing.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _code() -> dict[str, Any]:
    """Commit of the source tree, if the package runs from one; whether the package differs."""
    package = Path(__file__).parents[1]
    git = shutil.which("git")
    if git is None:
        return {"commit": None, "changed": None}

    def ask(*arguments: str) -> str | None:
        answer = subprocess.run(
            [git, "-C", str(package), *arguments], capture_output=True, text=True, check=False
        )
        return answer.stdout.strip() if answer.returncode == 0 else None

    commit = ask("rev-parse", "HEAD")
    # An installed copy may lie inside an unrelated repository: only tracked source counts.
    if commit is None or not ask("ls-files", "--", __file__):
        return {"commit": None, "changed": None}
    return {"commit": commit, "changed": bool(ask("status", "--porcelain", "--", "."))}
