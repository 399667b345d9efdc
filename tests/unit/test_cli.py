from __future__ import annotations

import errno
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer
import yaml
from rich.console import Console

from ratoon.cli import main as cli
from ratoon.cli.live import LiveDisplay, PlainDisplay, duration, make_display
from ratoon.cli.running import summary_table, watching
from ratoon.clock import ManualClock
from ratoon.config import SFTConfig, build_config, resolved_yaml
from ratoon.errors import ConfigError, RewardError
from ratoon.loop.open_run import open_folder
from ratoon.observe.summary import SUMMARY
from ratoon.stopping import Interrupted, Stopped


def run(*arguments: str) -> tuple[int, str, str]:
    """Run the command line in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "ratoon.cli.main", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def sft_values(tmp_path: Path) -> dict[str, object]:
    return {
        "name": "demo",
        "output_dir": str(tmp_path / "runs"),
        "model": {"path": str(tmp_path)},
        "data": {"train": {"kind": "arithmetic"}},
        "epochs": 1,
        "optimizer": {"lr": 1e-4, "schedule": "constant"},
    }


def test_help_names_every_verb_without_importing_torch() -> None:
    code = (
        "import sys\n"
        "from ratoon.cli.main import app\n"
        "try:\n    app(args=['--help'])\n"
        "except SystemExit:\n    pass\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    for verb in ("quickstart", "rl", "sft", "models", "bench", "report", "doctor", "config"):
        assert verb in done.stdout


@pytest.mark.parametrize("verb", ["rl", "sft"])
def test_bad_input_ends_in_one_message_and_exit_code_2(tmp_path: Path, verb: str) -> None:
    config = tmp_path / "bad.yaml"
    config.write_text("name: x\nsteps: many\n", encoding="utf-8")
    code, out, err = run(verb, str(config))
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert "`steps` = 'many'" in err
    assert "Traceback" not in err
    code, _, err = run(verb, str(config), "--debug")
    assert code == 2
    assert "Traceback" in err


def test_showing_a_configuration_checks_it_and_spells_out_the_defaults(tmp_path: Path) -> None:
    config = tmp_path / "sft.yaml"
    values = sft_values(tmp_path) | {"model": {"path": "models/not-here"}}
    config.write_text(yaml.safe_dump(values), encoding="utf-8")
    code, out, _ = run("config", "show", "sft", str(config), "optimizer.lr=1e-4")
    assert code == 0
    assert yaml.safe_load(out)["optimizer"]["lr"] == 1e-4
    code, out, _ = run("config", "schema", "rl")
    assert code == 0
    assert "sampling" in json.loads(out)["properties"]


def test_a_report_of_nothing_is_refused(tmp_path: Path) -> None:
    code, _, err = run("report", str(tmp_path))
    assert code == 2
    assert "holds no run" in err


@pytest.mark.parametrize("share", ["0", "2"])
def test_a_share_that_cannot_be_is_refused_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str], share: str
) -> None:
    with pytest.raises(SystemExit) as left:
        cli.app(args=["bench", "neighbour", "--model", "nowhere", "--share", share])
    assert left.value.code == 2
    assert f"--share {share}: must lie in (0, 1]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["eval", "nowhere", "--tasks", "gsm8k", "--k", "inf"], "--k inf: must be numbers"),
        (["eval", "nowhere", "--tasks", "gsm8k", "--k", "1.5"], "--k 1.5: must be whole numbers"),
        (["simulate", "published", "--workers", "nan"], "--workers nan: must be numbers"),
        (["simulate", "published", "--workers", "1"], "must be whole numbers from 2 to 1024"),
        (["bench", "trace", "--batches", "8,1.5"], "--batches 8,1.5: must be whole numbers"),
        (["bench", "rollout", "--temperatures", "warm"], "--temperatures warm: must be numbers"),
    ],
)
def test_numbers_that_are_none_are_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    with pytest.raises(SystemExit) as left:
        cli.app(args=arguments)
    assert left.value.code == 2
    assert words in capsys.readouterr().err


def test_a_model_is_not_fetched_into_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as left:
        cli.app(args=["models", "fetch", "smollm2-135m", "--to", str(tmp_path / "file" / "x")])
    assert left.value.code == 2
    assert "cannot be written" in capsys.readouterr().err


def test_a_simulation_needs_no_model_and_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    options = ("--workers", "2", "--steps", "2", "--planners", "static", "--page", str(page))
    code, out, _ = run("simulate", "published", "--json", *options)
    assert code == 0
    (row,) = json.loads(out)["rows"]
    assert (row["workers"], row["planner"], row["gain"]) == (2, "static", 1.0)
    assert "static" in page.read_text(encoding="utf-8")
    for wrong in (
        ("calm",),
        ("published", "--workers", "1"),
        ("published", "--planners", "no"),
        ("published", "--page", str(tmp_path / "no" / "page.html")),
    ):
        code, out, err = run("simulate", *wrong)
        assert (code, out) == (2, "")
        assert err.startswith("error: ")
        assert "Traceback" not in err


def test_an_unknown_verb_is_a_usage_error() -> None:
    code, _, err = run("trian")
    assert code == 2
    assert "trian" in err


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (RewardError("reward `f` raised"), 1, "error: reward `f` raised"),
        (ConfigError("`steps` [0] is wrong"), 2, "error: `steps` [0] is wrong"),
        (
            OSError(errno.ENOSPC, "No space left on device", "/x/y"),
            2,
            "No space left on device: /x/y",
        ),
        (KeyboardInterrupt(), 130, "interrupted"),
        (Interrupted(signal.SIGTERM), 143, "interrupted"),
        (Stopped("stopped after step 7"), 75, "note: stopped after step 7"),
    ],
)
def test_the_boundary_turns_errors_into_messages_and_exit_codes(
    capsys: pytest.CaptureFixture[str], error: BaseException, code: int, words: str
) -> None:
    app = typer.Typer(cls=cli.Boundary, pretty_exceptions_enable=False)

    @app.command()
    def fail() -> None:
        raise error

    @app.command()
    def other() -> None: ...

    with pytest.raises(SystemExit) as left:
        app(args=["fail"])
    assert left.value.code == code
    assert words in capsys.readouterr().err


def test_a_mistake_of_ours_keeps_its_traceback() -> None:
    app = typer.Typer(cls=cli.Boundary, pretty_exceptions_enable=False)

    @app.command()
    def fail() -> None:
        raise ZeroDivisionError

    @app.command()
    def other() -> None: ...

    with pytest.raises(ZeroDivisionError):
        app(args=["fail"])


def test_a_run_that_fails_before_it_begins_leaves_no_folder(tmp_path: Path) -> None:
    config = build_config(SFTConfig, sft_values(tmp_path))
    folder = open_folder(config, resume=False)
    with pytest.raises(ConfigError, match="empty data"), watching(folder):
        raise ConfigError("empty data")
    assert not folder.path.exists()


def test_a_resume_beside_a_running_process_touches_nothing(tmp_path: Path) -> None:
    config = build_config(SFTConfig, sft_values(tmp_path))
    folder = open_folder(config, resume=False)
    with watching(folder):
        more = build_config(SFTConfig, sft_values(tmp_path) | {"epochs": None, "steps": 9})
        folder.config.write_text(resolved_yaml(more.model_copy(update={"steps": 3})))
        before = folder.config.read_text()
        with (
            pytest.raises(ConfigError, match="another process is writing"),
            watching(open_folder(more, resume=True)),
        ):
            pass
        assert folder.config.read_text() == before
        assert folder.checkpoints.is_dir()


@pytest.mark.parametrize("length", [{}, {"epochs": None, "steps": 2}])
def test_a_complete_run_is_not_trained_again(tmp_path: Path, length: dict[str, object]) -> None:
    config = build_config(SFTConfig, sft_values(tmp_path) | length)
    folder = open_folder(config, resume=False)
    with watching(folder) as observer:
        observer.metrics(2, {"sft/loss": 1.0})
    folder.model.mkdir()
    with pytest.raises(ConfigError, match="is complete after 2 steps"):
        open_folder(config, resume=True)
    with watching(folder) as observer:
        # As a resumed run does that has not replaced the model yet.
        observer.metrics(2, {"sft/eval_loss": 1.0})
    os.utime(folder.model, (0, 0))
    assert open_folder(config, resume=True) == folder


def test_a_complete_run_may_go_on_for_more_steps(tmp_path: Path) -> None:
    values = sft_values(tmp_path) | {"epochs": None}
    folder = open_folder(build_config(SFTConfig, values | {"steps": 2}), resume=False)
    with watching(folder) as observer:
        observer.metrics(2, {"sft/loss": 1.0})
    folder.model.mkdir()
    assert open_folder(build_config(SFTConfig, values | {"steps": 3}), resume=True) == folder


def test_a_run_that_fails_later_keeps_what_it_wrote(tmp_path: Path) -> None:
    config = build_config(SFTConfig, sft_values(tmp_path))
    folder = open_folder(config, resume=False)

    def fail_late() -> None:
        with watching(folder) as observer:
            observer.metrics(1, {"sft/loss": 1.0})
            raise ConfigError("late")

    with pytest.raises(ConfigError, match="late"):
        fail_late()
    assert folder.metrics.read_text().count("\n") == 1
    with pytest.raises(ConfigError, match="holds another run"):
        open_folder(config, resume=False)
    assert open_folder(config, resume=True) == folder


def plain(clock: ManualClock) -> tuple[PlainDisplay, io.StringIO]:
    text = io.StringIO()
    return PlainDisplay(Console(file=text, width=200), clock), text


def test_without_a_terminal_progress_is_plain_lines_with_the_time_left() -> None:
    clock = ManualClock()
    display, text = plain(clock)
    assert isinstance(make_display(Console(file=io.StringIO())), PlainDisplay)
    display.phase("GRPO", 4)
    for step in (1, 2, 3, 4):
        clock.advance(30)
        display.status({"worker/0": "rollout", "live_batch": 3})
        display.step(step, {"reward/mean": 0.25 * step, "policy/kl": None})
    display.note("tolerant [numerics]")
    display.close()
    assert text.getvalue().splitlines() == [
        "GRPO (4 steps)",
        "GRPO 1/4, reward 0.250, 1:30 left",
        "GRPO 2/4, reward 0.500, 1:00 left",
        "GRPO 3/4, reward 0.750, 0:30 left",
        "GRPO 4/4, reward 1.000",
        "NOTE: tolerant [numerics]",
    ]


def test_fast_steps_do_not_flood_the_log_but_the_last_is_said() -> None:
    clock = ManualClock()
    display, text = plain(clock)
    display.phase("SFT", 100)
    for step in range(1, 101):
        clock.advance(0.1)
        display.step(step, {"sft/loss": 2.0})
    lines = text.getvalue().splitlines()
    assert 4 <= len(lines) <= 8
    assert lines[-1].startswith("SFT 100/100")


def test_the_time_left_of_a_resumed_phase_counts_only_steps_made_now() -> None:
    clock = ManualClock()
    display, text = plain(clock)
    display.phase("GRPO", 10, done=5)
    clock.advance(20)
    display.step(6, {})
    assert text.getvalue().splitlines()[-1] == "GRPO 6/10, 1:20 left"


def test_the_live_picture_shows_phase_figures_and_workers() -> None:
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=110, color_system=None)
    assert isinstance(make_display(console), LiveDisplay)
    clock = ManualClock()
    display = LiveDisplay(console, clock)
    display.phase("GRPO", 10)
    clock.advance(10)
    display.step(2, {"reward/mean": 0.5, "idle/frac": 0.25})
    display.status({"worker/1": "drafter_training", "worker/0": "rollout", "live_batch": 3})
    display.status({"finished": 61, "total": 64, "acceptance_length": 2.125})
    with console.capture() as shown:
        console.print(display.picture())
    picture = shown.get()
    for words in ("GRPO", "2/10", "0:40 left", "reward 0.500", "idle 25%", "61/64 responses"):
        assert words in picture
    assert picture.index("worker 0 ● rollout") < picture.index("worker 1 ● drafter training")
    assert "3 live" in picture
    assert "2.12 tokens per verification" in picture
    display.note("fell back")
    display.close()
    assert "✓ GRPO" in text.getvalue()
    assert "NOTE: fell back" in text.getvalue()


def test_a_phase_that_failed_is_not_ticked_off() -> None:
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=80, color_system=None)
    display = LiveDisplay(console, ManualClock())
    display.phase("SFT", 3)
    display.close(succeeded=False)
    assert "✗ SFT" in text.getvalue()
    assert "✓" not in text.getvalue()


def test_durations_are_short() -> None:
    assert [duration(s) for s in (0, 42, 725, 3723)] == ["0:00", "0:42", "12:05", "1:02:03"]


def test_the_closing_table_shows_each_figure_with_its_meaning() -> None:
    text = io.StringIO()
    summary = dict.fromkeys(SUMMARY, None) | {
        "tokens_identical": False,
        "rollout_speedup": 1.4321,
        "spot_tokens": 412000,
        "notes": ["a"],
    }
    Console(file=text, width=160).print(summary_table(summary))
    lines = text.getvalue().splitlines()
    assert len(lines) == len(SUMMARY)
    row = {line.split()[0]: line.split()[1] for line in lines}
    assert row["tokens_identical"] == "NO"
    assert row["rollout_speedup"] == "1.432"
    assert row["spot_tokens"] == "412,000"
    assert row["flips"] == "-"


def test_the_doctor_looks_at_everything_and_says_what_helps() -> None:
    from ratoon.cli.doctor import examine

    findings = {finding.name: finding for finding in examine()}
    assert {"Python", "torch", "numerics", "cores", "memory", "disk", "gguf"} <= findings.keys()
    for finding in findings.values():
        assert finding.verdict == "good" or finding.advice, finding
