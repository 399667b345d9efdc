"""A run of reinforcement learning on a model that is no Llama, drafters included."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from lab import Lab, metrics_of
from transformers import AutoModelForCausalLM

from ratoon.models.hf_config import family_config
from ratoon.models.hf_io import load_decoder, save_decoder
from ratoon.models.packing import PackedBatch
from ratoon.models.tiny import random_decoder

LENGTH = 64


def _start_model(path: Path, like: Path) -> Path:
    """A random GPT-2 with the tokenizer of another model; responses end at its last position."""
    known = load_decoder(like).config
    config = family_config(
        "gpt2",
        vocab_size=known.vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_layers=6,
        num_heads=4,
        num_kv_heads=4,
        head_dim=16,
        max_positions=LENGTH,
        bos_id=known.bos_id,
        eos_ids=known.eos_ids,
        pad_id=known.pad_id,
    )
    save_decoder(random_decoder(config, seed=0), path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(like / name, path / name)
    return path


def test_a_run_trains_and_saves_a_model_of_another_family(
    untrained: Path, dtype: str, tmp_path: Path
) -> None:
    lab = Lab(tmp_path, _start_model(tmp_path / "start", untrained), dtype)
    folder = lab.rl("run", "steps=1", f"rollout.max_length={LENGTH}")
    metrics = metrics_of(folder)[1]
    assert metrics["speculation/accepted"] > 0
    if dtype == "bfloat16":
        assert metrics["policy/engine_logprob_equal_frac"] == 1.0
    ours = load_decoder(folder.path / "model")
    assert ours.config.family == "gpt2"
    theirs = AutoModelForCausalLM.from_pretrained(folder.path / "model", dtype=torch.float32)
    ids = list(range(4, 24))
    with torch.no_grad():
        hidden, _ = ours(PackedBatch.of([ids]))
        expected = theirs(torch.tensor([ids])).logits[0]
        torch.testing.assert_close(hidden @ ours.head_weight.T, expected, atol=1e-4, rtol=0)
