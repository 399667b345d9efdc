"""What a dry run of pretraining prints."""

from __future__ import annotations

from rich.table import Table

from ratoon.cli.tables import plain_table
from ratoon.loop.pretrain_plan import Plan, PlannedStage


def plan_tables(plan: Plan) -> list[Table]:
    """The run's facts, and its stages."""
    return [_facts(plan), _stages(plan)]


def _facts(plan: Plan) -> Table:
    table = plain_table(header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    model, memory = plan.model, plan.memory
    data = "does not exist yet"
    if plan.epochs is not None:
        held_out = "none" if plan.held_out is None else f"{plan.held_out:,} sequences"
        data = f"{plan.epochs:.2f} epochs, held out: {held_out}"
    flops = f"{plan.full_flops:.3e} FLOP for the whole model"
    if plan.flops is not None and plan.saved_frac:
        flops = f"{plan.flops:.3e} FLOP, {plan.saved_frac:.1%} less than the whole model's"
    rows = {
        "model": f"{model.family}, {plan.parameters:,} parameters, {plan.layer_parameters:,} of "
        f"them in {model.num_layers} layers; vocabulary {model.vocab_size:,}",
        "training": f"{plan.steps:,} steps, {plan.tokens:,} tokens, "
        f"{plan.tokens / plan.parameters:.1f} per parameter",
        "data": data,
        "operations": flops,
        "memory": f"about {_gigabytes(memory.total)} a process: weights and optimizer "
        f"{_gigabytes(memory.optimizer)}, computing copy {_gigabytes(memory.compute)}, a "
        f"micro-batch {_gigabytes(memory.activations)}",
    }
    for name, text in rows.items():
        table.add_row(name, text)
    return table


def _stages(plan: Plan) -> Table:
    table = plain_table()
    table.add_column("steps")
    for name in ("layers", "heads", "neurons", "FLOP a step", "of full", "as the paper counts"):
        table.add_column(name, justify="right")
    for stage in plan.stages:
        rates = [f"{value:g}" for value in stage.rates.values]
        costs = [f"{stage.flops:.3e}", f"{stage.share:.3f}", f"{stage.share_paper:.3f}"]
        table.add_row(_span(stage), *rates, *costs)
    return table


def _span(stage: PlannedStage) -> str:
    if stage.start is None or stage.end is None:
        return "as losses decide"
    return f"{stage.start:,} to {stage.end:,}"


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB"
