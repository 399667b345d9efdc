"""Planners, and what they go by: predicted lengths and measured speeds."""

from __future__ import annotations

import json
import random
import statistics
from typing import get_args

import pytest

from ratoon.config.rl import Rollout
from ratoon.coordinator.lengths import LengthModel
from ratoon.coordinator.longest_first import LongestFirst
from ratoon.coordinator.memory import KINDS, PlannerMemory
from ratoon.coordinator.pace import Pace, Report, least_seconds
from ratoon.coordinator.planner import FirstCome, HandOut, Planner, Work


def work(*sizes: int, prompt_tokens: int = 16, limit: int = 1000) -> list[Work]:
    return [Work(("data", row), prompt_tokens, size, limit) for row, size in enumerate(sizes)]


def taught(*means: int) -> LengthModel:
    """A model that has seen prompts with responses of these lengths, and only these."""
    lengths = LengthModel()
    for row, mean in enumerate(means):
        for _ in range(16):
            lengths.observe(("data", row), 16, mean)
    lengths.end_round()
    return lengths


def measured(*slowness: float, fixed: float = 0.01, each: float = 0.001) -> Pace:
    """Speeds as they would be measured without noise."""
    pace = Pace(len(slowness))
    for live in (2, 8, 4, 1, 6) * 8:
        for worker, slow in enumerate(slowness):
            seconds = 1000 * slow * (fixed + each * live)
            report = Report(seconds, live * seconds, 1000 * live)
            pace.observe(worker, report)
    return pace


def hand_all(planner: Planner, now: float = 0.0) -> list[HandOut]:
    """Everything that is handed out before another response is done."""
    hands = []
    while (hand := planner.next(now)) is not None:
        planner.handed(hand, now)
        hands.append(hand)
    return hands


# Lengths


def test_before_anything_is_known_all_prompts_are_alike() -> None:
    lengths = LengthModel()
    lengths.observe(("data", 0), 16, 5)
    assert {lengths.predict(("data", row), 2**row, 700) for row in range(8)} == {700.0}
    assert not lengths.knows("data")
    lengths.end_round()
    assert lengths.knows("data")
    assert not lengths.knows("other")
    assert lengths.predict(("other", 0), 16, 700) == 700.0


def test_a_prediction_is_the_mean_that_it_says() -> None:
    """Own responses, and two of the run's mean; siblings that are done count like own ones."""
    lengths = taught(100, 300)
    lengths.observe(("data", 0), 16, 900)
    expected = (16 * 100 + 2 * 200 + 900) / (16 + 2 + 1)
    assert lengths.predict(("data", 0), 16, 10_000) == pytest.approx(expected)
    assert lengths.predict(("data", 0), 16, 120) == 120
    assert lengths.predict(("data", 77), 16, 10_000) == pytest.approx(200)


def test_a_new_prompt_is_like_those_of_its_length() -> None:
    lengths = LengthModel()
    for row in range(64):
        lengths.observe(("data", row), 10 if row % 2 else 1000, 50 if row % 2 else 350)
    lengths.end_round()
    assert lengths.predict(("data", 99), 10, 9999) == pytest.approx(50)
    assert lengths.predict(("data", 99), 1000, 9999) == pytest.approx(350)
    assert lengths.predict(("data", 99), 100, 9999) == pytest.approx(200)


def test_growing_responses_do_not_make_old_ones_wrong() -> None:
    """Prompts keep their place among the others, whatever the whole run does."""
    lengths = taught(100, 300)
    for _ in range(3):
        lengths.observe(("data", 1), 16, 900)
        lengths.observe(("data", 2), 16, 300)
    lengths.end_round()
    # Half of the mean of 200 then; the mean is 600 now.
    own = 16 * 0.5 * 600
    prior = statistics.fmean([0.5] * 16 + [1.5] * 16 + [1.5, 0.5] * 3) * 600
    assert lengths.predict(("data", 0), 16, 9999) == pytest.approx((own + 2 * prior) / 18)


def test_recurring_prompts_are_predicted_better_each_round() -> None:
    source = random.Random(0)
    middles = [source.lognormvariate(6, 0.8) for _ in range(60)]
    lengths, errors = LengthModel(), []
    for _ in range(4):
        drawn = {
            r: [m * source.lognormvariate(0, 0.4) for _ in range(4)] for r, m in enumerate(middles)
        }
        off = [abs(lengths.predict(("data", r), 16, 3000) - n) for r, g in drawn.items() for n in g]
        errors.append(statistics.fmean(off))
        for row, group in drawn.items():
            for length in group:
                lengths.observe(("data", row), 16, round(length))
        lengths.end_round()
    assert errors[0] > 2 * errors[1] > 2 * errors[3]


def test_what_is_remembered_survives_json() -> None:
    memory, other = PlannerMemory(2), PlannerMemory(2)
    memory.lengths, memory.pace = taught(100, 300, 50), measured(1.0, 2.0)
    kept = memory.state()
    other.load_state(json.loads(json.dumps(kept)))
    for row in range(5):
        one, two = (m.lengths.predict(("data", row), 16, 999) for m in (memory, other))
        assert one == pytest.approx(two, rel=1e-3)
    assert other.pace.state() == memory.pace.state()
    memory.pace.observe(0, Report(seconds=90.0, row_seconds=90.0, tokens=1000))
    assert kept["pace"] == other.pace.state() != memory.pace.state()
    fewer = PlannerMemory(1)
    fewer.load_state(memory.state())
    assert fewer.pace.slowness(0) == memory.pace.slowness(0)


# Speeds


def test_speeds_are_found_from_reports() -> None:
    pace = measured(1.0, 2.0, 0.5, fixed=0.04, each=0.002)
    fixed, each = pace.step()
    shared = pace.slowness(0)
    assert fixed * shared == pytest.approx(0.04, rel=0.1)
    assert each * shared == pytest.approx(0.002, rel=0.2)
    assert pace.slowness(1) / shared == pytest.approx(2.0, rel=0.1)
    assert pace.slowness(2) / shared == pytest.approx(0.5, rel=0.1)


def test_before_anything_is_measured_all_workers_are_alike() -> None:
    pace = Pace(3)
    assert not pace.is_measured
    assert {pace.slowness(worker) for worker in range(3)} == {1.0}
    pace.observe(0, Report(1.0, 1.0, 10))
    assert not pace.is_measured, "ten tokens tell nothing"


def test_no_schedule_beats_the_bound() -> None:
    """All ways to put five responses on two workers with one slot each, one after the other."""
    lengths, slowness, alone = [5, 9, 3, 7, 4], [1.0, 2.0], 0.5
    bound = least_seconds(lengths, slowness, slots=1, alone=alone, together=alone)
    best = min(
        max(
            sum(n for i, n in enumerate(lengths) if (choice >> i & 1) == worker) * slow * alone
            for worker, slow in enumerate(slowness)
        )
        for choice in range(2 ** len(lengths))
    )
    assert 0.8 * best < bound <= best
    assert least_seconds([100, 1], slowness, slots=8, alone=0.5, together=0.6) == 50


# Planners


@pytest.mark.parametrize("kind", KINDS)
def test_every_response_is_handed_out_once_whatever_happens(kind: str) -> None:
    """Random lengths, sizes, speeds, crashes and returns; nothing is stuck and nothing is twice."""
    for seed in range(30):
        source = random.Random(seed)
        count, slots = source.randint(1, 5), source.randint(1, 6)
        sizes = [source.randint(1, 7) for _ in range(source.randint(1, 12))]
        memory = PlannerMemory(count)
        if seed % 3:
            memory.lengths = taught(*(source.randint(1, 900) for _ in sizes))
            memory.pace = measured(*(source.choice([1.0, 1.05, 2.0, 8.0]) for _ in range(count)))
        planner = memory.planner(kind, work(*sizes), slots)
        held: list[list[tuple[int, int]]] = [[] for _ in range(count)]
        able, done, now = set(range(count)), [], 0.0
        while planner.queued or any(held):
            now += 1.0
            while (hand := planner.next(now)) is not None:
                assert hand.worker in able
                planner.handed(hand, now)
                held[hand.worker] += [(hand.group, member) for member in hand.members]
            busy = [worker for worker in able if held[worker]]
            assert busy, f"stuck with {planner.queued} queued, seed {seed}"
            worker = source.choice(busy)
            if len(able) > 1 and source.random() < 0.1:
                planner.close(worker)
                able.discard(worker)
                for group in {group for group, _ in held[worker]}:
                    members = tuple(m for g, m in held[worker] if g == group)
                    planner.returned(worker, group, members)
                held[worker] = []
                continue
            group, member = held[worker].pop(source.randrange(len(held[worker])))
            memory.lengths.observe(("data", group), 16, 50)
            planner.finished(worker, group, 50)
            done.append((group, member))
        assert sorted(done) == [(g, m) for g, size in enumerate(sizes) for m in range(size)]


def test_the_longest_come_first_and_equals_in_the_order_of_the_data() -> None:
    lengths, pace = taught(50, 400, 100, 400), measured(1.0)
    planner = LongestFirst(work(1, 1, 1, 1), 1, 1, lengths, pace)
    order = []
    while planner.queued:
        hand = planner.next(0.0)
        assert hand is not None
        planner.handed(hand, 0.0)
        planner.finished(0, hand.group, 1)
        order.append(hand.group)
    assert order == [1, 3, 2, 0]
    cold = LongestFirst(work(1, 1, 1), 1, 3, LengthModel(), Pace(1))
    assert [hand.group for hand in hand_all(cold)] == [0, 1, 2]


def test_a_slow_worker_gets_what_it_finishes_in_time() -> None:
    lengths, pace = taught(400, 390, 380, 100, 90), measured(1.0, 3.0)
    planner = LongestFirst(work(1, 1, 1, 1, 1), 2, 1, lengths, pace)
    first = {hand.worker: hand.group for hand in hand_all(planner)}
    assert first[0] == 0
    assert first[1] in (3, 4)
    alone = LongestFirst(work(1), 2, 1, taught(400), pace)
    assert [hand.worker for hand in hand_all(alone)] == [0], "the slow one would end later"


def test_a_worker_that_seems_a_little_slower_is_not_left_idle() -> None:
    """Where more live sequences seem to cost nothing, one worker could have them all."""
    pace = measured(1.0, 1.2, each=0.0)
    planner = LongestFirst(work(4, 4, 4, 4), 2, 32, taught(50, 40, 30, 20), pace)
    given = [hand.worker for hand in hand_all(planner)]
    assert 1 <= given.count(1) <= 2


def test_work_is_shared_by_speed_when_all_of_it_starts_at_once() -> None:
    lengths, pace = taught(*[100] * 12), measured(1.0, 2.0)
    planner = LongestFirst(work(*[1] * 12), 2, 12, lengths, pace)
    counts = [sum(hand.worker == worker for hand in hand_all(planner)) for worker in range(2)]
    # 100 (0.01 + 8 x 0.001) fast, against twice 100 (0.01 + 4 x 0.001).
    assert counts[0] > 1.5 * counts[1]


@pytest.mark.parametrize(("prompt_tokens", "parts"), [(16, 2), (10**6, 1)])
def test_a_group_is_split_where_that_earns_more_than_its_prompt_costs(
    prompt_tokens: int, parts: int
) -> None:
    pace = measured(1.0, 1.0, fixed=0.001, each=0.01)
    pace.observe(0, Report(prefill_seconds=1.0, prefill_tokens=1000))
    planner = LongestFirst(work(8, prompt_tokens=prompt_tokens), 2, 8, taught(300), pace)
    hands = hand_all(planner)
    assert [len(hand.members) for hand in hands] == ([4, 4] if parts == 2 else [8])
    assert {member for hand in hands for member in hand.members} == set(range(8))


def test_a_group_waits_whole_while_there_is_much_to_do_and_not_at_the_end() -> None:
    pace = measured(1.0, 1.0)
    # Long before the end, a worker with one free slot takes a group of four whole.
    planner = LongestFirst(work(*[4] * 20), 2, 3, taught(*[100] * 20), pace)
    assert {len(hand.members) for hand in hand_all(planner)} == {4}
    # At the end its last members would wait for slots of this worker while the other is done.
    last = LongestFirst(work(2, 2, 4), 2, 2, taught(100, 100, 100), pace)
    assert [len(hand.members) for hand in hand_all(last)] == [2, 2]
    last.finished(0, 0, 100)
    assert hand_all(last, now=2.0) == [HandOut(0, 2, (0,))]


def test_siblings_that_are_done_move_those_that_wait() -> None:
    lengths = taught(300, 200, 100)
    planner = LongestFirst(work(3, 1, 1), 1, 1, lengths, measured(1.0))
    planner.handed(HandOut(0, 0, (0,)), 0.0)
    for _ in range(40):
        lengths.observe(("data", 0), 16, 1)
    planner.finished(0, 0, 1)
    hand = planner.next(0.0)
    assert hand is not None
    assert hand.group == 1, "known to be short now, group 0 waits for longer ones"


def test_first_come_goes_by_room() -> None:
    planner = FirstCome(work(2, 3, 1, 9), 2, 4)
    hands = hand_all(planner)
    assert [(hand.worker, hand.group) for hand in hands] == [(0, 0), (1, 1), (0, 2)]
    planner.finished(1, 1, 5)
    assert planner.next(0.0) is None
    planner.finished(1, 1, 5)
    planner.finished(1, 1, 5)
    assert planner.next(0.0) == HandOut(1, 3, tuple(range(9))), "larger than a worker, so alone"


def test_the_static_split_is_by_neighbours() -> None:
    planner = PlannerMemory(2).planner("static", work(1, 1, 1, 1, 1), 1)
    assert [(hand.worker, hand.group) for hand in hand_all(planner)] == [
        (0, 0),
        (0, 1),
        (0, 2),
        (1, 3),
        (1, 4),
    ]


def test_the_configuration_names_all_planners() -> None:
    field = Rollout.model_fields["planner"]
    assert get_args(field.annotation) == KINDS
