"""What a user can set: strict, frozen, each field with its unit and range. Imports no torch."""

from ratoon.config.load import build_config, load_config, resolved_yaml
from ratoon.config.pretrain import PretrainConfig
from ratoon.config.rl import RLConfig
from ratoon.config.sft import SFTConfig

CONFIGS: dict[str, type[RLConfig] | type[SFTConfig] | type[PretrainConfig]] = {
    "rl": RLConfig,
    "sft": SFTConfig,
    "pretrain": PretrainConfig,
}

__all__ = [
    "CONFIGS",
    "PretrainConfig",
    "RLConfig",
    "SFTConfig",
    "build_config",
    "load_config",
    "resolved_yaml",
]
