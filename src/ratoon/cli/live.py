"""Progress in the terminal, and plain lines where there is no terminal.

The live picture has three parts: the phase with its bar, the newest figures, and a line for
each worker that says what it is doing.
"""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ratoon.clock import Clock, MonotonicClock
from ratoon.observe.display import Display, Status
from ratoon.observe.sinks import Values

SHOWN: dict[str, tuple[str, str]] = {
    "reward/mean": ("reward", ".3f"),
    "eval/reward": ("held out", ".3f"),
    "sft/loss": ("loss", ".3f"),
    "sft/eval_loss": ("held-out loss", ".3f"),
    "pretrain/loss": ("loss", ".3f"),
    "pretrain/eval_loss": ("held-out loss", ".3f"),
    "pretrain/stage": ("stage", ".0f"),
    "pretrain/tokens_per_s": ("tokens/s", ",.0f"),
    "pretrain/flops": ("FLOP", ".2e"),
    "pretrain/saved_frac": ("saved", ".0%"),
    "response/tokens_mean": ("length", ".0f"),
    "response/tokens_max": ("longest", ".0f"),
    "speculation/acceptance_length": ("accepted", ".2f"),
    "speculation/saved_s": ("s saved", "+.1f"),
    "policy/entropy": ("entropy", ".2f"),
    "idle/frac": ("idle", ".0%"),
    "idle/filled_frac": ("filled", ".0%"),
    "time/step_s": ("s/step", ".1f"),
}
_COLOURS = {
    "rollout": "blue",
    "idle": "bright_black",
    "drafter_training": "yellow",
    "reward": "green",
    "update": "magenta",
    "weights": "red",
    "evaluation": "cyan",
    "loading": "bright_black",
}
_MIN_GAP_S = 2.0


def make_display(console: Console) -> Display:
    """A live picture on a terminal, else plain lines."""
    return LiveDisplay(console) if console.is_terminal else PlainDisplay(console)


class _Progress:
    """What both displays know: phase, steps done, figures, and how long the rest will take."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.name = ""
        self.total: int | None = None
        self.done = 0
        self.values: dict[str, float] = {}
        self._begun_s = clock.now()
        self._offset = 0

    def begin(self, name: str, total: int | None, done: int) -> None:
        self.name, self.total, self.done, self._offset = name, total, done, done
        self.values = {}
        self._begun_s = self.clock.now()

    def advance(self, step: int, values: Values) -> None:
        self.done = max(self.done, step)
        # A new mapping each time: the picture is drawn by another thread.
        self.values = self.values | {k: v for k, v in values.items() if v is not None}

    @property
    def elapsed_s(self) -> float:
        return self.clock.now() - self._begun_s

    @property
    def remaining_s(self) -> float | None:
        """Time of the steps to come at the pace so far; None while there is no pace."""
        made = self.done - self._offset
        if self.total is None or made <= 0:
            return None
        return self.elapsed_s / made * max(self.total - self.done, 0)

    def figures(self) -> list[tuple[str, str]]:
        return [
            (word, format(self.values[name], spec))
            for name, (word, spec) in SHOWN.items()
            if name in self.values
        ]


def duration(seconds: float) -> str:
    """Time as people read it: `0:42`, `12:05`, `1:02:03`."""
    hours, rest = divmod(round(seconds), 3600)
    if hours:
        return f"{hours}:{rest // 60:02d}:{rest % 60:02d}"
    return f"{rest // 60}:{rest % 60:02d}"


class PlainDisplay:
    """One line a phase, and one line a step, but not more often than every two seconds."""

    def __init__(self, console: Console, clock: Clock | None = None) -> None:
        self._console = console
        self._progress = _Progress(clock or MonotonicClock())
        self._said_s = float("-inf")

    def phase(self, name: str, total: int | None = None, *, done: int = 0) -> None:
        """Say that a phase begins."""
        self._progress.begin(name, total, done)
        self._said_s = float("-inf")
        self._say(f"{name}" + (f" ({total} steps)" if total else ""))

    def step(self, step: int, values: Values) -> None:
        """Say what a step brought; the last step of a phase is never left out."""
        progress = self._progress
        progress.advance(step, values)
        now = progress.clock.now()
        if now - self._said_s < _MIN_GAP_S and progress.done != progress.total:
            return
        self._said_s = now
        of = f"/{progress.total}" if progress.total else ""
        words = [f"{progress.name} {progress.done}{of}"]
        words += [f"{word} {figure}" for word, figure in progress.figures()]
        if progress.remaining_s:
            words.append(f"{duration(progress.remaining_s)} left")
        self._say(", ".join(words))

    def status(self, values: Status) -> None:
        """Leave it out: lines are for what stays."""

    def note(self, text: str) -> None:
        """Say it."""
        self._say(f"NOTE: {text}")

    def close(self, *, succeeded: bool = True) -> None:
        """Do nothing: the lines stand."""

    def _say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, highlight=False, markup=False)


class LiveDisplay:
    """A picture that is redrawn in place a few times a second."""

    def __init__(self, console: Console, clock: Clock | None = None) -> None:
        self._progress = _Progress(clock or MonotonicClock())
        self._status: dict[str, str | int | float] = {}
        self._live = Live(
            console=console, get_renderable=self.picture, refresh_per_second=4, transient=True
        )
        self._live.start()

    def phase(self, name: str, total: int | None = None, *, done: int = 0) -> None:
        """Leave a line about the phase that ends, and begin another."""
        self._close_phase()
        self._status = {}
        self._progress.begin(name, total, done)

    def step(self, step: int, values: Values) -> None:
        """Move the bar and show the newest figures."""
        self._progress.advance(step, values)

    def status(self, values: Status) -> None:
        """Show what workers are doing."""
        self._status = {**self._status, **values}

    def note(self, text: str) -> None:
        """Print above the picture, where it stays."""
        self._live.console.print(Text(f"NOTE: {text}", style="yellow"))

    def close(self, *, succeeded: bool = True) -> None:
        """Leave a line about the last phase and take the picture away."""
        if self._live.is_started:
            self._close_phase(succeeded)
            self._live.stop()

    def _close_phase(self, succeeded: bool = True) -> None:
        progress = self._progress
        if not progress.name:
            return
        mark = ("✓ ", "green") if succeeded else ("✗ ", "red")
        line = Text.assemble(mark, (progress.name, "bold"))
        line.append(f"  {duration(progress.elapsed_s)}", style="dim")
        for word, figure in progress.figures() if progress.done else ():
            line.append(f"  {word} ", style="dim")
            line.append(figure)
        self._live.console.print(line)
        progress.name = ""

    def picture(self) -> RenderableType:
        """What is shown at this moment."""
        if not self._progress.name:
            return Text("")
        parts: list[RenderableType] = [self._bar()]
        if figures := self._progress.figures():
            line = Text("  ")
            for word, figure in figures:
                line.append(f"{word} ", style="dim").append(f"{figure}   ", style="bold")
            parts.append(line)
        parts.append(self._workers())
        return Group(*parts)

    def _bar(self) -> Table:
        progress = self._progress
        grid = Table.grid(padding=(0, 1))
        grid.add_column(no_wrap=True)
        grid.add_column(ratio=1, min_width=10, max_width=40)
        grid.add_column(no_wrap=True)
        of = f"{progress.done}/{progress.total}" if progress.total else str(progress.done or "")
        left = progress.remaining_s
        times = duration(progress.elapsed_s) + (f", {duration(left)} left" if left else "")
        bar = ProgressBar(
            total=progress.total,
            completed=progress.done,
            width=36,
            pulse=progress.total is None,
            animation_time=progress.elapsed_s,
        )
        grid.add_row(
            Text(progress.name, style="bold"), bar, Text.assemble(of, "  ", (times, "dim"))
        )
        return grid

    def _workers(self) -> Text:
        """Lines such as `worker 0 ● rollout`, then what the rollout as a whole has reached."""
        text = Text()
        for key, activity in sorted(self._status.items()):
            name, slash, number = key.partition("/")
            if name != "worker" or not slash:
                continue
            colour = _COLOURS.get(str(activity), "white")
            text.append(f"  worker {number} ", style="dim").append("● ", style=colour)
            text.append(f"{str(activity).replace('_', ' '):<18}", style=colour)
        words = self._rollout_words()
        if words:
            text.append("\n  " if text else "  ").append("  ".join(words), style="dim")
        return text

    def _rollout_words(self) -> list[str]:
        status, words = self._status, []
        if "total" in status:
            words.append(f"{status.get('finished', 0)}/{status['total']} responses")
        if "live_batch" in status:
            words.append(f"{status['live_batch']} live")
        if isinstance(length := status.get("acceptance_length"), int | float):
            words.append(f"{length:.2f} tokens per verification")
        if "drafter_version" in status:
            words.append(f"drafter version {status['drafter_version']}")
        if isinstance(share := status.get("update_frac"), int | float):
            words.append(f"update {share:.0%}")
        return words
