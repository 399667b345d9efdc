"""`ratoon simulate`: planners against each other on a simulated clock."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ratoon.cli.options import AsJson, Page, whole_numbers

_COLUMNS = (
    ("step s", "step_s", ",.1f"),
    ("to best", "to_bound", ".3f"),
    ("gain", "gain", ".2f"),
    ("idle", "idle_frac", ".1%"),
    ("trained", "trained_tokens", ",.0f"),
    ("msg/s", "messages_per_s", ",.1f"),
    ("CPU ms", "coordinator_ms", ",.0f"),
    ("CPU", "coordinator_share", ".2%"),
)


def simulate(
    scenario: Annotated[
        str,
        typer.Argument(
            help="published, drift, bad_drafter, unequal_workers or crash_storm.",
            show_default=False,
        ),
    ],
    workers: Annotated[
        str, typer.Option(help="Numbers of workers, with commas between.")
    ] = "2,8,32,128",
    planners: Annotated[
        str,
        typer.Option(
            help="Planners with commas between. `known` is longest first told the lengths."
        ),
    ] = "longest_first,first_come,static,known",
    steps: Annotated[int, typer.Option(min=2, help="Rollouts; the first is not counted.")] = 4,
    seed: Annotated[int, typer.Option(min=0, help="Seed of lengths and crashes.")] = 0,
    lengths: Annotated[
        Path | None, typer.Option(help="Folder of a run whose response lengths to use.")
    ] = None,
    costs: Annotated[
        Path | None,
        typer.Option(help="JSON list of pairs, rows and seconds of a forward pass, ascending."),
    ] = None,
    page: Page = None,
    as_json: AsJson = False,
) -> None:
    """Rollouts of many workers without a model: the real coordinator, planners and tuner.

    `to best` is the step's time over what no order could beat, `gain` the time of `static` over it,
    `trained` the drafter's tokens, `CPU` the coordinator's processor time, also as a share of the
    step.
    """
    from ratoon.observe.files import check_target, write_atomically
    from ratoon.report.simulation import render_simulation
    from ratoon.simulate.scenarios import named, with_costs, with_recorded
    from ratoon.simulate.study import check_arms, run_study

    check_target("--page", page)
    chosen = named(scenario)
    if lengths is not None:
        chosen = with_recorded(chosen, lengths)
    if costs is not None:
        chosen = with_costs(chosen, costs)
    counts, arms = whole_numbers("--workers", workers, 2, 1024), check_arms(planners.split(","))
    console = Console(stderr=True)
    with console.status("simulating") as status:
        record = run_study(chosen, counts, arms=arms, steps=steps, seed=seed, say=status.update)
    if page is not None:
        write_atomically(page, render_simulation(record))
    if as_json:
        typer.echo(json.dumps(record, indent=2))
    else:
        Console().print(planner_table(record))


def planner_table(record: dict[str, Any]) -> Table:
    """One row for each number of workers and planner; 80 columns hold it for 1,024 workers."""
    title = f"{record['scenario']}: {record['meaning']}"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    table.add_column("workers", justify="right", no_wrap=True)
    table.add_column("planner", no_wrap=True)
    for name, _, _ in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for row in record["rows"]:
        values = ((row[key], style) for _, key, style in _COLUMNS)
        cells = ("-" if value is None else format(value, style) for value, style in values)
        table.add_row(str(row["workers"]), row["planner"], *cells)
    return table
