"""Fresh decoders: reproducible, and as wide as their family's usual initialisation."""

from __future__ import annotations

import math

import pytest
import torch
from hf_models import make_theirs

from ratoon.models.decoder import Decoder, DecoderConfig
from ratoon.models.hf_config import family_config
from ratoon.models.initialise import new_decoder
from ratoon.models.packing import PackedBatch

SHAPE = {
    "vocab_size": 500, "hidden_size": 128, "intermediate_size": 256, "num_layers": 4,
    "num_heads": 4, "num_kv_heads": 4, "head_dim": 32, "max_positions": 64,
}  # fmt: skip
LLAMA, GPT2 = family_config("llama", **SHAPE), family_config("gpt2", **SHAPE)


def _deviations(decoder: Decoder) -> dict[str, float]:
    named = dict(decoder.named_parameters())
    return {name: float(p.detach().std()) for name, p in named.items() if p.dim() == 2}


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_the_seed_decides_all_bits(config: DecoderConfig) -> None:
    one, same, other = (new_decoder(config, seed) for seed in (3, 3, 4))
    assert all(map(torch.equal, one.parameters(), same.parameters()))
    assert not torch.equal(one.embed_tokens.weight, other.embed_tokens.weight)


@pytest.mark.parametrize(
    ("config", "plain", "residual"),
    [
        (GPT2, 0.02, 0.02 / math.sqrt(8)),
        (LLAMA, math.sqrt(2 / 5 / 128), 1 / math.sqrt(128) / 4),
    ],
    ids=["gpt2", "llama"],
)
def test_deviations_are_the_familys(config: DecoderConfig, plain: float, residual: float) -> None:
    decoder = new_decoder(config, seed=0)
    for name, deviation in _deviations(decoder).items():
        writes = name.endswith(("o_proj.weight", "down_proj.weight"))
        assert deviation == pytest.approx(residual if writes else plain, rel=0.05), name
    for name, parameter in decoder.named_parameters():
        if parameter.dim() == 1:
            assert bool((parameter == (0 if name.endswith("bias") else 1)).all())


def test_gpt2_is_initialised_as_transformers_does() -> None:
    theirs = make_theirs("gpt2", n_embd=128, n_layer=4, initializer_range=0.02)
    ours = _deviations(new_decoder(GPT2, seed=0))
    expected = dict(theirs.named_parameters())
    for mine, name in {
        "layers.0.qkv_proj.weight": "transformer.h.0.attn.c_attn.weight",
        "layers.0.o_proj.weight": "transformer.h.0.attn.c_proj.weight",
        "layers.0.down_proj.weight": "transformer.h.0.mlp.c_proj.weight",
        "embed_positions.weight": "transformer.wpe.weight",
    }.items():
        assert ours[mine] == pytest.approx(float(expected[name].detach().std()), rel=0.05), name


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_a_fresh_decoder_knows_nothing(config: DecoderConfig) -> None:
    decoder = new_decoder(config, seed=0)
    ids = torch.randint(500, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    hidden, _ = decoder(PackedBatch.of([ids]))
    loss = torch.nn.functional.cross_entropy(
        hidden[:-1] @ decoder.head_weight.T, torch.tensor(ids[1:])
    )
    assert float(loss.detach()) == pytest.approx(math.log(500), rel=0.1)
