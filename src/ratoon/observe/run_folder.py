"""The folder of one run: made once, never overwritten, resumed only by its own configuration."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, count, takewhile
from pathlib import Path
from typing import Any

import yaml

from ratoon.errors import CapabilityError, ConfigError
from ratoon.observe.files import read_lines, to_json, write_atomically

DEFAULT_FREE_BYTES = 500_000_000
# Size of a timeline without spans.
_EMPTY_BYTES = 4
# What may change when a run is resumed: a section counts with all its keys.
_MAY_CHANGE = {
    "steps": "`steps` may grow",
    "reward_runtime": "`reward_runtime` may change",
    "workers.timeout_s": "`workers.timeout_s` may change",
    "workers.max_restarts": "`workers.max_restarts` may change",
}


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths of one run. Example: `RunFolder(Path("runs/demo"))`.

    `is_new` says that this process made the folder; `pending_config` is what `settle` writes.
    """

    path: Path
    is_new: bool = field(default=False, compare=False)
    pending_config: str | None = field(default=None, compare=False)

    @classmethod
    def create(
        cls,
        path: Path,
        *,
        config_yaml: str,
        provenance: dict[str, Any],
        free_bytes: int = DEFAULT_FREE_BYTES,
    ) -> RunFolder:
        """Make the folder and write the resolved configuration and the provenance into it.

        Raises:
            ConfigError: the folder exists and is not empty, or cannot be made.
            CapabilityError: the disk has less than `free_bytes` left.
        """
        if is_occupied(path):
            raise ConfigError(
                f"`name` / `output_dir`: {path} holds another run and nothing is overwritten; "
                "give another `name`, remove the folder, or go on with that run by --resume"
            )
        folder = cls(path, is_new=True)
        check_space(path, free_bytes)
        try:
            path.mkdir(parents=True, exist_ok=True)
            folder.completions.mkdir()
            folder.checkpoints.mkdir()
            write_atomically(folder.config, config_yaml)
            write_atomically(folder.provenance, to_json(provenance, indent=2) + "\n")
        except OSError as error:
            raise ConfigError(
                f"`output_dir`: {path} cannot be made ({error.strerror}); name a folder that "
                "can be written to"
            ) from None
        return folder

    @classmethod
    def resume(cls, path: Path, *, config_yaml: str) -> RunFolder:
        """Open the folder of an earlier run to go on with it, perhaps for more `steps`.

        How rewards are computed (`reward_runtime`), and how long and how often workers may be lost,
        may change too: a run that was ended by these needs that. Nothing is written yet: another
        process may be at work there. Who has the right to write calls `settle`.

        Raises:
            ConfigError: there is no run, it was made with another configuration, or has done all
                its steps.
        """
        folder = cls(path, pending_config=config_yaml)
        if not folder.config.is_file():
            raise ConfigError(
                f"`name` / `output_dir`: {path} holds no run to resume; leave --resume out"
            )
        before, values = _settings(folder.config), yaml.safe_load(config_yaml)
        changed = _changed_keys(before, values)
        if changed:
            known = dict(_flat("", values)).keys() | values.keys()
            free = [words for key, words in _MAY_CHANGE.items() if key in known]
            raise ConfigError(
                f"{'; '.join(changed)} in {folder.config}; a run is resumed with the settings it "
                f"began with, only {' and '.join(free)}"
            )
        _refuse_other_rates(before, values)
        folder._refuse_finished(values.get("steps"))
        return folder

    def settle(self) -> None:
        """Write the configuration that the run is resumed with; needs the right to write.

        What a killed process left half written is removed, and the summary of fewer steps.
        """
        if self.pending_config is not None:
            for folder in self._folders():
                folder.mkdir(exist_ok=True)
            self.summary.unlink(missing_ok=True)
            for part in (*self.path.glob(".*.part"), *self.checkpoints.glob(".*.part")):
                shutil.rmtree(part)
            write_atomically(self.config, self.pending_config)

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.resolved.yaml"

    @property
    def provenance(self) -> Path:
        """Command, code, versions, machine, seed."""
        return self.path / "provenance.json"

    @property
    def metrics(self) -> Path:
        """One record a line; the truth about the run."""
        return self.path / "metrics.jsonl"

    @property
    def rollouts(self) -> Path:
        """What each rollout's decode steps were, one rollout a line."""
        return self.path / "rollouts.jsonl"

    @property
    def timeline(self) -> Path:
        """Spans per worker in Chrome's trace format."""
        return self.path / "timeline.json"

    @property
    def summary(self) -> Path:
        """The figures that the run is judged by."""
        return self.path / "summary.json"

    @property
    def certificate(self) -> Path:
        """What a check of the stored responses found."""
        return self.path / "certificate.json"

    @property
    def report(self) -> Path:
        """The self-contained page."""
        return self.path / "report.html"

    @property
    def completions(self) -> Path:
        """Folder of stored responses."""
        return self.path / "completions"

    @property
    def checkpoints(self) -> Path:
        """Folder of states to resume from."""
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        """The trained model in Hugging Face format."""
        return self.path / "model"

    @property
    def adapter(self) -> Path:
        """The trained adapters in PEFT's format, which the model holds merged."""
        return self.path / "adapter"

    @property
    def growth(self) -> Path:
        """What an adaptive schedule of pretraining has decided."""
        return self.path / "growth.json"

    @property
    def drafter(self) -> Path:
        """The trained drafter, a by-product."""
        return self.path / "drafter"

    def remove_if_unused(self) -> None:
        """Take back what `create` made here, if the run ended before it wrote anything of its own.

        Needs the right to write. A folder that another process made is left alone.
        """
        if not self.is_new or not self.path.is_dir():
            return
        for file in (self.metrics, self.timeline):
            if file.exists() and file.stat().st_size > _EMPTY_BYTES:
                return
        files = (self.metrics, self.rollouts, self.timeline, self.config, self.provenance)
        places = [self.path, *(folder for folder in self._folders() if folder.is_dir())]
        held = {held for place in places for held in place.iterdir()}
        if held - {*files, *self._folders()}:
            return
        for file in files:
            file.unlink(missing_ok=True)
        for folder in (*self._folders(), self.path):
            with contextlib.suppress(OSError):
                folder.rmdir()

    def refuse_complete(self, steps: int | None) -> None:
        """Refuse to train again what has been trained: the model was saved after the last step.

        `steps` is None for a run whose length follows from its data.

        Raises:
            ConfigError: the run is complete.
        """
        if not (self.model.is_dir() and self.metrics.is_file()):
            return
        # A resumed run records before it replaces the model of the shorter one.
        is_newest = self.model.stat().st_mtime_ns >= self.metrics.stat().st_mtime_ns
        done = max((row["step"] for row in read_lines(self.metrics, "step")), default=0)
        if is_newest and (steps is None or done >= steps):
            advice = "give another `name`" if steps is None else "raise `steps` to go on with it"
            raise ConfigError(f"the run in {self.path} is complete after {done} steps; {advice}")

    def _refuse_finished(self, steps: int | None) -> None:
        numbers = (path.name.rpartition("_")[2] for path in self.checkpoints.glob("step_*"))
        done = max((int(number) for number in numbers if number.isdecimal()), default=0)
        if steps is not None and (done > steps or (done == steps and self.summary.is_file())):
            raise ConfigError(
                f"`steps` = {steps}: the run in {self.path} has done {done} steps already; raise "
                "`steps` to go on with it"
            )

    def _folders(self) -> tuple[Path, Path]:
        return self.completions, self.checkpoints

    def drop_completions_after(self, step: int) -> None:
        """Remove responses of later steps: the run resumes there."""
        for file in self.completions.glob("*_*.jsonl"):
            if int(file.stem.rpartition("_")[2]) > step:
                file.unlink()


def check_space(path: Path, needed_bytes: int) -> None:
    """Make sure that the disk of `path`, which need not exist, has room.

    Raises:
        CapabilityError: fewer than `needed_bytes` are free.
    """
    existing = next(place for place in (path, *path.absolute().parents) if place.exists())
    free = shutil.disk_usage(existing).free
    if free < needed_bytes:
        raise CapabilityError(
            f"the disk of {path} has {free / 1e9:.2f} GB free, but the run needs about "
            f"{needed_bytes / 1e9:.2f} GB; free some space or give another `output_dir`"
        )


def is_occupied(path: Path) -> bool:
    """Whether `path` is a file, or a folder that holds something."""
    return path.exists() and (not path.is_dir() or any(path.iterdir()))


def first_free(path: Path) -> Path:
    """`path` itself, or the first of `path-2`, `path-3`, ... that holds nothing."""
    return next(candidate for candidate in _numbered(path) if not is_occupied(candidate))


def last_used(path: Path) -> Path:
    """The one before `first_free`, or `path` itself if that is free."""
    used = list(takewhile(is_occupied, _numbered(path)))
    return used[-1] if used else path


def _numbered(path: Path) -> Iterator[Path]:
    return chain([path], (path.with_name(f"{path.name}-{number}") for number in count(2)))


def _settings(path: Path) -> dict[str, Any]:
    """A run's resolved configuration. Raises: ConfigError if it is damaged."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        values = str(error).splitlines()[0]
    if not isinstance(values, dict):
        raise ConfigError(f"{path} is damaged ({values}); the run cannot be resumed without it")
    return values


def _refuse_other_rates(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Raise ConfigError where more steps would have given those already done another rate."""
    schedule = after.get("optimizer", {}).get("schedule")
    if before.get("steps") != after.get("steps") and schedule in ("linear", "cosine"):
        raise ConfigError(
            f"`steps` is {after.get('steps')} but was {before.get('steps')}: with "
            f"`optimizer.schedule` = {schedule} the steps already done would have had other "
            "learning rates; go on with the same `steps`, or begin a run with schedule: constant"
        )


def _changed_keys(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Name the settings that differ between two resolved configurations and must not."""
    old, new = (dict(_flat("", values)) for values in (before, after))
    return [
        f"`{key}` is {new.get(key)!r} but was {old.get(key)!r}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and not {key, key.partition(".")[0]} & _MAY_CHANGE.keys()
    ]


def _flat(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _flat(f"{key}.{name}" if key else name, item)
    else:
        yield key, value
