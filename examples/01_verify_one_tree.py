"""Verify draft trees by keyed selection: the tree decides how far a step gets, never what is said.

The target here is a table: its logits depend on the last token alone. At each node that the walk
reaches, the target selects its own token with the noise of that position, and the walk moves on
if the tree has that token. Run: `python examples/01_verify_one_tree.py`
"""

import torch
from torch import Tensor

from ratoon.records import DrawKey, SamplingParams, Stream
from ratoon.sampling import Selector, row_keys, sequence_keys
from ratoon.speculation.tree import Tree, packed, root_only
from ratoon.speculation.verify import walk

WORDS = ("the", "old", "dog", "cat", "sat", "ran", "on", ".")
LOGITS = torch.randn(len(WORDS), len(WORDS), generator=torch.Generator().manual_seed(3)) * 1.5
KEY = DrawKey(seed=7, stream=Stream.EVAL, round=0, dataset="example", row=0, sample=0)
KEYS = sequence_keys([KEY])
PARAMS = SamplingParams(temperature=1.0)
SELECTOR = Selector(len(WORDS))
LENGTH = 9


def plain() -> list[int]:
    """Plain decoding: one token a step, each selected by (prefix, key) alone."""
    tokens = [0]
    for t in range(1, LENGTH):
        keys = row_keys(KEYS, torch.tensor([t]))
        ids, _ = SELECTOR.select(LOGITS[tokens[-1:]], keys, PARAMS)
        tokens.append(int(ids))
    return tokens


def tree_of(root: int, nodes: list[tuple[int, int]]) -> Tree:
    """A tree for one sequence from `(parent, token)` pairs; the root is node 0."""
    parents, depths = [-1, *(parent for parent, _ in nodes)], [0]
    for parent, _ in nodes:
        depths.append(depths[parent] + 1)
    tokens = torch.tensor([[root, *(token for _, token in nodes)]])
    return Tree(
        tokens=tokens,
        parents=torch.tensor([parents]),
        depths=torch.tensor([depths]),
        chances=torch.ones(tokens.shape),
        valid=torch.ones(tokens.shape, dtype=torch.bool),
        sources=torch.zeros_like(tokens),
    )


def draft(tokens: list[int], drafter: str) -> Tree:
    """Two levels: the two tokens that a drafter likes best, and two below each of them."""
    if drafter == "none":
        return root_only(torch.tensor(tokens[-1:]))
    liked = {"good": LOGITS, "bad": -LOGITS}[drafter].topk(2).indices.tolist()
    children = [(0, token) for token in liked[tokens[-1]]]
    below = [(i + 1, token) for i, (_, parent) in enumerate(children) for token in liked[parent]]
    return tree_of(tokens[-1], children + below)


def speculative(drafter: str) -> tuple[list[int], list[int]]:
    """Decode with trees: the tokens, and how many each step committed."""
    tokens, commits = [0], []
    while len(tokens) < LENGTH:
        tree = draft(tokens, drafter)
        nodes, places = packed(tree)
        logits: Tensor = LOGITS[tree.tokens.view(-1)[nodes]]  # The target at all nodes at once.
        verified = walk(tree, logits, places, KEYS, torch.tensor([len(tokens)]), SELECTOR, PARAMS)
        commits.append(int(verified.counts))
        tokens += verified.tokens[0, : commits[-1]].tolist()
    return tokens[:LENGTH], commits


if __name__ == "__main__":
    print("plain   :", " ".join(WORDS[token] for token in plain()))
    for drafter in ("good", "bad", "none"):
        tokens, commits = speculative(drafter)
        assert tokens == plain()
        print(f"{drafter:8}: the same in {len(commits)} steps, tokens per step {commits}")
