"""What is drawn given the output agrees with the schemes themselves, run as they are defined."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from ratoon.offline.rejection import (
    accepted_child,
    best_shape,
    block_reach,
    num_accepted,
    token_reach,
)

SAMPLES = 60_000
VOCAB, LEVELS = 4, 3


def distributions(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(*shape, VOCAB, generator=generator).pow(3).add(0.02).softmax(-1)


def draw(weights: Tensor, source: random.Random) -> int:
    return source.choices(range(len(weights)), weights.tolist())[0]


def run_chain(p: Tensor, q: Tensor, *, block: bool, source: random.Random) -> tuple[int, list[int]]:
    """Accepted levels and the output of one draft; p and q depend on the level alone."""
    draft = [draw(q[level], source) for level in range(LEVELS)]
    if not block:
        for level, token in enumerate(draft):
            if source.random() >= min(1.0, float(p[level, token] / q[level, token])):
                return level, [*draft[:level], draw((p[level] - q[level]).clamp_min(0), source)]
        return LEVELS, [*draft, draw(p[LEVELS], source)]
    weights = [1.0]
    for level, token in enumerate(draft):
        weights.append(min(1.0, weights[-1] * float(p[level, token] / q[level, token])))
    kept = 0
    for level in range(1, LEVELS + 1):
        if level == LEVELS:
            chance = weights[level]
        else:
            missing = float((weights[level] * p[level] - q[level]).clamp_min(0).sum())
            rest = missing + 1 - weights[level]
            chance = missing / rest if rest > 0 else 1.0
        if source.random() < chance:
            kept = level
    if kept == LEVELS:
        return kept, [*draft, draw(p[LEVELS], source)]
    residual = (weights[kept] * p[kept] - q[kept]).clamp_min(0)
    return kept, [*draft[:kept], draw(residual, source)]


@pytest.mark.parametrize("block", [False, True], ids=["token", "block"])
def test_chains_accept_as_many_given_the_output(block: bool) -> None:
    p, q = distributions(1, LEVELS + 1), distributions(2, LEVELS)
    source = random.Random(0)
    runs = [run_chain(p, q, block=block, source=source) for _ in range(SAMPLES)]
    direct = torch.tensor([kept for kept, _ in runs]).bincount(minlength=LEVELS + 1) / SAMPLES
    first = torch.tensor([output[0] for _, output in runs]).bincount(minlength=VOCAB) / SAMPLES
    torch.testing.assert_close(first, p[0], atol=0.01, rtol=0)

    generator = torch.Generator().manual_seed(3)
    said = torch.stack(
        [torch.multinomial(row, SAMPLES, True, generator=generator) for row in p[:LEVELS]], dim=1
    )
    levels = torch.arange(LEVELS)
    reach = (block_reach if block else token_reach)(p[levels, said], q[levels, said])
    given = num_accepted(reach, generator).bincount(minlength=LEVELS + 1) / SAMPLES
    torch.testing.assert_close(given, direct, atol=0.01, rtol=0)


def test_block_verification_accepts_more() -> None:
    p, q = distributions(1, SAMPLES, LEVELS)[..., 0], distributions(2, SAMPLES, LEVELS)[..., 0]
    assert bool((block_reach(p, q) >= token_reach(p, q) - 1e-6).all())
    assert block_reach(p, q).mean() > 1.01 * token_reach(p, q).mean()


def run_children(p: Tensor, q: Tensor, count: int, source: random.Random) -> tuple[int, int]:
    """The accepted child of one node, and the token that came out; ids from VOCAB on are rest."""
    p, q = p.clone(), torch.cat([q, torch.zeros(len(p) - len(q))])
    for child in range(count):
        if float(q.sum()) <= 0:
            break
        token = draw(q, source)
        if source.random() < min(1.0, float(p[token] / q[token])):
            return child, token
        p = (p - q).clamp_min(0)
        p = p / p.sum()
        q = q.clone()
        q[token] = 0
        q = q / q.sum() if float(q.sum()) > 0 else q
    return -1, draw(p, source)


def test_sampled_children_are_accepted_as_often_given_the_output() -> None:
    count = 3
    p = torch.cat([distributions(4) * 0.8, torch.tensor([0.2])])
    q = distributions(5)
    source = random.Random(1)
    runs = [run_children(p, q, count, source) for _ in range(SAMPLES)]
    ranks = torch.tensor([rank for rank, _ in runs])
    out = torch.tensor([token for _, token in runs]).bincount(minlength=VOCAB + 1) / SAMPLES
    torch.testing.assert_close(out, p, atol=0.01, rtol=0)

    generator = torch.Generator().manual_seed(6)
    said = torch.multinomial(p, SAMPLES, True, generator=generator)
    given = accepted_child(
        p.expand(SAMPLES, -1),
        q.expand(SAMPLES, -1),
        said,
        torch.full((SAMPLES,), count),
        generator,
    )
    direct = (ranks + 1).bincount(minlength=count + 1) / SAMPLES
    torch.testing.assert_close(
        (given + 1).bincount(minlength=count + 1) / SAMPLES, direct, atol=0.01, rtol=0
    )


def test_a_node_without_children_or_drafts_accepts_nothing() -> None:
    p = torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0]])
    q = torch.tensor([[0.5, 0.5], [0.0, 0.0]])
    generator = torch.Generator().manual_seed(0)
    ranks = accepted_child(p, q, torch.tensor([0, 0]), torch.tensor([0, 2]), generator)
    assert ranks.tolist() == [-1, -1]


def test_the_best_shape_takes_the_likeliest_nodes() -> None:
    acceptance = torch.tensor([[0.6, 0.3], [0.4, 0.1]])
    # Chances: 0.6, then 0.3 beside it, 0.24 below the first and 0.12 below the second.
    assert best_shape(acceptance, 4) == [[1, 2], [3], [4], [], []]
    assert best_shape(acceptance, 100) == [[1, 2], [3, 5], [4, 6], [], [], [], []]
