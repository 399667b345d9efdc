"""`ratoon eval`: how good a model is at tasks, and whether another is better."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ratoon.cli.options import AsJson, whole_numbers
from ratoon.cli.tables import plain_table

Model = Annotated[Path, typer.Argument(help="Directory of the model.")]
Tasks = Annotated[
    str,
    typer.Option(help="With commas: gsm8k, math500, svamp, multiarith, mbpp, reasoning-gym:NAME."),
]
Data = Annotated[
    Path | None, typer.Option(help="Folder of the tasks' files; see docs/evaluation.md.")
]
Against = Annotated[
    Path | None, typer.Option(help="Another model, to compare with on the same noise.")
]
Output = Annotated[
    Path | None,
    typer.Option(
        help="Folder of responses and grades; an evaluation that was ended goes on there. "
        "Default: runs/eval_ and the model's name."
    ),
]
Samples = Annotated[int, typer.Option(min=1, help="Responses to each prompt.")]
K = Annotated[str, typer.Option(help="The k of pass@k, with commas.")]
Temperature = Annotated[
    float, typer.Option(min=0, max=10, help="0 = the likeliest token each time.")
]
TopP = Annotated[
    float, typer.Option(help="Draw from the likeliest tokens of this mass, in (0, 1].")
]
TopK = Annotated[int, typer.Option(min=0, help="Draw from so many likeliest tokens; 0 = all.")]
MaxTokens = Annotated[
    int | None, typer.Option(min=1, help="Longest response. Default: the task's own.")
]
Limit = Annotated[int | None, typer.Option(min=1, help="The first prompts of each task only.")]
FewShot = Annotated[int, typer.Option(min=0, help="Worked examples before each prompt (gsm8k).")]
SystemPrompt = Annotated[str | None, typer.Option(help="Instead of the tasks' own instructions.")]
ChatTemplate = Annotated[
    bool, typer.Option(help="Show prompts in the model's chat template, if it has one.")
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the noise.")]
Workers = Annotated[int | None, typer.Option(min=1, help="Processes. Default: one for each core.")]
Batch = Annotated[int, typer.Option(min=1, help="Live sequences of each process.")]
AllowCode = Annotated[
    bool, typer.Option("--allow-code-execution", help="Run what the model writes, confined.")
]


def evaluate(
    model: Model,
    tasks: Tasks,
    data: Data = None,
    against: Against = None,
    output: Output = None,
    samples: Samples = 1,
    k: K = "1",
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    max_tokens: MaxTokens = None,
    limit: Limit = None,
    few_shot: FewShot = 0,
    system_prompt: SystemPrompt = None,
    chat_template: ChatTemplate = True,
    seed: Seed = 0,
    workers: Workers = None,
    batch: Batch = 32,
    allow_code_execution: AllowCode = False,
    as_json: AsJson = False,
) -> None:
    """Evaluate a model on tasks: pass@k with standard errors, or its difference from another."""
    from ratoon.cli.running import watching
    from ratoon.errors import ConfigError
    from ratoon.evals.plan import EvalPlan
    from ratoon.evals.tasks import find_task
    from ratoon.loop.eval_run import Machine, run_eval
    from ratoon.records import SamplingParams

    names = [name.strip() for name in tasks.split(",")]
    if len(set(names)) < len(names):
        raise ConfigError(f"--tasks {tasks}: names a task twice")
    if system_prompt is not None and not chat_template:
        raise ConfigError("--system-prompt would have no effect with --no-chat-template")
    if not 0 < top_p <= 1:
        raise ConfigError(f"--top-p {top_p:g}: must lie in (0, 1]")
    plan = EvalPlan(
        tasks=tuple(find_task(name) for name in names),
        data=data,
        samples=samples,
        ks=whole_numbers("--k", k),
        params=SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k),
        max_tokens=max_tokens,
        limit=limit,
        few_shot=few_shot,
        system_prompt=system_prompt,
        chat_template=None if chat_template else False,
        seed=seed,
        allow_code=allow_code_execution,
    )
    folder = output or Path("runs") / f"eval_{model.resolve().name}"
    models = [model] if against is None else [model, against]
    with watching(None) as observer:
        record = run_eval(models, plan, folder, observer, Machine(workers, batch))
    if as_json:
        typer.echo(json.dumps(record, indent=2))
        return
    console = Console()
    for table in _tables(record):
        console.print(table)
    console.print(f"responses: {folder}", soft_wrap=True, highlight=False)


def _tables(record: dict[str, Any]) -> list[Table]:
    tables = [_results(record["model"], record["tasks"])]
    if "against" in record:
        tables.append(_results(record["against"], record["against_tasks"]))
        tables.append(_differences(record))
    return tables


def _results(model: str, tasks: list[dict[str, Any]]) -> Table:
    table = _table(model)
    passes = [key for key in tasks[0] if key.startswith("pass@") and "_" not in key]
    for column in ("prompts", *passes, "tokens", "cut off"):
        table.add_column(column, justify="right")
    for task in tasks:
        rates = [f"{task[key]:.3f} ± {task[f'{key}_stderr']:.3f}" for key in passes]
        table.add_row(
            task["task"],
            f"{task['prompts']:,}",
            *rates,
            f"{task['tokens_mean']:,.0f}",
            f"{task['cut_off']:.0%}",
        )
    return table


def _differences(record: dict[str, Any]) -> Table:
    table = _table(f"{record['model']} less {record['against']}")
    for column in ("pass@1", "better", "worse"):
        table.add_column(column, justify="right")
    for row in record["differences"]:
        table.add_row(
            row["task"],
            f"{row['difference']:+.3f} ± {row['stderr']:.3f}",
            f"{row['better']:,}",
            f"{row['worse']:,}",
        )
    return table


def _table(title: str) -> Table:
    table = plain_table(title)
    table.add_column("task")
    return table
