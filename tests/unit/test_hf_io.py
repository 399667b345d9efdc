"""Hugging Face directories: the same numbers as transformers, and refusals that name the cause."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import DOCUMENTS, make_theirs, our_logits, padded_logits
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from ratoon.errors import CapabilityError, CheckpointError
from ratoon.models import directories
from ratoon.models.hf_io import load_decoder, save_decoder

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "one key head for all": {"num_key_value_heads": 1},
    "two query heads a key head": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "no sharing, wide heads": {"num_key_value_heads": 4, "head_dim": 12},
    "llama 3 rope": {"num_key_value_heads": 2, "rope_parameters": LLAMA3},
    "another base": {"rope_parameters": {"rope_type": "default", "rope_theta": 777.0}},
}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A small untied model, as transformers writes it."""
    make_theirs("llama", num_key_value_heads=2).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("variant", VARIANTS, ids=VARIANTS.keys())
def test_logits_equal_transformers_row_by_row_and_survive_a_round_trip(
    variant: str, tmp_path: Path
) -> None:
    theirs = make_theirs("llama", **VARIANTS[variant])
    theirs.save_pretrained(tmp_path / "theirs")
    decoder = load_decoder(tmp_path / "theirs")
    ours = our_logits(decoder, DOCUMENTS)
    for side in ("left", "right"):
        for mine, other in zip(ours, padded_logits(theirs, DOCUMENTS, side), strict=True):
            torch.testing.assert_close(mine, other, atol=1e-4, rtol=0)
    save_decoder(decoder, tmp_path / "ours")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    assert again.config.tie_word_embeddings is theirs.config.tie_word_embeddings
    for mine, other in zip(ours, padded_logits(again, DOCUMENTS, "left"), strict=True):
        torch.testing.assert_close(mine, other, atol=1e-4, rtol=0)
    reread = load_decoder(tmp_path / "ours")
    assert reread.config == decoder.config
    assert all(map(torch.equal, reread.parameters(), decoder.parameters()))


def test_the_order_of_fused_parts_matters(saved: Path) -> None:
    """The comparison with transformers can fail: exchange keys and values."""
    decoder = load_decoder(saved)
    before = our_logits(decoder, DOCUMENTS[:1])[0]
    with torch.no_grad():
        weight = decoder.get_parameter("layers.0.qkv_proj.weight")
        query, key, value = weight.split(decoder.config.qkv_sizes)
        weight.copy_(torch.cat([query, value, key]))
    assert (our_logits(decoder, DOCUMENTS[:1])[0] - before).abs().max() > 1e-2


def test_older_spellings_of_the_rope_mean_the_same(tmp_path: Path) -> None:
    theirs = make_theirs("llama", rope_parameters=LLAMA3)
    theirs.save_pretrained(tmp_path / "new")
    shutil.copytree(tmp_path / "new", tmp_path / "old")
    settings = json.loads((tmp_path / "old/config.json").read_text())
    rope = settings.pop("rope_parameters")
    settings |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    rope["type"] = rope.pop("rope_type")
    (tmp_path / "old/config.json").write_text(json.dumps(settings))
    assert load_decoder(tmp_path / "old").config == load_decoder(tmp_path / "new").config


def test_sharded_weights_are_read_and_written(saved: Path, tmp_path: Path) -> None:
    decoder = load_decoder(saved)
    save_decoder(decoder, tmp_path / "shards", max_shard_bytes=20_000)
    files = sorted(path.name for path in (tmp_path / "shards").glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    again = load_decoder(tmp_path / "shards")
    assert all(map(torch.equal, again.parameters(), decoder.parameters()))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "shards", dtype=torch.float32)
    torch.testing.assert_close(
        our_logits(decoder, [[1, 2, 3]])[0],
        padded_logits(theirs, [[1, 2, 3]], "left")[0],
        atol=1e-4,
        rtol=0,
    )
    (tmp_path / "shards" / files[1]).unlink()
    with pytest.raises(CheckpointError, match=files[1]):
        load_decoder(tmp_path / "shards")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_weights_are_stored_in_the_type_asked_for(
    saved: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    decoder = load_decoder(saved)
    save_decoder(decoder, tmp_path / "out", dtype=dtype)
    assert {t.dtype for t in load_file(tmp_path / "out/model.safetensors").values()} == {dtype}
    assert json.loads((tmp_path / "out/config.json").read_text())["torch_dtype"] in str(dtype)
    loaded = load_decoder(tmp_path / "out", dtype=dtype)
    for mine, other in zip(loaded.parameters(), decoder.parameters(), strict=True):
        assert torch.equal(mine, other.to(dtype))
        assert mine.requires_grad


def test_what_the_decoder_does_not_read_goes_along(saved: Path, tmp_path: Path) -> None:
    settings = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps({**settings, "made_by": "somebody"}))
    (saved / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [2, 7], "top_p": 0.9})
    )
    (saved / "tokenizer.json").write_text('{"kind": "theirs"}')
    (saved / "notes.txt").write_text("stays behind")
    decoder = load_decoder(saved)
    assert decoder.config.eos_ids == (2, 7)
    save_decoder(decoder, tmp_path / "out", source=saved)
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert written["made_by"] == "somebody"
    assert written["eos_token_id"] == [2, 7]
    for name in ("generation_config.json", "tokenizer.json"):
        assert (tmp_path / "out" / name).read_text() == (saved / name).read_text()
    assert not (tmp_path / "out/notes.txt").exists()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM.*supported: LlamaForCausalLM"),
        ({"architectures": None, "model_type": "rwkv"}, "rwkv.*LlamaForCausalLM"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'.*'silu'"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"mlp_bias": True}, "mlp_bias = True"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "'yarn'.*'llama3'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    ],
)
def test_what_the_decoder_cannot_compute_is_refused_by_name(
    saved: Path, change: dict[str, Any], named: str
) -> None:
    settings = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps(settings | change))
    with pytest.raises(CapabilityError, match=named):
        load_decoder(saved)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_size": "32"}, "hidden_size is '32'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"vocab_size": None}, "vocab_size is None"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3"),
        ({"rms_norm_eps": -1}, "rms_norm_eps is -1"),
        ({"hidden_size": 65, "head_dim": None}, "hidden_size = 65 is no multiple of .* = 4"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
        ({"rope_parameters": {**LLAMA3, "factor": None}}, "factor"),
    ],
)
def test_malformed_settings_are_named(saved: Path, change: dict[str, Any], named: str) -> None:
    settings = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps(settings | change))
    with pytest.raises(CheckpointError, match=named):
        load_decoder(saved)


def test_missing_unknown_and_misshaped_tensors_are_named(saved: Path) -> None:
    tensors = load_file(saved / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(32)
    tensors["model.norm.weight"] = torch.ones(31)
    save_file(tensors, saved / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        load_decoder(saved)
    message = str(caught.value)
    assert "missing tensors: model.layers.1.mlp.up_proj.weight" in message
    assert "unknown tensors: model.layers.0.self_attn.q_proj.bias" in message
    assert "model.norm.weight [31] instead of [32]" in message


def test_quantised_tensors_are_refused(saved: Path) -> None:
    tensors = load_file(saved / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(32, dtype=torch.int8)
    save_file(tensors, saved / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"quantised.*model\.norm\.weight I8"):
        load_decoder(saved)


def test_a_head_stored_beside_a_tied_embedding_must_repeat_it(tmp_path: Path) -> None:
    make_theirs("llama", tie_word_embeddings=True).save_pretrained(tmp_path / "m")
    tensors = load_file(tmp_path / "m/model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "m/model.safetensors")
    assert load_decoder(tmp_path / "m").lm_head is None
    tensors["lm_head.weight"][3, 3] += 1
    save_file(tensors, tmp_path / "m/model.safetensors")
    with pytest.raises(CheckpointError, match="differs"):
        load_decoder(tmp_path / "m")


def test_damaged_files_are_named(saved: Path) -> None:
    weights = saved / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: damaged"):
        load_decoder(saved)
    weights.unlink()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        load_decoder(saved)
    (saved / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin.*never opened.*Convert"):
        load_decoder(saved)
    (saved / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json: not valid JSON"):
        load_decoder(saved)
    with pytest.raises(CheckpointError, match="no such file"):
        load_decoder(saved / "nowhere")


def test_saving_overwrites_nothing_and_leaves_nothing_half_written(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = load_decoder(saved)
    before = sorted(path.name for path in saved.iterdir())
    with pytest.raises(CheckpointError, match="already exists"):
        save_decoder(decoder, saved)
    assert sorted(path.name for path in saved.iterdir()) == before

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ratoon.models.hf_io.write_json", full)
    with pytest.raises(CheckpointError, match="disk is full"):
        save_decoder(decoder, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_too_little_space_is_known_before_writing(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(directories.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(CheckpointError, match="are needed, 0 MB are free"):
        save_decoder(load_decoder(saved), tmp_path / "out")
    assert not (tmp_path / "out").exists()
