"""`ratoon drafter`: train a drafter by itself, and tell how well one guesses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ratoon.cli.options import AsJson, numbers

if TYPE_CHECKING:
    from ratoon.offline.material import Given, Kind

app = typer.Typer(
    no_args_is_help=True, help="Train a drafter on stored rollouts or prompts, or measure one."
)

Model = Annotated[Path, typer.Argument(help="Directory of the model that is drafted for.")]
Rollouts = Annotated[
    list[str] | None,
    typer.Option(help="Folder of an `rl` run, as PATH or NAME=PATH. May be repeated."),
]
Prompts = Annotated[
    list[str] | None,
    typer.Option(help="JSON lines with a `prompt` each, to draw responses to. May be repeated."),
]
Text = Annotated[
    list[str] | None,
    typer.Option(help="Documents to draw continuations of. May be repeated."),
]


@app.command("train")
def train(
    model: Model,
    output: Annotated[Path, typer.Option(help="Folder of the drafter; must not exist.")],
    rollouts: Rollouts = None,
    prompts: Prompts = None,
    text: Text = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 300,
    draft_vocab_size: Annotated[
        int | None,
        typer.Option(
            min=16,
            help="Tokens that it can propose: those that the model says most often. Default: 8192.",
        ),
    ] = None,
    begun: Annotated[
        Path | None, typer.Option("--from", help="Directory of a drafter to go on with.")
    ] = None,
    responses: Annotated[int, typer.Option(min=1, help="At most so many of each source.")] = 512,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest response that is drawn. Default: 128.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0.01, max=10, help="Of what is drawn. Default: 1.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the start and the order.")] = 0,
) -> None:
    """Train a drafter; `drafter.path` and serving engines load what it writes."""
    from ratoon.loop.drafter_tools import TrainPlan, train_drafter

    plan = TrainPlan(
        steps=steps,
        responses=responses,
        vocabulary=draft_vocab_size,
        begun=begun,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
    )
    train_drafter(model, _given(rollouts, prompts, text), output, plan, _say)
    Console().print(f"drafter: {output}", soft_wrap=True, highlight=False)


@app.command("eval")
def evaluate(
    model: Model,
    drafter: Annotated[Path, typer.Argument(help="Directory of the drafter.")],
    rollouts: Rollouts = None,
    prompts: Prompts = None,
    text: Text = None,
    temperatures: Annotated[str, typer.Option(help="With commas.")] = "0,0.6,1",
    nodes: Annotated[
        int, typer.Option(min=6, max=128, help="Drafted nodes of a tree to verify.")
    ] = 16,
    responses: Annotated[int, typer.Option(min=1, help="At most so many of each source.")] = 64,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest response that is drawn.")] = 128,
    as_json: AsJson = False,
) -> None:
    """How many drafts are accepted, by depth, on prompts that `train` never trains on."""
    from ratoon.errors import ConfigError
    from ratoon.loop.drafter_tools import eval_drafter

    chosen = sorted(set(numbers("--temperatures", temperatures)))
    if not 0 <= chosen[0] <= chosen[-1] <= 10:
        raise ConfigError(f"--temperatures {temperatures}: must lie from 0 to 10")
    record = eval_drafter(
        model,
        drafter,
        _given(rollouts, prompts, text),
        temperatures=chosen,
        nodes=nodes,
        limit=responses,
        max_tokens=max_tokens,
        say=_say,
    )
    if as_json:
        typer.echo(json.dumps(record, indent=2))
    else:
        Console().print(_table(record))


def _given(
    rollouts: list[str] | None, prompts: list[str] | None, text: list[str] | None
) -> list[Given]:
    """What the options name; a name is the path's last part where none is given."""
    from ratoon.offline.material import Given

    options: list[tuple[Kind, list[str] | None]] = [
        ("rollouts", rollouts),
        ("prompts", prompts),
        ("text", text),
    ]
    found = []
    for kind, values in options:
        for value in values or ():
            name, equals, path = value.partition("=")
            if equals and not Path(value).exists():
                found.append(Given(name, kind, Path(path)))
            else:
                found.append(Given(Path(value).name, kind, Path(value)))
    return found


def _table(record: dict[str, Any]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("source", "drafted"):
        table.add_column(column)
    for column in ("T", "nats/token", "tokens per verification"):
        table.add_column(column, justify="right", overflow="fold")
    table.add_column("accepted by depth", overflow="fold")
    for row in record["rows"]:
        shares = ("-" if share is None else f"{share:.2f}" for share in row["accepted"])
        table.add_row(
            row["source"],
            row["way"],
            f"{row['temperature']:g}",
            f"{row['entropy_per_token']:.2f}",
            f"{row['tokens_per_verification']:.2f} [{row['low']:.2f}, {row['high']:.2f}]",
            " ".join(shares),
        )
    return table


def _say(message: str) -> None:
    Console(stderr=True).print(message, highlight=False, markup=False)
