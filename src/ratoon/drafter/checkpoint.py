"""Drafters on disk and on the wire: names, shapes and bytes are checked on the way in.

A checkpoint is a folder: `model.safetensors` and `config.json` in the EAGLE-3 layout of SpecForge
(float32, with `d2t` and `t2d`, without embeddings), `optimizer.safetensors` and `trainer.json`. It
is written beside its place and renamed, so it is whole or absent.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ratoon.drafter.data_buffer import DataBuffer
from ratoon.drafter.flat import TRAINABLE
from ratoon.drafter.flat_adamw import MOMENTS
from ratoon.drafter.model import DrafterConfig, Eagle3Drafter
from ratoon.drafter.trainer import DrafterTrainer, TrainerOptions
from ratoon.errors import CheckpointError, ConfigError, StaleVersionError
from ratoon.models.checksum import tensors_checksum
from ratoon.models.decoder import DecoderConfig

# Fields of DrafterConfig under the names that serving engines read; the rest is ours.
_STANDARD_KEYS = {
    "hidden_size": "hidden_size",
    "target_hidden_size": "target_hidden_size",
    "intermediate_size": "intermediate_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "rms_norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
    "rope_scaling": "rope_scaling",
    "vocab_size": "vocab_size",
    "draft_vocab_size": "draft_vocab_size",
}
_FIXED = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "torch_dtype": "float32",
}


def weights_checksum(weights: Mapping[str, Tensor]) -> str:
    """`tensors_checksum` of the trainable tensors, in a fixed order."""
    return tensors_checksum((name, weights[name]) for name in TRAINABLE)


@torch.no_grad()
def apply_weights(drafter: Eagle3Drafter, weights: Mapping[str, Tensor], checksum: str) -> None:
    """Copy published `weights` into `drafter`, in place.

    Raises: CheckpointError for wrong names or shapes; StaleVersionError for another checksum.
    """
    named = dict(drafter.named_parameters())
    _check_tensors(weights, {name: p.shape for name, p in named.items()}, "The published weights")
    found = weights_checksum(weights)
    if found != checksum:
        raise StaleVersionError(
            f"Drafter weights with checksum {found[:12]} were announced as {checksum[:12]}; they "
            "changed on the way or belong to another version."
        )
    for name, parameter in named.items():
        parameter.copy_(weights[name])


def save_checkpoint(folder: Path, trainer: DrafterTrainer, version: int) -> str:
    """Write drafter and optimizer to `folder`, which must not exist; return the checksum.

    `version` is that of the last publication.
    """
    drafter = trainer.drafter
    state = {name: tensor.detach().contiguous() for name, tensor in drafter.state_dict().items()}
    checksum = weights_checksum(state)
    values = {
        "step": trainer.step,
        "tokens": trainer.tokens,
        "version": version,
        "checksum": checksum,
    }

    def write(draft: Path) -> None:
        _save_tensors(draft / "model.safetensors", state)
        _save_tensors(draft / "optimizer.safetensors", trainer.optimizer_state())
        _save_json(draft / "config.json", config_values(drafter.config))
        _save_json(draft / "trainer.json", values)

    _write_folder(folder, write)
    return checksum


def load_drafter(folder: Path) -> Eagle3Drafter:
    """Read a drafter in float32.

    Raises: CheckpointError if anything is missing, unknown, misshapen or damaged.
    """
    drafter = Eagle3Drafter(read_drafter_config(folder))
    tensors = _load_tensors(folder / "model.safetensors")
    expected = {name: tensor.shape for name, tensor in drafter.state_dict().items()}
    _check_tensors(tensors, expected, str(folder / "model.safetensors"))
    try:
        drafter.set_vocabulary(tensors["d2t"] + torch.arange(len(tensors["d2t"])))
    except ConfigError as error:
        raise CheckpointError(f"{folder / 'model.safetensors'}: d2t is damaged. {error}") from error
    if not torch.equal(drafter.t2d, tensors["t2d"]):
        raise CheckpointError(
            f"{folder / 'model.safetensors'}: t2d and d2t describe different draft vocabularies."
        )
    drafter.load_state_dict(tensors)
    return drafter


def load_checkpoint(folder: Path, options: TrainerOptions) -> tuple[DrafterTrainer, int]:
    """Read drafter, optimizer and counters; return the trainer and the last published version.

    Raises: CheckpointError as `load_drafter`, and if the weights do not match their checksum.
    """
    drafter = load_drafter(folder)
    values = _load_json(folder / "trainer.json", ("step", "tokens", "version", "checksum"))
    found = weights_checksum(drafter.state_dict())
    if found != values["checksum"]:
        raise CheckpointError(
            f"{folder / 'model.safetensors'} has checksum {found[:12]}, but trainer.json names "
            f"{str(values['checksum'])[:12]}: the files do not belong together or are damaged."
        )
    trainer = DrafterTrainer(drafter, options)
    moments = _load_tensors(folder / "optimizer.safetensors")
    if moments:
        shapes = {name: p.shape for name, p in drafter.named_parameters()}
        expected = {f"{moment}.{name}": shapes[name] for moment in MOMENTS for name in shapes}
        _check_tensors(moments, expected, str(folder / "optimizer.safetensors"))
    trainer.load_optimizer_state(moments, values["step"], values["tokens"])
    return trainer, values["version"]


def save_buffer(folder: Path, buffer: DataBuffer) -> None:
    """Write all samples and the state of the draw to `folder`, which must not exist."""
    tensors, values = buffer.state()

    def write(draft: Path) -> None:
        _save_tensors(draft / "samples.safetensors", tensors)
        _save_json(draft / "samples.json", values)

    _write_folder(folder, write)


def load_buffer(folder: Path, buffer: DataBuffer) -> None:
    """Fill `buffer` with what `save_buffer` wrote.

    Raises: CheckpointError if a file is missing or damaged.
    """
    values = _load_json(folder / "samples.json", ("versions", "seed"))
    tensors = _load_tensors(folder / "samples.safetensors")
    try:
        buffer.restore(tensors, values)
    except KeyError as error:
        raise CheckpointError(
            f"{folder / 'samples.safetensors'} lacks {error}, which samples.json names."
        ) from error


def config_values(config: DrafterConfig) -> dict[str, Any]:
    """The drafter's `config.json`; taps and window are under `"ratoon"`."""
    values = {key: getattr(config, field) for field, key in _STANDARD_KEYS.items()}
    return _FIXED | values | {"ratoon": {"taps": list(config.taps), "window": config.window}}


def read_drafter_config(folder: Path) -> DrafterConfig:
    """The shape of a drafter in a folder. Raises: CheckpointError if it holds none."""
    path = folder / "config.json"
    values = _load_json(path, (*_STANDARD_KEYS.values(), "ratoon"))
    ours = values["ratoon"]
    if not isinstance(ours, dict) or not {"taps", "window"} <= ours.keys():
        raise CheckpointError(f'{path}: "ratoon" must hold "taps" and "window"; it is {ours!r}.')
    fields = {field: values[key] for field, key in _STANDARD_KEYS.items()}
    try:
        return DrafterConfig(**fields, taps=tuple(ours["taps"]), window=ours["window"])
    except (ConfigError, TypeError) as error:
        raise CheckpointError(f"{path}: {error}") from error


def check_target(config: DrafterConfig, target: DecoderConfig, folder: Path) -> None:
    """Refuse the drafter in `folder` for a target of another shape. Raises: CheckpointError."""
    needed = {
        "target_hidden_size": target.hidden_size,
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
    }
    wrong = [
        f"{name} {getattr(config, name)} instead of {value}"
        for name, value in needed.items()
        if getattr(config, name) != value
    ]
    if config.taps[-1] >= target.num_layers:
        wrong.append(f"a tap at layer {config.taps[-1]} of {target.num_layers}")
    if wrong:
        raise CheckpointError(
            f"{folder} holds a drafter of another model: {', '.join(wrong)}; give the model that "
            "it was trained for"
        )


def _check_tensors(
    tensors: Mapping[str, Tensor], expected: Mapping[str, torch.Size], source: str
) -> None:
    missing, unknown = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected)
    if missing or unknown:
        raise CheckpointError(
            f"{source}: missing tensors {missing}, unknown tensors {unknown}; an EAGLE-3 drafter "
            "has exactly the tensors of its layout."
        )
    for name, shape in expected.items():
        found = tuple(tensors[name].shape)
        if found == tuple(shape):
            continue
        hint = ""
        if name == "fc.weight" and len(found) == 2 and 3 * found[1] == 2 * shape[1]:
            hint = (
                " This is the width of an EAGLE-1 or EAGLE-2 head, which joins one state with the "
                "embedding; EAGLE-3 joins three tapped states."
            )
        raise CheckpointError(f"{source}: {name} has shape {found}, not {tuple(shape)}.{hint}")


def _write_folder(folder: Path, write: Callable[[Path], None]) -> None:
    if folder.exists():
        raise CheckpointError(f"{folder} exists; a checkpoint is never written over another.")
    draft = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        write(draft)
        for path in draft.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    try:
        save_file(
            {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}, path
        )
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} could not be written: {error}") from error


def _load_tensors(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; give the folder of a whole drafter checkpoint.")
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    return tensors


def _save_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _load_json(path: Path, keys: tuple[str, ...]) -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; give the folder of a whole drafter checkpoint.")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    missing = [key for key in keys if not isinstance(values, dict) or key not in values]
    if missing:
        raise CheckpointError(f"{path} lacks {missing}.")
    return dict(values)
