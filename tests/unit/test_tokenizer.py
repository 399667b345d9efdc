"""Tokenizer: which ids end a response, what a prompt looks like, and the tiny model's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ratoon.errors import CapabilityError, CheckpointError, DataError
from ratoon.models.hf_io import load_decoder
from ratoon.models.tiny import PRINTABLE, SPECIAL_TOKENS, make_tiny_model
from ratoon.models.tokenizer import Tokenizer

PAD, BOS, EOS, SEP = range(4)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "tiny", hidden_size=16, intermediate_size=16, num_layers=2)


def _change(directory: Path, name: str, **changes: object) -> None:
    path = directory / name
    settings = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: settings[key] for key in settings if settings[key] != ""}))


def test_a_tiny_model_reads_and_writes_characters(tiny: Path) -> None:
    tokenizer = Tokenizer.load(tiny)
    text = "34 - 5 = 29\nAnswer:  29~"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.vocab_size == len(SPECIAL_TOKENS) + len(PRINTABLE)
    assert tokenizer.vocab_size == load_decoder(tiny).config.vocab_size
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.end_id) == (PAD, BOS, EOS)
    assert tokenizer.eos_ids == (EOS,)
    assert tokenizer.encode("é") == (PAD,)


def test_a_prompt_and_its_completion_make_one_conversation(tiny: Path) -> None:
    tokenizer = Tokenizer.load(tiny)
    prompt = tokenizer.prompt("1+1")
    assert prompt == (BOS, *tokenizer.encode("1+1"), SEP)
    whole = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    together = tokenizer.chat(whole, add_generation_prompt=False)
    assert prompt + tokenizer.completion("2") == together
    assert tokenizer.decode(together) == "1+12"
    assert tokenizer.decode(together, keep_special=True) == "<bos>1+1<sep>2<eos>"


def test_without_a_template_prompts_are_plain_text(tiny: Path) -> None:
    _change(tiny, "tokenizer_config.json", chat_template="")
    tokenizer = Tokenizer.load(tiny)
    assert not tokenizer.has_chat_template
    assert tokenizer.prompt("ab") == tokenizer.encode("ab")
    with pytest.raises(CapabilityError, match="system message"):
        tokenizer.prompt("ab", system="be brief")
    with pytest.raises(CapabilityError, match=r"no chat template.*data\.chat_template: false"):
        tokenizer.prompt("ab", chat_template=True)
    with pytest.raises(CapabilityError, match="no chat template"):
        tokenizer.chat([{"role": "user", "content": "ab"}])


def test_a_template_can_be_switched_off(tiny: Path) -> None:
    tokenizer = Tokenizer.load(tiny)
    assert tokenizer.prompt("ab", chat_template=False) == tokenizer.encode("ab")


def test_plain_prompts_start_as_the_tokenizer_starts_text_and_stay_open(tiny: Path) -> None:
    settings = json.loads((tiny / "tokenizer.json").read_text())
    special = {
        name: {"id": name, "ids": [i], "tokens": [name]} for i, name in enumerate(SPECIAL_TOKENS)
    }
    settings["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<bos>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": "<eos>", "type_id": 0}},
        ],
        "pair": [],
        "special_tokens": special,
    }
    (tiny / "tokenizer.json").write_text(json.dumps(settings))
    tokenizer = Tokenizer.load(tiny)
    assert tokenizer.prompt("ab", chat_template=False) == (BOS, *tokenizer.encode("ab"))
    assert tokenizer.encode("ab")[0] != BOS


def test_all_ids_that_end_a_response_are_found(tiny: Path) -> None:
    template = (
        "{% for m in messages %}{{ m['content'] }}"
        "{% if m['role'] == 'assistant' %}{{ '<sep>\n' }}{% endif %}{% endfor %}"
    )
    _change(tiny, "tokenizer_config.json", chat_template=template)
    _change(tiny, "generation_config.json", eos_token_id=[EOS, 9])
    _change(tiny, "config.json", eos_token_id=11)
    tokenizer = Tokenizer.load(tiny)
    assert set(tokenizer.eos_ids) == {SEP, EOS, 9, 11}
    assert tokenizer.end_id == SEP  # What the template closes an answer with.


def test_a_template_that_ends_a_turn_with_text_adds_no_end(tiny: Path) -> None:
    template = "{% for m in messages %}{{ m['content'] + '\n\n' }}{% endfor %}"
    _change(tiny, "tokenizer_config.json", chat_template=template)
    assert Tokenizer.load(tiny).eos_ids == (EOS,)


def test_a_template_that_refuses_messages_says_why(tiny: Path) -> None:
    template = "{{ raise_exception('system messages are not for me') }}"
    _change(tiny, "tokenizer_config.json", chat_template=template)
    tokenizer = Tokenizer.load(tiny)
    with pytest.raises(DataError, match="not for me"):
        tokenizer.prompt("ab")


def test_a_model_that_never_ends_is_refused(tiny: Path) -> None:
    _change(tiny, "tokenizer_config.json", eos_token="", chat_template="")
    _change(tiny, "generation_config.json", eos_token_id=None)
    _change(tiny, "config.json", eos_token_id=None)
    with pytest.raises(CheckpointError, match="end-of-sequence"):
        Tokenizer.load(tiny)


def test_a_directory_without_or_with_a_broken_tokenizer_is_named(tiny: Path) -> None:
    shape = json.loads((tiny / "config.json").read_text())
    _change(tiny, "config.json", hidden_size=65)
    with pytest.raises(CheckpointError, match=f"{tiny}.*cannot be loaded"):
        Tokenizer.load(tiny)
    _change(tiny, "config.json", **shape)
    (tiny / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=f"{tiny}.*cannot be loaded"):
        Tokenizer.load(tiny)
    (tiny / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=f"{tiny}.*holds no tokenizer"):
        Tokenizer.load(tiny)


def test_a_seed_fixes_every_bit_of_a_tiny_model(tmp_path: Path) -> None:
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_layers": 3}
    make_tiny_model(tmp_path / "a", seed=1, **shape)
    make_tiny_model(tmp_path / "b", seed=1, **shape)
    make_tiny_model(tmp_path / "c", seed=2, **shape)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b
    assert a != c
    decoder = load_decoder(tmp_path / "a")
    assert (decoder.config.num_layers, decoder.config.intermediate_size) == (3, 24)
    spread = {name: p.std().item() for name, p in decoder.named_parameters() if p.dim() == 2}
    assert spread["layers.0.qkv_proj.weight"] == pytest.approx(16**-0.5, rel=0.1)
    assert spread["layers.2.down_proj.weight"] == pytest.approx((24 * 6) ** -0.5, rel=0.15)
    assert torch.equal(decoder.norm.weight, torch.ones(16))
    with pytest.raises(CheckpointError, match="already exists"):
        make_tiny_model(tmp_path / "a")
