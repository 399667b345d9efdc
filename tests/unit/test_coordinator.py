"""The coordinator on every interleaving of small worlds: crashes, updates, new drafters."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from ratoon.coordinator import coordinator as coordinator_module
from ratoon.coordinator.coordinator import Coordinator, Task
from ratoon.coordinator.decide import (
    Action,
    EndRollout,
    Snapshot,
    StartTraining,
    StopTraining,
    decide,
)
from ratoon.coordinator.memory import KINDS, Kind, PlannerMemory
from ratoon.coordinator.planner import HandOut, Work
from ratoon.coordinator.states import WorkerState, transition
from ratoon.coordinator.versions import Publication, VersionLedger
from ratoon.errors import StaleVersionError

ROLLOUTS = 2


@dataclass
class World:
    """Workers, their inboxes of drafter versions, and the coordinator that directs them."""

    kind: Kind
    sizes: tuple[int, ...]
    num_workers: int
    crashes: int
    publications: int
    spot: bool
    rollout: int = 0
    ledger: VersionLedger = field(default_factory=VersionLedger)

    def begin(self) -> None:
        """The next rollout: lost workers are back, all serve the newest weights."""
        work = [Work(("data", row), 8, size, 100) for row, size in enumerate(self.sizes)]
        memory = PlannerMemory(self.num_workers)
        planner = memory.planner(self.kind, work, 2)
        self.coordinator = Coordinator(self.num_workers, planner, spot_training=self.spot)
        self.policies = [self.ledger.policy] * self.num_workers
        self.drafters = [self.ledger.drafter] * self.num_workers
        self.trained = [0] * self.num_workers
        self.inboxes: list[tuple[int, ...]] = [()] * self.num_workers
        self.left = self.publications
        self.done: list[Task] = []

    def settle(self) -> bool:
        """Carry out decisions until there are none; whether the rollout ended."""
        while actions := self.coordinator.next_actions(0.0):
            for action in actions:
                self.coordinator.apply(action, 0.0)
                if isinstance(action, StartTraining):
                    self.trained[action.worker] = self.ledger.drafter
                if isinstance(action, EndRollout):
                    return True
        return False

    def events(self) -> Iterator[tuple[str, int]]:
        """All the news that may arrive next."""
        states = self.coordinator.states
        for worker, state in enumerate(states):
            if state is WorkerState.ROLLOUT:
                yield "first", worker
                if len(self.coordinator.tasks(worker)) > 1:
                    yield "last", worker
            if state is WorkerState.STOPPING:
                yield "stopped", worker
            if state is WorkerState.DRAFTER_TRAINING and self.left:
                yield "publish", worker
            if self.inboxes[worker] and state is not WorkerState.LOST:
                yield "take", worker
            alive = sum(other is not WorkerState.LOST for other in states)
            if self.crashes and state is not WorkerState.LOST and alive > 1:
                yield "crash", worker

    def happen(self, kind: str, worker: int) -> None:
        if kind in ("first", "last"):
            task = self.coordinator.tasks(worker)[0 if kind == "first" else -1]
            self.ledger.check_policy(self.policies[worker])
            self.done.append(task)
            self.coordinator.finished(worker, [(task, 10)], trainable_tokens=10)
        elif kind == "stopped":
            self.coordinator.stopped(worker)
        elif kind == "publish":
            self.left -= 1
            version = self.trained[worker] = self.trained[worker] + 1
            self.ledger.record(Publication(version, "", 0))
            self.inboxes = [(*inbox, version) for inbox in self.inboxes]
        elif kind == "take":
            version, *rest = self.inboxes[worker]
            assert self.drafters[worker] < version <= self.ledger.drafter
            self.drafters[worker], self.inboxes[worker] = version, tuple(rest)
        else:
            self.crashes -= 1
            self.coordinator.lost(worker)

    def check(self) -> None:
        """What holds whenever nothing can be done but wait."""
        seen = self.coordinator.snapshot(0.0)
        if seen.queued or not seen.unfinished:
            assert not seen.training, "work waits for drafter training"
        assert len(seen.training) + seen.stopping <= self.num_workers
        if seen.unfinished and not seen.stopping:
            states = self.coordinator.states
            assert WorkerState.ROLLOUT in states, "work waits for nobody"

    def check_end(self) -> None:
        """What holds when a rollout is over."""
        tasks = [(group, member) for group, size in enumerate(self.sizes) for member in range(size)]
        assert sorted(self.done) == tasks
        assert set(self.coordinator.states) <= {WorkerState.IDLE, WorkerState.LOST}
        assert not any(self.coordinator.tasks(worker) for worker in range(self.num_workers))


def explore(
    kind: Kind,
    sizes: tuple[int, ...],
    num_workers: int,
    crashes: int = 1,
    publications: int = 1,
    *,
    spot: bool = True,
) -> int:
    """Visit every reachable state of two rollouts with an update between; how many there are."""
    start = World(kind, sizes, num_workers, crashes, publications, spot)
    start.begin()
    frontier, seen, ended = [pickle.dumps(start)], set(), 0
    while frontier:
        world: World = pickle.loads(frontier.pop())
        if world.settle():
            world.check_end()
            world.rollout += 1
            world.ledger.policy += 1
            if world.rollout == ROLLOUTS:
                ended += 1
                continue
            world.begin()
            frontier.append(pickle.dumps(world))
            continue
        world.check()
        packed = pickle.dumps(world)
        if packed in seen:
            continue
        seen.add(packed)
        following = list(world.events())
        assert following, "nothing can happen any more"
        for event in following:
            changed: World = pickle.loads(packed)
            changed.happen(*event)
            frontier.append(pickle.dumps(changed))
    assert ended
    return len(seen)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("num_workers", "sizes"), [(1, (2, 1)), (2, (1, 2, 1)), (2, (5,)), (3, (2, 1))]
)
def test_every_interleaving_ends_with_all_responses_done_once_and_nobody_training(
    kind: Kind, num_workers: int, sizes: tuple[int, ...]
) -> None:
    """Two rollouts, one crash at any moment, drafters published and taken at any moment."""
    assert explore(kind, sizes, num_workers) > 5


def test_without_spot_training_nobody_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(snapshot: Snapshot) -> tuple[Action, ...]:
        actions = decide(snapshot)
        assert not any(isinstance(action, StartTraining) for action in actions)
        return actions

    monkeypatch.setattr(coordinator_module, "decide", never)
    explore("longest_first", (2, 1, 1), 2, spot=False)


def keeps_training(snapshot: Snapshot) -> tuple[Action, ...]:
    """A decision that lets a trainer go on though a crash has left work."""
    if snapshot.queued and snapshot.training:
        return (snapshot.proposal,) if snapshot.proposal is not None else ()
    return decide(snapshot)


def trains_twice(snapshot: Snapshot) -> tuple[Action, ...]:
    """A decision that lets a second worker train beside the first, from the same version."""
    if snapshot.unfinished and not snapshot.queued:
        return decide(snapshot._replace(training=(), stopping=0))
    return decide(snapshot)


def ends_early(snapshot: Snapshot) -> tuple[Action, ...]:
    """A decision that forgets what a worker still decodes."""
    if snapshot.unfinished == 1 and not snapshot.training:
        return (EndRollout(),)
    return decide(snapshot)


@pytest.mark.parametrize("wrong", [keeps_training, ends_early])
def test_a_wrong_decision_is_found(monkeypatch: pytest.MonkeyPatch, wrong: object) -> None:
    monkeypatch.setattr(coordinator_module, "decide", wrong)
    with pytest.raises(AssertionError):
        explore("first_come", (1, 1), 2)


def test_two_trainers_at_a_time_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator names no candidate while one trains, so that is undone too."""
    monkeypatch.setattr(coordinator_module, "decide", trains_twice)
    candidate = Coordinator._candidate

    def snapshot(self: Coordinator, now: float) -> Snapshot:
        return seen(self, now)._replace(candidate=candidate(self))

    seen = Coordinator.snapshot
    monkeypatch.setattr(Coordinator, "snapshot", snapshot)
    with pytest.raises(StaleVersionError):
        explore("first_come", (1, 1, 1), 3, crashes=0, publications=2)


def test_a_crash_that_is_forgotten_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(self: Coordinator, worker: int) -> None:
        self._tasks[worker] = {}
        lost(self, worker)

    lost = Coordinator.lost
    monkeypatch.setattr(Coordinator, "lost", forget)
    with pytest.raises(AssertionError):
        explore("longest_first", (1, 1), 2)


def test_a_response_that_was_not_asked_for_is_refused() -> None:
    planner = PlannerMemory(2).planner("first_come", [Work(("data", 0), 8, 1, 100)], 2)
    coordinator = Coordinator(2, planner, spot_training=False)
    (hand,) = coordinator.next_actions(0.0)
    coordinator.apply(hand, 0.0)
    with pytest.raises(RuntimeError, match="was not given"):
        coordinator.finished(1, [((0, 0), 10)], 0)
    coordinator.finished(0, [((0, 0), 10)], 0)
    with pytest.raises(RuntimeError, match="was not given"):
        coordinator.finished(0, [((0, 0), 10)], 0)


def test_versions_only_rise_and_the_policy_is_the_one_served() -> None:
    ledger = VersionLedger(policy=3)
    ledger.record(Publication(1, "", 0))
    ledger.check_policy(3)
    with pytest.raises(StaleVersionError, match="must rise"):
        ledger.record(Publication(1, "", 1))
    with pytest.raises(StaleVersionError, match="policy version 2"):
        ledger.check_policy(2)
    assert ledger.drafter == 1


TAIL = Snapshot(None, 0, 1, (), 0, False, 1, True)


def test_an_idle_worker_trains_while_another_decodes() -> None:
    assert decide(TAIL) == (StartTraining(1),)
    assert decide(TAIL._replace(spot_training=False)) == ()
    assert decide(TAIL._replace(training=(2,))) == ()
    assert decide(TAIL._replace(stopping=1)) == ()


def test_queued_work_is_never_left_lying_for_training() -> None:
    hand = HandOut(1, 0, (0,))
    assert decide(TAIL._replace(queued=1, proposal=hand)) == (hand,)
    waiting = TAIL._replace(queued=1, training=(2,), proposal=hand)
    assert decide(waiting) == (StopTraining(2),)


def test_training_stops_when_the_last_response_is_done() -> None:
    over = TAIL._replace(unfinished=0, training=(1,))
    assert decide(over) == (StopTraining(1),)
    assert decide(over._replace(training=(), stopping=1)) == ()
    assert decide(over._replace(training=(), settled=True)) == (EndRollout(),)


def test_an_illegal_transition_names_what_is_allowed() -> None:
    with pytest.raises(ValueError, match="allowed: idle, lost"):
        transition(WorkerState.ROLLOUT, WorkerState.UPDATE)
