"""Trees whose likeliest path lies in plain columns, and carried chains in front of them."""

from __future__ import annotations

import torch
from torch import Tensor

from ratoon.rollout.native.carry import main_path_first, num_final, with_chain
from ratoon.speculation.tree import Tree, ancestor_mask


def make_tree(
    parents: list[list[int]], chances: list[list[float]], valid: list[list[bool]] | None = None
) -> Tree:
    """Tokens are 100, 101, ... in the first row, 200, 201, ... in the second."""
    parent = torch.tensor(parents)
    num_rows, num_nodes = parent.shape
    depths = torch.zeros_like(parent)
    for node in range(1, num_nodes):
        depths[:, node] = depths.gather(1, parent[:, node, None])[:, 0] + 1
    index = torch.arange(num_nodes)
    return Tree(
        tokens=100 * (1 + torch.arange(num_rows)[:, None]) + index,
        parents=parent,
        depths=depths,
        chances=torch.tensor(chances),
        valid=torch.ones_like(parent, dtype=torch.bool) if valid is None else torch.tensor(valid),
        sources=index.repeat(num_rows, 1),
    )


def paths(tree: Tree) -> list[set[tuple[int, ...]]]:
    """The tokens from the root to each valid node, in each row."""
    found = []
    for row in range(len(tree.tokens)):
        seen: dict[int, tuple[int, ...]] = {}
        for node in range(tree.tokens.shape[1]):
            parent = int(tree.parents[row, node])
            if bool(tree.valid[row, node]):
                seen[node] = (*seen.get(parent, ()), int(tree.tokens[row, node]))
                assert len(seen[node]) == int(tree.depths[row, node]) + 1
        found.append(set(seen.values()))
    return found


TREE = make_tree(
    # 0 - 1 - 3, 0 - 2 - 4 - 5 with the second path likelier; the other row is a bush.
    parents=[[-1, 0, 0, 1, 2, 4], [-1, 0, 0, 0, 0, 0]],
    chances=[[1.0, 0.3, 0.6, 0.2, 0.5, 0.4], [1.0, 0.1, 0.2, 0.7, 0.0, 0.0]],
    valid=[[True] * 6, [True, True, True, True, False, False]],
)


def test_the_likeliest_path_gets_the_first_places() -> None:
    ordered = main_path_first(TREE)
    assert ordered.tokens[0, :4].tolist() == [100, 102, 104, 105]
    assert ordered.depths[0, :4].tolist() == [0, 1, 2, 3]
    assert ordered.tokens[1, :2].tolist() == [200, 203]
    assert paths(ordered) == paths(TREE)
    assert ordered.parents[:, 0].tolist() == [-1, -1]
    nodes = torch.arange(6)
    assert bool((ordered.parents < nodes)[ordered.valid].all())
    assert ordered.valid.sum(1).tolist() == TREE.valid.sum(1).tolist()
    assert not bool(ordered.valid[1, 4:].any())


def test_a_path_that_is_first_already_stays() -> None:
    ordered = main_path_first(TREE)
    again = main_path_first(ordered)
    for name in ("tokens", "parents", "depths", "valid", "sources"):
        assert torch.equal(getattr(again, name), getattr(ordered, name))
    assert torch.equal(again.chances, ordered.chances)


def test_trees_of_one_or_two_nodes_have_nothing_to_order() -> None:
    small = make_tree([[-1, 0]], [[1.0, 0.5]])
    assert main_path_first(small) is small


def test_a_chain_in_front_moves_the_tree_below_its_end() -> None:
    ordered = main_path_first(TREE)
    carried = torch.tensor([2, 0])
    chain = torch.tensor([[7, 8], [0, 0]])
    whole = with_chain(ordered, chain, carried)
    assert whole.tokens.shape == (2, 8)
    assert whole.tokens[0, :4].tolist() == [7, 8, 100, 102]
    assert whole.parents[0, :4].tolist() == [-1, 0, 1, 2]
    assert whole.depths[0, :4].tolist() == [0, 1, 2, 3]
    below = {(7, 8, *path) for path in paths(ordered)[0]}
    assert paths(whole)[0] == below | {(7,), (7, 8)}
    # A row without carried tokens keeps its tree; its additional places are invalid.
    assert paths(whole)[1] == paths(ordered)[1]
    assert not bool(whole.valid[1, 6:].any())
    assert bool(ancestor_mask(whole).any(-1).all())
    assert bool((whole.parents < torch.arange(8)).all())


def test_what_was_selected_in_plain_columns_is_final() -> None:
    path = torch.tensor([[0, 1, 2, -1], [0, 2, 3, -1], [0, 1, 5, 6], [0, -1, -1, -1]])
    counts = torch.tensor([3, 3, 4, 1])
    assert num_final(path, counts).tolist() == [3, 1, 2, 1]
    assert num_final(path, torch.tensor([1, 1, 1, 1])).tolist() == [1, 1, 1, 1]


def test_a_path_that_comes_back_to_a_plain_number_is_not_final() -> None:
    """Node 2 at level 2 behind a parent elsewhere: its ancestors are out of place."""
    path: Tensor = torch.tensor([[0, 3, 2]])
    assert num_final(path, torch.tensor([3])).tolist() == [1]
