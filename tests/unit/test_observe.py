from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from ratoon.clock import ManualClock
from ratoon.errors import CapabilityError, ConfigError, DataError, NumericsError
from ratoon.observe.completions import completions_path, stored, write_completions
from ratoon.observe.files import read_lines, write_atomically
from ratoon.observe.observer import Observer
from ratoon.observe.provenance import provenance
from ratoon.observe.run_folder import RunFolder, check_space, first_free
from ratoon.observe.sinks import MetricsFile
from ratoon.observe.summary import SUMMARY, write_summary
from ratoon.observe.timeline import Timeline, read_events
from ratoon.records import Completion, DrawKey, Prompt, Stream


def make_folder(path: Path) -> RunFolder:
    return RunFolder.create(path, config_yaml="seed: 1\nsteps: 2\n", provenance={}, free_bytes=0)


def test_metrics_are_on_disk_as_soon_as_they_are_written(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.write(1, 2.5, {"reward/mean": 0.25, "policy/kl": None, "reward/part/format": 1.0})
    assert list(read_lines(metrics.path)) == [
        {"step": 1, "time_s": 2.5, "reward/mean": 0.25, "policy/kl": None, "reward/part/format": 1}
    ]


def test_an_unregistered_metric_or_a_nan_is_an_error(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match="`reward/maen` is not registered; near: reward/mean"):
        metrics.write(1, 0.0, {"reward/maen": 1.0})
    with pytest.raises(NumericsError, match="`policy/loss` is nan at step 4"):
        metrics.write(4, 0.0, {"policy/loss": float("nan")})
    assert metrics.path.read_text() == ""


def test_resuming_drops_later_records_and_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    for step in range(4):
        metrics.write(step, step, {"reward/mean": 0.0})
    with path.open("a") as file:
        file.write('{"step": 4, "tim')
    metrics.truncate_after(2)
    metrics.write(3, 9.0, {"reward/mean": 1.0})
    assert [(row["step"], row["time_s"]) for row in read_lines(path)] == [
        (0, 0),
        (1, 1),
        (2, 2),
        (3, 9),
    ]


def test_a_broken_line_in_the_middle_is_an_error_not_skipped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1\n{"step": 2}\n')
    with pytest.raises(DataError, match="line 1"):
        list(read_lines(path))


def test_the_timeline_is_valid_json_after_every_save_and_goes_on_after_a_restart(
    tmp_path: Path,
) -> None:
    clock = ManualClock(100.0)
    timeline = Timeline(tmp_path / "timeline.json", clock)
    assert json.loads(timeline.path.read_text()) == []
    timeline.span("worker 0", "rollout", 100.0, 101.5, step=1)
    timeline.save()
    timeline.span("worker 0", "idle", 101.5, 102.0, step=1)
    timeline.span("worker 1", "update", 102.0, 103.0, step=2)
    timeline.save()
    timeline.save()

    later = Timeline(timeline.path, ManualClock(5000.0))
    later.span("worker 1", "rollout", 5000.0, 5001.0, step=2)
    later.save()
    events = json.loads(timeline.path.read_text())
    spans = [(e["name"], e["ts"], e["dur"], e["tid"]) for e in events if e["ph"] == "X"]
    assert spans == [
        ("rollout", 0, 1_500_000, 1),
        ("idle", 1_500_000, 500_000, 1),
        ("update", 2_000_000, 1_000_000, 2),
        ("rollout", 3_000_000, 1_000_000, 2),
    ]
    assert [e["args"]["name"] for e in events if e["ph"] == "M"] == ["worker 0", "worker 1"]

    later.truncate_after(1)
    later.span("worker 1", "idle", 5001.0, 5002.0, step=2)
    later.save()
    spans = [e for e in json.loads(timeline.path.read_text()) if e["ph"] == "X"]
    # What was dropped leaves no gap.
    assert [(e["name"], e["ts"]) for e in spans][-1] == ("idle", 2_000_000)
    assert [e["name"] for e in spans] == ["rollout", "idle", "idle"]


def test_a_timeline_cut_short_by_a_crash_is_continued(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "timeline.json", ManualClock())
    timeline.span("worker 0", "rollout", 0.0, 1.0, step=1)
    timeline.span("worker 0", "idle", 1.0, 2.0, step=1)
    timeline.save()
    timeline.path.write_bytes(timeline.path.read_bytes()[:-20])
    later = Timeline(timeline.path, ManualClock(7.0))
    later.span("worker 0", "update", 7.0, 8.0, step=2)
    later.save()
    spans = [e for e in json.loads(timeline.path.read_text()) if e["ph"] == "X"]
    assert [(e["name"], e["ts"]) for e in spans] == [("rollout", 0), ("update", 1_000_000)]


def test_a_span_of_unknown_kind_or_negative_length_is_an_error(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "timeline.json", ManualClock())
    with pytest.raises(ValueError, match="sleeping"):
        timeline.span("worker 0", "sleeping", 0.0, 1.0, step=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="ends before"):
        timeline.span("worker 0", "idle", 1.0, 0.0, step=1)


def test_a_run_folder_is_never_overwritten(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "runs" / "demo")
    assert folder.config.read_text() == "seed: 1\nsteps: 2\n"
    folder.metrics.write_text("x")
    with pytest.raises(ConfigError, match=r"demo holds another run.*--resume"):
        make_folder(folder.path)
    assert folder.metrics.read_text() == "x"
    assert first_free(folder.path) == tmp_path / "runs" / "demo-2"


def test_a_run_is_resumed_only_with_its_own_settings_but_for_more_steps(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "demo")
    resumed = RunFolder.resume(folder.path, config_yaml="seed: 1\nsteps: 9\n")
    assert resumed == folder
    with Observer(resumed):
        assert folder.config.read_text() == "seed: 1\nsteps: 9\n"
    with pytest.raises(ConfigError, match="`seed` is 2 but was 1"):
        RunFolder.resume(folder.path, config_yaml="seed: 2\nsteps: 9\n")
    with pytest.raises(ConfigError, match="holds no run to resume"):
        RunFolder.resume(tmp_path / "other", config_yaml="seed: 2\n")


def test_more_steps_are_refused_where_rates_would_have_been_others(tmp_path: Path) -> None:
    before = "steps: 2\noptimizer:\n  schedule: cosine\n"
    folder = RunFolder.create(tmp_path / "run", config_yaml=before, provenance={}, free_bytes=0)
    assert RunFolder.resume(folder.path, config_yaml=before) == folder
    with pytest.raises(ConfigError, match="other learning rates"):
        RunFolder.resume(folder.path, config_yaml=before.replace("2", "3"))
    constant = before.replace("cosine", "constant")
    folder = RunFolder.create(tmp_path / "even", config_yaml=constant, provenance={}, free_bytes=0)
    assert RunFolder.resume(folder.path, config_yaml=constant.replace("2", "3")) == folder


def test_how_rewards_are_computed_may_change_on_resume(tmp_path: Path) -> None:
    before = "seed: 1\nsteps: 2\nreward_runtime:\n  on_error: fail\n"
    folder = RunFolder.create(tmp_path / "run", config_yaml=before, provenance={}, free_bytes=0)
    after = before.replace("fail", "count")
    assert RunFolder.resume(folder.path, config_yaml=after) == folder
    with pytest.raises(ConfigError, match="only `steps` may grow and `reward_runtime` may change"):
        RunFolder.resume(folder.path, config_yaml=after.replace("seed: 1", "seed: 2"))


def test_how_long_workers_may_be_silent_may_change_on_resume_and_their_number_not(
    tmp_path: Path,
) -> None:
    before = "steps: 2\nworkers:\n  count: 2\n  timeout_s: 300.0\n"
    folder = RunFolder.create(tmp_path / "run", config_yaml=before, provenance={}, free_bytes=0)
    assert RunFolder.resume(folder.path, config_yaml=before.replace("300", "900")) == folder
    with pytest.raises(ConfigError, match=r"`workers.count` is 3 but was 2.*`workers.timeout_s`"):
        RunFolder.resume(folder.path, config_yaml=before.replace("count: 2", "count: 3"))


def test_a_change_anywhere_in_the_package_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "src" / "ratoon"
    (package / "observe").mkdir(parents=True)
    (package / "observe" / "provenance.py").write_text("")
    (package / "engine.py").write_text("exact = True")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *arguments], check=True)
    monkeypatch.setattr(
        "ratoon.observe.provenance.__file__", str(package / "observe" / "provenance.py")
    )
    (tmp_path / "notes.txt").write_text("not of the package")
    code = provenance(seed=0)["code"]
    assert len(code["commit"]) == 40
    assert code["changed"] is False
    (package / "engine.py").write_text("exact = False")
    assert provenance(seed=0)["code"] == code | {"changed": True}


def test_a_full_disk_is_found_before_the_work_starts(tmp_path: Path) -> None:
    with pytest.raises(CapabilityError, match=r"GB free, but the run needs about 1000000000\.00"):
        check_space(tmp_path, 10**18)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="`output_dir`"):
        make_folder(tmp_path / "file" / "demo")


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "new \ud800")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_summary_holds_every_figure_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    values = dict.fromkeys(SUMMARY, None)
    write_summary(path, {**values, "notes": []})
    assert set(json.loads(path.read_text())) == {*SUMMARY, "notes"}
    with pytest.raises(ValueError, match="flips"):
        write_summary(path, {k: v for k, v in values.items() if k != "flips"})
    with pytest.raises(ValueError, match="speed"):
        write_summary(path, {**values, "speed": 1})


def test_a_stored_response_holds_its_whole_key(tmp_path: Path) -> None:
    key = DrawKey(seed=7, stream=Stream.EVAL, round=3, dataset="sums", row=41, sample=2, attempt=1)
    completion = Completion(key, (1, 2), (3, 4), (-0.5, -0.25), "stop", policy_version=3)
    prompt = Prompt("sums", 41, "1 + 1", (1, 2), answer="2")
    row = stored(completion, prompt, response="2", reward=1.0, reward_parts={"number": 1.0})
    write_completions(tmp_path, "eval", 3, [row])
    (read,) = read_lines(completions_path(tmp_path, "eval", 3))
    names = ("seed", "stream", "round", "dataset", "row", "sample", "attempt")
    assert [read[name] for name in names] == [7, "eval", 3, "sums", 41, 2, 1]
    assert read["token_ids"] == [3, 4]
    assert read["reward_parts"] == {"number": 1.0}


def test_an_observer_that_resumes_forgets_what_came_later(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "demo")
    clock = ManualClock()
    with Observer(folder, clock=clock) as observer:
        for step in range(3):
            observer.span("worker 0", "rollout", step, step + 1, step=step)
            observer.completions("train", step, [])
            observer.metrics(step, {"reward/mean": 0.0})
            clock.advance(1.0)
    clock.advance(500.0)
    with Observer(folder, clock=clock) as observer:
        clock.advance(2.0)
        observer.resume_after(1)
        assert observer.elapsed_s == 3.0
    assert [row["step"] for row in read_lines(folder.metrics)] == [0, 1]
    assert sorted(p.name for p in folder.completions.iterdir()) == [
        "train_000000.jsonl",
        "train_000001.jsonl",
    ]
    spans = [e for e in json.loads(folder.timeline.read_text()) if e["ph"] == "X"]
    assert [e["args"]["step"] for e in spans] == [0, 1]


def test_provenance_names_versions_machine_and_seed() -> None:
    found = provenance(seed=5)
    assert found["seed"] == 5
    assert found["versions"]["torch"][0].isdigit()
    assert found["machine"]["cores"] >= 1
    assert json.loads(json.dumps(found)) == found


def test_a_run_is_written_by_one_process_at_a_time(tmp_path: Path) -> None:
    folder = RunFolder.create(
        tmp_path / "run", config_yaml="steps: 1\n", provenance={}, free_bytes=0
    )
    with Observer(folder), pytest.raises(ConfigError, match="another process is writing"):
        Observer(folder)
    with Observer(folder):
        assert not [path for path in folder.path.iterdir() if "lock" in path.name]


def test_who_may_not_write_changes_and_takes_back_nothing(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "run")
    with Observer(folder):
        before = {path: path.read_bytes() for path in folder.path.iterdir() if path.is_file()}
        other = RunFolder.resume(folder.path, config_yaml="seed: 1\nsteps: 9\n")
        with pytest.raises(ConfigError, match="another process is writing"), Observer(other):
            pass
        after = {path: path.read_bytes() for path in folder.path.iterdir() if path.is_file()}
        assert after == before


def test_a_resumed_run_that_ends_at_once_leaves_the_folder(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "run")
    resumed = RunFolder.resume(folder.path, config_yaml="seed: 1\nsteps: 9\n")
    with pytest.raises(KeyboardInterrupt), Observer(resumed):
        raise KeyboardInterrupt
    assert folder.provenance.is_file()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b'{"time_s": 1}\n{"step": 2}\n', "line 1: must be an object with step"),
        (b'{"step": 1, "x": "\xff"}\n{"step": 2}\n', "line 1: not JSON"),
        (b'[1]\n{"step": 2}\n', "line 1: must be an object"),
    ],
)
def test_records_that_are_damaged_are_named(tmp_path: Path, text: bytes, words: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(text)
    with pytest.raises(DataError, match=words):
        list(read_lines(path, "step"))


def test_a_timeline_that_is_something_else_is_named(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    path.write_text('{"traceEvents": []}')
    with pytest.raises(DataError, match="no event of a timeline"):
        read_events(path)


@pytest.mark.parametrize("text", [b"a: [", b"just words", b"\xff\xfe"])
def test_a_damaged_configuration_of_a_run_is_named(tmp_path: Path, text: bytes) -> None:
    folder = make_folder(tmp_path / "demo")
    folder.config.write_bytes(text)
    with pytest.raises(ConfigError, match=r"config\.resolved\.yaml is damaged"):
        RunFolder.resume(folder.path, config_yaml="seed: 1\n")


def test_what_others_left_among_checkpoints_does_not_matter(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "demo")
    (folder.checkpoints / "step_of_mine").mkdir()
    folder.completions.rmdir()
    text = folder.config.read_text()
    with Observer(RunFolder.resume(folder.path, config_yaml=text)):
        assert folder.completions.is_dir()
