"""Training and measuring a drafter by itself, on stored rollouts or on responses drawn first."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ratoon.drafter.checkpoint import (
    check_target,
    load_checkpoint,
    load_drafter,
    read_drafter_config,
    save_checkpoint,
)
from ratoon.drafter.model import default_taps
from ratoon.drafter.trainer import DrafterTrainer, StepMetrics, TrainerOptions
from ratoon.errors import CapabilityError, ConfigError
from ratoon.loop.setup import load_tokenizer
from ratoon.models.compute_dtype import DTYPES, fast_dtype
from ratoon.models.hf_config import read_config
from ratoon.models.hf_io import load_decoder
from ratoon.models.tokenizer import Tokenizer
from ratoon.offline.acceptance import acceptance
from ratoon.offline.material import Given, Material, read_material
from ratoon.offline.recorded import Source, forced, record
from ratoon.offline.responses import CHILDREN, DEPTH
from ratoon.offline.training import Recipe, train
from ratoon.rollout.native.engine import Finished
from ratoon.rollout.native.forward import InferenceModel

MAX_TOKENS = 128

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class TrainPlan:
    """How a drafter is trained.

    At most `responses` of each source; those still to be drawn have up to `max_tokens` and
    `temperature`, None = 128 and 1. `vocabulary` None = that of `begun`, or 8,192 for a new one.
    """

    steps: int = 300
    responses: int = 512
    vocabulary: int | None = None
    begun: Path | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    seed: int = 0


def train_drafter(
    model: Path, given: Sequence[Given], output: Path, plan: TrainPlan, say: Say
) -> None:
    """Train a drafter for `model` and write it to `output`, as an EAGLE-3 directory.

    Raises: ConfigError for an occupied folder or options without effect; CheckpointError if a
    folder holds no model, no drafter, or one of another model; DataError if there is nothing to
    train on; CapabilityError if responses are longer than the model's context.
    """
    _check_plan(given, output, plan)
    config, tokenizer = read_config(model), load_tokenizer(model)
    taps = default_taps(config.num_layers)
    if plan.begun is not None:
        begun_config = read_drafter_config(plan.begun)
        check_target(begun_config, config, plan.begun)
        taps = begun_config.taps
    parts = _read(given, tokenizer, held_out=False, limit=plan.responses)
    temperature = _temperature(parts, plan)
    options = TrainerOptions(temperature=temperature, compute_dtype=DTYPES[fast_dtype()])
    begun: DrafterTrainer | None = None
    if plan.begun is not None:
        begun, _ = load_checkpoint(plan.begun, options)
    recipe = Recipe(steps=plan.steps, seed=plan.seed, options=options)
    if plan.vocabulary is not None:
        recipe = replace(recipe, vocabulary=plan.vocabulary)
    source = _source(
        model,
        tokenizer,
        parts,
        taps,
        max_tokens=plan.max_tokens or MAX_TOKENS,
        temperatures=[temperature],
    )
    finished: list[Finished] = []
    for part in parts:
        finished += _responses(source, part, temperature, say)
    tokens = sum(len(item.completion.token_ids) for item in finished)
    say(f"training on {len(finished):,} responses of {tokens:,} tokens")
    trainer = train(source, finished, recipe, begun=begun, see=lambda steps: say(_progress(steps)))
    save_checkpoint(output, trainer, version=0)


def eval_drafter(
    model: Path,
    drafter: Path,
    given: Sequence[Given],
    *,
    temperatures: Sequence[float],
    nodes: int,
    limit: int,
    max_tokens: int,
    say: Say,
) -> dict[str, Any]:
    """Measure a drafter on held-out responses; JSON values with rows of `acceptance` by source.

    Stored responses are those of the temperature that they were drawn at; for others their prompts
    are answered anew.

    Raises: as `train_drafter`.
    """
    tokenizer, loaded = load_tokenizer(model), load_drafter(drafter)
    check_target(loaded.config, read_config(model), drafter)
    parts = _read(given, tokenizer, held_out=True, limit=limit)
    source = _source(
        model,
        tokenizer,
        parts,
        loaded.config.taps,
        max_tokens=max_tokens,
        temperatures=temperatures,
    )
    rows: list[dict[str, Any]] = []
    for part in parts:
        for temperature in temperatures:
            finished = _responses(source, part, temperature, say)
            own = {"source": part.name, "stored": part.has_stored(temperature)}
            found = acceptance(source, loaded, finished, temperature, nodes)
            rows += [own | row for row in found]
    return {
        "model": str(model),
        "drafter": str(drafter),
        "nodes": nodes,
        "depth": DEPTH,
        "children": CHILDREN,
        "rows": rows,
    }


def _check_plan(given: Sequence[Given], output: Path, plan: TrainPlan) -> None:
    if output.exists():
        raise ConfigError(f"--output {output}: exists and nothing is overwritten; give another")
    if plan.begun is not None and plan.vocabulary is not None:
        raise ConfigError(
            f"--draft-vocab-size {plan.vocabulary} would have no effect: the drafter in "
            f"{plan.begun} keeps its own"
        )
    if all(item.kind == "rollouts" for item in given):
        for option, value in (
            ("--max-tokens", plan.max_tokens),
            ("--temperature", plan.temperature),
        ):
            if value is not None:
                raise ConfigError(f"{option} {value:g} would have no effect: nothing is drawn")


def _read(
    given: Sequence[Given], tokenizer: Tokenizer, *, held_out: bool, limit: int
) -> list[Material]:
    if not given:
        raise ConfigError("give --rollouts, --prompts or --text: what the drafter is to draft")
    names = [item.name for item in given]
    if len(set(names)) < len(names):
        raise ConfigError(f"sources {', '.join(names)}: give each a name of its own, as NAME=PATH")
    return [read_material(item, tokenizer, held_out=held_out, limit=limit) for item in given]


def _temperature(parts: Sequence[Material], plan: TrainPlan) -> float:
    """The one temperature of all responses. Raises: ConfigError if there are several."""
    drawn = 1.0 if plan.temperature is None else plan.temperature
    found = {part.name: drawn if part.temperature is None else part.temperature for part in parts}
    if len(set(found.values())) > 1:
        told = ", ".join(f"{name} at {value:g}" for name, value in found.items())
        raise ConfigError(
            f"responses of one temperature are trained on, but there are {told}; give sources of "
            "one, or --temperature for those that are drawn"
        )
    return next(iter(found.values()))


def _source(
    model: Path,
    tokenizer: Tokenizer,
    parts: Sequence[Material],
    taps: Sequence[int],
    *,
    max_tokens: int,
    temperatures: Sequence[float],
) -> Source:
    """The model, as yet without prompts. Raises: CapabilityError if it is too short for all."""
    longest = max(part.longest(max_tokens, temperatures) for part in parts)
    decoder = load_decoder(model)
    if longest > decoder.config.max_positions:
        raise CapabilityError(
            f"prompts and responses have up to {longest} tokens, but the model in {model} has "
            f"{decoder.config.max_positions} positions; lower --max-tokens or shorten the prompts"
        )
    return Source(
        decoder=decoder,
        model=InferenceModel(decoder, num_positions=longest, dtype=DTYPES[fast_dtype()], taps=taps),
        prompts=(),
        eos_ids=tokenizer.eos_ids,
        vocab_limit=tokenizer.vocab_size,
        max_tokens=max_tokens,
    )


def _responses(source: Source, part: Material, temperature: float, say: Say) -> list[Finished]:
    """A source's responses at a temperature: stored, or drawn now."""
    if part.has_stored(temperature):
        assert part.stored is not None
        say(f"{part.name}: {len(part.stored)} stored responses")
        return forced(source, part.stored)
    say(f"{part.name}: drawing {len(part.prompts)} responses at temperature {temperature:g}")
    return record(replace(source, prompts=part.prompts), range(len(part.prompts)), temperature)


def _progress(steps: Sequence[StepMetrics]) -> str:
    loss = statistics.fmean(step.loss for step in steps)
    depths = zip(*(step.acceptance for step in steps), strict=True)
    shares = " ".join(f"{statistics.fmean(depth):.2f}" for depth in depths)
    return f"step {steps[-1].step}: loss {loss:.3f}, accepted by depth {shares}"
