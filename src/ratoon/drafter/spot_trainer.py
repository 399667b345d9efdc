"""Training the drafter in spare time, in pieces short enough to stop at any moment.

The spot trainer gets data and a question to ask between pieces ("should I stop?"). Whose time it
uses and why it stops is not its business. A piece is one micro-step, one optimizer step or one
publication; stopping loses at most the gradient gathered since the last optimizer step.

A failure propagates to the caller of `run_once`; nothing is caught.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ratoon.drafter.checkpoint import weights_checksum
from ratoon.drafter.data_buffer import DataBuffer
from ratoon.drafter.micro_batch import MicroBatch
from ratoon.drafter.trainer import DrafterTrainer, StepMetrics
from ratoon.errors import ConfigError

# Micro-batches are padded to multiples of this, for few sizes of matrices.
ROW_MULTIPLE = 32

Publish = Callable[[dict[str, Tensor], int, str], None]


@dataclass(frozen=True, slots=True)
class SpotReport:
    """What one session did.

    `tokens` were trained on in `steps` optimizer steps; `lost_tokens` had their gradient dropped
    when the session stopped (less than one optimizer step). `published` counts publications,
    `metrics` has one entry per optimizer step.
    """

    steps: int
    tokens: int
    micro_steps: int
    lost_tokens: int
    published: int
    metrics: tuple[StepMetrics, ...]


class SpotTrainer:
    """A drafter's trainer, its data and where its weights go.

    `publish(weights, version, checksum)` gets the trainable tensors in the compute dtype every
    `publish_every` optimizer steps; versions rise by one. With `deterministic_steps` a session does
    exactly that many optimizer steps whatever the stop signal says.
    """

    def __init__(
        self,
        trainer: DrafterTrainer,
        buffer: DataBuffer,
        publish: Publish,
        *,
        publish_every: int,
        deterministic_steps: int | None = None,
        version: int = 0,
    ) -> None:
        if publish_every < 1 or (deterministic_steps is not None and deterministic_steps < 1):
            raise ConfigError(
                f"Spot training: publish_every = {publish_every} and deterministic_steps = "
                f"{deterministic_steps} must be at least 1 (or deterministic_steps null)."
            )
        self.trainer = trainer
        self.buffer = buffer
        self.publish_every = publish_every
        self.deterministic_steps = deterministic_steps
        self.version = version
        self._publish = publish
        self._published_step = trainer.step

    @property
    def unpublished_steps(self) -> int:
        """Optimizer steps whose result nobody has got yet."""
        return self.trainer.step - self._published_step

    def publish(self) -> None:
        """Hand out the weights under the next version number."""
        weights = self.trainer.weights()
        self.version += 1
        self._published_step = self.trainer.step
        self._publish(weights, self.version, weights_checksum(weights))

    def adopt(self, version: int) -> None:
        """Go on from what somebody else trained and published as `version`."""
        self.version = version
        self._published_step = self.trainer.step

    def start(self, should_stop: Callable[[], bool]) -> SpotSession:
        """Begin a session; `should_stop` is asked before each piece of work."""
        return SpotSession(self, should_stop)


class SpotSession:
    """One stretch of spare time."""

    def __init__(self, spot: SpotTrainer, should_stop: Callable[[], bool]) -> None:
        self._spot = spot
        self._should_stop = should_stop
        self._metrics: list[StepMetrics] = []
        self._micro_steps = 0
        self._published = 0
        self._report: SpotReport | None = None
        spot.trainer.discard()

    @property
    def trainer(self) -> DrafterTrainer:
        """The trainer that this session drives."""
        return self._spot.trainer

    @property
    def is_closed(self) -> bool:
        """Whether the session stopped; a closed session does nothing more."""
        return self._report is not None

    def run_once(self) -> bool:
        """Do one piece of work; False if there was none: stopped, complete, or no data yet.

        Once stopped or complete the session is closed; without data it stays open.
        """
        if self._report is not None:
            return False
        if self._is_over():
            self.close()
            return False
        trainer = self.trainer
        if self._spot.unpublished_steps >= self._spot.publish_every:
            self._spot.publish()
            self._published += 1
            return True
        if trainer.is_full:
            self._metrics.append(trainer.optimizer_step())
            return True
        return self._micro_step()

    def run(self) -> SpotReport:
        """Work until there is no more to do, then close."""
        while self.run_once():
            pass
        return self.close()

    def close(self) -> SpotReport:
        """Stop now, drop the gradient gathered, and say what was done; idempotent."""
        if self._report is None:
            trainer = self.trainer
            self._report = SpotReport(
                steps=len(self._metrics),
                tokens=sum(metrics.tokens for metrics in self._metrics),
                micro_steps=self._micro_steps,
                lost_tokens=trainer.pending_tokens,
                published=self._published,
                metrics=tuple(self._metrics),
            )
            trainer.discard()
        return self._report

    def _is_over(self) -> bool:
        steps = self._spot.deterministic_steps
        return self._should_stop() if steps is None else len(self._metrics) >= steps

    def _micro_step(self) -> bool:
        trainer, options = self.trainer, self.trainer.options
        window = trainer.drafter.config.window
        slices = self._spot.buffer.draw(
            options.micro_rows, 4 * options.micro_tokens, window, unroll=options.unroll
        )
        if not slices:
            return False
        batch = MicroBatch.build(
            slices, options.unroll, window, stride=options.deep_stride, multiple=ROW_MULTIPLE
        )
        version = slices[0].sample.policy_version
        trainer.micro_step(batch, self._spot.buffer.head_rows(version))
        self._micro_steps += 1
        return True
