"""The learned drafter's layout, its start from the target, and its vocabulary."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ratoon.drafter.model import (
    DrafterConfig,
    Eagle3Drafter,
    choose_draft_vocabulary,
    default_taps,
)
from ratoon.errors import CapabilityError, ConfigError
from ratoon.models.decoder import Decoder, DecoderConfig

VOCABULARY = 24
TARGET = DecoderConfig("llama", VOCABULARY, 32, 48, 8, 4, 2, 8)


def test_state_dict_is_the_eagle3_layout_tensor_for_tensor() -> None:
    drafter = Eagle3Drafter(DrafterConfig.for_target(TARGET, VOCABULARY, 8))
    shapes = {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()}
    attention, mlp = "midlayer.self_attn", "midlayer.mlp"
    assert shapes == {
        "fc.weight": (32, 96),
        "midlayer.input_layernorm.weight": (32,),
        "midlayer.hidden_norm.weight": (32,),
        f"{attention}.q_proj.weight": (32, 64),
        f"{attention}.k_proj.weight": (16, 64),
        f"{attention}.v_proj.weight": (16, 64),
        f"{attention}.o_proj.weight": (32, 32),
        "midlayer.post_attention_layernorm.weight": (32,),
        f"{mlp}.gate_proj.weight": (48, 32),
        f"{mlp}.up_proj.weight": (48, 32),
        f"{mlp}.down_proj.weight": (32, 48),
        "norm.weight": (32,),
        "lm_head.weight": (24, 32),
        "d2t": (24,),
        "t2d": (24,),
    }
    assert drafter.d2t.dtype == torch.int64
    assert drafter.t2d.dtype == torch.bool


def test_a_fresh_drafter_starts_as_the_targets_last_layer_and_head() -> None:
    target = Decoder(replace(TARGET, vocab_size=9000))
    config = DrafterConfig.for_target(target.config, 6, 8)
    ids = torch.tensor([0, 7, 70, 700, 7000, 8999])
    drafter = Eagle3Drafter.from_target(config, target, ids)
    last, attention = target.layers[-1], drafter.midlayer.self_attn
    queries = last.qkv_proj.weight[:32]
    assert torch.equal(drafter.lm_head.weight, target.head_weight[ids])
    assert torch.equal(drafter.teacher_rows(target.head_weight), target.head_weight[ids])
    assert torch.equal(attention.q_proj.weight[:, 32:], queries)
    assert not attention.q_proj.weight[:, :32].any()
    assert torch.equal(drafter.midlayer.mlp.down_proj.weight, last.down_proj.weight)
    features = torch.randn(5, 96)
    torch.testing.assert_close(drafter.fc(features), features[:, 64:])
    assert all(parameter.dtype == torch.float32 for parameter in drafter.parameters())


def test_draft_vocabulary_is_the_most_frequent_with_forced_ids_and_lowest_id_on_ties() -> None:
    counts = torch.tensor([0, 5, 5, 9, 0, 5, 1])
    assert choose_draft_vocabulary(counts, 3, []).tolist() == [1, 2, 3]
    assert choose_draft_vocabulary(counts, 3, [6, 0]).tolist() == [0, 3, 6]
    assert choose_draft_vocabulary(counts, 7, [2]).tolist() == list(range(7))
    with pytest.raises(ConfigError, match="4 forced ids"):
        choose_draft_vocabulary(counts, 3, [0, 1, 2, 3])
    with pytest.raises(ConfigError, match="outside"):
        choose_draft_vocabulary(counts, 3, [7])


def test_small_targets_get_the_full_vocabulary() -> None:
    assert DrafterConfig.for_target(TARGET, 8, 16).draft_vocab_size == VOCABULARY
    large = replace(TARGET, vocab_size=8192)
    assert DrafterConfig.for_target(large, 100, 16).draft_vocab_size == 100
    assert DrafterConfig.for_target(large, 10_000, 16).draft_vocab_size == 8192


def test_taps_are_three_different_layers_in_order() -> None:
    assert default_taps(30) == (2, 15, 27)
    assert default_taps(8) == (2, 4, 5)
    for layers in range(3, 40):
        taps = default_taps(layers)
        assert sorted(set(taps)) == list(taps)
        assert taps[0] >= 0
        assert taps[2] < layers
    with pytest.raises(CapabilityError, match="which has 2"):
        default_taps(2)
    with pytest.raises(ConfigError, match="layers 0 to 7"):
        DrafterConfig.for_target(TARGET, 8, 16, taps=(1, 2, 8))
    with pytest.raises(ConfigError, match="rising"):
        DrafterConfig.for_target(TARGET, 8, 16, taps=(1, 1, 2))
