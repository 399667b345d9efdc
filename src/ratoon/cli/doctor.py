"""`ratoon doctor`: is this machine fit, and what would make it faster."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import typer
from rich.console import Console

from ratoon.cli.tables import plain_table

Verdict = Literal["good", "slow", "bad"]
_STYLES = {"good": "green", "slow": "yellow", "bad": "bold red"}
_MIN_FREE_GB = 2.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at. `slow` works but costs speed or a feature; `bad` does not work."""

    name: str
    verdict: Verdict
    found: str
    advice: str = ""


def doctor() -> None:
    """Check Python, torch, the processor, memory, disk and the optional packages."""
    findings = examine()
    table = plain_table(header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column()
    for finding in findings:
        words = finding.found + (f"\n[dim]{finding.advice}[/]" if finding.advice else "")
        style = _STYLES[finding.verdict]
        table.add_row(finding.name, f"[{style}]{finding.verdict}[/]", words)
    Console().print(table)
    if any(finding.verdict == "bad" for finding in findings):
        raise typer.Exit(1)


def examine() -> list[Finding]:
    """Look at everything. Imports torch."""
    return [_python(), *_torch(), _transformers(), *_machine(), *_extras()]


def _python() -> Finding:
    return Finding("Python", "good", platform.python_version())


def _torch() -> list[Finding]:
    try:
        import torch
    except ImportError as error:
        return [Finding("torch", "bad", f"cannot be imported: {error}", "pip install torch")]
    from ratoon.models.prepacked import prepacking_available

    build = "CUDA " + torch.version.cuda if torch.version.cuda else "CPU build"
    findings = [Finding("torch", "good", f"{torch.__version__}, {build}")]
    if torch.cuda.is_available():
        findings.append(Finding("GPU", "good", torch.cuda.get_device_name()))
    capability = torch.backends.cpu.get_cpu_capability()
    if prepacking_available():
        findings.append(Finding("vector unit", "good", f"{capability}, multiplies bf16"))
        findings.append(
            Finding("numerics", "good", "prepacked bf16 operators: the same bits for any batch")
        )
        return findings
    findings.append(
        Finding(
            "vector unit",
            "slow",
            f"{capability}, does not multiply bf16",
            "models compute in float32, with twice the memory and, on small batches, time",
        )
    )
    if torch.backends.mkl.is_available():
        findings.append(
            Finding("numerics", "good", "float32 by MKL: a run proves the same bits when it starts")
        )
    else:
        findings.append(
            Finding(
                "numerics",
                "slow",
                "neither prepacked bf16 operators nor MKL",
                "rollouts run in tolerant numerics, which counts the tokens that rounding flips",
            )
        )
    return findings


def _transformers() -> Finding:
    try:
        import transformers
        from transformers import AutoTokenizer  # noqa: F401
    except (ImportError, RuntimeError) as error:
        advice = "pip install 'transformers>=5'"
        if "torchvision" in str(error):
            advice = "torchvision does not fit this torch: pip uninstall -y torchvision"
        return Finding("transformers", "bad", str(error).splitlines()[0], advice)
    return Finding("transformers", "good", transformers.__version__)


def _machine() -> list[Finding]:
    import psutil

    from ratoon.observe.provenance import usable_cores

    cores, memory = usable_cores(), psutil.virtual_memory()
    findings = [
        Finding(
            "cores",
            "good" if cores > 1 else "slow",
            f"{cores} usable",
            "" if cores > 1 else "with one core nothing is ever idle, and nothing trains for free",
        ),
        Finding(
            "memory",
            "good" if memory.available > 4e9 else "slow",
            f"{memory.available / 1e9:.1f} of {memory.total / 1e9:.1f} GB free",
            "" if memory.available > 4e9 else "SmolLM2-135M with two workers needs about 4 GB",
        ),
    ]
    free = shutil.disk_usage(Path.cwd()).free / 1e9
    findings.append(
        Finding(
            "disk",
            "good" if free > _MIN_FREE_GB else "bad",
            f"{free:.1f} GB free here",
            "" if free > _MIN_FREE_GB else f"a run needs about {_MIN_FREE_GB:.0f} GB",
        )
    )
    if not os.access(Path.cwd(), os.W_OK):
        findings.append(
            Finding("folder", "bad", f"{Path.cwd()} cannot be written to", "go to another folder")
        )
    return [*findings, *_huge_pages()]


def _huge_pages() -> list[Finding]:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.is_file():
        return []
    words = setting.read_text(encoding="utf-8")
    mode = words.partition("[")[2].partition("]")[0]
    if mode != "never":
        return [Finding("huge pages", "good", f"{mode}: workers ask for them")]
    return [
        Finding(
            "huge pages",
            "slow",
            "never",
            "about 20 % faster decoding: echo madvise > " + str(setting),
        )
    ]


def _extras() -> list[Finding]:
    wanted = (
        ("reasoning_gym", "tasks", "procedural tasks"),
        ("gguf", "gguf", "`ratoon models fetch smollm2-135m`"),
    )
    return [
        Finding(module, "good", f"installed: {purpose}")
        if importlib.util.find_spec(module)
        else Finding(
            module,
            "slow",
            f"not installed: no {purpose}",
            f'pip install "ratoon\\[{extra}]"',
        )
        for module, extra, purpose in wanted
    ]
