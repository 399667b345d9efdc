"""One simulated rollout: discrete events around the real coordinator and planner."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from ratoon.coordinator.coordinator import Coordinator
from ratoon.coordinator.decide import Action, EndRollout, StartTraining, StopTraining
from ratoon.coordinator.memory import PlannerMemory
from ratoon.coordinator.planner import HandOut, Planner, Work
from ratoon.simulate.machine import Machine
from ratoon.simulate.scenarios import Scenario
from ratoon.simulate.speed import GRAIN, Speeds

# A drafter in training: tokens per second of a core, tokens between publications, and the longest
# time until an order to stop is obeyed.
TRAIN_TOKENS_PER_S = 5000.0
PUBLISH_TOKENS = 2048
STOP_S = 0.1


@dataclass(slots=True)
class Outcome:
    """A rollout's figures. `coordinator_s` is processor time of this machine, all else simulated.

    `idle_s` is the workers' time with nothing to decode; lost workers do not count.
    """

    seconds: float = 0.0
    idle_s: float = 0.0
    tokens: int = 0
    trained_tokens: float = 0.0
    messages: int = 0
    coordinator_s: float = 0.0
    crashes: int = 0


class Simulation:
    """Runs one rollout to its end. `lengths[group][member]` is what only the machines know."""

    def __init__(
        self,
        scenario: Scenario,
        planner: Planner,
        work: Sequence[Work],
        lengths: Sequence[Sequence[int]],
        *,
        slowness: Sequence[float],
        speeds: Speeds,
        quality: float,
        memory: PlannerMemory,
    ) -> None:
        self._scenario, self._work, self._lengths = scenario, work, lengths
        self._speeds, self.quality = speeds, quality
        self._memory = memory
        count = len(slowness)
        self._machines = [self._machine(slow) for slow in slowness]
        self._coordinator = Coordinator(count, planner, spot_training=True)
        self._now = 0.0
        # (time, kind, worker, number): stale ends of responses are known by their number.
        self._events: list[tuple[float, str, int, int]] = []
        self._number = [0] * count
        self._trainable = [0] * count
        self._idle_since: dict[int, float] = dict.fromkeys(range(count), 0.0)
        self._last_response = 0.0
        self._idle_spans: list[tuple[float, float]] = []
        self._training_since = 0.0
        self._trainer: int | None = None
        self._graded = round(quality / GRAIN)
        self._lost: set[int] = set()
        self.outcome = Outcome()

    def run(self, crashes: Sequence[tuple[float, int]] = ()) -> Outcome:
        """All events in order; `crashes` are (time, worker)."""
        for at, worker in crashes:
            heappush(self._events, (at, "crash", worker, 0))
        while not self._act():
            self._now, kind, worker, number = heappop(self._events)
            if kind == "end" and number == self._number[worker]:
                self._responses(worker)
            elif kind == "publish" and worker == self._trainer and number == self._number[worker]:
                self._publish(worker)
            elif kind == "stopped" and worker not in self._lost:
                self._told(self._coordinator.stopped, worker)
                self.outcome.messages += 1
            elif kind == "crash":
                self._crash(worker)
        outcome = self.outcome
        outcome.seconds = self._last_response
        ends = [(since, math.inf) for since in self._idle_since.values()]
        outcome.idle_s = sum(
            min(end, self._last_response) - min(start, self._last_response)
            for start, end in [*self._idle_spans, *ends]
        )
        outcome.tokens = sum(sum(group) for group in self._lengths)
        return outcome

    def _machine(self, slowness: float) -> Machine:
        table = self._speeds.table(self.quality)
        return Machine(self._scenario.slots, slowness, table, self._scenario.prefill_s)

    def _act(self) -> bool:
        while True:
            started = time.thread_time()
            actions = self._coordinator.next_actions(self._now)
            for action in actions:
                self._coordinator.apply(action, self._now)
            self.outcome.coordinator_s += time.thread_time() - started
            for action in actions:
                if isinstance(action, EndRollout):
                    return True
                self._carry_out(action)
            if not actions:
                return False

    def _carry_out(self, action: Action) -> None:
        assert not isinstance(action, EndRollout)
        worker = action.worker
        self.outcome.messages += 1
        if isinstance(action, HandOut):
            tasks = [
                ((action.group, member), self._lengths[action.group][member])
                for member in action.members
            ]
            self._machines[worker].give(tasks, self._now, self._work[action.group].prompt_tokens)
            if worker in self._idle_since:
                self._idle_spans.append((self._idle_since.pop(worker), self._now))
            self._schedule(worker)
        elif isinstance(action, StartTraining):
            self.outcome.messages += 1
            self._trainer, self._training_since = worker, self._now
            self._schedule_publication(worker)
        elif isinstance(action, StopTraining):
            self._train(self._now)
            self._trainer = None
            heappush(self._events, (self._now + STOP_S, "stopped", worker, 0))

    def _responses(self, worker: int) -> None:
        machine = self._machines[worker]
        done = machine.finish(self._now)
        if done:
            responses = [((g, m), self._lengths[g][m]) for g, m in done]
            self._trainable[worker] += sum(tokens for _, tokens in responses)
            self._last_response = self._now
            self.outcome.messages += 1
            report = machine.report()
            started = time.thread_time()
            self._memory.pace.observe(worker, report)
            for (group, _), tokens in responses:
                item = self._work[group]
                self._memory.lengths.observe(item.uid, item.prompt_tokens, tokens)
            self._coordinator.finished(worker, responses, self._trainable[worker])
            self.outcome.coordinator_s += time.thread_time() - started
            if not self._coordinator.tasks(worker):
                self._idle_since[worker] = self._now
        self._schedule(worker)

    def _crash(self, worker: int) -> None:
        self.outcome.crashes += 1
        self._lost.add(worker)
        self._number[worker] += 1
        self._machines[worker] = self._machine(1.0)
        if worker in self._idle_since:
            self._idle_spans.append((self._idle_since.pop(worker), self._now))
        if worker == self._trainer:
            self._trainer = None
        self._told(self._coordinator.lost, worker)

    def _told(self, tell: Callable[[int], None], worker: int) -> None:
        started = time.thread_time()
        tell(worker)
        self.outcome.coordinator_s += time.thread_time() - started

    def _schedule(self, worker: int) -> None:
        self._number[worker] += 1
        end = self._machines[worker].next_end()
        if end < math.inf:
            heappush(self._events, (end, "end", worker, self._number[worker]))

    def _train(self, now: float) -> None:
        """What the trainer has learned since it last said so."""
        tokens = (now - self._training_since) * TRAIN_TOKENS_PER_S
        drafter = self._scenario.drafter
        self.outcome.trained_tokens += tokens
        self.quality += (drafter.best - self.quality) * -math.expm1(-tokens / drafter.scale)
        self._training_since = now

    def _schedule_publication(self, worker: int) -> None:
        at = self._now + PUBLISH_TOKENS / TRAIN_TOKENS_PER_S
        heappush(self._events, (at, "publish", worker, self._number[worker]))

    def _publish(self, worker: int) -> None:
        self._train(self._now)
        self.outcome.messages += 1 + len(self._machines)
        self._schedule_publication(worker)
        grade = round(self.quality / GRAIN)
        if grade == self._graded:
            return
        self._graded = grade
        table = self._speeds.table(self.quality)
        for other, machine in enumerate(self._machines):
            machine.use(table, self._now)
            if machine.live:
                self._schedule(other)
