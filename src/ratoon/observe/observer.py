"""One object through which a run reports: files that are the truth, and a display."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from types import TracebackType

from ratoon.clock import Clock, MonotonicClock
from ratoon.observe.completions import Split, StoredCompletion, write_completions
from ratoon.observe.display import Display, Silent, Status
from ratoon.observe.files import FolderLock
from ratoon.observe.rollouts import RolloutRecord
from ratoon.observe.run_folder import RunFolder
from ratoon.observe.sinks import MetricsFile, StepsFile, Values
from ratoon.observe.timeline import Activity, Timeline


class Observer:
    """Writes metrics, spans and completions of one run, and shows progress.

    Without a folder it only shows: a run of several parts (as the quickstart) makes one such
    observer and calls `within(folder)` for each part. Use as a context manager, or call `close`;
    if the block raises before anything was recorded, a folder that was made for it is taken back.

    Raises: ConfigError if another process writes into the folder.
    """

    def __init__(
        self,
        folder: RunFolder | None = None,
        display: Display | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.display: Display = display or Silent()
        self.clock: Clock = clock or MonotonicClock()
        self._start_s = self.clock.now()
        self._folder = folder
        self._lock = FolderLock(folder.path) if folder else None
        if folder:
            folder.settle()
        self._metrics = MetricsFile(folder.metrics) if folder else None
        self._rollouts: StepsFile | None = None
        self._timeline = Timeline(folder.timeline, self.clock) if folder else None

    def within(self, folder: RunFolder) -> Observer:
        """An observer of another folder that shares this one's display and clock."""
        return Observer(folder, self.display, self.clock)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the run began; of a resumed run, those before it was interrupted, too."""
        return self.clock.now() - self._start_s

    def phase(self, name: str, total: int | None = None, *, done: int = 0) -> None:
        """Begin a phase of `total` steps, such as "GRPO"; `done` of them before a resume."""
        self.display.phase(name, total, done=done)

    def status(self, **values: str | int | float) -> None:
        """Show what is going on inside a step; see `Display` for the keys."""
        self.display.status(values)

    def status_of(self, values: Status) -> None:
        """Like `status`, for keys that are no identifiers, such as `worker/0`."""
        self.display.status(values)

    def note(self, text: str) -> None:
        """Say something that must not be overlooked."""
        self.display.note(text)

    def metrics(self, step: int, values: Values) -> None:
        """Record and show metrics of `step`, which is 0 before the first update.

        Raises:
            ValueError: a metric is not registered.
            NumericsError: a value is NaN or infinite.
        """
        if self._metrics:
            self._metrics.write(step, self.elapsed_s, values)
        if self._timeline:
            self._timeline.save()
        self.display.step(step, values)

    def span(
        self, worker: str, activity: Activity, start_s: float, end_s: float, *, step: int
    ) -> None:
        """Record what a worker did, in seconds of the clock; see `Timeline.span`."""
        if self._timeline:
            self._timeline.span(worker, activity, start_s, end_s, step=step)

    def completions(self, split: Split, step: int, rows: Iterable[StoredCompletion]) -> None:
        """Store the responses of a step."""
        if self._folder:
            write_completions(self._folder.completions, split, step, rows)

    def rollout(self, record: RolloutRecord) -> None:
        """Record what a rollout's decode steps were."""
        if self._folder:
            self._rollouts = self._rollouts or StepsFile(self._folder.rollouts)
            self._rollouts.append(asdict(record))

    def resume_after(self, step: int) -> None:
        """Forget everything later than `step`, the step of the checkpoint resumed from."""
        if self._folder and self._metrics and self._timeline:
            self._metrics.truncate_after(step)
            self._start_s -= self._metrics.last_time_s()
            if self._folder.rollouts.exists():
                self._rollouts = self._rollouts or StepsFile(self._folder.rollouts)
                self._rollouts.truncate_after(step)
            self._timeline.truncate_after(step)
            self._folder.drop_completions_after(step)

    def close(self) -> None:
        """Save what is pending and close the files; the display stays with its owner."""
        self._close_files()
        self._unlock()

    def _close_files(self) -> None:
        if self._timeline:
            self._timeline.save()
        for file in (self._metrics, self._rollouts):
            if file:
                file.close()

    def _unlock(self) -> None:
        if self._lock:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> Observer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close_files()
        if kind is not None and self._folder:
            # Before others may write: what they wrote would go too.
            self._folder.remove_if_unused()
        self._unlock()
