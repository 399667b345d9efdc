"""`ratoon explain`: what speculation did in each rollout, what it saved or cost, and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ratoon.observe.rollouts import RolloutRecord, StepTally, WorkerSteps


def explain(
    run: Annotated[Path, typer.Argument(help="Folder of an `rl` run, such as runs/quickstart.")],
    step: Annotated[
        int | None, typer.Option(min=0, help="Say more of this step's rollouts.")
    ] = None,
) -> None:
    """Say what guessing ahead saved or cost in each rollout, and why it was on or off."""
    from ratoon.errors import DataError
    from ratoon.observe.rollouts import read_rollouts
    from ratoon.observe.run_folder import RunFolder

    folder = RunFolder(run)
    records = list(read_rollouts(folder.rollouts))
    if not records:
        raise DataError(f"{folder.rollouts} holds no rollouts; give the folder of an `rl` run")
    chosen = [record for record in records if step is None or record.step == step]
    if not chosen:
        raise DataError(
            f"--step {step}: there is no such rollout; {run} has those of steps {records[0].step} "
            f"to {records[-1].step}"
        )
    console = Console()
    for record in chosen:
        console.print(rollout_line(record), soft_wrap=True, highlight=False, markup=False)
        if step is not None:
            for line in _details(record):
                console.print(line, soft_wrap=True, highlight=False, markup=False)


def rollout_line(record: RolloutRecord) -> str:
    """A rollout in one line: saved or lost, drafted, accepted, and why guessing was on or off."""
    head = f"{record.split} {record.step}: {record.seconds:.1f} s"
    guessing = [tally for worker in record.workers for tally in worker.guessing]
    if record.off is not None:
        return f"{head}, speculation off by {record.off}"
    if not guessing:
        return f"{head}, speculation off by the tuner: {_reasons(record.workers)}"
    steps = sum(tally.steps for worker in record.workers for tally in worker.tallies)
    share = sum(tally.steps for tally in guessing) / steps
    drafted = sum(tally.drafted for tally in guessing)
    accepted = sum(sum(tally.accepted) for tally in guessing)
    words = [
        head,
        _saved([worker.saved_s for worker in record.workers]),
        f"guessed in {share:.0%} of {steps:,} steps",
        f"{drafted:,} tokens drafted, {accepted:,} accepted",
    ]
    return ", ".join(words) + f"; {_causes(record.workers)}"


def _saved(parts: Sequence[float | None]) -> str:
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return "saved: not measured by this tuner"
    total = sum(known)
    return f"{'saved' if total >= 0 else 'lost'} {abs(total):.2f} s of workers' time"


def _causes(workers: Sequence[WorkerSteps]) -> str:
    """How often each cause switched guessing on or off."""
    counts: dict[str, int] = {}
    for worker in workers:
        for change in worker.changes:
            name = f"{'on' if change.guesses else 'off'} by {change.cause}"
            counts[name] = counts.get(name, 0) + 1
    probes = sum(worker.probes for worker in workers)
    words = [f"{name} {count} x" for name, count in counts.items()]
    switched = f"switched {', '.join(words)}" if words else "never switched"
    return switched + (f", tried the other way {probes} x" if probes else "")


def _reasons(workers: Sequence[WorkerSteps]) -> str:
    return " | ".join(dict.fromkeys(worker.why for worker in workers if worker.tallies))


def _details(record: RolloutRecord) -> Iterator[str]:
    """By worker and live batch: trees, steps, acceptance by depth, times; then the changes."""
    for number, worker in enumerate(record.workers):
        yield f"  worker {number}" + ("" if worker.tallies else ": decoded nothing")
        tallies = sorted(worker.tallies, key=lambda item: (-item.live[0], -item.steps))
        if tallies:
            yield from _aligned([_HEAD, *map(_row, tallies)])
        for change in worker.changes:
            word = "on" if change.guesses else "off"
            yield (
                f"    step {change.step}, {change.live} live: {word} by {change.cause}: "
                f"{change.why}"
            )
        if worker.num_changes > len(worker.changes):
            yield f"    and {worker.num_changes - len(worker.changes)} more changes"


_HEAD = (
    "live",
    "tree",
    "steps",
    "tokens",
    "drafted",
    "accepted by depth",
    "ms",
    "expected",
    "saved",
)


def _row(tally: StepTally) -> tuple[str, ...]:
    """A tally's cells under `_HEAD`; milliseconds are per step, `saved` seconds of all."""
    low, high = tally.live
    shares = " ".join(f"{count / tally.sequences:.0%}" for count in tally.accepted)
    expected, plain = tally.expected_s, tally.plain_s
    saved = "" if plain is None or not tally.guesses else f"{plain - tally.spent_s:+.2f} s"
    return (
        f"{low}" if low == high else f"{low}-{high}",
        tally.tree,
        f"{tally.steps:,}",
        f"{tally.tokens:,}",
        f"{tally.drafted:,}" if tally.guesses else "",
        shares,
        f"{1e3 * tally.spent_s / tally.steps:.1f}",
        "" if expected is None else f"{1e3 * expected / tally.steps:.1f}",
        saved,
    )


def _aligned(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Cells in columns as wide as their widest, the first two to the left, figures to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.ljust(width) if place < 2 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield f"    {'  '.join(cells)}".rstrip()
