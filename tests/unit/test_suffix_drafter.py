"""The suffix drafter: proposes what really followed, per prompt, within its bounds."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from ratoon.cluster.stored_state import load_state, save_state
from ratoon.drafter.suffix import GRAMS, MIN_CAPACITY, SuffixDrafter
from ratoon.errors import ConfigError

ONE, OTHER = ("arithmetic", 1), ("arithmetic", 2)
PROMPT = [91, 92, 93, 94, 95, 96, 97, 98]
RESPONSE = list(range(10, 40))


def drafter(num_rows: int = 4, capacity: int = MIN_CAPACITY) -> SuffixDrafter:
    return SuffixDrafter(num_rows, capacity=capacity)


def append(index: SuffixDrafter, *rows: list[int]) -> None:
    longest = max(map(len, rows))
    padded = [row + [-1] * (longest - len(row)) for row in rows]
    index.append(
        torch.tensor(padded, dtype=torch.int64).reshape(len(rows), longest),
        torch.tensor([len(row) for row in rows]),
    )


def proposals(index: SuffixDrafter, num_rows: int, num_children: int = 4) -> list[dict[int, float]]:
    tokens, priors = index.root(num_rows, num_children)
    return [
        {t: p for t, p in zip(*row, strict=True) if p > 0}
        for row in zip(tokens[:, 0].tolist(), priors[:, 0].tolist(), strict=True)
    ]


def follow(index: SuffixDrafter, num_rows: int, depth: int) -> list[list[int]]:
    """The first candidate of each level, for each row, until there is none."""
    tokens, priors = index.root(num_rows, 1)
    chains: list[list[int]] = [[] for _ in range(num_rows)]
    alive = [True] * num_rows
    for _ in range(depth):
        for row in range(num_rows):
            alive[row] &= float(priors[row, 0, 0]) > 0
            if alive[row]:
                chains[row].append(int(tokens[row, 0, 0]))
        tokens, priors = index.advance(torch.zeros(num_rows, 1).long(), tokens[:, 0, :1], 1)
    return chains


def test_a_sibling_is_offered_as_the_continuation() -> None:
    index = drafter()
    for row in range(2):
        index.begin(row, ONE, PROMPT)
    append(index, RESPONSE, RESPONSE[:5])
    assert follow(index, 2, 6) == [[], RESPONSE[5:11]]


def test_an_earlier_round_is_offered_from_the_first_token_on() -> None:
    index = drafter()
    index.begin(0, ONE, PROMPT)
    append(index, RESPONSE)
    index.release(0)
    index.begin(0, ONE, PROMPT)
    assert follow(index, 1, 4) == [RESPONSE[:4]]


def test_a_rows_own_context_is_offered() -> None:
    index = drafter()
    index.begin(0, ONE, PROMPT)
    append(index, [1, 2, 3, 4, 5, 6, 1, 2, 3])
    assert follow(index, 1, 3) == [[4, 5, 6]]


def test_a_prompts_own_text_is_offered() -> None:
    index = drafter()
    index.begin(0, ONE, PROMPT)
    append(index, PROMPT[:4])
    assert follow(index, 1, 4) == [PROMPT[4:]]


def test_a_response_generated_elsewhere_is_offered() -> None:
    index = drafter()
    index.add(ONE, PROMPT, RESPONSE)
    index.begin(0, ONE, PROMPT)
    assert follow(index, 1, 30) == [RESPONSE]


def test_other_prompts_are_not_offered() -> None:
    index = drafter()
    index.add(ONE, PROMPT, RESPONSE)
    index.begin(0, OTHER, PROMPT)
    assert proposals(index, 1) == [{}]


def test_rows_without_a_response_get_no_proposals() -> None:
    index = drafter()
    index.add(ONE, PROMPT, RESPONSE)
    index.begin(0, ONE, PROMPT)
    index.release(0)
    assert proposals(index, 2) == [{}, {}]


def test_a_longer_match_wins_over_a_shorter_one() -> None:
    index = drafter()
    index.add(ONE, PROMPT, [1, 2, 3, 4, 5, 6, 7, 8, 50])
    index.add(ONE, PROMPT, [60, 6, 7, 8, 70])
    index.begin(0, ONE, PROMPT)
    append(index, [1, 2, 3, 4, 5, 6, 7, 8])
    assert list(proposals(index, 1)[0]) == [50]


def test_votes_of_siblings_become_priors() -> None:
    index = drafter()
    for last in (5, 5, 5, 6):
        index.add(ONE, PROMPT, [1, 2, 3, 4, last])
    index.begin(0, ONE, PROMPT)
    append(index, [1, 2, 3, 4])
    found = proposals(index, 1)[0]
    assert set(found) == {5, 6}
    assert found[5] == pytest.approx(3 * found[6])
    assert sum(found.values()) < 1


def test_the_latest_continuations_are_remembered() -> None:
    index = drafter()
    for last in range(20, 60):
        index.add(ONE, PROMPT, [1, 2, 3, 4, last])
    index.begin(0, ONE, PROMPT)
    append(index, [1, 2, 3, 4])
    assert set(proposals(index, 1, 8)[0]) == set(range(52, 60))


def test_a_branch_is_followed_only_where_its_token_was_taken() -> None:
    index = drafter()
    index.add(ONE, PROMPT, [1, 2, 3, 4, 5, 6])
    index.add(ONE, PROMPT, [1, 2, 3, 7, 8, 9])
    index.begin(0, ONE, PROMPT)
    append(index, [1, 2, 3])
    assert set(proposals(index, 1)[0]) == {4, 7}
    parents, nodes = torch.zeros(1, 3).long(), torch.tensor([[7, 4, 33]])
    tokens, priors = index.advance(parents, nodes, 2)
    assert tokens[0, :, 0].tolist()[:2] == [8, 5]
    assert priors[0, 2].tolist() == [0.0, 0.0]
    tokens, priors = index.advance(torch.tensor([[1, 0]]), torch.tensor([[5, 8]]), 2)
    assert tokens[0, :, 0].tolist() == [6, 9]


def test_what_is_offered_really_followed_however_full_the_store_is() -> None:
    """Old text is overwritten many times over; buckets of the table collide all the time."""
    rng = random.Random(1)
    index = drafter(num_rows=6)
    uids = [("noise", row) for row in range(4)]
    followers: dict[tuple[tuple[str, int], tuple[int, ...]], set[int]] = {}
    texts: list[list[int]] = [[] for _ in range(6)]
    names = [rng.choice(uids) for _ in range(6)]
    for row in range(6):
        index.begin(row, names[row], [])
    offered = 0
    for step in range(400):
        tokens = [[rng.randrange(6) for _ in range(rng.randrange(0, 9))] for _ in range(6)]
        for row in range(6):
            for token in tokens[row]:
                for gram in GRAMS:
                    padded = [-1] * gram + texts[row]
                    context = (names[row], tuple(padded[-gram:]))
                    followers.setdefault(context, set()).add(token)
                texts[row].append(token)
        append(index, *[row or [] for row in tokens])
        for row, found in enumerate(proposals(index, 6)):
            seen: set[int] = set()
            for gram in GRAMS:
                padded = [-1] * gram + texts[row]
                seen |= followers.get((names[row], tuple(padded[-gram:])), set())
            assert found.keys() <= seen
            offered += len(found)
        if step % 40 == 39:
            row = rng.randrange(6)
            index.release(row)
            names[row], texts[row] = rng.choice(uids), []
            index.begin(row, names[row], [])
    assert offered > 1000


def test_overwritten_text_is_forgotten() -> None:
    index = drafter()
    index.add(ONE, PROMPT, RESPONSE)
    filler = [1000 + place for place in range(MIN_CAPACITY // 4)]
    for row in range(5):
        index.add(("filler", row), [], filler)
    index.begin(0, ONE, PROMPT)
    assert proposals(index, 1) == [{}]


def test_a_chain_ends_where_its_text_was_overwritten() -> None:
    index = drafter()
    index.begin(0, ONE, PROMPT)
    append(index, RESPONSE)
    for row in range(40):
        index.add(("filler", row), [], [2000 + place for place in range(MIN_CAPACITY // 32)])
        append(index, RESPONSE)
        for chain in follow(index, 1, 40):
            assert all(token < 2000 for token in chain)


def test_text_longer_than_the_store_keeps_its_end() -> None:
    index = drafter()
    index.add(ONE, [], list(range(3 * MIN_CAPACITY)))
    found = 0
    for start in range(3 * MIN_CAPACITY - 1000, 3 * MIN_CAPACITY - 100, 30):
        index.begin(0, ONE, list(range(start, start + 8)))
        chain = follow(index, 1, 2)[0]
        assert chain in ([], [start + 8, start + 9])
        found += bool(chain)
    assert found > 20
    index.begin(0, ONE, list(range(100, 108)))
    assert follow(index, 1, 2) == [[]]


def test_rows_move_with_their_state() -> None:
    index = drafter()
    for row in range(3):
        index.begin(row, ONE, PROMPT)
    append(index, RESPONSE, RESPONSE[:3], RESPONSE[:9])
    index.release(0)
    index.move_row(2, 0)
    index.release(2)
    assert follow(index, 3, 2) == [RESPONSE[9:11], RESPONSE[3:5], []]
    append(index, RESPONSE[9:11], RESPONSE[3:5])
    assert follow(index, 2, 2) == [RESPONSE[11:13], RESPONSE[5:7]]


def test_one_by_one_and_all_at_once_store_the_same() -> None:
    steps, whole = drafter(), drafter()
    for index in (steps, whole):
        index.begin(0, ONE, PROMPT)
        index.begin(1, OTHER, PROMPT)
    text = [random.Random(2).randrange(5) for _ in range(120)]
    for token in text:
        append(steps, [token], [])
    append(whole, text, [])
    for state, other in zip(steps.state_dict().values(), whole.state_dict().values(), strict=True):
        assert torch.equal(state, other) if isinstance(state, torch.Tensor) else state == other


def test_reliability_follows_the_outcomes() -> None:
    good, bad = drafter(), drafter()
    for index in (good, bad):
        index.add(ONE, PROMPT, RESPONSE)
        index.begin(0, ONE, PROMPT)
        for _ in range(60):
            index.root(1, 4)
            append(index, RESPONSE[:1] if index is good else [77])
            index.begin(0, ONE, PROMPT)
    good_prior = proposals(good, 1)[0][RESPONSE[0]]
    bad_prior = proposals(bad, 1)[0].get(RESPONSE[0], 0.0)
    fresh = drafter()
    fresh.add(ONE, PROMPT, RESPONSE)
    fresh.begin(0, ONE, PROMPT)
    assert bad_prior < proposals(fresh, 1)[0][RESPONSE[0]] < good_prior


def test_deeper_levels_are_judged_along_the_committed_path() -> None:
    index = drafter()
    index.add(ONE, PROMPT, [1, 2, 3, 4, 5])
    index.add(ONE, PROMPT, [1, 2, 3, 6, 7])
    index.begin(0, ONE, PROMPT)
    append(index, [1, 2, 3])
    index.root(1, 4)
    index.advance(torch.zeros(1, 2).long(), torch.tensor([[4, 6]]), 4)
    append(index, [6, 7])
    state = index.state_dict()
    assert float(state["hits"].sum()) == pytest.approx(2.0)
    assert float(state["expected"].sum()) == pytest.approx(2 / 3 + 1 / 2)


def test_a_replay_from_the_snapshot_does_not_know_the_recorded_step() -> None:
    index = drafter()
    index.add(ONE, PROMPT, RESPONSE[:5])
    before = index.state_dict()
    index.begin(0, ONE, PROMPT)
    append(index, RESPONSE)
    index.begin(0, ONE, PROMPT)
    assert follow(index, 1, 30) == [RESPONSE], "the index should leak here, or the test is void"
    index.load_state_dict(before)
    index.begin(0, ONE, PROMPT)
    assert follow(index, 1, 30) == [RESPONSE[:5]]


def test_an_index_goes_on_from_its_state_whatever_it_knew_before(tmp_path: Path) -> None:
    """Also when the store has wrapped around, and over a state that knew more."""
    source = random.Random(4)
    texts = [[source.randrange(6) for _ in range(700)] for _ in range(12)]
    for count in (1, 12):
        first, second = drafter(), drafter()
        for text in texts[:count]:
            first.add(ONE, PROMPT, text)
        for text in texts:
            second.add(OTHER, PROMPT, text[::-1])
            second.add(ONE, PROMPT, text[::-1])
        save_state(tmp_path / str(count), first.state_dict())
        second.load_state_dict(load_state(tmp_path / str(count)))
        for index in (first, second):
            index.begin(0, ONE, PROMPT)
            index.begin(1, OTHER, PROMPT)
            append(index, texts[0][-9:], texts[1][-9:])
        assert follow(first, 2, 20) == follow(second, 2, 20)
        assert any(follow(first, 1, 20))
        one, other = first.state_dict(), second.state_dict()
        for name, value in one.items():
            same = (
                torch.equal(value, other[name]) if torch.is_tensor(value) else value == other[name]
            )
            assert same, name


def test_a_snapshot_of_another_capacity_is_refused() -> None:
    with pytest.raises(ConfigError, match=str(2 * MIN_CAPACITY)):
        drafter().load_state_dict(drafter(capacity=2 * MIN_CAPACITY).state_dict())


@pytest.mark.parametrize("capacity", [0, 1000, MIN_CAPACITY + 1])
def test_a_capacity_that_does_not_work_is_refused(capacity: int) -> None:
    with pytest.raises(ConfigError, match=str(capacity)):
        drafter(capacity=capacity)


def test_running_out_of_positions_starts_over() -> None:
    index = drafter()
    index.add(ONE, PROMPT, RESPONSE)
    index._head = 2**31 - 2**27
    index.begin(0, ONE, PROMPT)
    append(index, RESPONSE)
    append(index, RESPONSE[:4])
    assert follow(index, 1, 3) == [RESPONSE[4:7]]
