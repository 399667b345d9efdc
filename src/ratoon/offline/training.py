"""Drafters trained on recorded responses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from ratoon.drafter.data_buffer import DataBuffer, Sample
from ratoon.drafter.model import DrafterConfig, Eagle3Drafter, choose_draft_vocabulary
from ratoon.drafter.spot_trainer import SpotTrainer
from ratoon.drafter.trainer import DrafterTrainer, StepMetrics, TrainerOptions
from ratoon.errors import DataError
from ratoon.models.compute_dtype import DTYPES, fast_dtype
from ratoon.offline.recorded import Source, all_ids
from ratoon.rollout.native.engine import Finished

# Optimizer steps between two looks at the training.
LOOK_EVERY = 20


def _fast(options: TrainerOptions) -> TrainerOptions:
    return replace(options, compute_dtype=DTYPES[fast_dtype()])


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a drafter is made: its shape, its start, and its training; `taps` None = the default."""

    vocabulary: int = 8192
    window: int = 512
    steps: int = 400
    taps: tuple[int, ...] | None = None
    from_target: bool = True
    seed: int = 0
    options: TrainerOptions = field(default_factory=lambda: _fast(TrainerOptions()))


def train(
    source: Source,
    finished: Sequence[Finished],
    recipe: Recipe,
    *,
    begun: DrafterTrainer | None = None,
    see: Callable[[Sequence[StepMetrics]], None] = lambda steps: None,
) -> DrafterTrainer:
    """A drafter trained on recorded responses; it proposes their most frequent tokens.

    `begun` is gone on with for `recipe.steps` more, and then shape, start and options are its own.
    `see` is shown the steps, `LOOK_EVERY` of them at a time.

    Raises: DataError if no response has a token to learn from.
    """
    trainer = begun or _new_trainer(source, finished, recipe)
    trainer.set_embedding(source.model.embedding)
    buffer = DataBuffer(sum(map(_num_tokens, finished)) + 1, seed=recipe.seed)
    head = source.decoder.head_weight[trainer.drafter.draft_ids]
    buffer.begin_step(0, head.to(source.model.dtype))
    for item in finished:
        buffer.add(_sample(item))
    if not len(buffer):
        raise DataError(f"{len(finished)} responses hold no token that a drafter can learn from")
    end = trainer.step + recipe.steps
    spot = SpotTrainer(trainer, buffer, lambda *_: None, publish_every=end + 1)
    while trainer.step < end:
        pause = min(end, trainer.step + LOOK_EVERY)
        see(spot.start(partial(_has_done, trainer, pause)).run().metrics)
    return trainer


def _has_done(trainer: DrafterTrainer, steps: int) -> bool:
    return trainer.step >= steps


def _new_trainer(source: Source, finished: Sequence[Finished], recipe: Recipe) -> DrafterTrainer:
    config = DrafterConfig.for_target(
        source.decoder.config, recipe.vocabulary, recipe.window, source.model.taps
    )
    counts = torch.zeros(config.vocab_size, dtype=torch.int64)
    for item in finished:
        counts += torch.tensor(item.completion.token_ids).bincount(minlength=config.vocab_size)
    ids = choose_draft_vocabulary(counts, config.draft_vocab_size, source.eos_ids)
    torch.manual_seed(recipe.seed)
    drafter = Eagle3Drafter.from_target(config, source.decoder, ids)
    if not recipe.from_target:
        for parameter in drafter.parameters():
            if parameter.dim() == 2:
                parameter.data.normal_(std=0.02)
    return DrafterTrainer(drafter, recipe.options)


def _num_tokens(item: Finished) -> int:
    return len(item.completion.prompt_ids) + len(item.completion.token_ids)


def _sample(item: Finished) -> Sample:
    assert item.features is not None
    assert item.hidden is not None
    key = item.completion.key
    return Sample(
        uid=(key.row, key.round, key.sample, key.attempt),
        ids=all_ids(item),
        features=item.features,
        hidden=item.hidden,
        prompt_len=len(item.completion.prompt_ids),
        policy_version=0,
    )
