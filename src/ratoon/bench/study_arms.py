"""The arms of the pretraining study: one small model, trained in different ways.

The model has the proportions of GPT-2 117M where they matter: with a vocabulary of 32 tokens per
unit of width the output head takes 28 % of a step's operations, a layer is 12 D^2, heads and
neurons divide in halves. At a width of 128 its layers have 1.2M parameters, and 20 tokens for each
are 24M.

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
    "model": {"shape": {"family": "gpt2", "layers": 6, "heads": 4}},
    "optimizer": {"schedule": "wsd", "decay_frac": 0.3, "final_lr_frac": 0.0},
    "update": {"batch_tokens": BATCH_TOKENS, "micro_batch_tokens": BATCH_TOKENS},
    "evaluation": {"sequences": 256},
    "log_every": 50,
}
WARMUP_FRAC = 0.02
NUM_EVALUATIONS = 20
TOKENS_PER_PARAMETER = 20

Stages = list[dict[str, float]]


def _paper(rate: float = 0.5, length: float = 1.0) -> Stages:
    """Layers, heads and neurons; then heads and neurons; then all, at reconstructed boundaries.

    `length` is that of the first two stages as a share of the paper's.
    """
    return [
        {"start": 0.0, "layers": rate, "heads": rate, "neurons": rate},
        {"start": length * 2 / 15, "heads": rate, "neurons": rate},
        {"start": length * 7 / 15},
    ]


def _random(stages: Stages, **choice: Any) -> dict[str, Any]:
    return {"evolve": {"method": "random", "stages": stages, "random": choice}}


def _nested(stages: Stages, **settings: Any) -> dict[str, Any]:
    return {"evolve": {"method": "nested", "stages": stages, **settings}}


_DEPTH: Stages = [{"start": 0.0, "layers": 0.5}, {"start": 7 / 15}]
_EARLY: Stages = [{"start": 0.0, "layers": 0.5}, {"start": 0.25}]
_LATE: Stages = [{"start": 0.0, "layers": 0.5}, {"start": 0.65}]
_THIRDS: Stages = [
    {"start": 0.0, "layers": 1 / 3},
    {"start": 0.25, "layers": 2 / 3},
    {"start": 0.5},
]
_LATE_THIRDS: Stages = [
    {"start": 0.0, "layers": 1 / 3},
    {"start": 0.35, "layers": 2 / 3},
    {"start": 0.65},
]
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
    "nested_early": _nested(_EARLY),
    "nested_late": _nested(_LATE),
    "nested_thirds": _nested(_THIRDS),
    "nested_late_thirds": _nested(_LATE_THIRDS),
    "nested_staged": _nested(_paper()),
    "random_layers": _random(_DEPTH),
    "random_width": _random(_WIDTH),
    "random_no_scale": _random(_paper(), **_NO_SCALE),
    "random_root_scale": _random(_paper(), **_ROOT_SCALE),
    "random_three_quarters": _random(_paper(0.75)),
    "random_half_as_long": _random(_paper(length=0.5)),
    "random_shared": _random(_paper(), share_indices=True),
    "random_unclipped": {**_random(_paper()), "optimizer": {"max_grad_norm": 1e9}},
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


def study_tokens(width: int) -> int:
    """Tokens of a run of the full model: 20 for each parameter of its layers."""
    return TOKENS_PER_PARAMETER * int(BASE["model"]["shape"]["layers"]) * 12 * width**2


def arm_config(
    arm: str,
    data: Path,
    *,
    width: int,
    steps: int,
    lr: float,
    seed: int,
    name: str,
    output_dir: Path,
) -> PretrainConfig:
    """The configuration of one cell of the study. Raises: KeyError for an unknown arm."""
    values = _merged(BASE, ARMS[arm])
    values["model"]["shape"] |= {"width": width, "mlp_width": 4 * width}
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
