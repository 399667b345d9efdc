"""`ratoon config`: look at settings without running anything."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Look at settings without running anything.")


class Command(StrEnum):
    """Verbs that take a configuration."""

    RL = "rl"
    SFT = "sft"
    PRETRAIN = "pretrain"


@app.command("show")
def show(
    command: Annotated[Command, typer.Argument(help="The verb that the file is for.")],
    config: Annotated[Path, typer.Argument(help="YAML file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings as section.key=value.")
    ] = None,
) -> None:
    """Check a configuration and show every setting, defaults included.

    The files and folders that it names need not exist yet.
    """
    from ratoon.config import CONFIGS, load_config, resolved_yaml

    settings = load_config(CONFIGS[command], config, overrides or (), may_miss=None)
    typer.echo(resolved_yaml(settings), nl=False)


@app.command("schema")
def schema(
    command: Annotated[Command, typer.Argument(help="The verb that the schema is for.")],
) -> None:
    """Show the JSON Schema of a configuration, for editors that complete and check YAML."""
    from ratoon.config import CONFIGS

    typer.echo(json.dumps(CONFIGS[command].model_json_schema(), indent=2))
