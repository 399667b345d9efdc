"""The learned drafter at inference computes EAGLE-3's forward, step by step as training does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ratoon.drafter.learned import CHUNK, LearnedDrafter
from ratoon.drafter.model import DrafterConfig, Eagle3Drafter
from ratoon.errors import CapabilityError

VOCAB, DRAFT_VOCAB, WIDTH, WINDOW = 60, 24, 32, 7
CONFIG = DrafterConfig(
    hidden_size=WIDTH,
    target_hidden_size=WIDTH,
    intermediate_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rms_norm_eps=1e-5,
    rope_theta=10_000.0,
    rope_scaling=None,
    vocab_size=VOCAB,
    draft_vocab_size=DRAFT_VOCAB,
    taps=(1, 2, 3),
    window=WINDOW,
)
POSITIONS = 400


def random_drafter(seed: int = 0) -> tuple[Eagle3Drafter, Tensor]:
    """A drafter with large random weights, so that every input matters, and an embedding."""
    generator = torch.Generator().manual_seed(seed)
    drafter = Eagle3Drafter(CONFIG)
    with torch.no_grad():
        for parameter in drafter.parameters():
            scale = 0.3 if parameter.dim() == 2 else 0.2
            noise = torch.randn(parameter.shape, generator=generator) * scale
            parameter.copy_(noise if parameter.dim() == 2 else 1 + noise)
    drafter.set_vocabulary(torch.randperm(VOCAB, generator=generator)[:DRAFT_VOCAB].sort().values)
    return drafter, torch.randn(VOCAB, WIDTH, generator=generator)


DRAFTER, EMBEDDING = random_drafter()


def served(num_rows: int = 4, window: int = WINDOW, tree_slots: int = 12) -> LearnedDrafter:

    learned = LearnedDrafter(
        replace(CONFIG, window=window),
        num_rows=num_rows,
        num_positions=POSITIONS,
        num_tree_slots=tree_slots,
        dtype=torch.float32,
    )
    learned.load(DRAFTER, EMBEDDING)
    return learned


class Document:
    """Random features and tokens of one sequence."""

    def __init__(self, length: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.features = torch.randn(length, 3 * WIDTH, generator=generator)
        self.ids = torch.randint(0, VOCAB, (length + 1,), generator=generator)

    def pairs(self, first: int, end: int) -> tuple[Tensor, Tensor, Tensor]:
        """Features, next tokens and positions of pairs first..end-1."""
        return self.features[first:end], self.ids[first + 1 : end + 1], torch.arange(first, end)


def observe(learned: LearnedDrafter, parts: list[tuple[Document, int, int]]) -> None:
    """One call with the given pairs of each row, padded to the longest."""
    longest = max(end - first for _, first, end in parts)
    features = torch.full((len(parts), longest, 3 * WIDTH), torch.nan)
    tokens = torch.full((len(parts), longest), -1)
    positions = torch.zeros(len(parts), longest, dtype=torch.int64)
    for row, (document, first, end) in enumerate(parts):
        count = end - first
        pair = document.pairs(first, end)
        features[row, :count], tokens[row, :count], positions[row, :count] = pair
    counts = torch.tensor([end - first for _, first, end in parts])
    learned.observe(features, tokens, positions, counts)


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """Half-split rotation of `x [T, heads, E]`."""
    half = CONFIG.head_dim // 2
    frequencies = CONFIG.rope_theta ** (-torch.arange(half).double() / half)
    angles = (positions[:, None].double() * frequencies)[:, None]
    left, right = x.double()[..., :half], x.double()[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1).to(x.dtype)


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + CONFIG.rms_norm_eps).sqrt() * weight


def expected_logits(document: Document, end: int, steps: Tensor, window: int = WINDOW) -> Tensor:
    """Logits `[K, Vd]` after `end` pairs and along a chain of tokens `steps [K - 1]`.

    Written out from the published layout, one pair at a time, with the checkpoint's own tensors.
    """
    w = {name: value.detach() for name, value in DRAFTER.state_dict().items()}
    attention = "midlayer.self_attn."
    keys: list[Tensor] = []
    values: list[Tensor] = []
    logits = []
    out = torch.zeros(WIDTH)
    tokens = torch.cat([document.ids[1 : end + 1], steps])
    for place, token in enumerate(tokens.tolist()):
        drafted = place >= end
        hidden = out if drafted else w["fc.weight"] @ document.features[place]
        joined = torch.cat(
            [
                normed(EMBEDDING[token], w["midlayer.input_layernorm.weight"]),
                normed(hidden, w["midlayer.hidden_norm.weight"]),
            ]
        )
        at = torch.tensor([place])
        query, key, value = (
            (w[f"{attention}{part}_proj.weight"] @ joined).view(1, -1, CONFIG.head_dim)
            for part in "qkv"
        )
        keys.append(rotated(key, at).repeat_interleave(2, 1)[0])
        values.append(value.repeat_interleave(2, 1)[0])
        first = max(0, min(place, end - 1) - window + 1)
        seen_keys, seen_values = torch.stack(keys[first:]), torch.stack(values[first:])
        scores = torch.einsum("he,she->hs", rotated(query, at)[0], seen_keys)
        weights = (scores / CONFIG.head_dim**0.5).softmax(-1)
        attended = torch.einsum("hs,she->he", weights, seen_values).flatten()
        x = hidden + w[f"{attention}o_proj.weight"] @ attended
        inner = normed(x, w["midlayer.post_attention_layernorm.weight"])
        gate, up = (w[f"midlayer.mlp.{part}_proj.weight"] @ inner for part in ("gate", "up"))
        out = x + w["midlayer.mlp.down_proj.weight"] @ (torch.nn.functional.silu(gate) * up)
        if place >= end - 1:
            logits.append(w["lm_head.weight"] @ normed(out, w["norm.weight"]))
    return torch.stack(logits)


def drafted_chain(learned: LearnedDrafter, chains: Tensor) -> Tensor:
    """Logits `[B, K, Vd]` along one chain of tokens `[B, K - 1]` per row."""
    parents = torch.zeros(len(chains), 1, dtype=torch.int64)
    logits = [learned.root(len(chains))]
    logits += [learned.advance(parents, token) for token in chains.split(1, dim=1)]
    return torch.cat(logits, dim=1)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("length", [1, 3, WINDOW, WINDOW + 5])
def test_serving_computes_the_published_forward(length: int) -> None:
    document = Document(length, seed=length)
    chain = torch.tensor([[5, 17, 40]])
    learned = served()
    observe(learned, [(document, 0, length)])
    close(drafted_chain(learned, chain)[0], expected_logits(document, length, chain[0]))


def test_ragged_rows_do_not_see_each_other() -> None:
    lengths = [9, 1, 5]
    documents = [Document(length, seed=10 + length) for length in lengths]
    chains = torch.tensor([[1, 2], [3, 4], [5, 6]])
    learned = served()
    observe(learned, [(d, 0, n) for d, n in zip(documents, lengths, strict=True)])
    found = drafted_chain(learned, chains)
    for row, (document, length) in enumerate(zip(documents, lengths, strict=True)):
        close(found[row], expected_logits(document, length, chains[row]))


def test_pairs_in_any_portions_are_the_same_context() -> None:
    documents = [Document(30, seed=1), Document(30, seed=2)]
    generator = torch.Generator().manual_seed(3)
    learned = served()
    ends = [0, 0]
    for _ in range(9):
        counts = torch.randint(0, 4, (2,), generator=generator).tolist()
        observe(learned, [(d, e, e + n) for d, e, n in zip(documents, ends, counts, strict=True)])
        ends = [end + count for end, count in zip(ends, counts, strict=True)]
        if min(ends) > 0:
            # Drafting in between leaves no trace.
            drafted_chain(learned, torch.tensor([[7, 8], [9, 10]]))
    chains = torch.tensor([[1, 2], [3, 4]])
    found = drafted_chain(learned, chains)
    for row in range(2):
        close(found[row], expected_logits(documents[row], ends[row], chains[row]))


@pytest.mark.parametrize("length", [CHUNK, CHUNK + 3, 3 * CHUNK + 11])
@pytest.mark.parametrize("window", [WINDOW, 50])
def test_long_catch_ups_go_through_in_chunks(length: int, window: int) -> None:
    document, short = Document(length, seed=4), Document(2, seed=5)
    learned = served(window=window)
    observe(learned, [(document, 0, length), (short, 0, 2)])
    chains = torch.tensor([[1], [2]])
    found = drafted_chain(learned, chains)
    close(found[0], expected_logits(document, length, chains[0], window))
    close(found[1], expected_logits(short, 2, chains[1], window))


def test_the_last_window_of_pairs_is_enough_to_catch_up() -> None:
    document = Document(200, seed=6)
    learned = served()
    observe(learned, [(document, 0, 20)])
    observe(learned, [(document, 200 - WINDOW, 200)])
    chain = torch.tensor([[1, 2]])
    close(drafted_chain(learned, chain)[0], expected_logits(document, 200, chain[0]))


def test_each_node_of_a_tree_sees_its_own_ancestors_only() -> None:
    document = Document(6, seed=7)
    learned = served()
    observe(learned, [(document, 0, 6)])
    learned.root(1)
    first = learned.advance(torch.zeros(1, 2, dtype=torch.int64), torch.tensor([[11, 12]]))
    second = learned.advance(torch.tensor([[1, 0, 1]]), torch.tensor([[21, 22, 23]]))
    third = learned.advance(torch.tensor([[2, 0]]), torch.tensor([[31, 32]]))
    for logits, node, path in [
        (first, 0, [11]),
        (first, 1, [12]),
        (second, 0, [12, 21]),
        (second, 1, [11, 22]),
        (second, 2, [12, 23]),
        (third, 0, [12, 23, 31]),
        (third, 1, [12, 21, 32]),
    ]:
        close(logits[0, node], expected_logits(document, 6, torch.tensor(path))[-1])


def test_rows_move_with_their_context() -> None:
    documents = [Document(5, seed=20 + row) for row in range(3)]
    learned = served()
    observe(learned, [(document, 0, 4) for document in documents])
    learned.move_row(2, 0)
    learned.reset_row(2)
    chains = torch.tensor([[1, 2], [3, 4]])
    found = drafted_chain(learned, chains)
    close(found[0], expected_logits(documents[2], 4, chains[0]))
    close(found[1], expected_logits(documents[1], 4, chains[1]))
    observe(learned, [(documents[2], 4, 5), (documents[1], 4, 5)])
    close(drafted_chain(learned, chains)[0], expected_logits(documents[2], 5, chains[0]))


def test_a_row_without_context_proposes_nothing() -> None:
    learned = served()
    observe(learned, [(Document(3, seed=1), 0, 3), (Document(3, seed=2), 0, 0)])
    logits = learned.root(3)
    assert bool(logits[0].isfinite().all())
    assert bool((logits[1:] == -torch.inf).all())
    deeper = learned.advance(torch.zeros(3, 1, dtype=torch.int64), torch.tensor([[1], [2], [3]]))
    assert bool(deeper.isfinite().all())


def test_another_response_in_a_row_sees_nothing_of_the_last_one() -> None:
    first, second = Document(9, seed=1), Document(4, seed=2)
    learned = served()
    observe(learned, [(first, 0, 9)])
    learned.reset_row(0)
    observe(learned, [(second, 0, 4)])
    chain = torch.tensor([[1, 2]])
    close(drafted_chain(learned, chain)[0], expected_logits(second, 4, chain[0]))


def test_broken_weights_are_gone_after_the_next_load() -> None:
    broken, _ = random_drafter(1)
    with torch.no_grad():
        broken.midlayer.self_attn.v_proj.weight.fill_(torch.nan)
    document = Document(5, seed=3)
    learned = served()
    learned.load(broken, EMBEDDING)
    observe(learned, [(document, 0, 5)])
    assert bool(learned.root(1).isnan().all())
    learned.load(DRAFTER, EMBEDDING)
    assert bool((learned.root(1) == -torch.inf).all()), "keys of other weights are forgotten"
    observe(learned, [(document, 0, 5)])
    chain = torch.tensor([[1, 2]])
    close(drafted_chain(learned, chain)[0], expected_logits(document, 5, chain[0]))


def test_a_tree_beyond_its_slots_is_refused() -> None:
    learned = served(tree_slots=3)
    observe(learned, [(Document(3, seed=1), 0, 3)])
    learned.root(1)
    learned.advance(torch.zeros(1, 2, dtype=torch.int64), torch.tensor([[1, 2]]))
    with pytest.raises(CapabilityError, match=r"4 nodes.*3 tree slots"):
        learned.advance(torch.zeros(1, 2, dtype=torch.int64), torch.tensor([[1, 2]]))


def test_draft_ids_are_the_vocabularys_target_ids() -> None:
    assert served().draft_ids.tolist() == DRAFTER.draft_ids.tolist()


def test_the_prepacked_bf16_path_agrees_with_float32() -> None:
    document = Document(6, seed=8)
    chain = torch.tensor([[5, 6]])
    learned = LearnedDrafter(CONFIG, num_rows=1, num_positions=POSITIONS, num_tree_slots=4)
    learned.load(DRAFTER, EMBEDDING.bfloat16())
    observe(learned, [(document, 0, 6)])
    found = drafted_chain(learned, chain)[0].float()
    expected = expected_logits(document, 6, chain[0])
    assert float((found - expected).abs().max()) < 0.15 * float(expected.abs().max())
