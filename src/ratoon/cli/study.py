"""`ratoon bench pretrain`: the study of training on subnetworks that grow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ratoon.cli.options import AsJson, Page, numbers
from ratoon.cli.tables import plain_table


def study(
    data: Annotated[Path, typer.Argument(help="Folder that `ratoon data prepare` made.")],
    results: Annotated[Path, typer.Option(help="Folder of finished runs; they are not repeated.")],
    arms: Annotated[
        str, typer.Option(help="Arms with commas between, `full` among them; all by default.")
    ] = "all",
    budgets: Annotated[
        str, typer.Option(help="Shares of the full model's seconds, with commas between.")
    ] = "0.75,1",
    lrs: Annotated[
        str, typer.Option(help="Peak learning rates that the first seed tries.")
    ] = "1e-3,2e-3,4e-3",
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of each arm and budget.")] = 3,
    width: Annotated[
        int,
        typer.Option(min=8, help="The model's width; its head fits a vocabulary of 32 times that."),
    ] = 128,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens of the full model's run of budget 1; 20 per parameter of its layers by "
            "default.",
        ),
    ] = None,
    processes: Annotated[int, typer.Option(min=1, help="Runs at a time, one thread each.")] = 1,
    work: Annotated[Path, typer.Option(help="Folder of unfinished runs.")] = Path("runs/study"),
    show: Annotated[
        bool, typer.Option("--show", help="Train nothing; show the finished runs in --results.")
    ] = False,
    page: Page = None,
    as_json: AsJson = False,
) -> None:
    """Pretraining on subnetworks that grow, against the full model at equal seconds."""
    from ratoon.bench.study import Study, load_results, run
    from ratoon.bench.study_arms import ARMS, study_tokens
    from ratoon.bench.study_summary import summarise
    from ratoon.observe.files import check_target, write_atomically
    from ratoon.report.study import render_study

    check_target("--page", page)
    console = Console(stderr=True)
    if not show:
        wanted = Study(
            width=width,
            data=data,
            results=results,
            work=work,
            arms=tuple(ARMS) if arms == "all" else tuple(arms.split(",")),
            budgets=numbers("--budgets", budgets),
            lrs=numbers("--lrs", lrs),
            seeds=seeds,
            tokens=tokens or study_tokens(width),
        )
        run(wanted, processes, lambda text: console.print(text, highlight=False))
    record = summarise(load_results(results))
    if page is not None:
        write_atomically(page, render_study(record))
    if as_json:
        typer.echo(json.dumps(record, indent=2))
    else:
        Console().print(_table(record["rows"]))


def _table(rows: list[dict[str, Any]]) -> Table:
    table = plain_table()
    for column in ("arm", "seconds", "lr", "seeds", "Mtokens", "TFLOP", "loss", "against full"):
        table.add_column(column, justify="left" if column == "arm" else "right", no_wrap=True)
    for row in rows:
        against = "-" if row["against_full"] is None else f"{row['against_full']:+.4f}"
        if row["stderr"] is not None:
            against += f" ± {row['stderr']:.4f}"
        table.add_row(
            row["arm"],
            f"{row['budget']:.0%}",
            f"{row['lr']:g}",
            str(row["seeds"]),
            f"{row['tokens'] / 1e6:.1f}",
            f"{row['flops'] / 1e12:.0f}",
            f"{row['loss']:.4f}",
            against,
        )
    return table
