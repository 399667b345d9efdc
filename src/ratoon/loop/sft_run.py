"""A whole run of supervised fine-tuning."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ratoon.cluster.local import LocalWorkers, shared_folder
from ratoon.cluster.spec import TrainingSpec, WorkerSpec
from ratoon.config.sft import SFTConfig
from ratoon.data.examples import Example, load_examples
from ratoon.data.prompts import PromptStyle
from ratoon.loop.checkpoints import Checkpoint, latest_checkpoint, whole_checkpoint
from ratoon.loop.setup import (
    check_adapters,
    check_context,
    load_tokenizer,
    num_workers,
    with_machine,
)
from ratoon.models.tokenizer import Tokenizer
from ratoon.observe.observer import Observer
from ratoon.observe.run_folder import RunFolder
from ratoon.stopping import Stop

Batch = list[Example]


def run_sft(
    config: SFTConfig, folder: RunFolder, observer: Observer, stop: Stop | None = None
) -> None:
    """Train as configured; continues after the last checkpoint in `folder`, if there is one.

    Raises: Stopped as `stop` asks, when the last complete step is saved; RatoonError of all kinds.
    """
    stop = stop or Stop()
    config = with_machine(config)
    checkpoint = latest_checkpoint(folder)
    check_context("max_length", config.max_length, config.model.path)
    check_adapters(config.lora, config.model.path)
    tokenizer = load_tokenizer(config.model.path)
    train, held_out = _load(config, tokenizer, observer.note)
    batches = list(make_batches(train, config))
    with (
        shared_folder() as shared,
        LocalWorkers(_specs(config, tokenizer, shared, len(batches))) as workers,
    ):
        observer.phase("loading")
        workers.wait_until_ready()
        done = _begin(checkpoint, observer, workers)
        with stop.deferred():
            _train(config, folder, observer, workers, batches, held_out, done=done, stop=stop)
        for product in (folder.model, folder.adapter):
            if product.exists():
                shutil.rmtree(product)
        workers.call(0, "save_model", folder=folder.model)
        if config.lora is not None:
            workers.call(0, "save_adapter", folder=folder.adapter)


def make_batches(examples: Sequence[Example], config: SFTConfig) -> Iterator[Batch]:
    """The examples of each optimizer step: epoch after epoch, each in an order of its own."""
    order = _endless(examples, config.seed, config.epochs)
    batch: Batch = []
    made = tokens = 0
    for example in order:
        size = len(example.prompt_ids) + len(example.completion_ids)
        if batch and tokens + size > config.update.batch_tokens:
            yield batch
            made, batch, tokens = made + 1, [], 0
            if made == config.steps:
                return
        batch.append(example)
        tokens += size
    if batch:
        yield batch


def _endless(examples: Sequence[Example], seed: int, epochs: int | None) -> Iterator[Example]:
    epoch = 0
    while epochs is None or epoch < epochs:
        order = list(examples)
        random.Random(f"{seed}/{epoch}").shuffle(order)
        yield from order
        epoch += 1


def _load(
    config: SFTConfig, tokenizer: Tokenizer, say: Callable[[str], None]
) -> tuple[list[Example], list[Example]]:
    data = config.data
    style = PromptStyle(
        data.system_prompt,
        data.chat_template,
        config.max_length,
        limit="max_length",
        say_too_long=say if data.too_long == "drop" else None,
    )
    train = load_examples(data.train.model_dump(), tokenizer, split="train", style=style)
    if data.eval is None:
        return train, []
    return train, load_examples(data.eval.model_dump(), tokenizer, split="eval", style=style)


def _specs(
    config: SFTConfig, tokenizer: Tokenizer, folder: Path, total_steps: int
) -> list[WorkerSpec]:
    count = num_workers(config.workers)
    training = TrainingSpec(
        optimizer=config.optimizer,
        update=config.update,
        lora=config.lora,
        algorithm=None,
        temperature=1.0,
        max_tokens=config.max_length,
        total_steps=total_steps,
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
            rollout=None,
            drafting=None,
        )
        for index in range(count)
    ]


def _pairs(examples: Sequence[Example]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(example.prompt_ids, example.completion_ids) for example in examples]


def _begin(checkpoint: Checkpoint | None, observer: Observer, workers: LocalWorkers) -> int:
    """Load the checkpoint, if there is one; returns the steps done."""
    if checkpoint is None:
        # What a run wrote that ended before its first checkpoint.
        observer.resume_after(-1)
        return 0
    workers.call_all("load_training", folder=checkpoint.path / "policy")
    observer.resume_after(checkpoint.step)
    return checkpoint.step


def _train(
    config: SFTConfig,
    folder: RunFolder,
    observer: Observer,
    workers: LocalWorkers,
    batches: Sequence[Batch],
    held_out: Sequence[Example],
    *,
    done: int,
    stop: Stop,
) -> None:
    observer.phase("SFT", len(batches), done=done)
    if held_out and not done:
        _evaluate(observer, workers, held_out, 0)
    for step, batch in enumerate(batches[done:], start=done + 1):
        started = observer.clock.now()
        metrics = workers.call_all("train_batch", examples=_pairs(batch))[0]
        ended = observer.clock.now()
        for index in range(len(workers)):
            observer.span(f"worker {index}", "update", started, ended, step=step)
        observer.metrics(step, {**metrics, "time/step_s": ended - started})
        last = step == len(batches)
        every = config.evaluate_every
        if held_out and (last or (every is not None and step % every == 0)):
            _evaluate(observer, workers, held_out, step)
        if not last and (stop.is_asked or step % config.checkpoint.every == 0):
            with whole_checkpoint(folder, step, config.checkpoint.keep) as draft:
                workers.call(0, "save_training", folder=draft / "policy")
            stop.check(f"stopped after step {step}, which is saved; go on with --resume")


def _evaluate(
    observer: Observer, workers: LocalWorkers, held_out: Sequence[Example], step: int
) -> None:
    loss = workers.call_all("evaluate_batch", examples=_pairs(held_out))[0]
    observer.metrics(step, {"sft/eval_loss": loss})
