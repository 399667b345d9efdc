"""Which weights of a run are stored, and what the engine served them as.

Responses of training step s were drawn with the weights after step s - 1, those of an evaluation
with the weights after its step. A checkpoint holds the float32 masters of what is trained, and is
read as a resumed run reads it; the saved model holds those of everything. Serving rounds them to
the run's format, so what was served can be rebuilt to the bit.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from ratoon.cluster.training_unit import TrainingUnit
from ratoon.config.rl import RLConfig
from ratoon.errors import DataError
from ratoon.loop.checkpoints import checkpoints, read_checkpoint
from ratoon.loop.setup import rl_specs
from ratoon.models.checksum import tensors_checksum
from ratoon.models.compute_dtype import DTYPES
from ratoon.models.decoder import Decoder
from ratoon.models.hf_io import load_decoder
from ratoon.models.tokenizer import Tokenizer
from ratoon.observe.completions import Split
from ratoon.observe.run_folder import RunFolder


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """The policy after `version` steps, in a model directory or a checkpoint of a run."""

    version: int
    path: Path
    in_checkpoint: bool

    def load(self, config: RLConfig, tokenizer: Tokenizer) -> Decoder:
        """The masters. Raises: CheckpointError if they are missing or damaged."""
        if not self.in_checkpoint:
            return load_decoder(self.path)
        decoder = load_decoder(config.model.path)
        spec = replace(rl_specs(config, tokenizer, self.path)[0], count=1)
        assert spec.training is not None
        TrainingUnit(spec, spec.training, decoder).load(self.path / "policy")
        return decoder


def version_of(split: Split, step: int) -> int:
    """After how many steps the policy was that drew a step's responses."""
    return step - 1 if split == "train" else step


def stored_weights(folder: RunFolder, config: RLConfig) -> dict[int, StoredWeights]:
    """What is stored, by version: the saved model, checkpoints, and the model to start from.

    Checkpoints are read into the model to start from, and are of no use without it.
    """
    found: dict[int, StoredWeights] = {}
    if (config.model.path / "config.json").is_file():
        found[0] = StoredWeights(0, config.model.path, in_checkpoint=False)
        for path in checkpoints(folder):
            step = read_checkpoint(path).step
            found[step] = StoredWeights(step, path, in_checkpoint=True)
    saved = saved_model(folder)
    if saved is not None:
        found[saved.version] = saved
    return found


def saved_model(folder: RunFolder) -> StoredWeights | None:
    """The model of a run that has ended; its summary says after how many steps.

    Raises: DataError if the summary is damaged.
    """
    if not (folder.model.is_dir() and folder.summary.is_file()):
        return None
    try:
        steps = json.loads(folder.summary.read_text(encoding="utf-8")).get("steps")
    except (ValueError, AttributeError) as error:
        raise DataError(f"{folder.summary}: must hold a JSON object ({error})") from None
    return StoredWeights(steps, folder.model, in_checkpoint=False) if steps else None


def served_checksum(decoder: Decoder, dtype: str) -> str:
    """Checksum of the weights as they were served: rounded to `dtype`."""
    named = sorted(decoder.named_parameters())
    return tensors_checksum((name, value.to(DTYPES[dtype])) for name, value in named)
