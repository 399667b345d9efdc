"""What a pretraining run would be, found out without training: size, operations, memory.

All checks of a run are made that need no weights; data is opened where it exists.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from ratoon.config.pretrain import PretrainConfig
from ratoon.data.token_file import TokenHeader
from ratoon.errors import ConfigError
from ratoon.est.adaptive import AdaptiveSchedule
from ratoon.est.subnetwork import Rates, Subnetwork
from ratoon.loop.accounting import StepCost
from ratoon.loop.memory import Memory, estimate_memory
from ratoon.loop.pretrain_setup import (
    Data,
    decoder_config,
    evolution,
    open_data,
    share_out,
)
from ratoon.loop.setup import check_context
from ratoon.models.compute_dtype import with_dtype
from ratoon.models.decoder import Decoder, DecoderConfig
from ratoon.models.hf_config import read_config
from ratoon.training.update_checks import require_muon


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """A stage from `start` to before `end`; of an adaptive schedule None, since losses decide.

    `flops` are of one step; `share` is that of a whole model's step, `share_paper` as the paper
    counts.
    """

    start: int | None
    end: int | None
    rates: Rates
    flops: float
    share: float
    share_paper: float


@dataclass(frozen=True, slots=True)
class Plan:
    """What would be trained. `epochs` and `held_out` (sequences) are None without data.

    `flops` and `saved_frac` are None where an adaptive schedule decides.
    """

    model: DecoderConfig
    parameters: int
    layer_parameters: int
    steps: int
    tokens: int
    epochs: float | None
    held_out: int | None
    stages: tuple[PlannedStage, ...]
    full_flops: float
    flops: float | None
    memory: Memory

    @property
    def saved_frac(self) -> float | None:
        """Share of operations saved against the whole model on the same tokens."""
        return None if self.flops is None else 1.0 - self.flops / self.full_flops


def plan_run(config: PretrainConfig, *, vocab_size: int | None = None, processes: int = 1) -> Plan:
    """Check a configuration as a run would, and say what the run would be.

    `vocab_size` stands for the tokenizer where `data.path` does not exist yet.

    Raises:
        ConfigError, DataError, CapabilityError: what the run would raise, or `vocab_size` is
            missing or has no effect.
    """
    config = with_dtype(config)
    data = _data(config, vocab_size)
    model = _model(config, data, vocab_size)
    batch, share = share_out(config, processes)
    length, update = config.data.sequence_length, config.update
    if config.optimizer.kind == "muon":
        require_muon()
    micro_batch = min(update.micro_batch_tokens // length, share)
    evolved = evolution(config, model, micro_batch)
    with torch.device("meta"):
        decoder = Decoder(model)
    shapes = [tuple(p.shape) for p in decoder.parameters()]
    full = Subnetwork.full(evolved.shape)
    cost = StepCost(
        model,
        full,
        tokens=batch * length,
        length=length,
        parameters=shapes,
        optimizer=config.optimizer.kind,
    )

    def planned(start: int | None, end: int | None, rates: Rates) -> PlannedStage:
        subnetwork = evolved.sampler.draw(rates, 0, 0, micro_batch)
        flops = cost.flops(subnetwork)
        return PlannedStage(
            start, end, rates, flops, flops / cost.flops(full), cost.paper(subnetwork)
        )

    schedule, total = evolved.schedule, None
    if isinstance(schedule, AdaptiveSchedule):
        stages = tuple(planned(None, None, rates) for rates in schedule.settings.ladder)
    else:
        starts = [*(stage.start for stage in schedule.stages), config.steps]
        stages = tuple(
            planned(start, end, stage.rates)
            for (start, end), stage in zip(itertools.pairwise(starts), schedule.stages, strict=True)
        )
        total = sum((s.end - s.start) * s.flops for s in stages if s.end and s.start is not None)
    parameters = sum(p.numel() for p in decoder.parameters())
    return Plan(
        model=model,
        parameters=parameters,
        layer_parameters=sum(p.numel() for p in decoder.layers.parameters()),
        steps=config.steps,
        tokens=config.steps * batch * length,
        epochs=None if data is None else config.steps * batch / len(data.train),
        held_out=None if data is None or data.held_out is None else len(data.held_out),
        stages=stages,
        full_flops=config.steps * cost.flops(full),
        flops=total,
        memory=estimate_memory(config, model, tokens=micro_batch * length, processes=processes),
    )


def _data(config: PretrainConfig, vocab_size: int | None) -> Data | None:
    if config.data.path.exists():
        if vocab_size is not None:
            raise ConfigError(
                f"--vocabulary {vocab_size} would have no effect because data.path = "
                f"{config.data.path} exists; remove it"
            )
        return open_data(config)
    if vocab_size is None and config.model.path is None:
        raise ConfigError(
            f"data.path = {config.data.path} does not exist, so the tokenizer is unknown; make the "
            "data with `ratoon data prepare`, or give the tokenizer's size with --vocabulary"
        )
    return None


def _model(config: PretrainConfig, data: Data | None, vocab_size: int | None) -> DecoderConfig:
    if data is not None:
        return decoder_config(config, data.train.header)
    if config.model.path is not None:
        check_context("data.sequence_length", config.data.sequence_length, config.model.path)
        return read_config(config.model.path)
    assert vocab_size is not None
    return decoder_config(config, TokenHeader("uint32", 0, vocab_size, 0, 0, ""))
