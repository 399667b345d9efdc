"""A whole run of pretraining, in this process or in each that torchrun started.

    for each step:   stage → grow at its beginning → draw, forward, backward, update → record

Rank 0 records, shows, and writes checkpoints and the model; draws, data and updates are functions
of the configuration and the step alone, so the ranks agree without a message.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

import torch

from ratoon.config.pretrain import PretrainConfig
from ratoon.est.adaptive import AdaptiveSchedule
from ratoon.est.schedule import Stage
from ratoon.est.subnetwork import Rates, Subnetwork
from ratoon.loop.accounting import Account, StepCost
from ratoon.loop.adapting import Adaptation
from ratoon.loop.growing import grow_into
from ratoon.loop.growth_file import write_growth
from ratoon.loop.memory import require_memory
from ratoon.loop.pretrain_output import load_run, save_pretrained, save_run
from ratoon.loop.pretrain_setup import (
    decoder_config,
    evolution,
    learning_rate,
    make_decoder,
    open_data,
    share_out,
    update_rule,
)
from ratoon.loop.switches import switch_losses, switch_metrics
from ratoon.models.compute_dtype import DTYPES, with_dtype
from ratoon.models.decoder import Decoder
from ratoon.observe.observer import Observer
from ratoon.observe.run_folder import RunFolder
from ratoon.training.data_parallel import DataParallel
from ratoon.training.pretrainer import Ids, Passes, Pretrainer, StepResult
from ratoon.training.torchrun import torchrun_workers
from ratoon.training.update_checks import require_finite


@dataclass(frozen=True, slots=True)
class PretrainResult:
    """What a run came to.

    `evaluations` maps a step to the whole model's held-out loss, `losses` to the mean training loss
    since the record before, both in nats per token. `metrics` are the last recorded. `stages` are
    those that the run went through, and where each began. Deciding about them has cost
    `probe_flops` operations and `probe_s` seconds, which are part of the run's.
    """

    evaluations: dict[int, float]
    losses: dict[int, float]
    metrics: dict[str, float]
    stages: tuple[Stage, ...]
    probe_flops: float
    probe_s: float


def pretrain(
    config: PretrainConfig, folder: RunFolder | None, observer: Observer
) -> PretrainResult:
    """Train as configured; continues after the last checkpoint in `folder`, if there is one.

    Without a folder nothing is written: no checkpoints and no model.

    Raises:
        ConfigError, DataError, CheckpointError, CapabilityError: before the first step.
        NumericsError: a gradient is not finite.
    """
    config = with_dtype(config)
    with torchrun_workers() as (workers, device):
        run = _Run(config, folder, observer, workers, device)
        run.resume()
        run.train()
        run.save()
        return run.result()


@dataclass(slots=True)
class _Window:
    """What happened since the last record; tensors are on the device, and nothing waits for them.

    `started_s` is the clock at its first step.
    """

    started_s: float
    results: list[StepResult] = field(default_factory=list)


class _Run:
    """State of one process of a run."""

    def __init__(
        self,
        config: PretrainConfig,
        folder: RunFolder | None,
        observer: Observer,
        workers: DataParallel,
        device: torch.device,
    ) -> None:
        self.config, self.folder, self.observer, self.workers = config, folder, observer, workers
        length, update = config.data.sequence_length, config.update
        self.batch, self.share = share_out(config, workers.size)
        self.data = open_data(config)
        self.model = model = decoder_config(config, self.data.train.header)
        passes = Passes(
            min(update.micro_batch_tokens // length, self.share),
            update.activation_checkpointing,
            update.compile,
        )
        self.evolution = evolution(config, model, passes.micro_batch)
        self.lr = learning_rate(config)
        if device.type == "cpu":
            tokens = passes.micro_batch * length
            require_memory(config, model, tokens=tokens, processes=workers.size)
        self.trainer = Pretrainer(
            make_decoder(config, model).to(device),
            update_rule(config),
            passes,
            shape=self.evolution.shape,
            freezes=config.evolve is None or config.evolve.unsampled == "freeze",
            compute_dtype=DTYPES[config.model.dtype],
            workers=workers,
            shard=update.shard,
        )
        self.full = Subnetwork.full(self.evolution.shape)
        self.cost = StepCost(
            model,
            self.full,
            tokens=self.batch * length,
            length=length,
            parameters=[tuple(p.shape) for p in self.trainer.decoder.parameters()],
            optimizer=config.optimizer.kind,
        )
        self.account = Account()
        self.adaptation = self._adaptation()
        self.window = _Window(observer.clock.now())
        self.evaluations: dict[int, float] = {}
        self.losses: dict[int, float] = {}
        self.metrics: dict[str, float] = {}

    def resume(self) -> None:
        """Go on after the last checkpoint, if there is one."""
        account = load_run(self.config, self.folder, self.trainer, self.data, self.evolution)
        if account is not None:
            self.account = account
        # Also what a run wrote that ended before its first checkpoint.
        self.observer.resume_after(self.account.steps or -1)
        self._write_growth()

    def train(self) -> None:
        """All steps that are left."""
        config, done = self.config, self.account.steps
        self.observer.phase("pretraining", config.steps, done=done)
        if not done:
            self._say_stage(0)
            self._evaluate(0)
        self.window.started_s = self.observer.clock.now()
        for step in range(done, config.steps):
            self._decide(step)
            if self._begins_stage(step):
                self._grow(step)
            self._step(step)
            made = step + 1
            last = made == config.steps
            every = config.evaluation.every
            evaluates = last or (every is not None and made % every == 0)
            saves = made % config.checkpoint.every == 0 and not last
            if made % config.log_every == 0 or evaluates or saves:
                self._record(made)
            if evaluates:
                self._evaluate(made)
            if saves:
                save_run(config, self.folder, self.trainer, self.data, self.evolution, self.account)
            if evaluates or saves:
                self.window.started_s = self.observer.clock.now()

    def save(self) -> None:
        """Write the model."""
        masters = self.trainer.weights.tensors()["master"]
        if self.folder is not None:
            decoder = Decoder(self.model)
            decoder.load_state_dict(dict(masters), assign=True)
            save_pretrained(
                self.config, self.folder, decoder, self.metrics, self.evolution.schedule.stages
            )

    def result(self) -> PretrainResult:
        """What the run has come to."""
        probes = self._probe_cost()
        return PretrainResult(
            self.evaluations,
            self.losses,
            self.metrics,
            self.evolution.schedule.stages,
            probes.get("pretrain/probe_flops", 0.0),
            probes.get("pretrain/probe_s", 0.0),
        )

    def _probe_cost(self) -> dict[str, float]:
        schedule = self.evolution.schedule
        if not isinstance(schedule, AdaptiveSchedule):
            return {}
        return {
            "pretrain/probe_flops": schedule.probe_flops,
            "pretrain/probe_s": schedule.probe_seconds,
        }

    def _write_growth(self) -> None:
        schedule = self.evolution.schedule
        if isinstance(schedule, AdaptiveSchedule) and self.folder is not None:
            write_growth(self.folder, schedule)

    def _decide(self, step: int) -> None:
        """Let an adaptive schedule settle the stage of `step`."""
        if self.adaptation is not None:
            started = self.observer.clock.now()
            decided = len(self.adaptation.schedule.log)
            self.adaptation.decide(step, self.account)
            if len(self.adaptation.schedule.log) > decided:
                self._write_growth()
            # It has paid for its time.
            self.window.started_s += self.observer.clock.now() - started

    def _step(self, step: int) -> None:
        stage = self.evolution.schedule.at(step)

        def draw(number: int, count: int) -> Subnetwork:
            return self.evolution.sampler.draw(stage.rates, step, number, count)

        result = self.trainer.step(
            self._sequences(step),
            self._lr(step, stage.rates),
            None if stage.rates.is_full else draw,
        )
        self.window.results.append(result)
        self._pay(stage)

    def _sequences(self, step: int) -> Ids:
        """This worker's share of the sequences of a step."""
        start = step * self.batch + self.workers.rank * self.share
        return self.data.train.sequences(self.data.order.take(start, self.share))

    def _lr(self, step: int, rates: Rates) -> float:
        evolve = self.config.evolve
        return self.lr.at(step) * (1.0 if evolve is None or rates.is_full else evolve.lr_scale)

    def _adaptation(self) -> Adaptation | None:
        schedule, evolve = self.evolution.schedule, self.config.evolve
        if not isinstance(schedule, AdaptiveSchedule):
            return None
        assert evolve is not None
        assert evolve.adaptive is not None
        return Adaptation(
            trainer=self.trainer,
            schedule=schedule,
            sampler=self.evolution.sampler,
            settings=evolve.adaptive,
            held_out=self._held_out(),
            batch=self._sequences,
            lr=self._lr,
            cost=self.cost,
            clock=self.observer.clock,
        )

    def _held_out(self) -> Ids:
        held_out = self.data.held_out
        assert held_out is not None
        return held_out.first(self.config.evaluation.sequences or len(held_out))

    def _pay(self, stage: Stage) -> None:
        account, subnetwork = self.account, self._example(stage)
        account.steps += 1
        account.tokens += self.batch * self.config.data.sequence_length
        account.flops += self.cost.flops(subnetwork)
        account.full_flops += self.cost.flops(self.full)
        account.paper_steps += self.cost.paper(subnetwork)

    def _example(self, stage: Stage) -> Subnetwork:
        """One draw of a stage; all of them cost the same."""
        return self.evolution.sampler.draw(stage.rates, 0, 0, self.trainer.passes.micro_batch)

    def _begins_stage(self, step: int) -> bool:
        return any(stage.start == step for stage in self.evolution.schedule.stages[1:])

    def _grow(self, step: int) -> None:
        """The stage before `step` ends; measure what the switch does."""
        if self.window.results:
            self._record(step)
        schedule = self.evolution.schedule
        before, after = schedule.at(step - 1), schedule.at(step)
        losses = self._switch_losses(before.rates, step)
        grow_into(self.trainer, self._example(before), self._example(after), after.new_layers)
        if self.config.evolve is not None and self.config.evolve.moments == "reset":
            self.trainer.weights.reset_moments()
        if losses is not None:
            found = self._switch_losses(after.rates, step)
            assert found is not None
            self._say(step, switch_metrics(losses, found))
        self._say_stage(step)
        self.window.started_s = self.observer.clock.now()

    def _switch_losses(self, rates: Rates, step: int) -> dict[str, float] | None:
        """Held-out losses of the whole model and of subnetworks; None where not asked for."""
        evolve, held_out = self.config.evolve, self.data.held_out
        if evolve is None or not evolve.switch_sequences or held_out is None:
            return None
        sequences = held_out.first(evolve.switch_sequences)
        return switch_losses(self.trainer, self.evolution.sampler, evolve, sequences, rates, step)

    def _say_stage(self, step: int) -> None:
        """Say which stage begins at `step`."""
        if self.config.evolve is not None:
            schedule = self.evolution.schedule
            rates = schedule.at(step).rates
            values = {f"switch/{name}": value for name, value in asdict(rates).items()}
            self._say(step, {"switch/stage": schedule.index(step), **values})

    def _record(self, made: int) -> None:
        """Record the steps since the last record. The run's only host-device syncs."""
        results, clock = self.window.results, self.observer.clock
        losses = torch.stack([result.loss for result in results])
        norms = torch.stack([result.grad_norm for result in results])
        loss = float(self.workers.sum_(losses).mean())
        norm = float(norms.mean())
        require_finite(norm)
        now = clock.now()
        seconds = now - self.window.started_s
        self.account.train_s += seconds
        tokens = len(results) * self.batch * self.config.data.sequence_length
        step = made - 1
        self.observer.span("trainer", "update", self.window.started_s, now, step=made)
        self.losses[made] = loss
        limit = self.config.optimizer.max_grad_norm
        self._say(
            made,
            {
                "pretrain/loss": loss,
                "pretrain/grad_norm": norm,
                "pretrain/clipped_frac": float((norms > limit).double().mean()),
                "pretrain/lr": self._lr(step, self.evolution.schedule.at(step).rates),
                "pretrain/stage": self.evolution.schedule.index(step),
                "pretrain/processes": self.workers.size,
                "pretrain/tokens_per_s": tokens / seconds if seconds else 0.0,
                **self.account.metrics(),
                **self._probe_cost(),
            },
        )
        self.window = _Window(clock.now())

    def _evaluate(self, made: int) -> None:
        """Held-out loss of the whole model, and of a nested subnetwork beside it."""
        if self.data.held_out is None:
            return
        clock = self.observer.clock
        started = clock.now()
        sequences = self._held_out()
        loss = self.trainer.evaluate(sequences)
        values = {"pretrain/eval_loss": loss}
        stage = self.evolution.schedule.at(max(0, made - 1))
        evolve = self.config.evolve
        if evolve is not None and evolve.method == "nested" and not stage.rates.is_full:
            values["pretrain/eval_subnetwork_loss"] = self.trainer.evaluate(
                sequences, self._example(stage)
            )
        self.observer.span("trainer", "evaluation", started, clock.now(), step=made)
        self.evaluations[made] = loss
        self._say(made, values)

    def _say(self, made: int, values: dict[str, float]) -> None:
        self.metrics |= values
        self.observer.metrics(made, values)
