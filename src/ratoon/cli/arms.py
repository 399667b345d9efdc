"""`ratoon bench rl`: one recipe's steps, decoded in different ways."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ratoon.cli.options import AsJson, Page
from ratoon.cli.tables import plain_table


def arms(
    config: Annotated[Path, typer.Argument(help="YAML file, as for `ratoon rl`.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings as section.key=value.")
    ] = None,
    results: Annotated[
        Path, typer.Option(help="Folder of finished runs; they are not repeated.")
    ] = Path("runs/bench-rl"),
    only: Annotated[
        str, typer.Option("--arms", help="Arms with commas between, `plain` among them.")
    ] = "all",
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each arm.")] = 3,
    drafter: Annotated[
        Path | None,
        typer.Option(help="Drafter to begin with; by default one is trained in a run before."),
    ] = None,
    page: Page = None,
    as_json: AsJson = False,
) -> None:
    """Steps of a recipe: plain, with a frozen drafter, with spot training; the same tokens."""
    from ratoon.bench.rl import ARMS, Comparison, run
    from ratoon.cli.running import load_settings
    from ratoon.config import RLConfig
    from ratoon.observe.files import check_target, write_atomically
    from ratoon.report.arms import render_arms

    check_target("--page", page)
    console = Console(stderr=True)
    settings = load_settings(RLConfig, config, overrides or ())
    comparison = Comparison(
        values=settings.model_dump(mode="json", exclude_unset=True),
        arms=tuple(ARMS) if only == "all" else tuple(only.split(",")),
        rounds=rounds,
        results=results,
        work=results / "unfinished",
        drafter=drafter,
    )
    record = run(comparison, lambda text: console.print(text, highlight=False))
    if page is not None:
        write_atomically(page, render_arms(record))
    if as_json:
        typer.echo(json.dumps(record, indent=2))
        return
    Console().print(_table(record))
    Console().print(
        f"tokens identical: {'yes' if record['tokens_identical'] else 'NO'}; rollout is "
        f"{record['rollout_share_plain']:.0%} of a plain step; {record['steps']} steps, "
        f"{record['rounds']} rounds",
        highlight=False,
    )


def _table(record: dict[str, Any]) -> Table:
    table = plain_table()
    table.add_column("arm", no_wrap=True)
    columns = {
        "step": "step",
        "amdahl_share": "Amdahl",
        "rollout_s": "rollout s",
        "step_s": "step s",
        "idle_filled": "filled",
        "acceptance_length": "accepted",
    }
    for name in ("rollout", *columns.values()):
        table.add_column(name, justify="right", no_wrap=True)
    for row in record["rows"]:
        low, high = row["rollout_low"], row["rollout_high"]
        rollout = f"{row['rollout']:.2f} [{low:.2f}, {high:.2f}]"
        table.add_row(row["arm"], rollout, *(_figure(row[key]) for key in columns))
    return table


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
