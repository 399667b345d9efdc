"""One rollout over all workers: hand out groups, let idle workers train the drafter, end together.

What to do is the coordinator's business; here it is done.
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
from ratoon.coordinator.coordinator import Coordinator, Task
from ratoon.coordinator.decide import Action, EndRollout, StartTraining, StopTraining
from ratoon.coordinator.memory import Kind, PlannerMemory
from ratoon.coordinator.pace import least_seconds
from ratoon.coordinator.planner import HandOut, Work
from ratoon.coordinator.states import WorkerState
from ratoon.coordinator.versions import Publication, VersionLedger
from ratoon.errors import WorkerDiedError
from ratoon.loop.order import Group
from ratoon.observe.observer import Observer
from ratoon.observe.timeline import Activity
from ratoon.records import Completion, DrawKey
from ratoon.rollout.native.engine import EngineStats
from ratoon.stopping import Stop

POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class RolloutResult:
    """What a rollout gave and how the workers' time went.

    `completions` are in the order of the requests. `seconds` runs from the first request to the
    last response; `idle_s` is the workers' time with nothing to decode in between, `filled_s` the
    part of it that trained the drafter, both summed over workers. `stop_s` are the times from the
    order to end a session of drafter training to its end. `least_s` is what no order could beat,
    with these lengths at the measured speeds; `length_error` how far predictions were off on
    average, as a share of the mean length. Both are None while nothing is known.
    """

    completions: tuple[Completion, ...]
    seconds: float
    idle_s: float
    filled_s: float
    spot: tuple[SpotResult, ...]
    stop_s: tuple[float, ...]
    stats: tuple[EngineStats, ...]
    least_s: float | None
    length_error: float | None

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
    stop_ordered_s: float = 0.0
    last_response_s: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)


def publish(workers: LocalWorkers, ledger: VersionLedger, message: DrafterPublished) -> None:
    """Let all workers draft with new weights from their next step on."""
    ledger.record(Publication(message.version, message.checksum, message.slot))
    for worker in range(len(workers)):
        workers.send(worker, TakeDrafter(message.version, message.checksum, message.slot))


def train_drafter_steps(workers: LocalWorkers, ledger: VersionLedger) -> SpotResult:
    """Let the first worker train the drafter for its fixed number of steps; the others wait."""
    workers.send(0, Call("train_spot_steps", {"version": ledger.drafter}))
    while True:
        for _, message in workers.receive():
            if isinstance(message, DrafterPublished):
                publish(workers, ledger, message)
            elif isinstance(message, Returned):
                assert isinstance(message.value, SpotResult)
                return message.value


def _give_up(error: WorkerDiedError) -> None:
    raise error


class Rollout:
    """Runs one rollout.

    `memory` is read by the planner of this `kind`, and learns from the responses. `on_response` is
    called with each response as it arrives; `activity` is what the timeline calls the time in which
    a worker decodes. `stop` is looked at between messages: Stopped leaves the workers in the midst
    of work. `on_lost` replaces a worker that died, or raises what it is told.
    """

    def __init__(
        self,
        workers: LocalWorkers,
        observer: Observer,
        ledger: VersionLedger,
        memory: PlannerMemory,
        *,
        kind: Kind,
        slots: int,
        step: int,
        on_response: Callable[[Completion], None] = lambda completion: None,
        activity: Activity = "rollout",
        stop: Stop | None = None,
        on_lost: Callable[[WorkerDiedError], None] = _give_up,
    ) -> None:
        self._workers = workers
        self._observer = observer
        self._clock: Clock = observer.clock
        self._ledger = ledger
        self._memory = memory
        self._kind: Kind = kind
        self._slots = slots
        self._step = step
        self._on_response = on_response
        self._stop = stop or Stop()
        self._on_lost = on_lost
        self._activities: dict[WorkerState, Activity] = {
            WorkerState.ROLLOUT: activity,
            WorkerState.IDLE: "idle",
            WorkerState.DRAFTER_TRAINING: "drafter_training",
            WorkerState.STOPPING: "drafter_training",
        }
        self._finished: dict[DrawKey, Completion] = {}
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
        Where a lost worker is replaced, what is finished is kept and the rest is drawn again: the
        same keys, the same tokens.

        Raises: WorkerDiedError as `on_lost` does.
        """
        start = self._last_response_s = self._clock.now()
        while True:
            missing = [tuple(r for r in group if r.key not in self._finished) for group in groups]
            try:
                stats, predicted = self._draw(
                    [group for group in missing if group],
                    speculate=speculate,
                    collect=collect,
                    spot_training=spot_training,
                )
            except WorkerDiedError as error:
                for index in range(len(self._table)):
                    self._leave_state(index)
                self._on_lost(error)
            else:
                return self._result(groups, start, stats, predicted)

    def _draw(
        self, groups: Sequence[Group], *, speculate: bool, collect: bool, spot_training: bool
    ) -> tuple[list[EngineStats], list[float] | None]:
        """Statistics of each worker, and the lengths that were predicted for the groups."""
        now = self._handed_out_s = self._clock.now()
        self._table = [_Worker(WorkerState.IDLE, now) for _ in range(len(self._workers))]
        self._workers.call_all("begin_rollout", speculate=speculate, collect=collect)
        self._groups = groups
        self._tasks: dict[DrawKey, Task] = {
            request.key: (number, member)
            for number, group in enumerate(groups)
            for member, request in enumerate(group)
        }
        work = [_work(group) for group in groups]
        predicted = self._predict(work)
        planner = self._memory.planner(self._kind, work, self._slots)
        self._coordinator = Coordinator(len(self._table), planner, spot_training=spot_training)
        while not self._act():
            self._stop.check()
            for index, message in self._workers.receive(POLL_S):
                self._handle(index, message)
        for index in range(len(self._table)):
            self._leave_state(index)
        stats = self._workers.call_all("end_rollout")
        self._memory.lengths.end_round()
        return stats, predicted

    def _act(self) -> bool:
        """Carry out decisions until there are none; whether the rollout is over."""
        while actions := self._coordinator.next_actions(self._clock.now()):
            for action in actions:
                self._coordinator.apply(action, self._clock.now())
                if isinstance(action, EndRollout):
                    return True
                self._carry_out(action)
        return False

    def _carry_out(self, action: Action) -> None:
        assert not isinstance(action, EndRollout)
        index = action.worker
        self._follow(index)
        if isinstance(action, HandOut):
            group = self._groups[action.group]
            self._workers.send(index, Generate(tuple(group[m] for m in action.members)))
        elif isinstance(action, StartTraining):
            self._workers.send(index, Call("start_spot", {"version": self._ledger.drafter}))
        elif isinstance(action, StopTraining):
            self._table[index].stop_ordered_s = self._clock.now()
            self._workers.send(index, Call("stop_spot"))

    def _handle(self, index: int, message: object) -> None:
        worker = self._table[index]
        if isinstance(message, Responses):
            worker.last_response_s = self._last_response_s = self._clock.now()
            self._responses(index, message)
        elif isinstance(message, DrafterPublished):
            publish(self._workers, self._ledger, message)
            self._observer.status(drafter_version=message.version)
        elif isinstance(message, Returned) and message.method == "stop_spot":
            self._spot.append(message.value)
            self._stop_s.append(message.value.ended_s - worker.stop_ordered_s)
            self._coordinator.stopped(index)
            self._follow(index)
        elif not (isinstance(message, Returned) and message.method == "start_spot"):
            raise RuntimeError(f"worker {index} sent {message!r:.200} during a rollout")

    def _responses(self, index: int, message: Responses) -> None:
        self._memory.pace.observe(index, message.report)
        responses = []
        for completion in message.completions:
            self._ledger.check_policy(completion.policy_version)
            task, tokens = self._tasks[completion.key], len(completion.token_ids)
            responses.append((task, tokens))
            uid = (completion.key.dataset, completion.key.row)
            self._memory.lengths.observe(uid, len(completion.prompt_ids), tokens)
            self._finished[completion.key] = completion
            self._on_response(completion)
        self._coordinator.finished(index, responses, message.trainable_tokens)
        self._observer.status(finished=len(self._finished), total=len(self._tasks))
        self._follow(index)

    def _follow(self, index: int) -> None:
        """Account for what a worker has done if the coordinator has it do something else now."""
        worker, state = self._table[index], self._coordinator.states[index]
        if state is worker.state:
            return
        self._leave_state(index)
        worker.state = state
        self._observer.status_of({f"worker/{index}": self._activities[state]})

    def _leave_state(self, index: int) -> None:
        worker = self._table[index]
        activity = self._activities[worker.state]
        now = self._clock.now()
        worker.seconds[activity] = worker.seconds.get(activity, 0.0) + now - worker.since_s
        self._observer.span(f"worker {index}", activity, worker.since_s, now, step=self._step)
        worker.since_s = now

    def _predict(self, work: Sequence[Work]) -> list[float] | None:
        lengths = self._memory.lengths
        if not all(lengths.knows(item.uid[0]) for item in work):
            return None
        return [lengths.predict(item.uid, item.prompt_tokens, item.max_tokens) for item in work]

    def _result(
        self,
        groups: Sequence[Group],
        start: float,
        stats: list[EngineStats],
        predicted: list[float] | None,
    ) -> RolloutResult:
        end = self._last_response_s
        decoded_until = (max(w.last_response_s, self._handed_out_s) for w in self._table)
        idle = sum(max(0.0, end - until) for until in decoded_until)
        trained = sum(worker.seconds.get("drafter_training", 0.0) for worker in self._table)
        rested = sum(result.rested_s for result in self._spot)
        completions = tuple(self._finished[r.key] for group in groups for r in group)
        lengths = [len(completion.token_ids) for completion in completions]
        error = None
        if predicted:
            drawn = [
                (predicted[group], len(self._finished[key].token_ids))
                for key, (group, _) in self._tasks.items()
            ]
            error = sum(abs(p - n) for p, n in drawn) / sum(n for _, n in drawn)
        return RolloutResult(
            completions=completions,
            seconds=end - start,
            idle_s=idle,
            filled_s=max(0.0, trained - rested - sum(self._stop_s)),
            spot=tuple(self._spot),
            stop_s=tuple(self._stop_s),
            stats=tuple(stats),
            least_s=self._least_s(lengths),
            length_error=error,
        )

    def _least_s(self, lengths: Sequence[int]) -> float | None:
        pace = self._memory.pace
        if not pace.is_measured:
            return None
        fixed, each = pace.step()
        return least_seconds(
            lengths,
            [pace.slowness(worker) for worker in range(len(self._table))],
            slots=self._slots,
            alone=fixed + each,
            together=fixed + each * self._slots,
        )


def _work(group: Group) -> Work:
    first = group[0]
    uid = (first.key.dataset, first.key.row)
    return Work(uid, len(first.prompt_ids), len(group), first.max_tokens)
