"""The folder of a run: made for a new one, or opened to go on with. Imports no torch."""

from __future__ import annotations

from ratoon.config import resolved_yaml
from ratoon.config.pretrain import PretrainConfig
from ratoon.config.rl import RLConfig
from ratoon.config.sft import SFTConfig
from ratoon.observe.provenance import provenance
from ratoon.observe.run_folder import RunFolder


def open_folder(config: RLConfig | SFTConfig | PretrainConfig, *, resume: bool) -> RunFolder:
    """Make the run's folder, or open the one to resume.

    Raises:
        ConfigError: it holds another run, or none to resume, or one that is complete.
        CapabilityError: the disk is too full.
    """
    path, text = config.output_dir / config.name, resolved_yaml(config)
    if resume:
        folder = RunFolder.resume(path, config_yaml=text)
        folder.refuse_complete(config.steps)
        return folder
    return RunFolder.create(path, config_yaml=text, provenance=provenance(config.seed))
