"""The drafter's data buffer: bounds, versions, and which tokens a draw takes."""

from __future__ import annotations

import json
import random

import pytest
import torch

from ratoon.drafter.data_buffer import DataBuffer, Sample
from ratoon.errors import ConfigError, DataError, StaleVersionError

HEAD = torch.zeros(4, 2)


def make_sample(uid: int, response_len: int, version: int = 1, prompt_len: int = 4) -> Sample:
    n = prompt_len + response_len
    states = torch.full((n - 1, 6), float(uid))
    return Sample((uid,), torch.full((n,), uid), states, states[:, :2], prompt_len, version)


def uids(buffer: DataBuffer) -> list[tuple[int, int]]:
    return [(sample.policy_version, sample.uid[0]) for sample in buffer.samples()]


def test_last_steps_long_samples_stay_one_step_and_short_ones_go() -> None:
    buffer = DataBuffer(1000, seed=0)
    buffer.begin_step(1, HEAD)
    for uid, length in enumerate([3, 30, 5, 20]):
        assert buffer.add(make_sample(uid, length))
    buffer.begin_step(2, HEAD + 1)
    assert uids(buffer) == [(1, 1), (1, 3)]
    buffer.add(make_sample(9, 4, version=2))
    assert uids(buffer) == [(1, 1), (1, 3), (2, 9)]
    assert buffer.versions == (1, 2)
    assert [float(buffer.head_rows(version)[0, 0]) for version in (1, 2)] == [0, 1]
    buffer.begin_step(5, HEAD)
    assert uids(buffer) == [(2, 9)]
    assert buffer.versions == (2, 5)


def test_teacher_rows_of_a_version_without_samples_are_let_go() -> None:
    buffer = DataBuffer(40, seed=0)
    buffer.begin_step(1, HEAD)
    buffer.add(make_sample(0, 10))
    buffer.begin_step(2, HEAD)
    assert buffer.versions == (1, 2)
    buffer.add(make_sample(1, 30, version=2))
    assert uids(buffer) == [(2, 1)]
    assert buffer.versions == (2,)


def test_the_buffer_never_exceeds_its_bound_and_keeps_last_steps_longest() -> None:
    buffer = DataBuffer(100, seed=0, long_share=0.7)
    buffer.begin_step(1, HEAD)
    for uid, length in enumerate([30, 20, 5, 9]):
        buffer.add(make_sample(uid, length))
    buffer.begin_step(2, HEAD)
    assert uids(buffer) == [(1, 0), (1, 1)]
    for uid in range(10, 20):
        buffer.add(make_sample(uid, 12, version=2))
        assert buffer.tokens <= 100
        assert buffer.tokens == sum(len(sample.ids) - 1 for sample in buffer.samples())
        if uid == 12:
            assert (1, 0) in uids(buffer)
            assert (1, 1) not in uids(buffer)
    assert uids(buffer) == [(2, uid) for uid in range(14, 20)]


def test_what_is_kept_does_not_depend_on_the_order_of_arrival() -> None:
    lengths = [9, 40, 11, 12, 5, 33, 12, 12, 25, 7, 30]
    states = []
    for seed in range(20):
        buffer = DataBuffer(150, seed=0)
        buffer.begin_step(1, HEAD)
        for uid, length in enumerate([20, 30, 25]):
            buffer.add(make_sample(uid, length))
        buffer.begin_step(2, HEAD)
        arrival = list(enumerate(lengths))
        random.Random(seed).shuffle(arrival)
        for uid, length in arrival:
            buffer.add(make_sample(uid, length, version=2))
        states.append(buffer.state())
    assert sorted(uids(buffer)) == [(2, 1), (2, 5), (2, 8), (2, 10)]
    tensors, values = states[0]
    for others, other in states[1:]:
        assert other == values
        assert others.keys() == tensors.keys()
        assert all(torch.equal(others[name], tensors[name]) for name in tensors)


def test_a_sample_of_another_version_is_refused() -> None:
    buffer = DataBuffer(100, seed=0)
    with pytest.raises(StaleVersionError, match="version 1"):
        buffer.add(make_sample(0, 5))
    buffer.begin_step(2, HEAD)
    with pytest.raises(StaleVersionError, match="version 1"):
        buffer.add(make_sample(0, 5))
    with pytest.raises(StaleVersionError, match="must rise"):
        buffer.begin_step(2, HEAD)


def test_samples_that_do_not_fit_are_refused_by_name() -> None:
    buffer = DataBuffer(20, seed=0)
    buffer.begin_step(1, HEAD)
    with pytest.raises(DataError, match="holds 20"):
        buffer.add(make_sample(0, 30))
    bad = make_sample(3, 5)
    wrong = Sample((3,), bad.ids, bad.features[:-1], bad.hidden, 4, 1)
    with pytest.raises(DataError, match=r"\(3,\).* 8 rows"):
        buffer.add(wrong)
    with pytest.raises(ConfigError, match="max_tokens = 0"):
        DataBuffer(0, seed=0)


def test_responses_that_teach_nothing_are_not_stored() -> None:
    buffer = DataBuffer(20, seed=0)
    buffer.begin_step(1, HEAD)
    assert not buffer.add(make_sample(0, 0))
    assert not buffer.add(make_sample(1, 1, prompt_len=1))
    assert buffer.add(make_sample(2, 1, prompt_len=2))
    assert len(buffer) == 1
    assert buffer.draw(8, 100, 5)[0].count == 1


def filled(seed: int = 0, order: int = 1) -> DataBuffer:
    buffer = DataBuffer(10_000, seed=seed)
    buffer.begin_step(1, HEAD)
    for uid in range(8):
        buffer.add(make_sample(uid, 40 + uid))
    buffer.begin_step(2, HEAD)
    for uid in list(range(20))[::order]:
        buffer.add(make_sample(uid, 3 + 2 * uid, version=2))
    return buffer


def drawn(buffer: DataBuffer, count: int = 40) -> list[list[tuple[int, int, int, int]]]:
    return [
        [
            (piece.sample.policy_version, piece.sample.uid[0], piece.first, piece.count)
            for piece in buffer.draw(16, 60, 12)
        ]
        for _ in range(count)
    ]


def test_draws_depend_on_seed_and_contents_but_not_on_the_order_of_arrival() -> None:
    assert drawn(filled()) == drawn(filled()) == drawn(filled(order=-1))
    assert drawn(filled()) != drawn(filled(seed=1))


def test_a_draw_holds_one_version_within_its_bounds_and_no_sample_twice() -> None:
    for draw in drawn(filled()):
        assert len({version for version, *_ in draw}) == 1
        assert len({uid for _, uid, *_ in draw}) == len(draw)
        assert sum(count for *_, count in draw) <= 16
        keys = sum(count + min(11, first) for *_, first, count in draw)
        assert keys - (draw[-1][3] + min(11, draw[-1][2])) < 60
    versions = {draw[0][0] for draw in drawn(filled())}
    assert versions == {1, 2}


def test_all_tokens_are_covered_equally_to_within_two_passes() -> None:
    buffer = filled()
    counts = {id(sample): torch.zeros(sample.num_queries) for sample in buffer.samples()}
    for _ in range(400):
        for piece in buffer.draw(16, 60, 12):
            start = piece.first - piece.sample.first_query
            counts[id(piece.sample)][start : start + piece.count] += 1
        everything = torch.cat(list(counts.values()))
        assert float(everything.max() - everything.min()) <= 2
    assert float(everything.min()) >= 5


def test_a_short_sample_does_not_fill_up_every_slice_of_a_long_one() -> None:
    buffer = DataBuffer(1000, seed=0)
    buffer.begin_step(1, HEAD)
    buffer.add(make_sample(0, 60))
    buffer.add(make_sample(1, 5))
    counts = [0, 0]
    for _ in range(60):
        for piece in buffer.draw(50, 1000, 8):
            counts[piece.sample.uid[0]] += piece.count
    assert counts[1] / 5 <= counts[0] / 60 + 2


def test_a_sample_that_arrives_late_is_mixed_with_the_others() -> None:
    buffer = filled()
    drawn(buffer, 200)
    late = make_sample(77, 10, version=2)
    buffer.add(late)
    draws = drawn(buffer, 40)
    with_late = [draw for draw in draws if (2, 77) in [piece[:2] for piece in draw]]
    assert 1 <= len(with_late) <= 4


def test_an_empty_buffer_gives_nothing() -> None:
    buffer = DataBuffer(10, seed=0)
    assert buffer.draw(8, 8, 4) == []
    buffer.begin_step(1, HEAD)
    assert buffer.draw(8, 8, 4) == []


def test_a_restored_buffer_draws_on_as_the_first_would_have() -> None:
    buffer = filled()
    drawn(buffer, 7)
    tensors, values = buffer.state()
    copy = DataBuffer(10_000, seed=99)
    copy.restore(tensors, json.loads(json.dumps(values)))
    assert sorted(uids(copy)) == sorted(uids(buffer))
    assert copy.tokens == buffer.tokens
    assert drawn(copy) == drawn(buffer)
    copy.begin_step(3, HEAD)
    buffer.begin_step(3, HEAD)
    assert uids(copy) == uids(buffer)
