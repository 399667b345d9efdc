"""Trains the drafter in bounded pieces.

The drafter's parameters are float32 views of one flat buffer, compute copies and gradient are views
of two others in bfloat16: the optimizer goes over all of them once, whatever the number of tensors
(see `flat_adamw`). Many small optimizer steps learn more per second than few large ones.

The policy never receives a gradient: features, hidden states, embedding and teacher rows enter
detached.

Shape letters: K unroll steps, V vocabulary, D width, Vd draft vocabulary, P trainable numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ratoon.drafter.flat import FlatLayout, adopt
from ratoon.drafter.flat_adamw import FlatAdamW
from ratoon.drafter.losses import (
    KL,
    ROWS,
    TOP1_AGREED,
    TOP1_ROWS,
    TV,
    HeadLoss,
    LossKind,
    LossShape,
)
from ratoon.drafter.micro_batch import MicroBatch
from ratoon.drafter.model import Eagle3Drafter
from ratoon.drafter.training_ops import columns
from ratoon.drafter.unroll import TrainedDrafter
from ratoon.errors import ConfigError, NumericsError


@dataclass(frozen=True, slots=True)
class TrainerOptions:
    """How the drafter is trained.

    `micro_tokens` bounds the rows of a micro-step and with them its time; about `batch_tokens` of
    them make one optimizer step. Step i of the `unroll` steps weighs `step_decay**i`; beyond step 0
    only every `deep_stride`-th column goes on, with a weight to match. Unroll as deep as drafts go:
    one step beyond, acceptance falls to nearly nothing. `temperature` is the rollouts'. The
    learning rate rises over `warmup_steps` and then stays. `compiled` makes the optimizer's loop
    with torch.compile: worth its seconds in runs of some thousand steps.
    """

    learning_rate: float = 1e-3
    warmup_steps: int = 20
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    unroll: int = 4
    step_decay: float = 0.8
    deep_stride: int = 4
    loss: LossKind = "hybrid"
    tv_weight: float = 3.0
    temperature: float = 1.0
    micro_tokens: int = 256
    batch_tokens: int = 256
    compute_dtype: torch.dtype = torch.bfloat16
    compiled: bool = False

    def __post_init__(self) -> None:
        """Refuse values that cannot train."""
        positive = {
            "learning_rate": self.learning_rate,
            "clip_norm": self.clip_norm,
            "unroll": self.unroll,
            "step_decay": self.step_decay,
            "deep_stride": self.deep_stride,
            "temperature": self.temperature,
            "micro_tokens": self.micro_tokens,
            "batch_tokens": self.batch_tokens,
        }
        for name, value in positive.items():
            if value <= 0:
                raise ConfigError(f"Drafter training: {name} = {value}; it must be above 0.")
        if self.loss not in ("kl", "tv", "hybrid"):
            raise ConfigError(
                f"Drafter training: loss = {self.loss!r}; allowed are kl, tv and hybrid."
            )

    @property
    def micro_rows(self) -> int:
        """Rows of a micro-step: never more than an optimizer step has."""
        return min(self.micro_tokens, self.batch_tokens)


class StepMetrics(NamedTuple):
    """One optimizer step. Per-depth values are means over the rows trained on.

    `acceptance[i]` is 1 - tv at unroll step i: the chance that a draft drawn from the drafter is
    accepted, given that the target's token lies in the draft vocabulary. `top1[i]` is the share of
    rows whose most likely tokens agree, estimated on the first rows of each micro-step.
    """

    step: int
    tokens: int
    loss: float
    kl: tuple[float, ...]
    acceptance: tuple[float, ...]
    top1: tuple[float, ...]
    grad_norm: float
    learning_rate: float


class DrafterTrainer:
    """Owns the optimizer of one drafter; processes micro-batches one at a time.

    The drafter's parameters become views of the trainer's flat master buffer, so the module always
    holds the newest weights.
    """

    def __init__(self, drafter: Eagle3Drafter, options: TrainerOptions) -> None:
        self.drafter = drafter
        self.options = options
        self.step = 0
        self.tokens = 0
        self._head_loss = HeadLoss(
            LossShape.of(options.loss, options.tv_weight, options.temperature)
        )
        self._layout = FlatLayout(drafter)
        self._master = adopt(drafter, self._layout)
        self._compute = self._master.to(options.compute_dtype, copy=True)
        # Weight gradients as the products give them; the optimizer makes them float32.
        self._gradient = torch.zeros_like(self._compute)
        self._model = TrainedDrafter(drafter.config, self._layout.fused(self._compute))
        self._head_inputs: list[Tensor] = []
        self._optimizer = FlatAdamW(
            self._master,
            self._compute,
            options.betas,
            options.weight_decay,
            compiled=options.compiled,
        )
        steps = torch.arange(options.unroll, dtype=torch.float64, device=self._master.device)
        self._decay = options.step_decay**steps
        self._rope = drafter.config.rope_table(1, options.compute_dtype)
        self._embedding: Tensor | None = None
        self.discard()

    @property
    def pending_tokens(self) -> int:
        """Columns whose gradient was gathered since the last optimizer step."""
        return self._pending_tokens

    @property
    def is_full(self) -> bool:
        """Whether an optimizer step is due: as near to `batch_tokens` as micro-steps come."""
        next_one = self.options.micro_rows
        enough = self.options.batch_tokens - next_one / 2
        return self._pending_tokens > max(0.0, enough)

    def set_embedding(self, embedding: Tensor) -> None:
        """Use the target's live embedding `[V, D]` from here on; a copy where dtypes differ."""
        self._embedding = embedding.detach().to(self.options.compute_dtype)

    def micro_step(self, batch: MicroBatch, teacher_head: Tensor) -> None:
        """Add one micro-batch's gradient; `teacher_head [Vd, D]` is of the batch's version.

        Cost: one forward and backward over the batch, no host-device sync.
        """
        student = self._student(batch)
        loss, stats, gradient = self._apply(self._head_loss, student.detach(), batch, teacher_head)
        self._head_inputs.append(student.detach())
        student.backward(gradient @ self._model.head)
        self._stats += stats
        self._loss += loss
        self._weight += batch.row_weights(self._decay).sum()
        self._pending_tokens += batch.num_queries

    def optimizer_step(self) -> StepMetrics:
        """Apply the gathered gradient, normalised by the weight of its rows.

        Raises: NumericsError if the gradient is not finite; the weights are left as they were.
        Cost: one product per weight, two passes over the P numbers, one host-device sync.
        """
        options, stats = self.options, self._stats.cpu()
        self._write_gradient()
        normaliser = float(self._weight)
        norm = self._optimizer.norm(self._gradient) / normaliser
        if not math.isfinite(norm):
            raise NumericsError(
                f"The drafter's gradient norm is {norm} at step {self.step}. Lower the drafter's "
                "learning rate, or check the target's states for NaN."
            )
        rate = options.learning_rate * min(1.0, (self.step + 1) / max(1, options.warmup_steps))
        scale = min(1.0, options.clip_norm / max(norm, 1e-12)) / normaliser
        self._optimizer.step(self._gradient, scale, rate)
        self.step += 1
        self.tokens += self._pending_tokens
        rows, seen = stats[:, ROWS].clamp(min=1), stats[:, TOP1_ROWS].clamp(min=1)
        metrics = StepMetrics(
            step=self.step,
            tokens=self._pending_tokens,
            loss=float(self._loss) / normaliser,
            kl=tuple((stats[:, KL] / rows).tolist()),
            acceptance=tuple(((stats[:, ROWS] - stats[:, TV]) / rows).tolist()),
            top1=tuple((stats[:, TOP1_AGREED] / seen).tolist()),
            grad_norm=norm,
            learning_rate=rate,
        )
        self.discard()
        return metrics

    def discard(self) -> None:
        """Forget the gradient gathered since the last optimizer step."""
        device = self._master.device
        self._model.discard_gradients()
        self._head_loss.clear()
        self._head_inputs.clear()
        self._pending_tokens = 0
        self._stats = torch.zeros(self.options.unroll, 5, dtype=torch.float64, device=device)
        self._loss = torch.zeros((), dtype=torch.float64, device=device)
        self._weight = torch.zeros((), dtype=torch.float64, device=device)

    @torch.no_grad()
    def evaluate(self, batch: MicroBatch, teacher_head: Tensor) -> Tensor:
        """Statistics `[K, 5]` of a batch, as `HeadLoss` sums them, without training."""
        loss = HeadLoss(self._head_loss.shape)
        return self._apply(loss, self._student(batch), batch, teacher_head)[1]

    def weights(self) -> dict[str, Tensor]:
        """Copies of the trainable tensors in the compute dtype, under their checkpoint names."""
        flat = self._compute.clone()
        return self._layout.named(flat)

    def optimizer_state(self) -> dict[str, Tensor]:
        """First and second moments per tensor, keyed `exp_avg.<name>` and `exp_avg_sq.<name>`.

        Empty before the first step.
        """
        return {
            f"{moment}.{name}": view
            for moment, flat in self._optimizer.moments.items()
            for name, view in self._layout.named(flat).items()
        }

    def load_optimizer_state(self, moments: Mapping[str, Tensor], step: int, tokens: int) -> None:
        """Take over `moments` from `optimizer_state` and the counters; weights are read anew."""
        self.step, self.tokens = step, tokens
        for moment, flat in self._optimizer.restart(step if moments else 0).items():
            for name, view in self._layout.named(flat).items() if moments else ():
                view.copy_(moments[f"{moment}.{name}"])
        self._compute.copy_(self._master)
        self.discard()

    def _student(self, batch: MicroBatch) -> Tensor:
        """Head inputs `[R, D]` of a batch."""
        if self._embedding is None:
            raise ConfigError("The drafter's trainer has no embedding; call set_embedding first.")
        self._extend_rope(batch.longest + self.options.unroll)
        return self._model.head_inputs(self._embedding, batch, self._rope)

    def _apply(
        self, loss: HeadLoss, student: Tensor, batch: MicroBatch, teacher_head: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype = self.options.compute_dtype
        return loss(
            student,
            self._model.head,
            batch.teacher_hidden.to(dtype),
            teacher_head.detach().to(dtype),
            batch.teacher_rows,
            batch.row_weights(self._decay),
            batch.step_rows,
        )

    def _write_gradient(self) -> None:
        """Form all weight gradients gathered."""
        views = self._layout.fused(self._gradient)
        self._model.write_gradients(views)
        torch.mm(columns(self._head_inputs), self._head_loss.gradients(), out=views.head.t())

    def _extend_rope(self, num_positions: int) -> None:
        if self._rope.shape[1] < num_positions:
            table = self.drafter.config.rope_table(2 * num_positions, self.options.compute_dtype)
            self._rope = table.to(self._master.device)
