"""Every family computes what transformers computes, forward and backward, and refuses the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hf_models import DOCUMENTS, make_theirs, our_logits, padded_logits
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from ratoon.errors import CapabilityError, CheckpointError
from ratoon.models.decoder import Decoder
from ratoon.models.document_attention import plan_documents
from ratoon.models.hf_config import FAMILIES
from ratoon.models.hf_io import load_decoder, save_decoder, stored_views
from ratoon.models.packing import PackedBatch

LONG_WINDOW: dict[str, Any] = {"sliding_window": 128, "use_sliding_window": True}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {}),
    "gpt2, untied, narrow": ("gpt2", {"tie_word_embeddings": False, "n_inner": 40, "n_head": 2}),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 12}),
    "mistral, long window": ("mistral", {"sliding_window": 128}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2, long window": ("qwen2", {**LONG_WINDOW, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 12, "tie_word_embeddings": True}),
    "qwen3, as many key heads": ("qwen3", {"num_key_value_heads": 4, "head_dim": 8}),
}
SHORT_WINDOW = {"sliding_window": 100, "use_sliding_window": True}


def _saved(family: str, path: Path, **changes: Any) -> Path:
    make_theirs(family, **changes).save_pretrained(path)
    return path


def _change(path: Path, change: dict[str, Any]) -> None:
    settings = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(settings | change))


def _assert_close(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-4, rtol=0)


@pytest.mark.parametrize("variant", VARIANTS, ids=VARIANTS.keys())
@torch.no_grad()
def test_logits_equal_transformers_and_survive_a_round_trip(variant: str, tmp_path: Path) -> None:
    family, changes = VARIANTS[variant]
    theirs = make_theirs(family, **changes)
    theirs.save_pretrained(tmp_path / "theirs")
    decoder = load_decoder(tmp_path / "theirs")
    assert decoder.config.family == family
    ours = our_logits(decoder, DOCUMENTS)
    for side in ("left", "right"):
        _assert_close(ours, padded_logits(theirs, DOCUMENTS, side))
    for source in (None, tmp_path / "theirs"):
        saved = save_decoder(decoder, tmp_path / f"ours-{source is None}", source=source)
        again = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
        assert again.config.tie_word_embeddings is theirs.config.tie_word_embeddings
        _assert_close(ours, padded_logits(again, DOCUMENTS, "left"))
        reread = load_decoder(saved)
        assert reread.config == decoder.config
        assert all(map(torch.equal, reread.parameters(), decoder.parameters()))


def _loss(logits: list[Tensor]) -> Tensor:
    pieces = [
        F.cross_entropy(rows[:-1], torch.tensor(document[1:], dtype=torch.long), reduction="sum")
        for rows, document in zip(logits, DOCUMENTS, strict=True)
    ]
    return torch.stack(pieces).sum()


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_equal_transformers(family: str, tmp_path: Path) -> None:
    theirs = make_theirs(family)
    if family == "mistral":
        theirs.config.sliding_window = None
    theirs.save_pretrained(tmp_path / "theirs")
    decoder = load_decoder(tmp_path / "theirs")
    _loss(padded_logits(theirs, DOCUMENTS, "left")).backward()
    hidden, _ = decoder(PackedBatch.of(DOCUMENTS))
    logits = (hidden @ decoder.head_weight.T).split([len(document) for document in DOCUMENTS])
    _loss(list(logits)).backward()
    gradients = {name: p.grad for name, p in decoder.named_parameters() if p.grad is not None}
    assert len(gradients) == len(list(decoder.parameters()))
    mine = stored_views(decoder.config, gradients)
    expected = dict(theirs.named_parameters())
    for name, gradient in mine.items():
        wanted = expected[name].grad
        assert float((gradient - wanted).norm()) < 1e-4 * float(wanted.norm()), name


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_float32_sums_equal_those_of_autograd(family: str, tmp_path: Path) -> None:
    """With `main_grad` nothing is left to autograd, and two micro-batches add up."""
    changes = {"sliding_window": None} if family == "mistral" else {}
    decoder = load_decoder(_saved(family, tmp_path / "model", **changes), dtype=torch.float64)
    batch = PackedBatch.of(DOCUMENTS)
    weights = torch.randn(len(batch.ids), decoder.config.hidden_size, dtype=torch.float64)
    (decoder(batch)[0] * weights).sum().backward()
    named = dict(decoder.named_parameters())
    expected = {name: p.grad for name, p in named.items() if p.grad is not None}
    for parameter in named.values():
        parameter.grad = None
        parameter.main_grad = torch.zeros_like(parameter)  # type: ignore[attr-defined]
    for _ in range(2):
        (decoder(batch)[0] * weights).sum().backward()
    for name, gradient in expected.items():
        assert named[name].grad is None
        torch.testing.assert_close(named[name].main_grad, 2 * gradient)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("variant", "broken"),
    [
        ("gpt2", "layers.1.qkv_proj.bias"),
        ("gpt2", "layers.2.down_proj.bias"),
        ("gpt2", "embed_positions.weight"),
        ("gpt2", "norm.bias"),
        ("qwen2", "layers.0.qkv_proj.bias"),
        ("qwen3", "layers.1.k_norm.weight"),
    ],
)
def test_the_comparison_sees_each_kind_of_tensor(variant: str, broken: str, tmp_path: Path) -> None:
    family, changes = VARIANTS[variant]
    decoder = load_decoder(_saved(family, tmp_path / "model", **changes))
    before = our_logits(decoder, DOCUMENTS[:1])[0]
    with torch.no_grad():
        parameter = decoder.get_parameter(broken)
        parameter.copy_(parameter.roll(1, 0))
    assert (our_logits(decoder, DOCUMENTS[:1])[0] - before).abs().max() > 1e-2


def test_gpt2_files_without_the_prefix_and_with_masks_are_read(tmp_path: Path) -> None:
    """As they lie on the hub."""
    whole = _saved("gpt2", tmp_path / "model")
    expected = load_decoder(whole)
    tensors = {
        name.removeprefix("transformer."): tensor
        for name, tensor in load_file(whole / "model.safetensors").items()
    }
    for layer in range(3):
        tensors[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 64, 64).tril()
        tensors[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(tensors, whole / "model.safetensors")
    found = load_decoder(whole)
    assert all(map(torch.equal, found.parameters(), expected.parameters()))
    del tensors["h.1.mlp.c_fc.bias"]
    save_file(tensors, whole / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing tensors: h\.1\.mlp\.c_fc\.bias"):
        load_decoder(whole)


@pytest.mark.parametrize(
    ("family", "change", "named"),
    [
        ("gpt2", {"activation_function": "relu"}, "activation_function = 'relu'.*'gelu_new'"),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights = False"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention = True"),
        ("mistral", {"sliding_window": 127}, "sliding_window = 127.*max_position.* = 128"),
        ("qwen2", SHORT_WINDOW, "sliding_window = 100"),
        ("qwen2", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'"),
        ("qwen3", SHORT_WINDOW, "sliding_window = 100"),
        ("qwen3", {"attention_bias": True}, "attention_bias = True"),
        ("qwen3", {"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
    ],
)
def test_what_a_family_cannot_compute_is_refused_before_weights_are_read(
    family: str, change: dict[str, Any], named: str, tmp_path: Path
) -> None:
    path = _saved(family, tmp_path / "model")
    (path / "model.safetensors").unlink()
    _change(path, change)
    with pytest.raises(CapabilityError, match=named):
        load_decoder(path)


def test_a_window_that_is_switched_off_is_no_window(tmp_path: Path) -> None:
    path = _saved("qwen2", tmp_path / "model")
    before = our_logits(load_decoder(path), DOCUMENTS)
    _change(path, {"sliding_window": 4, "use_sliding_window": False})
    assert all(map(torch.equal, our_logits(load_decoder(path), DOCUMENTS), before))


def test_heads_that_do_not_fit_the_width_are_named(tmp_path: Path) -> None:
    path = _saved("gpt2", tmp_path / "model")
    _change(path, {"n_head": 5})
    with pytest.raises(CheckpointError, match="32 cannot be cut into 5 heads"):
        load_decoder(path)


def test_documents_beyond_the_learned_positions_are_refused(tmp_path: Path) -> None:
    decoder = load_decoder(_saved("gpt2", tmp_path / "model"))
    decoder(PackedBatch.of([[1] * 64, [2] * 64]))
    with pytest.raises(CapabilityError, match=r"65 tokens.*64 positions"):
        decoder(PackedBatch.of([[1] * 65]))
    prompt_and_response = PackedBatch.of([[1] * 60, [2] * 5], (None, 0))
    with pytest.raises(CapabilityError, match=r"65 tokens.*64 positions"):
        decoder(prompt_and_response)


def test_a_layer_computes_with_selected_weights(tmp_path: Path) -> None:
    """A layer whose outputs are selected away adds nothing."""
    decoder: Decoder = load_decoder(_saved("gpt2", tmp_path / "model"), dtype=torch.float64)
    batch = PackedBatch.of(DOCUMENTS)
    block = decoder.layers[0]
    plan = plan_documents(batch, 4, 4)
    x = decoder.embed(batch)
    plain = block(x, None, plan)
    same = block(x, None, plan, lambda weights: weights)
    assert torch.equal(plain, same)

    def silent(weights: Any) -> Any:
        return weights._replace(
            down=torch.zeros_like(weights.down), down_bias=torch.zeros_like(weights.down_bias),
            out=torch.zeros_like(weights.out), out_bias=torch.zeros_like(weights.out_bias),
        )  # fmt: skip

    assert torch.equal(block(x, None, plan, silent), x)
