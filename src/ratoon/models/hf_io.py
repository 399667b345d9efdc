"""Hugging Face model directories <-> `Decoder`.

Reads and writes safetensors only, sharded or not; pickled weights are never opened. Directories
appear whole or not at all. Peak memory is the model itself plus one stored tensor (loading) or
one shard (saving).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ratoon.errors import CheckpointError
from ratoon.models.decoder import Decoder, DecoderConfig
from ratoon.models.directories import whole_directory
from ratoon.models.hf_config import FAMILIES, read_config, read_json, write_config, write_json

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CARRIED_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
_HEAD = "lm_head.weight"
_DTYPES = ("F64", "F32", "F16", "BF16")
_MAX_NAMED = 5


def load_decoder(path: Path | str, dtype: torch.dtype = torch.float32) -> Decoder:
    """Read a Hugging Face model directory into a decoder on the CPU.

    Args:
        path: directory with `config.json` and `model.safetensors` or its sharded form.
        dtype: of all parameters, whatever the files hold.

    Raises:
        CapabilityError: if the architecture is not supported.
        CheckpointError: if a file or tensor is missing, damaged, unknown or has another shape;
            the message names them.
    """
    directory = Path(path)
    config = read_config(directory)
    with torch.device("meta"):
        decoder = Decoder(config)
    shapes = {name: parameter.shape for name, parameter in decoder.named_parameters()}
    state = {name: torch.empty(shape, dtype=dtype) for name, shape in shapes.items()}
    _read_tensors(directory, stored_views(config, state), config)
    decoder.load_state_dict(state, strict=True, assign=True)
    return decoder


def save_decoder(
    decoder: Decoder,
    path: Path | str,
    *,
    source: Path | str | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5 * 10**9,
) -> Path:
    """Write a decoder as a Hugging Face model directory that transformers loads.

    Args:
        decoder: the model; its parameters may live on any device.
        path: a path that does not exist yet (or an empty directory).
        source: model directory whose tokenizer, generation config and unread settings of
            `config.json` go along.
        dtype: of the stored tensors; `None` keeps the decoder's.
        max_shard_bytes: a file grows no larger, unless one tensor alone is.

    Raises:
        CheckpointError: if `path` holds something, or the disk is full.
    """
    directory, config = Path(path), decoder.config
    state = {name: parameter.detach() for name, parameter in decoder.named_parameters()}
    stored = dtype or next(iter(state.values())).dtype
    tensors = stored_views(config, state)
    total = sum(tensor.numel() for tensor in tensors.values()) * stored.itemsize
    with whole_directory(directory, needed_bytes=total) as part:
        _write_shards(part, tensors, stored, max_shard_bytes)
        _write_settings(part, config, stored, Path(source) if source is not None else None)
    return directory


def stored_views(config: DecoderConfig, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Hugging Face's tensor names with the views of the decoder's parameters that they fill.

    Args:
        config: the decoder's.
        state: tensors under the decoder's parameter names; the views share their memory.
    """
    views: dict[str, Tensor] = {}
    family = FAMILIES[config.family]
    for ours, theirs in family.tensor_names(config).items():
        parts = stacked_parts(config, ours, len(theirs), state[ours])
        if ours.endswith(family.transposed):
            parts = [part.t() for part in parts]
        views |= zip(theirs, parts, strict=True)
    return views


def stacked_parts(config: DecoderConfig, name: str, count: int, tensor: Tensor) -> Sequence[Tensor]:
    """Views of the `count` matrices that the parameter `name` holds on top of each other."""
    if count == 1:
        return (tensor,)
    return tensor.split(config.qkv_sizes) if ".qkv_proj." in name else tensor.chunk(count)


def _weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a directory, all of them present."""
    if (directory / INDEX).exists():
        listed = read_json(directory / INDEX).get("weight_map")
        if not isinstance(listed, dict) or not all(
            isinstance(name, str) for name in listed.values()
        ):
            raise CheckpointError(f"{directory / INDEX}: has no weight_map from tensors to files.")
        files = [directory / Path(name).name for name in sorted(set(listed.values()))]
        missing = [file.name for file in files if not file.exists()]
        if missing:
            raise CheckpointError(f"{directory}: files of {INDEX} are missing: {_named(missing)}.")
        return files
    if (directory / WEIGHTS).exists():
        return [directory / WEIGHTS]
    pickles = sorted(file.name for file in directory.glob("*.bin"))
    if pickles:
        raise CheckpointError(
            f"{directory}: holds pickled weights ({_named(pickles)}), which can run code and are "
            "never opened. Convert them: load with transformers on a machine you trust and call "
            "save_pretrained(path), which writes safetensors."
        )
    raise CheckpointError(f"{directory}: neither {WEIGHTS} nor {INDEX} is there.")


@dataclass(frozen=True, slots=True)
class _Stored:
    """Where a tensor is, as the header of its file says."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def _read_tensors(directory: Path, targets: dict[str, Tensor], config: DecoderConfig) -> None:
    """Fill the views `targets` from the files, after every name and shape has been checked."""
    inventory: dict[str, _Stored] = {}
    for file in _weight_files(directory):
        with _opened(file) as weights:
            for name in weights.keys():  # noqa: SIM118 - is no mapping
                part = weights.get_slice(name)
                inventory[name] = _Stored(file, tuple(part.get_shape()), part.get_dtype())
    family = FAMILIES[config.family]
    prefix = family.optional_prefix
    if not any(name.startswith(prefix) for name in inventory):
        targets = {name.removeprefix(prefix): target for name, target in targets.items()}
    inventory = {name: s for name, s in inventory.items() if not name.endswith(family.constants)}
    (embedding,) = family.tensor_names(config)["embed_tokens.weight"]
    embedding = embedding if embedding in targets else embedding.removeprefix(prefix)
    wanted = dict(targets)
    if config.tie_word_embeddings and _HEAD in inventory:
        wanted[_HEAD] = torch.empty_like(targets[embedding])
    _check_inventory(directory, inventory, wanted)
    for file in dict.fromkeys(stored.file for stored in inventory.values()):
        with _opened(file) as weights:
            for name, target in wanted.items():
                if inventory[name].file == file:
                    target.copy_(weights.get_tensor(name))
    if _HEAD not in targets and _HEAD in wanted:
        _require_tied(directory, wanted[_HEAD], wanted[embedding])


def _require_tied(directory: Path, head: Tensor, embedding: Tensor) -> None:
    if not torch.equal(head, embedding):
        raise CheckpointError(
            f"{directory}: config.json ties {_HEAD} to the embedding, but the stored {_HEAD} "
            "differs. Set tie_word_embeddings to false if the head is meant."
        )


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """An open safetensors file (untyped there); damage is a `CheckpointError`."""
    try:
        with safe_open(file, framework="pt") as weights:
            yield weights
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: damaged or not a safetensors file ({error}).") from error


def _check_inventory(
    directory: Path, inventory: dict[str, _Stored], targets: dict[str, Tensor]
) -> None:
    shapes = {name: tuple(target.shape) for name, target in targets.items()}
    extra = [name for name in inventory if name not in shapes]
    known = {name: stored for name, stored in inventory.items() if name in shapes}
    complaints = {
        "missing tensors": [name for name in shapes if name not in inventory],
        "unknown tensors": extra,
        "tensors of another shape": [
            f"{name} {list(stored.shape)} instead of {list(shapes[name])}"
            for name, stored in known.items()
            if stored.shape != shapes[name]
        ],
        f"tensors of a quantised type (supported: {', '.join(_DTYPES)})": [
            f"{name} {stored.dtype}"
            for name, stored in known.items()
            if stored.dtype not in _DTYPES
        ],
    }
    told = [f"{problem}: {_named(names)}" for problem, names in complaints.items() if names]
    if told:
        raise CheckpointError(f"{directory}: does not fit its config.json; {'; '.join(told)}.")


def _named(names: list[str]) -> str:
    """At most `_MAX_NAMED` names, then how many more there are."""
    more = len(names) - _MAX_NAMED
    return ", ".join(names[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


def _write_shards(
    part: Path, tensors: dict[str, Tensor], dtype: torch.dtype, max_shard_bytes: int
) -> None:
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        num_bytes = tensor.numel() * dtype.itemsize
        if shards[-1] and size + num_bytes > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += num_bytes
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = (
            f"model-{number:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else WEIGHTS
        )
        # Stored tensors must not share memory; converted copies live only as long as the shard.
        copies = {
            name: tensor.to("cpu", dtype, copy=True, memory_format=torch.contiguous_format)
            for name, tensor in shard.items()
        }
        try:
            save_file(copies, part / file, metadata={"format": "pt"})
        except SafetensorError as error:
            # safetensors hides the error number of a failed write.
            raise CheckpointError(
                f"{file}: cannot be written ({error}); is the disk full?"
            ) from error
        # safetensors makes private files; weights are as readable as their directory.
        (part / file).chmod(part.stat().st_mode & 0o666)
        weight_map |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        total = sum(tensor.numel() for tensor in tensors.values()) * dtype.itemsize
        write_json(part / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write_settings(
    part: Path, config: DecoderConfig, dtype: torch.dtype, source: Path | None
) -> None:
    settings = write_config(config, str(dtype).removeprefix("torch."))
    if source is not None:
        # Newer spellings in the source's file would overrule the ones written here.
        replaced = {"rope_parameters", "dtype", "transformers_version"}
        kept = read_json(source / "config.json")
        settings = {key: kept[key] for key in kept if key not in replaced} | settings
        for name in CARRIED_FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, part / name)
    write_json(part / "config.json", settings)
    if not (part / "generation_config.json").exists():
        ids = {key: settings[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        write_json(part / "generation_config.json", ids)
