"""What an adaptive schedule asks for: losses of the present subnetwork, and slopes of larger ones.

A probe trains a copy of the run for a few steps on the sequences that come next, and puts
everything back. It costs what it costs: operations and time go to the run's account.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ratoon.clock import Clock
from ratoon.config.evolve import Adaptive
from ratoon.est.adaptive import AdaptiveSchedule
from ratoon.est.sampler import NestedSampler, Sampler
from ratoon.est.subnetwork import Rates, Subnetwork
from ratoon.loop.accounting import Account, StepCost
from ratoon.loop.growing import grow_into
from ratoon.training.pretrainer import Ids, Pretrainer


@dataclass(frozen=True, slots=True)
class Adaptation:
    """Runs probes for a schedule. `batch` gives this worker's sequences of a step, `lr` its rate.

    `held_out` are the sequences whose loss is compared. Of random subnetworks that is the whole
    model's loss; of nested ones that of the prefix itself.
    """

    trainer: Pretrainer
    schedule: AdaptiveSchedule
    sampler: Sampler
    settings: Adaptive
    held_out: Ids
    batch: Callable[[int], Ids]
    lr: Callable[[int, Rates], float]
    cost: StepCost
    clock: Clock

    def decide(self, step: int, account: Account) -> None:
        """Settle the stage of `step`, before it; called for each step once, on all workers."""
        started, flops = self.clock.now(), account.flops
        present = self.schedule.settings.ladder[self.schedule.rung]
        if not present.is_full and step and step % self.settings.observe_every == 0:
            self.schedule.observe(self._loss(present, account), account.flops)
        slopes = {rung: self._probe(rung, step, account) for rung in self.schedule.asks(step)}
        self.schedule.decide(step, slopes)
        seconds = self.clock.now() - started
        account.train_s += seconds
        if account.flops > flops:
            self.schedule.observe_probe(account.flops - flops, seconds)

    def _probe(self, rung: int, step: int, account: Account) -> float:
        """Fall of the held-out loss per operation over some steps at the rates of `rung`."""
        schedule, trainer = self.schedule, self.trainer
        present, rates = (schedule.settings.ladder[place] for place in (schedule.rung, rung))
        restore = trainer.weights.snapshot()
        larger = self._example(rates)
        grow_into(trainer, self._example(present), larger, schedule.settings.new_layers)
        before, spent = self._loss(rates, account), 0.0
        for later in range(
            step, min(step + self.settings.probe_steps, schedule.settings.total_steps)
        ):

            def draw(number: int, count: int, at: int = later) -> Subnetwork:
                return self.sampler.draw(rates, at, number, count)

            trainer.step(self.batch(later), self.lr(later, rates), draw)
            spent += self.cost.flops(larger)
        account.flops += spent
        after = self._loss(rates, account)
        restore()
        return (before - after) / spent

    def _loss(self, rates: Rates, account: Account) -> float:
        nested = isinstance(self.sampler, NestedSampler)
        subnetwork = self._example(rates) if nested else Subnetwork.full(self.sampler.shape)
        tokens = len(self.held_out) * (self.held_out.shape[1] - 1)
        account.flops += self.cost.forward(subnetwork, tokens)
        return self.trainer.evaluate(self.held_out, subnetwork)

    def _example(self, rates: Rates) -> Subnetwork:
        return self.sampler.draw(rates, 0, 0, self.trainer.passes.micro_batch)
