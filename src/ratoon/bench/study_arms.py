"""The arms of the pretraining study: one small model, trained in different ways.

The model has the proportions of GPT-2 117M where they matter: the output head takes 28 % of a
step's operations, a layer is 12 D^2, heads and neurons divide in halves. Two million parameters, so
that 20 tokens per parameter of the layers are 24M tokens.

Every arm is a change of the same configuration. How many steps it gets follows from the seconds
that it may take, so that arms are compared at equal seconds.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ratoon.config import build_config
from ratoon.config.load import apply_overrides
from ratoon.config.pretrain import PretrainConfig
from ratoon.models.compute_dtype import with_dtype

SEQUENCE = 256
BATCH_TOKENS = 4096
BASE: dict[str, Any] = {
    "model": {
        "shape": {"family": "gpt2", "width": 128, "layers": 6, "heads": 4, "mlp_width": 512},
    },
    "optimizer": {"schedule": "wsd", "decay_frac": 0.3, "final_lr_frac": 0.0},
    "update": {"batch_tokens": BATCH_TOKENS, "micro_batch_tokens": BATCH_TOKENS},
    "evaluation": {"sequences": 256},
    "log_every": 50,
}
WARMUP_FRAC = 0.02
NUM_EVALUATIONS = 20

Stages = list[dict[str, float]]


def _paper(rate: float = 0.5) -> Stages:
    """Layers, heads and neurons; then heads and neurons; then all, at reconstructed boundaries."""
    return [
        {"start": 0.0, "layers": rate, "heads": rate, "neurons": rate},
        {"start": 2 / 15, "heads": rate, "neurons": rate},
        {"start": 7 / 15},
    ]


def _random(stages: Stages, **choice: Any) -> dict[str, Any]:
    return {"evolve": {"method": "random", "stages": stages, "random": choice}}


def _nested(stages: Stages, **settings: Any) -> dict[str, Any]:
    return {"evolve": {"method": "nested", "stages": stages, **settings}}


_DEPTH: Stages = [{"start": 0.0, "layers": 0.5}, {"start": 7 / 15}]
_WIDTH: Stages = [{"start": 0.0, "heads": 0.5, "neurons": 0.5}, {"start": 7 / 15}]
_NO_SCALE = {f"scale_{axis}": "none" for axis in ("attention", "mlp", "layers")}
_ROOT_SCALE = {f"scale_{axis}": "inv_sqrt_p" for axis in ("attention", "mlp", "layers")}

# Sections of the configuration that an arm changes.
ARMS: dict[str, dict[str, Any]] = {
    "full": {},
    "random_staged": _random(_paper()),
    "nested_stacked": _nested(_DEPTH),
    "nested_zero_output": _nested(_DEPTH, new_layers="zero_output"),
    "half_depth": {"model": {"shape": {"layers": 3}}},
    "nested_staged": _nested(_paper()),
    "random_layers": _random(_DEPTH),
    "random_width": _random(_WIDTH),
    "random_no_scale": _random(_paper(), **_NO_SCALE),
    "random_root_scale": _random(_paper(), **_ROOT_SCALE),
    "random_three_quarters": _random(_paper(0.75)),
    "random_pinned": _random(_paper(2 / 3), pinned_layers=[0, -1]),
    "adaptive": {
        "evolve": {
            "method": "nested",
            "adaptive": {"layers": 0.5, "heads": 1.0, "neurons": 1.0, "quantum": 1 / 6},
        }
    },
    "random_sequences": _random(_DEPTH, depth="sequences"),
    "random_decay": {
        "evolve": {**_random(_paper())["evolve"], "unsampled": "decay"},
    },
    "random_reset": {
        "evolve": {**_random(_paper())["evolve"], "moments": "reset"},
    },
}


def arm_config(
    arm: str, data: Path, *, steps: int, lr: float, seed: int, name: str, output_dir: Path
) -> PretrainConfig:
    """The configuration of one cell of the study. Raises: KeyError for an unknown arm."""
    values = _merged(BASE, ARMS[arm])
    values |= {"name": name, "output_dir": str(output_dir), "seed": seed, "steps": steps}
    values["data"] = {"path": str(data), "sequence_length": SEQUENCE}
    values["optimizer"] |= {"lr": lr, "warmup_steps": round(WARMUP_FRAC * steps)}
    values["evaluation"] |= {"every": max(1, steps // NUM_EVALUATIONS)}
    values["checkpoint"] = {"every": max(1, steps // NUM_EVALUATIONS), "keep": 1}
    apply_overrides(PretrainConfig, values, ())
    return with_dtype(build_config(PretrainConfig, values))


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = copy.deepcopy(dict(base))
    for key, value in changes.items():
        inner = merged.get(key)
        if isinstance(inner, dict) and isinstance(value, Mapping):
            merged[key] = _merged(inner, value)
        else:
            merged[key] = copy.deepcopy(value)
    return merged
