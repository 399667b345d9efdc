"""The decoder's two forwards: packed documents for training, cached rows for inference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ratoon.models.decoder import Decoder, DecoderConfig, rope_table
from ratoon.models.packing import PackedBatch
from ratoon.models.tiny import random_decoder
from ratoon.rollout.native.forward import InferenceModel, attention_mask
from ratoon.rollout.native.numerics import check_invariance, decode

CONFIG = DecoderConfig(
    family="llama",
    vocab_size=70,
    hidden_size=64,
    intermediate_size=96,
    num_layers=5,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_positions=256,
)
TAPS = (1, 2, 4)
DOCUMENTS = [[5, 9, 2, 7, 7, 30, 1], [3], list(range(69, 0, -1)), [8, 8, 8]]


def make_decoder(config: DecoderConfig = CONFIG, dtype: torch.dtype = torch.float32) -> Decoder:
    decoder = random_decoder(config, seed=4)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    return decoder.to(dtype)


@torch.inference_mode()
def infer(model: InferenceModel, document: list[int], portion: int) -> tuple[Tensor, Tensor]:
    """Final-norm states and features of a document, computed in portions behind a cache."""
    cache = model.make_cache(2, 128)
    group = model.config.num_heads // model.config.num_kv_heads
    hidden, features = [], []
    for start in range(0, len(document), portion):
        tokens = torch.tensor([document[start : start + portion]])
        count = tokens.shape[1]
        chain = torch.ones(1, count, count, dtype=torch.bool).tril()
        mask = attention_mask(torch.tensor([start]), chain, 128, group, model.dtype)
        positions = torch.arange(start, start + count)
        entries = cache.num_positions + positions
        states = model.forward(tokens, positions[None], entries, mask, cache, first_slot=1)
        hidden.append(states[0])
        features.append(states[1])
    return torch.cat(hidden), torch.cat(features)


@torch.no_grad()
def train_forward(decoder: Decoder, documents: list[list[int]]) -> tuple[Tensor, Tensor]:
    hidden, tapped = decoder(PackedBatch.of(documents), taps=TAPS)
    return hidden, torch.cat(tapped, dim=-1)


def test_packed_documents_do_not_see_each_other() -> None:
    decoder = make_decoder(dtype=torch.float64)
    together = train_forward(decoder, DOCUMENTS)
    alone = [train_forward(decoder, [document]) for document in DOCUMENTS]
    for index in range(2):
        torch.testing.assert_close(together[index], torch.cat([states[index] for states in alone]))


def test_a_tokens_states_do_not_depend_on_what_follows() -> None:
    decoder = make_decoder(dtype=torch.float64)
    document = DOCUMENTS[2]
    whole = train_forward(decoder, [document])
    part = train_forward(decoder, [document[:20]])
    for index in range(2):
        torch.testing.assert_close(whole[index][:20], part[index])


@pytest.mark.parametrize("portion", [1, 8, 100])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_inference_computes_what_training_computes(dtype: torch.dtype, portion: int) -> None:
    decoder = make_decoder(dtype=dtype)
    model = InferenceModel(decoder, num_positions=128, dtype=dtype, taps=TAPS)
    for document in DOCUMENTS:
        expected = train_forward(decoder, [document])
        found = infer(model, document, portion)
        tolerance = 1e-9 if dtype == torch.float64 else 2e-5
        for index in range(2):
            torch.testing.assert_close(found[index], expected[index], rtol=0, atol=tolerance)


def test_in_bf16_training_and_inference_have_the_same_bits() -> None:
    decoder = make_decoder(dtype=torch.bfloat16)
    model = InferenceModel(decoder, num_positions=128, dtype=torch.bfloat16, taps=TAPS)
    if not check_invariance(model).holds:
        pytest.skip("bits do not hold on this machine")
    expected = train_forward(decoder, DOCUMENTS)
    found = [infer(model, document, portion=3) for document in DOCUMENTS]
    for index in range(2):
        assert torch.equal(torch.cat([states[index] for states in found]), expected[index])


def test_taps_are_the_inputs_of_their_layers() -> None:
    decoder = make_decoder()
    batch = PackedBatch.of(DOCUMENTS)
    seen: dict[int, Tensor] = {}

    def keep(index: int) -> None:
        def hook(module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
            seen[index] = inputs[0]

        decoder.layers[index].register_forward_pre_hook(hook)

    for index in range(CONFIG.num_layers):
        keep(index)
    _, tapped = decoder(batch, taps=TAPS)
    assert torch.equal(seen[0], decoder.embed_tokens(batch.ids))
    for index, states in zip(TAPS, tapped, strict=True):
        assert torch.equal(states, seen[index])
    assert decoder(batch)[1] == []


def test_a_tied_head_is_the_embedding_and_a_free_one_is_not() -> None:
    tied = make_decoder()
    assert tied.head_weight is tied.embed_tokens.weight
    free = make_decoder(replace(CONFIG, tie_word_embeddings=False))
    assert free.lm_head is not None
    assert free.head_weight is free.lm_head.weight
    model = InferenceModel(free, num_positions=128, dtype=torch.float32)
    hidden, _ = free(PackedBatch.of([[1, 2, 3]]))
    torch.testing.assert_close(model.logits(hidden), hidden @ free.lm_head.weight.t())


def test_an_inference_model_does_not_follow_later_updates() -> None:
    decoder = make_decoder()
    model = InferenceModel(decoder, num_positions=128, dtype=torch.float32)
    tokens = torch.tensor([[1, 2, 3]])
    before = decode(model, model.make_cache(1, 64), tokens, [0])
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.add_(1.0)
    assert torch.equal(decode(model, model.make_cache(1, 64), tokens, [0]), before)


def test_a_tree_is_the_chains_of_its_paths() -> None:
    """Nodes 0 - 1 - 2 and 0 - 3 - 4: each branch is what it would be as a chain."""
    decoder = make_decoder(dtype=torch.float64)
    model = InferenceModel(decoder, num_positions=128, dtype=torch.float64)
    parents = [-1, 0, 1, 0, 3]
    ancestors = torch.eye(5, dtype=torch.bool)
    for node, parent in enumerate(parents[1:], start=1):
        ancestors[node] |= ancestors[parent]
    context, tokens = torch.tensor([[11, 12, 13]]), torch.tensor([[1, 2, 3, 4, 5]])
    cache = model.make_cache(1, 64)
    decode(model, cache, context, [0])
    logits = decode(model, cache, tokens, [3], ancestors)
    for path in ([0, 1, 2], [0, 3, 4]):
        alone = model.make_cache(1, 64)
        decode(model, alone, context, [0])
        torch.testing.assert_close(logits[:, path], decode(model, alone, tokens[:, path], [3]))


def test_a_mask_shows_the_context_and_the_ancestors() -> None:
    ancestors = torch.tensor([[[True, False], [True, True]], [[True, False], [False, True]]])
    mask = attention_mask(torch.tensor([1, 3]), ancestors, 6, group=2, dtype=torch.bfloat16)
    assert mask.shape == (2, 1, 4, 6)
    assert mask.dtype == torch.bfloat16
    visible = (mask == 0).squeeze(1).int().tolist()
    assert visible[0] == [[1, 1, 0, 0, 0, 0]] * 2 + [[1, 1, 1, 0, 0, 0]] * 2
    assert visible[1] == [[1, 1, 1, 1, 0, 0]] * 2 + [[1, 1, 1, 0, 1, 0]] * 2


def test_rotary_positions_start_anew_in_each_document() -> None:
    table = rope_table(CONFIG, 8, torch.float64)
    assert table.shape == (2, 8, CONFIG.head_dim)
    assert bool((table[0, 0] == 1).all())
    assert bool((table[1, 0] == 0).all())
    assert PackedBatch.of([[1, 2, 3], [4, 5]]).positions.tolist() == [0, 1, 2, 0, 1]
