"""A worker's learned drafter: the copy it drafts with, and the one it trains in idle time."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ratoon.cluster.exchange import DrafterExchange
from ratoon.cluster.messages import DrafterPublished, SpotResult, TakeDrafter
from ratoon.cluster.spec import DraftingSpec, WorkerSpec
from ratoon.drafter.checkpoint import (
    apply_weights,
    load_buffer,
    load_checkpoint,
    load_drafter,
    save_buffer,
    save_checkpoint,
)
from ratoon.drafter.data_buffer import DataBuffer, Sample
from ratoon.drafter.model import DrafterConfig, Eagle3Drafter
from ratoon.drafter.spot_trainer import SpotSession, SpotTrainer
from ratoon.drafter.trainer import DrafterTrainer, TrainerOptions
from ratoon.errors import StaleVersionError
from ratoon.models.compute_dtype import DTYPES
from ratoon.models.decoder import Decoder
from ratoon.rollout.native.engine import Finished

_NOTHING_TO_DO_S = 0.05


class DrafterUnit:
    """Everything of one worker that belongs to the learned drafter.

    `send` is called with each publication.
    """

    def __init__(
        self,
        spec: DraftingSpec,
        trainer: DrafterTrainer,
        *,
        folder: Path,
        seed: int,
        version: int,
        send: Callable[[DrafterPublished], None],
    ) -> None:
        self._send = send
        self.trainer = trainer
        self.served = Eagle3Drafter(trainer.drafter.config).to(trainer.drafter.d2t.device)
        self.served.load_state_dict(trainer.drafter.state_dict())
        self.exchange = DrafterExchange(folder, self.served, trainer.options.compute_dtype)
        self.buffer = DataBuffer(spec.spot.buffer_tokens, seed=seed)
        self._spot = SpotTrainer(
            self.trainer,
            self.buffer,
            self._publish,
            publish_every=spec.spot.publish_every_steps,
            deterministic_steps=spec.spot.deterministic_steps,
            version=version,
        )
        self._session: SpotSession | None = None
        self._rested_s = 0.0
        self._rest_per_work = 1.0 / spec.spot.share - 1.0
        self._served_version = version
        self.mark()

    @property
    def version(self) -> int:
        """Number of the last publication that this worker knows of."""
        return self._spot.version

    @property
    def is_training(self) -> bool:
        """Whether a session is open."""
        return self._session is not None

    def begin_step(self, policy_version: int, head: Tensor, embedding: Tensor) -> None:
        """The policy changed: keep last step's long samples, use its embedding from here on.

        Nothing happens where it did not: one step may have several rollouts.
        """
        if policy_version in self.buffer.versions[-1:]:
            return
        self.buffer.begin_step(policy_version, head[self.served.draft_ids].clone())
        self.trainer.set_embedding(embedding)

    def mark(self) -> None:
        """Keep the data that `abandon` goes back to."""
        self._marked = self.buffer.state()

    def abandon(self) -> None:
        """End a session that is open, and go back to the data at `mark`.

        What the drafter has learned meanwhile it keeps.
        """
        if self.is_training:
            self.stop(time.monotonic)
        self.buffer.restore(*self._marked)

    def add(self, finished: Finished) -> None:
        """Store a finished response for training."""
        completion = finished.completion
        assert finished.features is not None
        assert finished.hidden is not None
        ids = torch.tensor(completion.prompt_ids + completion.token_ids)
        self.buffer.add(
            Sample(
                uid=(completion.key.row, completion.key.sample, completion.key.attempt),
                ids=ids.to(finished.features.device),
                features=finished.features,
                hidden=finished.hidden,
                prompt_len=len(completion.prompt_ids),
                policy_version=completion.policy_version,
            )
        )

    def start(self, version: int) -> None:
        """Begin a session; `version` is the newest publication of any worker."""
        self.exchange.load_training(self.trainer)
        self._spot.adopt(version)
        self._session = self._spot.start(lambda: False)
        self._rested_s = 0.0

    def run_once(self) -> bool:
        """One piece of training; false if there is nothing to do."""
        assert self._session is not None
        return self._session.run_once()

    def run_and_rest(self, wait: Callable[[float], object]) -> None:
        """One piece of training, then a rest in proportion; `wait(seconds)` may return early."""
        started = time.monotonic()
        if not self.run_once():
            # All that the buffer holds has been drawn: wait for news instead of spinning.
            wait(_NOTHING_TO_DO_S)
            return
        worked = time.monotonic()
        wait((worked - started) * self._rest_per_work)
        self._rested_s += time.monotonic() - worked

    def stop(self, ended_s: Callable[[], float]) -> SpotResult:
        """End the session, publish what nobody has got yet, and leave the state for others."""
        assert self._session is not None
        report = self._session.close()
        ended = ended_s()
        self._session = None
        if report.steps:
            if self._spot.unpublished_steps:
                self._spot.publish()
            self.exchange.store_training(self.trainer)
        last = report.metrics[-1] if report.metrics else None
        return SpotResult(
            tokens=report.tokens,
            steps=report.steps,
            published=report.published,
            loss=last.loss if last else None,
            acceptance=last.acceptance if last else (),
            ended_s=ended,
            rested_s=self._rested_s,
        )

    def take(self, message: TakeDrafter) -> None:
        """Make published weights the served ones.

        Weights that a newer publication has replaced meanwhile are passed over: its message
        follows.

        Raises: StaleVersionError if they are not what was announced.
        """
        if message.version == self._served_version:
            return
        try:
            apply_weights(self.served, self.exchange.read(message.slot), message.checksum)
        except StaleVersionError:
            if self.exchange.version(message.slot) > message.version:
                return
            raise
        self._served_version = message.version
        self._spot.version = max(self._spot.version, message.version)

    def save(self, folder: Path) -> None:
        """Write drafter and optimizer as the last session left them."""
        self.exchange.load_training(self.trainer)
        save_checkpoint(folder, self.trainer, self.version)

    def save_buffer(self, folder: Path) -> None:
        """Write this worker's data."""
        save_buffer(folder, self.buffer)

    def load_buffer(self, folder: Path) -> None:
        """Go on with the data that `save_buffer` wrote."""
        load_buffer(folder, self.buffer)

    def _publish(self, weights: dict[str, Tensor], version: int, checksum: str) -> None:
        slot = self.exchange.publish(version, weights)
        self._send(DrafterPublished(version, checksum, slot))


def _trainer_options(spec: WorkerSpec) -> TrainerOptions:
    """The drafter trainer's options from the configuration."""
    assert spec.drafting is not None
    settings = spec.drafting.drafter
    return TrainerOptions(
        learning_rate=settings.lr,
        unroll=settings.unroll,
        loss=settings.loss,
        temperature=spec.drafting.temperature,
        batch_tokens=settings.batch_tokens,
        compiled=settings.compiled,
        compute_dtype=DTYPES[spec.model.dtype],
    )


def new_trainer(spec: WorkerSpec, decoder: Decoder, vocabulary: Tensor) -> DrafterTrainer:
    """A trainer at its start; the same on every worker: the noise is drawn from the run's seed."""
    options = _trainer_options(spec)
    assert spec.drafting is not None
    settings = spec.drafting.drafter
    if settings.path is not None:
        return DrafterTrainer(load_drafter(settings.path), options)
    config = DrafterConfig.for_target(decoder.config, settings.draft_vocab_size, settings.window)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        drafter = Eagle3Drafter.from_target(config, decoder, vocabulary)
    return DrafterTrainer(drafter, options)


def restored_trainer(spec: WorkerSpec, folder: Path) -> DrafterTrainer:
    """The trainer that `DrafterUnit.save` wrote."""
    trainer, _ = load_checkpoint(folder, _trainer_options(spec))
    return trainer
