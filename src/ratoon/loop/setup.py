"""From a configuration to the things that a run works with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from ratoon.cluster.exchange import exchange_bytes
from ratoon.cluster.local import LocalWorkers
from ratoon.cluster.spec import DraftingSpec, TrainingSpec, WorkerSpec
from ratoon.config.rl import RLConfig
from ratoon.config.sft import SFTConfig
from ratoon.config.training import LoRA, Workers
from ratoon.data.prompts import PromptStyle, load_prompts
from ratoon.drafter.checkpoint import check_target, read_drafter_config
from ratoon.drafter.model import DrafterConfig
from ratoon.errors import CapabilityError, CheckpointError, ConfigError
from ratoon.loop.evaluation import evaluation_params
from ratoon.models.compute_dtype import DTYPES, with_dtype
from ratoon.models.hf_config import read_config
from ratoon.models.tokenizer import Tokenizer
from ratoon.observe.observer import Observer
from ratoon.observe.provenance import usable_cores
from ratoon.records import Prompt
from ratoon.sampling.stop_strings import check_stop_strings
from ratoon.sampling.transforms import check_ids
from ratoon.training.lora import check_targets

Config = TypeVar("Config", RLConfig, SFTConfig)


def num_workers(workers: Workers) -> int:
    """The configured number of processes, or as many as the usable cores have room for."""
    if workers.count is not None:
        return workers.count
    return max(1, usable_cores() // workers.threads)


def with_machine(config: Config) -> Config:
    """The configuration with the number format and number of workers that this machine decides.

    A run's folder keeps both: on another kind of machine a run is not resumed by accident.
    """
    config = with_dtype(config)
    workers = config.workers.model_copy(update={"count": num_workers(config.workers)})
    return config.model_copy(update={"workers": workers})


def check_context(key: str, length: int, model: Path) -> None:
    """Refuse sequences that the model has no positions for.

    Raises: CapabilityError, and as `read_config` does.
    """
    positions = read_config(model).max_positions
    if length > positions:
        raise CapabilityError(
            f"`{key}` = {length}, but the model in {model} has {positions} positions; lower `{key}`"
        )


def load_tokenizer(model: Path) -> Tokenizer:
    """The tokenizer of a model whose every token the model knows.

    Raises: CheckpointError if it has more tokens, and as `Tokenizer.load` and `read_config` do.
    """
    tokenizer, size = Tokenizer.load(model), read_config(model).vocab_size
    if tokenizer.vocab_size > size:
        raise CheckpointError(
            f"model.path = {model}: the tokenizer has ids up to {tokenizer.vocab_size - 1}, but "
            f"config.json says vocab_size = {size}; give the tokenizer that the model was trained "
            "with"
        )
    return tokenizer


def check_sampling(config: RLConfig, tokenizer: Tokenizer) -> None:
    """Refuse ids that are never drawn, and stop strings that no text shows. Raises: ConfigError."""
    try:
        check_ids(evaluation_params(config), tokenizer.vocab_size)
    except ConfigError as error:
        raise ConfigError(f"evaluation.sampling.{error}") from None
    check_stop_strings(config.sampling.stop_strings)
    for string in config.sampling.stop_strings:
        ids = tokenizer.encode(string)
        if tokenizer.decode(ids) != tokenizer.decode(ids, keep_special=True):
            raise ConfigError(
                f"sampling.stop_strings holds {string!r}, a special token, which text does not "
                "show; remove it. A response ends with these ids: "
                f"{', '.join(map(str, tokenizer.eos_ids))}"
            )


def check_drafter(config: RLConfig) -> None:
    """Refuse a `drafter.path` that holds no drafter of the model. Raises: CheckpointError."""
    path = config.drafter.path
    if path is None:
        return
    target = read_config(config.model.path)
    try:
        check_target(read_drafter_config(path), target, path)
    except CheckpointError as error:
        raise CheckpointError(f"drafter.path = {path}: {error}") from None


def check_adapters(lora: LoRA | None, model: Path) -> None:
    """Refuse adapters of matrices that the model does not have. Raises: ConfigError."""
    if lora is not None:
        check_targets(read_config(model), lora.targets)


def shared_bytes(config: RLConfig) -> int:
    """How much memory the workers will share, about."""
    if not config.speculation.uses_learned:
        return 0
    target, settings = read_config(config.model.path), config.drafter
    return exchange_bytes(
        DrafterConfig.for_target(target, settings.draft_vocab_size, settings.window),
        DTYPES[config.model.dtype],
    )


def load_rl_prompts(
    config: RLConfig, tokenizer: Tokenizer, say: Callable[[str], None]
) -> tuple[list[Prompt], list[Prompt]]:
    """Training prompts, and the held-out ones that are evaluated; `say` hears what is left out.

    Raises: ConfigError if more are to be evaluated than there are.
    """
    style = PromptStyle(
        system_prompt=config.data.system_prompt,
        chat_template=config.data.chat_template,
        max_tokens=config.rollout.max_length - config.sampling.max_tokens,
        limit="rollout.max_length - sampling.max_tokens",
        say_too_long=say if config.data.too_long == "drop" else None,
        say_no_answer=say if config.data.no_answer == "drop" else None,
    )
    train = load_prompts(config.data.train.model_dump(), tokenizer, split="train", style=style)
    if config.data.eval is None:
        return train, []
    held_out = load_prompts(config.data.eval.model_dump(), tokenizer, split="eval", style=style)
    wanted = config.evaluation.prompts
    if "prompts" in config.evaluation.changed_keys() and wanted > len(held_out):
        raise ConfigError(
            f"evaluation.prompts = {wanted}, but data.eval holds {len(held_out)} prompts; lower it "
            "or hold more out"
        )
    return train, held_out[:wanted]


def rl_specs(config: RLConfig, tokenizer: Tokenizer, folder: Path) -> Sequence[WorkerSpec]:
    """One spec per worker."""
    count = num_workers(config.workers)
    temperature = config.sampling.temperature
    drafting = None
    if config.speculation.enabled:
        drafting = DraftingSpec(config.speculation, config.drafter, config.spot, temperature)
    training = TrainingSpec(
        optimizer=config.optimizer,
        update=config.update,
        lora=config.lora,
        algorithm=config.algorithm,
        temperature=temperature,
        max_tokens=config.sampling.max_tokens,
        total_steps=config.steps,
    )
    return [
        WorkerSpec(
            index=index,
            count=count,
            threads=config.workers.threads,
            timeout_s=config.workers.timeout_s,
            seed=config.seed,
            folder=folder,
            model=config.model,
            vocab_limit=tokenizer.vocab_size,
            training=training,
            rollout=config.rollout,
            drafting=drafting,
        )
        for index in range(count)
    ]


def report_numerics(workers: LocalWorkers, observer: Observer, consequence: str) -> None:
    """Say aloud if numerics are tolerant because a proof failed, and what follows."""
    failures = [item["failures"] for item in workers.descriptions if item["failures"]]
    if failures:
        observer.note(
            f"numerics fall back to tolerant: here {len(failures[0])} checks found other bits "
            f"for other batches (first: {failures[0][0]}); {consequence}"
        )
