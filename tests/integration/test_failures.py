"""What happens when something fails or is stopped: one clear error, and nothing left behind.

Every test also checks, by the fixture `nothing_left`, that no process and no shared folder stays.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from lab import (
    Driver,
    Faults,
    Lab,
    all_gone,
    equal_bits,
    metrics_of,
    parameters_of,
    responses_of,
)

from ratoon.errors import RewardError, StaleVersionError, WorkerDiedError, WorkerLostError
from ratoon.loop.checkpoints import latest_checkpoint
from ratoon.observe.run_folder import RunFolder

REWARDS = """
import threading

CALLS = []

def score(response, answer, fields):
    kind = KIND
    if kind == "hang later":
        CALLS.append(response)
        kind = "hang" if len(CALLS) > 16 else "fine"
    if kind == "count":
        kind = ["raise", "nan", "none", "fine"][len(response) % 4]
    if kind == "raise":
        raise ValueError("not today")
    if kind == "hang":
        if LOG is not None:
            with open(LOG, "a") as file:
                file.write('{"hangs": "reward"}\\n')
        threading.Event().wait()
    return {"nan": float("nan"), "none": None, "fine": 1.0}[kind]
"""


def reward(tmp_path: Path, kind: str, log: Path | None = None) -> str:
    """An override that makes the reward a function that behaves like this."""
    file = tmp_path / "score.py"
    file.write_text(
        f"KIND = {kind!r}\nLOG = {None if log is None else str(log)!r}\n{REWARDS}",
        encoding="utf-8",
    )
    return f"rewards=[{{kind: python, function: '{file}:score'}}]"


def test_drafter_training_that_fails_fails_the_run(lab: Lab, faults: Faults) -> None:
    faults.hold_tail()
    faults.add("spot", "raise")
    with pytest.raises(WorkerLostError, match="worker 1 failed: ZeroDivisionError: injected"):
        lab.rl("run", "data.eval=null", "evaluation={}")


@pytest.mark.parametrize("phase", ["rollout", "spot", "update"])
def test_a_worker_that_is_killed_ends_the_run_and_is_named(
    lab: Lab, faults: Faults, phase: str
) -> None:
    """Also when the other worker fails first, because it lost its colleague in a common sum."""
    faults.hold_tail()
    faults.add(phase, "kill")
    alone = ["data.eval=null", "evaluation={}", "workers.max_restarts=0"]
    with pytest.raises(WorkerLostError, match=r"worker 1 \(process \d+\) ended with exit code -9"):
        lab.rl("run", *alone)


@pytest.mark.parametrize(
    ("phase", "action"), [("rollout", "kill once"), ("rollout", "stop once"), ("spot", "kill once")]
)
def test_a_worker_that_is_lost_in_a_rollout_is_replaced_and_no_bit_differs(
    lab: Lab, faults: Faults, reference: RunFolder, exact: bool, phase: str, action: str
) -> None:
    """Lost in the evaluation before training, or in the first step while it trains the drafter."""
    faults.hold_tail()
    faults.add(phase, action)
    run = lab.rl("run", "steps=2", "workers.timeout_s=4.0", "replay_last_step=true")
    assert faults.log.with_suffix(".struck").exists()
    assert not (run.path / "recovery").exists()
    if exact:
        for step in (1, 2):
            drawn, expected = (
                [(row["row"], row["sample"], row["token_ids"]) for row in responses_of(one, step)]
                for one in (run, reference)
            )
            assert drawn == expected
        assert equal_bits(parameters_of(run, 2), parameters_of(reference, 2))


def test_a_run_gives_up_when_too_many_workers_are_lost(lab: Lab, faults: Faults) -> None:
    faults.add("rollout", "kill", worker=0)
    alone = ["data.eval=null", "evaluation={}", "workers.max_restarts=1", "steps=1"]
    with pytest.raises(WorkerDiedError, match="ended with exit code -9") as raised:
        lab.rl("run", *alone)
    assert "replaced before: 1 of workers.max_restarts = 1" in raised.value.__notes__[0]


def test_of_two_workers_that_fail_the_first_is_named(lab: Lab, faults: Faults) -> None:
    faults.add("update", "raise")
    with pytest.raises(WorkerLostError, match="worker 1 failed: ZeroDivisionError: injected"):
        lab.rl("run")


def test_a_run_that_ended_before_its_first_checkpoint_begins_anew(lab: Lab, faults: Faults) -> None:
    faults.add("update", "raise", worker=0)
    alone = ["workers.count=1", "steps=1"]
    with pytest.raises(WorkerLostError):
        lab.rl("run", *alone)
    faults.clear()
    run = lab.rl("run", *alone, resume=True)
    assert sorted(metrics_of(run)) == [0, 1]


def test_drafter_weights_that_are_not_what_was_announced_fail_the_run(
    lab: Lab, faults: Faults
) -> None:
    faults.hold_tail()
    faults.add("publish", "corrupt")
    with pytest.raises(StaleVersionError, match="announced as"):
        lab.rl("run", "data.eval=null", "evaluation={}")


def test_a_published_drafter_reaches_the_worker_that_still_decodes(
    lab: Lab, faults: Faults
) -> None:
    """Also when publications overtake each other: what is out of date is passed over."""
    faults.hold_tail()
    faults.add("spot", "overtake")
    run = lab.rl("run", "data.eval=null", "evaluation={}")
    metrics = metrics_of(run)
    versions = sum(metrics[step]["drafter/versions"] for step in (1, 2))
    assert versions >= 10
    taken = faults.events("took")
    assert max(event["took"] for event in taken) == versions
    assert max(event["serves"] for event in taken) == versions


@pytest.mark.parametrize(
    ("kind", "words"),
    [("raise", "not today"), ("hang", "longer than 2 s"), ("nan", "returned nan")],
)
def test_a_reward_that_fails_ends_the_run(lab: Lab, tmp_path: Path, kind: str, words: str) -> None:
    with pytest.raises(RewardError, match=words):
        lab.rl(
            "run",
            reward(tmp_path, kind),
            "reward_runtime.timeout_s=2.0",
            "data.eval=null",
            "evaluation={}",
            "workers.count=1",
        )


def test_failing_rewards_are_counted_if_so_configured(lab: Lab, tmp_path: Path) -> None:
    run = lab.rl(
        "run", reward(tmp_path, "count"), "reward_runtime.on_error=count", "workers.count=1"
    )
    metrics = metrics_of(run)
    assert 0 < metrics[1]["reward/errors"] < 16
    assert metrics[1]["reward/mean"] == 1 - metrics[1]["reward/errors"] / 16


@pytest.mark.parametrize("phase", ["loading", "update"])
def test_where_there_is_nothing_to_save_or_at_the_second_signal_the_run_ends_at_once(
    lab: Lab, faults: Faults, phase: str
) -> None:
    """An update changes the policy, so the first signal waits for its end."""
    config = lab.file(lab.rl_config("run", "data.eval=null", "evaluation={}"))
    faults.add(phase, "hang")
    with Driver(faults, "rl", str(config)) as driver:
        driver.wait_for("hangs")
        family = driver.family()
        driver.signal()
        if phase == "update":
            driver.hears("once more ends the run at once")
            driver.signal()
        code, out, err = driver.result()
        assert (code, out) == (130, "")
        assert "interrupted" in err
        assert "Traceback" not in err
        assert all_gone(family, 10)
    assert not shared_folders(faults)


def test_a_group_that_is_told_to_end_saves_its_last_complete_step(
    lab: Lab, faults: Faults, tmp_path: Path
) -> None:
    """SIGTERM reaches the workers, too; the step at hand waits for a reward that never comes."""
    overrides = ["data.eval=null", "evaluation={}", "checkpoint={every: 100, keep: 10}"]
    overrides += [reward(tmp_path, "hang later", faults.log), "reward_runtime.timeout_s=600.0"]
    faults.add("save", "announce")
    config = lab.file(lab.rl_config("run", *overrides))
    with Driver(faults, "rl", str(config)) as driver:
        driver.wait_for("hangs")
        family = driver.family()
        driver.signal(signal.SIGTERM)
        code, out, err = driver.result()
        assert (code, out) == (75, "")
        assert "note: stopped after step 1, which is saved; go on with --resume" in err
        assert "Traceback" not in err
        assert all_gone(family, 10)
    assert not shared_folders(faults)
    saved = latest_checkpoint(RunFolder(lab.folder / "run"))
    assert saved is not None
    assert saved.step == 1


@pytest.mark.parametrize("phase", ["update", "reward"])
def test_a_driver_that_dies_takes_all_processes_with_it(
    lab: Lab, faults: Faults, tmp_path: Path, phase: str
) -> None:
    """In `update` worker 0 waits for worker 1 in a common sum; rewards have ten minutes."""
    overrides = ["data.eval=null", "evaluation={}"]
    if phase == "reward":
        overrides += [reward(tmp_path, "hang", faults.log), "reward_runtime.timeout_s=600.0"]
        faults.add("save", "announce")
    else:
        faults.add(phase, "hang")
    config = lab.file(lab.rl_config("run", *overrides))
    with Driver(faults, "rl", str(config)) as driver:
        driver.wait_for("hangs")
        family = driver.family()
        assert len([process for process in family if process.is_running()]) >= 3
        driver.kill()
        assert all_gone(family, 30)
    assert not shared_folders(faults)


def shared_folders(faults: Faults) -> list[str]:
    """Folders of the run's workers that still exist."""
    folders = [event["folder"] for event in faults.events("folder")]
    return [folder for folder in folders if Path(folder).exists()]
