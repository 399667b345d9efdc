"""One rollout over all workers: hand out groups, let idle workers train the drafter, end together.

What to do is `coordinator.decide`'s business; here it is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ratoon.clock import Clock
from ratoon.cluster.local import LocalWorkers
from ratoon.cluster.messages import (
    Call,
    DrafterPublished,
    Generate,
    Responses,
    Returned,
    SpotResult,
    TakeDrafter,
)
from ratoon.coordinator.decide import (
    EndRollout,
    HandGroup,
    Snapshot,
    StartTraining,
    StopTraining,
    WorkerView,
    decide,
)
from ratoon.coordinator.states import WorkerState, transition
from ratoon.loop.order import Group
from ratoon.observe.observer import Observer
from ratoon.observe.timeline import Activity
from ratoon.records import Completion
from ratoon.rollout.native.engine import EngineStats
from ratoon.stopping import Stop

POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class RolloutResult:
    """What a rollout gave and how the workers' time went.

    `completions` are in the order of the requests. `seconds` runs from the first request to the
    last response; `idle_s` is the workers' time with nothing to decode in between, `filled_s` the
    part of it that trained the drafter, both summed over workers. `stop_s` are the times from the
    order to end a session of drafter training to its end.
    """

    completions: tuple[Completion, ...]
    seconds: float
    idle_s: float
    filled_s: float
    spot: tuple[SpotResult, ...]
    stop_s: tuple[float, ...]
    stats: tuple[EngineStats, ...]

    @property
    def tokens(self) -> int:
        """Response tokens generated."""
        return sum(len(completion.token_ids) for completion in self.completions)

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per sequence and verification; None if nothing was guessed."""
        rows = sum(stats.rows_speculated for stats in self.stats)
        tokens = sum(stats.tokens_speculated for stats in self.stats)
        return tokens / rows if rows else None


@dataclass(slots=True)
class _Worker:
    state: WorkerState
    since_s: float
    unfinished: int = 0
    trainable_tokens: int = 0
    stop_ordered_s: float = 0.0
    last_response_s: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)


class DrafterLedger:
    """The newest published drafter, across rollouts."""

    def __init__(self, version: int = 0) -> None:
        self.version = version
        self.latest: DrafterPublished | None = None

    def record(self, publication: DrafterPublished) -> TakeDrafter:
        """Note a publication; returns the message that makes a worker use it."""
        self.latest = publication
        self.version = publication.version
        return TakeDrafter(publication.version, publication.checksum, publication.slot)


def train_drafter_steps(workers: LocalWorkers, ledger: DrafterLedger) -> SpotResult:
    """Let the first worker train the drafter for its fixed number of steps; the others wait."""
    workers.send(0, Call("train_spot_steps", {"version": ledger.version}))
    while True:
        for _, message in workers.receive():
            if isinstance(message, DrafterPublished):
                take = ledger.record(message)
                for other in range(len(workers)):
                    workers.send(other, take)
            elif isinstance(message, Returned):
                assert isinstance(message.value, SpotResult)
                return message.value


class Rollout:
    """Runs one rollout.

    `on_response` is called with each response as it arrives; `activity` is what the timeline calls
    the time in which a worker decodes. `stop` is looked at between messages: Stopped leaves the
    workers in the midst of work.
    """

    def __init__(
        self,
        workers: LocalWorkers,
        observer: Observer,
        ledger: DrafterLedger,
        *,
        capacity: int,
        step: int,
        on_response: Callable[[Completion], None] = lambda completion: None,
        activity: Activity = "rollout",
        stop: Stop | None = None,
    ) -> None:
        self._workers = workers
        self._observer = observer
        self._clock: Clock = observer.clock
        self._ledger = ledger
        self._capacity = capacity
        self._step = step
        self._on_response = on_response
        self._stop = stop or Stop()
        self._activities: dict[WorkerState, Activity] = {
            WorkerState.ROLLOUT: activity,
            WorkerState.IDLE: "idle",
            WorkerState.DRAFTER_TRAINING: "drafter_training",
            WorkerState.STOPPING: "drafter_training",
        }
        self._finished: dict[object, Completion] = {}
        self._spot: list[SpotResult] = []
        self._stop_s: list[float] = []

    def run(
        self,
        groups: Sequence[Group],
        *,
        speculate: bool = True,
        collect: bool = False,
        spot_training: bool = False,
    ) -> RolloutResult:
        """Generate all groups.

        `collect` keeps states to train the drafter on, `spot_training` lets idle workers do so.
        """
        self._workers.call_all("begin_rollout", speculate=speculate, collect=collect)
        start = self._clock.now()
        self._table = [_Worker(WorkerState.IDLE, start) for _ in range(len(self._workers))]
        self._queue = list(groups)
        self._total = sum(len(group) for group in groups)
        self._spot_training = spot_training
        while not self._act():
            self._stop.check()
            for index, message in self._workers.receive(POLL_S):
                self._handle(index, message)
        end = max(worker.last_response_s for worker in self._table)
        for index in range(len(self._table)):
            self._leave_state(index)
        stats = self._workers.call_all("end_rollout")
        return self._result(groups, start, end, stats)

    def _act(self) -> bool:
        """Carry out decisions until there are none; whether the rollout is over."""
        while True:
            actions = decide(self._snapshot())
            for action in actions:
                if isinstance(action, EndRollout):
                    return True
                self._carry_out(action)
            if not actions:
                return False

    def _snapshot(self) -> Snapshot:
        views = tuple(
            WorkerView(index, worker.state, worker.unfinished, worker.trainable_tokens)
            for index, worker in enumerate(self._table)
        )
        queued = tuple(len(group) for group in self._queue)
        return Snapshot(views, queued, self._capacity, self._spot_training)

    def _carry_out(self, action: HandGroup | StartTraining | StopTraining) -> None:
        index = action.worker
        worker = self._table[index]
        if isinstance(action, HandGroup):
            group = self._queue.pop(0)
            worker.unfinished += len(group)
            if worker.state is not WorkerState.ROLLOUT:
                self._enter(index, WorkerState.ROLLOUT)
            self._workers.send(index, Generate(group))
        elif isinstance(action, StartTraining):
            self._enter(index, WorkerState.DRAFTER_TRAINING)
            self._workers.send(index, Call("start_spot", {"version": self._ledger.version}))
        else:
            self._enter(index, WorkerState.STOPPING)
            worker.stop_ordered_s = self._clock.now()
            self._workers.send(index, Call("stop_spot"))

    def _handle(self, index: int, message: object) -> None:
        worker = self._table[index]
        if isinstance(message, Responses):
            worker.last_response_s = self._clock.now()
            worker.unfinished -= len(message.completions)
            worker.trainable_tokens = message.trainable_tokens
            for completion in message.completions:
                self._finished[completion.key] = completion
                self._on_response(completion)
            self._observer.status(finished=len(self._finished), total=self._total)
            if worker.unfinished == 0:
                self._enter(index, WorkerState.IDLE)
        elif isinstance(message, DrafterPublished):
            take = self._ledger.record(message)
            self._observer.status(drafter_version=message.version)
            for other in range(len(self._table)):
                self._workers.send(other, take)
        elif isinstance(message, Returned) and message.method == "stop_spot":
            self._spot.append(message.value)
            self._stop_s.append(message.value.ended_s - worker.stop_ordered_s)
            self._enter(index, WorkerState.IDLE)
        elif not (isinstance(message, Returned) and message.method == "start_spot"):
            raise RuntimeError(f"worker {index} sent {message!r:.200} during a rollout")

    def _enter(self, index: int, state: WorkerState) -> None:
        self._leave_state(index)
        worker = self._table[index]
        worker.state = transition(worker.state, state)
        worker.since_s = self._clock.now()
        self._observer.status_of({f"worker/{index}": self._activities[state]})

    def _leave_state(self, index: int) -> None:
        worker = self._table[index]
        activity = self._activities[worker.state]
        now = self._clock.now()
        worker.seconds[activity] = worker.seconds.get(activity, 0.0) + now - worker.since_s
        self._observer.span(f"worker {index}", activity, worker.since_s, now, step=self._step)
        worker.since_s = now

    def _result(
        self, groups: Sequence[Group], start: float, end: float, stats: list[EngineStats]
    ) -> RolloutResult:
        idle = sum(end - max(worker.last_response_s, start) for worker in self._table)
        trained = sum(worker.seconds.get("drafter_training", 0.0) for worker in self._table)
        rested = sum(result.rested_s for result in self._spot)
        return RolloutResult(
            completions=tuple(self._finished[r.key] for group in groups for r in group),
            seconds=end - start,
            idle_s=idle,
            filled_s=max(0.0, trained - rested - sum(self._stop_s)),
            spot=tuple(self._spot),
            stop_s=tuple(self._stop_s),
            stats=tuple(stats),
        )
