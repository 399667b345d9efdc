"""Adapters: their gradients are those of the chain rule, and nothing else of the model changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.func import functional_call

from ratoon.errors import ConfigError
from ratoon.models.decoder import Decoder, DecoderConfig
from ratoon.models.hf_config import FAMILIES
from ratoon.models.hf_io import load_decoder, save_decoder, stacked_parts, stored_views
from ratoon.training.checkpoint import load_trainer, save_trainer
from ratoon.training.core import TrainerCore
from ratoon.training.logprobs import token_log_probs
from ratoon.training.lora import LoRASettings
from ratoon.training.optimizer import OptimizerSettings
from ratoon.training.samples import Example
from ratoon.training.sft import SFTTrainer

SHAPE: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_heads": 4,
}  # fmt: skip
LLAMA = DecoderConfig("llama", **SHAPE, num_kv_heads=2, head_dim=8)
QWEN3 = DecoderConfig("qwen3", **SHAPE, num_kv_heads=1, head_dim=8, qk_norm=True)
GPT2 = DecoderConfig(
    "gpt2", **SHAPE, num_kv_heads=4, head_dim=8, **FAMILIES["gpt2"].traits, max_positions=64
)
EXAMPLES: list[Example] = [((1, 2, 3), (4, 5, 6, 7)), ((8, 9), (10, 11, 12)), ((13,), (14, 15))]
SETTINGS = OptimizerSettings(lr=1e-2, eps=1e-6, max_grad_norm=1e9)
SOME = LoRASettings(rank=3, alpha=6.0, targets=("q_proj", "v_proj", "down_proj"))


def make_core(config: DecoderConfig, lora: LoRASettings | None, **kwargs: Any) -> TrainerCore:
    torch.manual_seed(0)
    decoder = Decoder(config).double()
    torch.nn.init.normal_(decoder.embed_tokens.weight, std=0.3)
    settings = kwargs.pop("settings", SETTINGS)
    return TrainerCore(decoder, settings, compute_dtype=torch.float64, lora=lora, seed=5, **kwargs)


def parameters(core: TrainerCore) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in core.decoder.named_parameters()}


def adapters(core: TrainerCore) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in core.state_dict()["tensors"]["master"].items()}


def by_autograd(core: TrainerCore, lora: LoRASettings, steps: int) -> dict[str, Tensor]:
    """The decoder's weights after AdamW on A and B, with W composed inside the forward."""
    decoder, config = core.decoder, core.decoder.config
    base = parameters(core)
    pairs = {name: value.requires_grad_() for name, value in adapters(core).items()}
    optimizer = torch.optim.AdamW(
        pairs.values(), lr=SETTINGS.lr, betas=SETTINGS.betas, eps=SETTINGS.eps, weight_decay=0
    )

    def composed() -> dict[str, Tensor]:
        whole = dict(base)
        for ours, theirs in FAMILIES[config.family].tensor_names(config).items():
            parts = stacked_parts(config, ours, len(theirs), base[ours])
            names = [name.removesuffix(".weight") for name in theirs]
            whole[ours] = torch.cat([
                part + lora.scale * pairs[f"{name}.lora_B"] @ pairs[f"{name}.lora_A"]
                if f"{name}.lora_A" in pairs else part
                for name, part in zip(names, parts, strict=True)
            ])  # fmt: skip
        return whole

    total = sum(len(completion) for _, completion in EXAMPLES)
    for _ in range(steps):
        loss = torch.zeros((), dtype=torch.float64)
        weights = composed()
        for _, batch in core.micro_batches(EXAMPLES):
            hidden, _ = functional_call(decoder, weights, (batch.packed,))
            head = weights["embed_tokens.weight"]
            logprobs = token_log_probs(hidden.index_select(0, batch.rows), head, batch.targets)
            loss = loss - logprobs.sum() / total
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {name: value.detach() for name, value in composed().items()}


@pytest.mark.parametrize("config", [LLAMA, QWEN3, GPT2], ids=lambda config: config.family)
@pytest.mark.parametrize("targets", ["some", "all"])
def test_steps_are_those_of_autograd_through_the_product(
    config: DecoderConfig, targets: str
) -> None:
    lora = LoRASettings(rank=3, alpha=6.0)
    if targets == "some":
        names = ("c_attn",) if config is GPT2 else SOME.targets
        lora = LoRASettings(rank=3, alpha=6.0, targets=names)
    expected = by_autograd(make_core(config, lora), lora, steps=3)
    core = make_core(config, lora)
    for _ in range(3):
        SFTTrainer(core).step(EXAMPLES)
    for name, value in parameters(core).items():
        torch.testing.assert_close(value, expected[name], atol=1e-10, rtol=0)


def test_the_policy_begins_as_it_was_and_only_adapted_matrices_change() -> None:
    before = parameters(make_core(LLAMA, None))
    core = make_core(LLAMA, SOME)
    assert all(torch.equal(value, before[name]) for name, value in parameters(core).items())
    SFTTrainer(core).step(EXAMPLES)
    changed = {name for name, value in parameters(core).items() if not value.equal(before[name])}
    assert changed == {
        f"layers.{layer}.{name}.weight" for layer in (0, 1) for name in ("qkv_proj", "down_proj")
    }
    _, key, _ = stacked_parts(LLAMA, ".qkv_proj.", 3, parameters(core)["layers.0.qkv_proj.weight"])
    _, old, _ = stacked_parts(LLAMA, ".qkv_proj.", 3, before["layers.0.qkv_proj.weight"])
    assert torch.equal(key, old)


def test_frozen_embeddings_keep_their_bits_and_all_else_is_trained() -> None:
    before = parameters(make_core(LLAMA, None))
    core = make_core(LLAMA, None, freeze_embeddings=True)
    SFTTrainer(core).step(EXAMPLES)
    kept = {name for name, value in parameters(core).items() if value.equal(before[name])}
    assert kept == {"embed_tokens.weight"}
    whole = make_core(LLAMA, None)
    SFTTrainer(whole).step(EXAMPLES)
    assert not whole.decoder.embed_tokens.weight.equal(before["embed_tokens.weight"])


def test_a_run_read_from_disk_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    whole = make_core(LLAMA, SOME)
    SFTTrainer(whole).step(EXAMPLES)
    save_trainer(tmp_path / "state", whole)
    resumed = make_core(LLAMA, SOME)
    load_trainer(tmp_path / "state", resumed)
    for core in (whole, resumed):
        SFTTrainer(core).step(EXAMPLES)
    one, other = parameters(whole), parameters(resumed)
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=lambda config: config.family)
def test_files_are_those_of_peft(tmp_path: Path, config: DecoderConfig) -> None:
    lora = LoRASettings(rank=3, alpha=6.0)
    core = make_core(config, lora)
    base = {name: value.clone() for name, value in stored_views(config, parameters(core)).items()}
    for _ in range(2):
        SFTTrainer(core).step(EXAMPLES)
    core.save_adapter(tmp_path / "adapter", "base")
    stored = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    merged = stored_views(config, parameters(core))
    scale = stored["lora_alpha"] / stored["r"]
    for name, value in base.items():
        key = f"base_model.model.{name.removesuffix('.weight')}.lora_{{}}.weight"
        if key.format("A") in tensors:
            assert name.split(".")[-2] in stored["target_modules"]
            delta = scale * tensors[key.format("B")] @ tensors[key.format("A")]
            value += delta.T if stored["fan_in_fan_out"] else delta
        torch.testing.assert_close(value, merged[name], atol=1e-12, rtol=0)


def test_peft_computes_the_same_policy(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    from transformers import AutoModelForCausalLM

    core = make_core(LLAMA, LoRASettings(rank=3, alpha=6.0))
    save_decoder(core.decoder, tmp_path / "base")
    for _ in range(2):
        SFTTrainer(core).step(EXAMPLES)
    core.save_adapter(tmp_path / "adapter", str(tmp_path / "base"))
    save_decoder(core.decoder, tmp_path / "merged")
    theirs = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float64),
        tmp_path / "adapter",
    )
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float64)
    ids = torch.tensor([[1, 2, 3, 4, 5]])
    torch.testing.assert_close(theirs(ids).logits, merged(ids).logits, atol=1e-6, rtol=0)
    assert load_decoder(tmp_path / "merged").config.num_layers == 2


def test_targets_that_the_model_does_not_have_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"c_attn is no matrix of this model's layers; give any "):
        make_core(LLAMA, LoRASettings(rank=3, alpha=6.0, targets=("q_proj", "c_attn")))
