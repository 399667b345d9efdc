"""Rewards in worker processes: order, time limits, failures, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ratoon.errors import CapabilityError, ConfigError, RewardError
from ratoon.records import Prompt
from ratoon.rl.rewards import build_rewards
from ratoon.rl.rewards.base import Reward, RewardSum, Term
from ratoon.rl.rewards.pool import RewardPool, RewardResult

# What a response makes this reward do is spelt out in the response.
MISCHIEF = """
import os, re, subprocess, sys, threading

def score(response, answer, fields):
    word, _, rest = response.partition(" ")
    if word == "wait":
        while not os.path.exists(rest):
            threading.Event().wait(0.005)
        return 1
    if word == "hang":
        threading.Event().wait(600)
    if word == "spin":  # A regular expression that runs away holds the interpreter's lock.
        re.match(r"(a+)+$", "a" * 64 + "b")
    if word == "child":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        with open(rest, "w") as file:
            file.write(str(child.pid))
        child.wait()
    if word == "exit":
        os._exit(3)
    if word == "raise":
        raise ValueError("not today")
    if word in ("None", "nan"):
        return {"None": None, "nan": float("nan")}[word]
    return float(response == answer)
"""


@pytest.fixture
def mischief(tmp_path: Path) -> RewardSum:
    file = tmp_path / "mischief.py"
    file.write_text(MISCHIEF)
    return build_rewards([{"kind": "python", "function": f"{file}:score"}])


def _prompt(row: int, answer: str = "7") -> Prompt:
    return Prompt("set/train", row, "question", (1, 2), answer, {"row": row})


def _is_gone(pid: int) -> bool:
    """Whether a process ended; one that nobody has waited for yet counts as ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in "ZX"


def _await_end(pid: int, limit_s: float = 30.0) -> bool:
    deadline = time.monotonic() + limit_s
    while not _is_gone(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return _is_gone(pid)


needs_proc = pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="reads process states from /proc"
)


def test_results_come_in_the_order_of_submission_whatever_finishes_first(
    mischief: RewardSum, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    with RewardPool(mischief, num_workers=2, timeout_s=60) as pool:
        pool.submit("slow", _prompt(0), f"wait {gate}")
        for row in range(1, 6):
            pool.submit(row, _prompt(row), "7" if row % 2 else "8")
        early: list[RewardResult] = []
        while len(early) < 5:  # The fast ones do not wait for the slow one.
            early += pool.poll()
        assert [result.key for result in early] == [1, 2, 3, 4, 5]
        assert [result.score for result in early] == [1.0, 0.0, 1.0, 0.0, 1.0]
        assert pool.num_pending == 1
        gate.touch()
        assert [result.key for result in pool.drain()] == ["slow"]
        assert pool.num_pending == 0
        assert pool.poll() == []


def test_the_number_of_workers_changes_no_result(mischief: RewardSum) -> None:
    outcomes = []
    for num_workers in (1, 3):
        with RewardPool(mischief, num_workers=num_workers, on_error="count") as pool:
            for row in range(12):
                pool.submit((row, "key"), _prompt(row), ("7", "raise", "8", "nan")[row % 4])
            outcomes.append((pool.drain(), dict(pool.failures)))
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][1] == {"raised": 3, "not_a_number": 3}


@pytest.mark.parametrize(
    ("response", "kind", "detail"),
    [
        ("hang", "timeout", "longer than 0.5 s"),
        ("spin", "timeout", "longer than 0.5 s"),
        ("exit", "died", "exit code 3"),
        ("raise", "raised", "ValueError: not today"),
        ("None", "not_a_number", "None"),
        ("nan", "not_a_number", "nan"),
    ],
)
def test_a_bad_reward_fails_the_run_or_scores_zero_and_is_counted(
    mischief: RewardSum, response: str, kind: str, detail: str
) -> None:
    limit = 0.5 if kind == "timeout" else 60.0
    with RewardPool(mischief, timeout_s=limit, on_error="count") as pool:
        pool.submit("bad", _prompt(0), response)
        pool.submit("good", _prompt(1), "7")
        bad, good = pool.drain()
        assert (bad.score, bad.failure, bad.parts) == (0.0, kind, {})
        assert (good.score, good.failure, good.parts) == (1.0, None, {"python": 1.0})
        assert dict(pool.failures) == {kind: 1}
    with RewardPool(mischief, timeout_s=limit, on_error="fail") as pool:
        pool.submit("bad", _prompt(41), response)
        with pytest.raises(RewardError, match=f"set/train, row 41, failed.*{detail}") as caught:
            pool.drain()
        assert ".." not in str(caught.value)


def test_of_several_failures_the_first_submitted_is_reported(
    mischief: RewardSum,
) -> None:
    with RewardPool(mischief, num_workers=2, timeout_s=0.5) as pool:
        pool.submit("slow to fail", _prompt(10), "hang")
        pool.submit("quick to fail", _prompt(11), "raise")
        with pytest.raises(RewardError, match="row 10"):
            pool.drain()


def test_a_failure_does_not_wait_for_responses_behind_it(mischief: RewardSum) -> None:
    with RewardPool(mischief, num_workers=2, timeout_s=3600.0) as pool:
        pool.submit("fine", _prompt(10), "7")
        pool.submit("fails", _prompt(11), "raise")
        for row in range(12, 15):
            pool.submit("hangs", _prompt(row), "hang")
        with pytest.raises(RewardError, match="row 11"):
            pool.drain()


def test_what_keeps_a_worker_from_starting_is_raised_before_any_work(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("import a_package_that_is_not_there\n")
    with pytest.raises(ConfigError, match="a_package_that_is_not_there"):
        RewardPool(build_rewards([{"kind": "python", "function": f"{file}:score"}]))
    file.write_text("import os; os._exit(1)\n")
    with pytest.raises(RewardError, match="ended while it imported"):
        RewardPool(build_rewards([{"kind": "python", "function": f"{file}:score"}]))


class _NeedsPackage(Reward):
    def load(self) -> None:
        raise CapabilityError("needs a package")

    def __call__(self, prompt: Prompt, text: str) -> float:
        return 0.0


def test_a_prompt_that_cannot_travel_is_an_error_and_not_a_hang(mischief: RewardSum) -> None:
    with RewardPool(mischief) as pool:
        pool.submit("odd", Prompt("set/train", 0, "", (1,), "7", {"lock": (i for i in ())}), "7")
        with pytest.raises(RewardError, match="broke down"):
            pool.drain()


def test_a_closed_pool_takes_nothing(mischief: RewardSum) -> None:
    pool = RewardPool(mischief)
    pool.close()
    pool.close()
    with pytest.raises(RewardError, match="closed"):
        pool.submit("late", _prompt(0), "7")


@needs_proc
def test_closing_ends_workers_that_are_busy_and_what_they_started(
    mischief: RewardSum, tmp_path: Path
) -> None:
    noted = tmp_path / "child"
    pool = RewardPool(mischief, num_workers=2, timeout_s=300)
    pids = pool.worker_pids
    assert len(pids) == 2
    pool.submit("busy", _prompt(0), "hang")
    pool.submit("parent", _prompt(1), f"child {noted}")
    while not (noted.exists() and noted.read_text()):
        time.sleep(0.005)
    pool.close()
    assert pool.worker_pids == ()
    assert all(_await_end(pid) for pid in (*pids, int(noted.read_text())))


@needs_proc
@pytest.mark.parametrize("response", ["7", "spin"])
def test_no_worker_outlives_a_killed_parent(tmp_path: Path, response: str) -> None:
    file, pids = tmp_path / "mischief.py", tmp_path / "pids"
    file.write_text(MISCHIEF)
    program = f"""
import pathlib, time
from ratoon.records import Prompt
from ratoon.rl.rewards import build_rewards
from ratoon.rl.rewards.pool import RewardPool

if __name__ == "__main__":
    rewards = build_rewards([{{"kind": "python", "function": {f"{file}:score"!r}}}])
    pool = RewardPool(rewards, num_workers=2, timeout_s=1.0, on_error="count")
    pool.submit(0, Prompt("set", 0, "", (1,), "7"), {response!r})
    pathlib.Path({str(pids)!r}).write_text(" ".join(map(str, pool.worker_pids)))
    time.sleep(600)
"""
    script = tmp_path / "parent.py"
    script.write_text(program)
    parent = subprocess.Popen([sys.executable, str(script)])
    try:
        while not (pids.exists() and pids.read_text()):
            assert parent.poll() is None
            time.sleep(0.005)
    finally:
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
    workers = [int(pid) for pid in pids.read_text().split()]
    assert len(workers) == 2
    assert all(_await_end(pid) for pid in workers)


def test_a_missing_package_is_reported_by_the_pool() -> None:
    rewards = RewardSum((Term("needy", 1.0, _NeedsPackage()),))
    with pytest.raises(CapabilityError, match="needs a package"):
        RewardPool(rewards)
