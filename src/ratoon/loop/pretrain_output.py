"""What a pretraining run leaves behind: states to resume from, and a model with its card."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from ratoon.config.pretrain import PretrainConfig
from ratoon.errors import CheckpointError, ConfigError
from ratoon.est.adaptive import AdaptiveSchedule
from ratoon.est.schedule import Stage
from ratoon.loop.accounting import Account
from ratoon.loop.checkpoints import latest_checkpoint, whole_checkpoint
from ratoon.loop.model_card import CARD, hub_card
from ratoon.loop.pretrain_setup import Data, Evolution, learning_rate
from ratoon.models.compute_dtype import DTYPES
from ratoon.models.decoder import Decoder
from ratoon.models.directories import whole_directory
from ratoon.models.hf_io import CARRIED_FILES, save_decoder
from ratoon.observe.run_folder import RunFolder
from ratoon.training.checkpoint import load_state, save_state
from ratoon.training.pretrainer import Pretrainer

TRAINER = "trainer"


def save_run(
    config: PretrainConfig,
    folder: RunFolder | None,
    trainer: Pretrainer,
    data: Data,
    evolution: Evolution,
    account: Account,
) -> None:
    """Write a checkpoint after the steps of `account`.

    All ranks call this; the one that has the folder writes.
    """
    tensors, values = trainer.state()
    if folder is None:
        return
    state = {"account": account.state(), "past": _past(config, data, evolution, account.steps)}
    if isinstance(evolution.schedule, AdaptiveSchedule):
        state["schedule"] = evolution.schedule.state_dict()
    with whole_checkpoint(folder, account.steps, config.checkpoint.keep, **state) as draft:
        save_state(draft / TRAINER, tensors, values)


def load_run(
    config: PretrainConfig,
    folder: RunFolder | None,
    trainer: Pretrainer,
    data: Data,
    evolution: Evolution,
) -> Account | None:
    """Load the newest checkpoint of rank 0's folder into all ranks; None if there is none.

    Raises:
        CheckpointError: it is damaged, or of another model.
        ConfigError: what is past would have been otherwise with this configuration.
    """
    workers = trainer.workers
    checkpoint = latest_checkpoint(folder) if folder is not None else None
    own = checkpoint.state if checkpoint is not None else None
    state = json.loads(workers.broadcast(json.dumps(own)))
    if state is None:
        return None
    try:
        account, past = Account(**state["account"]), state["past"]
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"{checkpoint and checkpoint.path} is no checkpoint of pretraining ({error}); give the "
            "folder of such a run"
        ) from None
    if isinstance(evolution.schedule, AdaptiveSchedule):
        evolution.schedule.load_state_dict(state["schedule"])
    now = _past(config, data, evolution, account.steps)
    for key in now:
        if now[key] != past.get(key):
            raise ConfigError(
                f"the run cannot be resumed: {key} was {past.get(key)} and would be {now[key]}. "
                "`steps` may grow only while what is done stays the same (schedule constant, or "
                "wsd before its decay, and stages that keep their steps); data may not change"
            )
    if checkpoint is None:
        trainer.load_state(None, {})
    else:
        trainer.load_state(*load_state(checkpoint.path / TRAINER))
    return account


def _past(config: PretrainConfig, data: Data, evolution: Evolution, steps: int) -> dict[str, Any]:
    """What the first `steps` steps depend on beyond settings that may not change."""
    lr = learning_rate(config)
    return {
        "data": data.train.header.sha256,
        "learning rate of the last step": lr.at(steps - 1),
        "stages": [
            [stage.start, *stage.rates.values]
            for stage in evolution.schedule.stages
            if stage.start < steps
        ],
    }


def save_pretrained(
    config: PretrainConfig,
    folder: RunFolder,
    decoder: Decoder,
    metrics: Mapping[str, float],
    stages: Sequence[Stage],
) -> None:
    """Write the model with its tokenizer and card as a Hugging Face directory."""
    if folder.model.exists():
        shutil.rmtree(folder.model)
    source = config.model.path
    with whole_directory(folder.model) as part:
        dtype = DTYPES[config.model.dtype]
        save_decoder(decoder, part / "model", source=source, dtype=dtype)
        for file in (part / "model").iterdir():
            file.replace(part / file.name)
        (part / "model").rmdir()
        for name in CARRIED_FILES:
            if (config.data.path / name).is_file() and not (part / name).exists():
                shutil.copyfile(config.data.path / name, part / name)
        card = model_card(config, decoder, metrics, stages)
        (part / CARD).write_text(card, encoding="utf-8")


def model_card(
    config: PretrainConfig,
    decoder: Decoder,
    metrics: Mapping[str, float],
    stages: Sequence[Stage],
) -> str:
    """What a reader of the model's page must know."""
    shape = decoder.config
    count = sum(p.numel() for p in decoder.parameters())
    how = "as a whole"
    if config.evolve is not None:
        grown = "; ".join(
            f"from step {stage.start:,}: {stage.rates.layers:g} of layers, {stage.rates.heads:g} "
            f"of heads, {stage.rates.neurons:g} of neurons"
            for stage in stages
        )
        how = f"on {config.evolve.method} subnetworks that grow ({grown})"
    saved = metrics.get("pretrain/saved_frac", 0.0)
    loss = metrics.get("pretrain/eval_loss")
    held_out = "not measured" if loss is None else f"{loss:.4f} nats per token"
    text = f"""A {shape.family} model of {count:,} parameters ({shape.num_layers} layers, width \
{shape.hidden_size}, vocabulary {shape.vocab_size:,}), pretrained with Ratoon {how}.

| | |
| --- | --- |
| tokens | {metrics.get("pretrain/tokens", 0):,.0f}, in sequences of {config.data.sequence_length} |
| held-out loss | {held_out} |
| operations | {metrics.get("pretrain/flops", 0.0):.3e} counted, head and optimizer included |
| saved against the whole model on the same tokens | {saved:.1%} |
| time of training | {metrics.get("pretrain/train_s", 0.0):,.0f} s |

It is a plain model: it needs nothing of Ratoon to run. It was trained to continue text, not to
follow instructions, and repeats what its data held."""
    return hub_card(config, "pretraining", text)
