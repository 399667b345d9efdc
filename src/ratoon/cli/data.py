"""`ratoon data`: text into token files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(no_args_is_help=True, help="Prepare data for pretraining.")


@app.callback()
def data() -> None:
    """Keep `prepare` a word of its own, though it is the only one so far."""


@app.command("prepare")
def prepare(
    destination: Annotated[Path, typer.Argument(help="Folder to make.")],
    inputs: Annotated[
        list[Path],
        typer.Argument(help="Text, JSONL or Parquet files, .xz, .gz, .tar, or folders of them."),
    ],
    tokenizer: Annotated[
        Path | None, typer.Option(help="Directory with a Hugging Face tokenizer.")
    ] = None,
    train_bpe: Annotated[
        int | None, typer.Option(help="Train a byte-level BPE of so many tokens instead.")
    ] = None,
    column: Annotated[
        str, typer.Option(help="Field of JSONL and Parquet rows that holds the text.")
    ] = "text",
    held_out: Annotated[
        float, typer.Option(help="Share of documents kept for validation, in [0, 1).")
    ] = 0.01,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the split.")] = 0,
) -> None:
    """Tokenise documents into files that `ratoon pretrain` maps into memory."""
    from ratoon.data import prepare as work

    console = Console(stderr=True)
    with console.status("reading") as status:
        made = work.prepare(
            inputs,
            destination,
            tokenizer=tokenizer,
            train_bpe=train_bpe,
            column=column,
            held_out=held_out,
            seed=seed,
            progress=lambda phase, done: status.update(f"{phase}: {done:,} documents"),
        )
    for word, header in (("training", made.train), ("held out", made.held_out)):
        if header is not None:
            Console().print(
                f"{word}: {header.count:,} tokens of {header.documents:,} documents, "
                f"vocabulary {header.vocab_size:,}",
                soft_wrap=True,
                highlight=False,
            )
