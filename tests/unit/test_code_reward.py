"""Code from responses: what passes, and what an attack cannot do."""

from __future__ import annotations

import tempfile
from pathlib import Path

import psutil
import pytest

from ratoon.config import RLConfig, build_config
from ratoon.errors import CapabilityError, ConfigError, DataError
from ratoon.records import Prompt
from ratoon.rl.rewards import build_rewards, confined
from ratoon.rl.rewards.code import CodeReward, code_of, row_tests
from ratoon.rl.rewards.pool import RewardPool
from ratoon.rl.rewards.sandbox import passes

confining = pytest.mark.skipif(
    not confined.is_supported(), reason="the sandbox is written for Linux on x86-64"
)
TESTS = "assert f(2) == 4"
FINE = "def f(x): return 4\n"


def _passes(code: str, tests: str = TESTS, timeout_s: float = 10.0) -> bool:
    return passes(code, tests, timeout_s=timeout_s, memory_bytes=400_000_000)


def test_the_code_is_the_last_block_or_all_of_the_response() -> None:
    assert code_of("So\n```python\na\n```\nor\n```\nb\nc\n```\ndone") == "b\nc\n"
    assert code_of("So\n```python\ncut") == "cut"
    assert code_of("def f(): ...") == "def f(): ..."


def test_tests_are_text_or_a_list_of_texts() -> None:
    assert row_tests({"tests": "a"}, "tests") == "a"
    assert row_tests({"test_list": ["a", "b"]}, "test_list") == "a\nb"
    assert row_tests({"imports": ["a"], "tests": "b"}, ("imports", "tests")) == "a\nb"
    assert row_tests({"tests": [1]}, "tests") == row_tests({}, "tests") == ""
    with pytest.raises(DataError, match="'tests'; columns found: level"):
        CodeReward(True).check(Prompt("set", 0, "", (1,), fields={"level": 1}))


@confining
def test_code_passes_if_it_and_its_tests_raise_nothing() -> None:
    assert _passes("import math, re, json, random\ndef f(x): return math.prod([x, x])")
    assert not _passes("def f(x): return x")
    assert not _passes("def f(")
    assert not _passes("x = '\0'")
    assert not _passes("def f(x): return f(x)")


@confining
@pytest.mark.parametrize(
    "code",
    [
        "import os; os._exit(0)",
        "import sys; sys.exit(0)",
        "raise SystemExit",
        "import ctypes; ctypes.string_at(0)",
        "import sys; sys.stdout.write('1'); raise SystemExit(0)",
    ],
)
def test_ending_early_does_not_pass(code: str) -> None:
    assert not _passes(code)


@confining
@pytest.mark.parametrize(
    "attempt",
    [
        "os.fork()",
        "threading.Thread(target=print).start()",
        "subprocess.Popen(['true'])",
        "os.execv('/bin/true', ['true'])",
        "socket.socket()",
        "os.kill(os.getppid(), 0)",
        "os.kill(-1, 9)",
        "open('inside', 'w')",
        "open(TARGET, 'w')",
        "open(TARGET, 'r+')",
        "os.open(TARGET, os.O_RDONLY | os.O_CREAT | os.O_TRUNC)",
        "os.unlink(TARGET)",
        "os.rename(TARGET, TARGET + '2')",
        "os.chmod(TARGET, 0)",
        "os.symlink(TARGET, TARGET + '2')",
        "os.mkdir(TARGET + '2')",
        "os.truncate(TARGET, 0)",
        "os.setpriority(0, 0, 5)",
        "resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
        "mmap.mmap(os.open('/dev/zero', os.O_RDWR), 10)",
    ],
)
def test_what_is_refused_raises_and_leaves_no_trace(tmp_path: Path, attempt: str) -> None:
    target = tmp_path / "file"
    target.write_text("kept")
    modules = "import mmap, os, resource, socket, subprocess, threading\n"
    harmless = f"TARGET = {str(target)!r}\n{modules}{FINE}"
    assert _passes(harmless)
    attacked = f"{harmless}try:\n    {attempt}\nexcept Exception:\n    pass\n"
    assert _passes(attacked), "it must be told, not killed"
    assert not _passes(f"{harmless}{attempt}\n")
    assert target.read_text() == "kept"
    assert list(tmp_path.iterdir()) == [target]


@confining
@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import time; time.sleep(600)",
        "while True: print('x' * 1_000_000)",
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: pass",
        "open('/dev/zero').read()",
        "bytearray(10**10)",
        "10 ** 10 ** 10",
        "x = []\nwhile True: x.append('a' * 1_000_000)",
        "import os\nwhile True:\n    for i in range(32):\n        try: os.write(i, b'x' * 9999)\n"
        "        except OSError: pass",
    ],
)
def test_endless_and_huge_programs_end_and_nothing_is_left(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    children = set(psutil.Process().children(recursive=True))
    assert not _passes(f"{code}\n{FINE}", timeout_s=0.5)
    assert not list(tmp_path.iterdir())
    assert set(psutil.Process().children(recursive=True)) <= children


@confining
def test_the_environment_and_folder_are_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "1")
    assert _passes(
        f"import os\nassert 'SECRET' not in os.environ and os.listdir('.') == []\n{FINE}"
    )


def test_without_the_filter_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confined, "is_supported", lambda: False)
    with pytest.raises(CapabilityError, match="Linux on x86-64"):
        CodeReward(True).load()


def test_a_filter_that_allows_a_call_more_would_be_noticed() -> None:
    """The attacks above have power: each needs a call that the list lacks."""
    attacks = {"fork": 57, "clone": 56, "clone3": 435, "execve": 59, "socket": 41, "kill": 62}
    attacks |= {"open": 2, "unlink": 87, "rename": 82, "ptrace": 101, "io_uring_setup": 425}
    assert not set(attacks.values()) & set(confined.ALLOWED.values())
    assert len(set(confined.ALLOWED.values())) == len(confined.ALLOWED)


def test_code_runs_only_where_the_user_said_so() -> None:
    with pytest.raises(ConfigError, match="allow_code_execution: true"):
        build_rewards([{"kind": "code"}]).load()
    values = {
        "name": "run",
        "model": {"path": "model"},
        "data": {"train": {"kind": "arithmetic"}},
        "rewards": [{"kind": "code"}],
    }
    with pytest.raises(ConfigError, match="allow_code_execution: true"):
        build_config(RLConfig, values)
    values["rewards"] = [{"kind": "code", "allow_code_execution": True, "timeout_s": 10.0}]
    with pytest.raises(ConfigError, match=r"smaller than reward_runtime\.timeout_s = 10"):
        build_config(RLConfig, values)


@confining
def test_reward_processes_run_code() -> None:
    rewards = build_rewards([{"kind": "code", "allow_code_execution": True, "timeout_s": 5.0}])
    prompt = Prompt("set", 0, "", (1,), fields={"tests": [TESTS, "assert f(3) == 9"]})
    rewards.check([prompt])
    with RewardPool(rewards, timeout_s=60) as pool:
        pool.submit("right", prompt, "```python\ndef f(x): return x * x\n```")
        pool.submit("wrong", prompt, f"```python\n{FINE}```")
        assert [result.score for result in pool.drain()] == [1.0, 0.0]
