"""Cutting a batch into micro-batches for workers."""

from __future__ import annotations

import random

import pytest
import torch

from ratoon.models.packing import micro_batches
from ratoon.training.samples import families, pack


@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize("seed", range(5))
def test_every_document_is_in_one_micro_batch_within_the_budget(
    seed: int, num_workers: int
) -> None:
    source = random.Random(seed)
    lengths = [source.randint(1, 300) for _ in range(source.randint(1, 60))]
    plan = micro_batches(lengths, 512, num_workers)
    dealt = [index for worker in plan for batch in worker for index in batch]
    assert sorted(dealt) == list(range(len(lengths)))
    assert len(plan) == num_workers
    for worker in plan:
        for batch in worker:
            assert batch == sorted(batch)
            assert sum(lengths[i] for i in batch) <= 512
    tokens = [sum(lengths[i] for batch in worker for i in batch) for worker in plan]
    assert max(tokens) - min(tokens) <= len(plan[0]) * max(lengths)


def test_a_document_beyond_the_budget_is_alone_and_nothing_gives_nothing() -> None:
    assert micro_batches([600, 10, 10], 512) == [[[0], [1, 2]]]
    assert micro_batches([], 512, 2) == [[], []]
    assert micro_batches([5, 3, 4], 8) == [[[0], [1, 2]]]


def test_rows_are_the_tokens_before_each_completion_token() -> None:
    batch = pack([((5, 6), [(7, 8, 9)]), ((1,), [(2,)])], torch.device("cpu"))
    assert batch.packed.ids.tolist() == [5, 6, 7, 8, 1]
    assert batch.packed.positions.tolist() == [0, 1, 2, 3, 0]
    assert batch.packed.parents == (None, None)
    assert batch.rows.tolist() == [1, 2, 3, 4]
    assert batch.targets.tolist() == [7, 8, 9, 2]
    assert batch.per_token([0.5, -1.0], torch.float32).tolist() == [0.5, 0.5, 0.5, -1.0]


def test_a_prompt_is_held_once_for_its_completions() -> None:
    batch = pack([((5, 6), [(7, 8, 9), (3,), (4, 2)])], torch.device("cpu"))
    assert batch.packed.ids.tolist() == [5, 6, 7, 8, 4]
    assert batch.packed.positions.tolist() == [0, 1, 2, 3, 2]
    assert batch.packed.lengths == (2, 2, 1)
    assert batch.packed.parents == (None, 0, 0)
    assert batch.packed.longest == 4
    assert batch.rows.tolist() == [1, 2, 3, 1, 1, 4]
    assert batch.targets.tolist() == [7, 8, 9, 3, 4, 2]
    assert batch.lengths == (3, 1, 2)


def test_families_share_group_and_prompt_and_are_cut_at_the_budget() -> None:
    examples = [((1, 2), (3, 4)), ((1, 2), (5,)), ((9,), (3, 4, 5)), ((1, 2), (6, 7, 8))]
    assert families(examples, None, 100) == [[0], [1], [2], [3]]
    assert families(examples, ["a", "a", "a", "a"], 100) == [[0, 1, 3], [2]]
    assert families(examples, ["a", "b", "a", "a"], 100) == [[0, 3], [1], [2]]
    assert families(examples, ["a", "a", "a", "a"], 3) == [[0, 1], [2], [3]]


def test_an_empty_prompt_or_completion_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a prompt of 0 tokens has completions of \[2\]"):
        pack([((1,), [(2,)]), ((), [(1, 2)])], torch.device("cpu"))
    with pytest.raises(ValueError, match=r"completions of \[1, 0\]"):
        pack([((1,), [(2,), ()])], torch.device("cpu"))
