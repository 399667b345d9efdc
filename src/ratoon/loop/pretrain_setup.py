"""What pretraining needs before its first step: data, model, subnetworks, learning rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ratoon.config.evolve import Adaptive, Evolve
from ratoon.config.pretrain import ModelShape, PretrainConfig
from ratoon.data.prepare import HELD_OUT, TRAIN, tokenizer_hash
from ratoon.data.token_file import SequenceOrder, TokenFile, TokenHeader
from ratoon.errors import CapabilityError, ConfigError, DataError
from ratoon.est.adaptive import AdaptiveSchedule, AdaptiveSettings, ladder
from ratoon.est.sampler import NestedSampler, RandomSampler, Sampler
from ratoon.est.schedule import NewLayers, StagedSchedule, StagePart
from ratoon.est.subnetwork import Normalisation, Rates, Shape
from ratoon.loop.growth_file import read_growth
from ratoon.loop.setup import check_context
from ratoon.models.decoder import Decoder, DecoderConfig
from ratoon.models.hf_config import FAMILIES, read_config
from ratoon.models.hf_io import load_decoder
from ratoon.models.initialise import new_decoder
from ratoon.training.flat_weights import UpdateRule
from ratoon.training.lr_schedule import LearningRate


@dataclass(frozen=True, slots=True)
class Data:
    """Sequences to learn from, those held out, and the order of the former."""

    train: TokenFile
    held_out: TokenFile | None
    order: SequenceOrder


def open_data(config: PretrainConfig) -> Data:
    """Open the token files and look at every id.

    Raises:
        DataError: one is missing, damaged or too short, or was made with another tokenizer than
            the one that lies beside it.
        ConfigError: held-out tokens are asked for that there are not.
    """
    folder, length = config.data.path, config.data.sequence_length
    train = TokenFile(folder / TRAIN, length)
    held_out = TokenFile(folder / HELD_OUT, length) if (folder / HELD_OUT).exists() else None
    for file in (train, held_out):
        if file is not None:
            _check_tokenizer(file)
            file.check_ids()
    if held_out is not None and held_out.header.vocab_size != train.header.vocab_size:
        raise DataError(
            f"{held_out.path}: has a vocabulary of {held_out.header.vocab_size} tokens, {TRAIN} "
            f"one of {train.header.vocab_size}; prepare both together"
        )
    if held_out is None and config.evolve is not None and config.evolve.adaptive is not None:
        raise ConfigError(
            f"evolve.adaptive needs held-out tokens, but {folder} holds no {HELD_OUT}; prepare the "
            "data with --held-out, or give evolve.stages"
        )
    if held_out is None and "evaluation" in config.changed_keys():
        raise ConfigError(
            f"evaluation would have no effect because {folder} holds no {HELD_OUT}; prepare the "
            "data with --held-out, or remove the section"
        )
    _check_sequences(config, 0 if held_out is None else len(held_out))
    return Data(train, held_out, SequenceOrder(len(train), config.seed))


def _check_sequences(config: PretrainConfig, available: int) -> None:
    """Raise ConfigError if more held-out sequences are asked for than there are."""
    asked = {}
    if "sequences" in config.evaluation.changed_keys():
        asked["evaluation.sequences"] = config.evaluation.sequences or 0
    if config.evolve is not None:
        asked["evolve.switch_sequences"] = config.evolve.switch_sequences
    for key, count in asked.items():
        if count > available:
            raise ConfigError(
                f"{key} = {count}, but {config.data.path} holds out {available} sequences of "
                f"{config.data.sequence_length} tokens; lower it, or hold more out"
            )


def _check_tokenizer(file: TokenFile) -> None:
    """Raise DataError unless the folder of `file` holds the tokenizer that made it."""
    folder, header = file.path.parent, file.header
    found = tokenizer_hash(folder)
    if found is None:
        raise DataError(
            f"data.path = {folder} holds no tokenizer, and the trained model needs the one that "
            "made the tokens; put its files back, or prepare the data again"
        )
    if found != header.tokenizer:
        raise DataError(
            f"{file.path}: was not made with the tokenizer in {folder} (SHA-256 "
            f"{header.tokenizer[:12]} in its header, {found[:12]} there); put the right files "
            "back, or prepare the data again"
        )


def share_out(config: PretrainConfig, processes: int) -> tuple[int, int]:
    """Sequences of a step, and of each process's part. Raises: ConfigError if parts differ."""
    length, tokens = config.data.sequence_length, config.update.batch_tokens
    batch = tokens // length
    if batch % processes:
        raise ConfigError(
            f"update.batch_tokens = {tokens} is {batch} sequences, which {processes} processes "
            f"cannot share out; give a multiple of {processes * length}"
        )
    return batch, batch // processes


def decoder_config(config: PretrainConfig, header: TokenHeader) -> DecoderConfig:
    """The configured model's shape.

    Raises:
        ConfigError: it does not fit the tokens or the sequences.
        CapabilityError: its family is not supported.
    """
    if config.model.path is None:
        assert config.model.shape is not None
        return _new_config(config.model.shape, header, config.data.sequence_length)
    found = read_config(config.model.path)
    check_context("data.sequence_length", config.data.sequence_length, config.model.path)
    if tokenizer_hash(config.model.path) != header.tokenizer:
        raise ConfigError(
            f"data.path = {config.data.path} was not made with the tokenizer of model.path = "
            f"{config.model.path}; prepare it again with --tokenizer {config.model.path}"
        )
    if found.vocab_size < header.vocab_size:
        raise ConfigError(
            f"the model has {found.vocab_size} tokens, data.path = {config.data.path} has "
            f"{header.vocab_size}; prepare the data with the model's tokenizer"
        )
    return found


def _new_config(shape: ModelShape, header: TokenHeader, length: int) -> DecoderConfig:
    if shape.family not in FAMILIES:
        raise CapabilityError(
            f"model.shape.family = {shape.family} is not supported; supported: "
            f"{', '.join(FAMILIES)}"
        )
    multiple = shape.vocab_multiple
    traits: dict[str, Any] = FAMILIES[shape.family].traits
    return DecoderConfig(
        family=shape.family,
        vocab_size=-(-header.vocab_size // multiple) * multiple,
        hidden_size=shape.width,
        intermediate_size=shape.mlp_width,
        num_layers=shape.layers,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads or shape.heads,
        head_dim=shape.head_width or shape.width // shape.heads,
        max_positions=shape.positions or length,
        tie_word_embeddings=shape.tie_embeddings,
        bos_id=header.document_end,
        eos_ids=(header.document_end,),
        **traits,
    )


def make_decoder(config: PretrainConfig, shape: DecoderConfig) -> Decoder:
    """The decoder to begin with, in float32 on the CPU."""
    if config.model.path is None:
        return new_decoder(shape, config.seed)
    return load_decoder(config.model.path)


def learning_rate(config: PretrainConfig) -> LearningRate:
    """The learning rate of each step."""
    optimizer = config.optimizer
    return LearningRate(
        optimizer.lr,
        config.steps,
        optimizer.warmup_steps,
        optimizer.schedule,
        optimizer.decay_frac,
        optimizer.final_lr_frac,
    )


def update_rule(config: PretrainConfig) -> UpdateRule:
    """How gradients become updates."""
    optimizer = config.optimizer
    return UpdateRule(
        kind=optimizer.kind,
        betas=optimizer.betas,
        momentum=optimizer.momentum,
        weight_decay=optimizer.weight_decay,
        max_grad_norm=optimizer.max_grad_norm,
    )


@dataclass(frozen=True, slots=True)
class Evolution:
    """How the subnetwork of a step is found."""

    shape: Shape
    schedule: StagedSchedule | AdaptiveSchedule
    sampler: Sampler


def evolution(config: PretrainConfig, model: DecoderConfig, micro_batch: int) -> Evolution:
    """Schedule and sampler, checked against the model and `micro_batch` sequences.

    Without `evolve` there is one stage, the whole model.

    Raises: ConfigError if rates leave nothing of an axis, or stages start past the decay.
    """
    evolve = config.evolve
    if evolve is None:
        shape = Shape.of(model)
        whole = StagedSchedule.of([StagePart(0.0, Rates())], config.steps)
        return Evolution(shape, whole, NestedSampler(shape))
    shape = Shape.of(model, neuron_block=evolve.neuron_block, head_unit=evolve.head_unit)
    sampler = _sampler(evolve, shape, config.seed)
    new_layers: NewLayers = evolve.new_layers if evolve.method == "nested" else "as_they_are"
    if evolve.adaptive is not None:
        settings = _adaptive(evolve.adaptive, new_layers, config)
        _check_rates(sampler, "evolve.adaptive", settings.ladder, micro_batch)
        return Evolution(shape, AdaptiveSchedule(settings), sampler)
    if evolve.replay is not None:
        schedule = read_growth(evolve.replay, config.steps, new_layers)
    else:
        parts = [StagePart(each.start, Rates(*each.rates), new_layers) for each in evolve.stages]
        schedule = StagedSchedule.of(parts, config.steps)
    if config.optimizer.schedule == "wsd":
        schedule.require_growth_before(learning_rate(config).decay_start)
    key = "evolve.stages" if evolve.replay is None else "evolve.replay"
    _check_rates(sampler, key, [stage.rates for stage in schedule.stages], micro_batch)
    return Evolution(shape, schedule, sampler)


def _check_rates(sampler: Sampler, key: str, stages: Sequence[Rates], micro_batch: int) -> None:
    """Raise ConfigError naming the first stage, counted from 0, whose rates leave nothing."""
    for number, rates in enumerate(stages):
        try:
            sampler.check(rates, micro_batch)
        except ConfigError as error:
            raise ConfigError(f"{key}, stage {number}: {error}") from None


def _adaptive(
    adaptive: Adaptive, new_layers: NewLayers, config: PretrainConfig
) -> AdaptiveSettings:
    steps = config.steps
    deadline = round(adaptive.deadline_frac * steps)
    decay_start = learning_rate(config).decay_start
    if config.optimizer.schedule == "wsd" and deadline > decay_start:
        raise ConfigError(
            f"evolve.adaptive.deadline_frac = {adaptive.deadline_frac} is step {deadline}, after "
            f"the learning rate begins to decay at step {decay_start}; lower it, or "
            "optimizer.decay_frac"
        )
    return AdaptiveSettings(
        ladder=ladder(Rates(adaptive.layers, adaptive.heads, adaptive.neurons), adaptive.quantum),
        total_steps=steps,
        deadline=deadline,
        min_steps=max(1, round(adaptive.min_frac * steps)),
        max_steps=round(adaptive.max_frac * steps),
        check_every=adaptive.check_every,
        window=adaptive.window,
        margin=adaptive.margin,
        new_layers=new_layers,
    )


def _sampler(evolve: Evolve, shape: Shape, seed: int) -> Sampler:
    if evolve.method == "nested":
        return NestedSampler(shape)
    choice = evolve.random
    return RandomSampler(
        shape,
        seed,
        Normalisation(choice.scale_attention, choice.scale_mlp, choice.scale_layers),
        share_indices=choice.share_indices,
        per=choice.every,
        depth=choice.depth,
        pinned_layers=choice.pinned_layers,
    )
