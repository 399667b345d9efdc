"""The main job end to end: a short warm start, then reinforcement learning with spot training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ratoon.config import build_config
from ratoon.config.rl import RLConfig
from ratoon.config.sft import SFTConfig
from ratoon.loop.open_run import open_folder
from ratoon.loop.rl_run import run_rl
from ratoon.loop.setup import with_machine
from ratoon.loop.sft_run import run_sft
from ratoon.models.fetch import fetch
from ratoon.models.tiny import make_tiny_model
from ratoon.observe.observer import Observer
from ratoon.observe.run_folder import is_occupied
from ratoon.stopping import Stop

MODEL = "smollm2-135m"

# Sums with a geometric number of terms: a few solutions are several times as long as most.
TASK = {"kind": "arithmetic", "max_terms": 32, "max_value": 6}
SFT: dict[str, Any] = {
    "data": {"train": TASK | {"size": 2000, "seed": 1}, "chat_template": False},
    # Where copying the first term is half learned: what sampling still gets wrong, the model can
    # find out by itself.
    "steps": 32,
    "max_length": 512,
    # Many small steps learn more per second than few large ones.
    "optimizer": {"lr": 4e-4, "warmup_steps": 4, "schedule": "linear"},
    "update": {"batch_tokens": 1024, "micro_batch_tokens": 1024},
    "checkpoint": {"every": 1000},
}
RL: dict[str, Any] = {
    "steps": 16,
    "data": {
        "train": TASK | {"size": 2000, "seed": 2},
        "eval": TASK | {"size": 256, "seed": 3},
        "chat_template": False,
    },
    "rewards": [{"kind": "number"}],
    "sampling": {"max_tokens": 288},
    "algorithm": {"prompts_per_step": 16, "group_size": 8},
    "optimizer": {"lr": 2e-5},
    "update": {"micro_batch_tokens": 2048},
    "rollout": {"max_length": 448, "max_batch": 64},
    # The policy is so sure of most tokens that guessing one may pay for 64 sequences, too.
    "speculation": {"max_rows": 128},
    "drafter": {"draft_vocab_size": 1024, "window": 256},
    "evaluation": {"prompts": 256},
    "checkpoint": {"every": 1000},
    "replay_last_step": True,
}

TINY_TASK = {"kind": "arithmetic", "max_terms": 8, "max_value": 5}
TINY_SFT: dict[str, Any] = {
    "data": {"train": TINY_TASK | {"size": 4000, "seed": 1}, "chat_template": False},
    "steps": 560,
    "max_length": 160,
    "optimizer": {"lr": 3e-3, "warmup_steps": 10, "schedule": "linear"},
    "update": {"batch_tokens": 640, "micro_batch_tokens": 640},
    "checkpoint": {"every": 1000},
}
TINY_RL: dict[str, Any] = {
    "steps": 32,
    "data": {
        "train": TINY_TASK | {"size": 1000, "seed": 2},
        "eval": TINY_TASK | {"size": 256, "seed": 3},
        "chat_template": False,
    },
    "rewards": [{"kind": "number"}],
    "sampling": {"max_tokens": 128},
    "algorithm": {"prompts_per_step": 16, "group_size": 8},
    "optimizer": {"lr": 4e-5},
    "rollout": {"max_length": 192, "max_batch": 32},
    "drafter": {"window": 64},
    "evaluation": {"prompts": 256},
    "checkpoint": {"every": 1000},
    "replay_last_step": True,
}


def run_quickstart(
    tiny: bool,
    target: Path,
    observer: Observer,
    seed: int = 1,
    *,
    resume: bool = False,
    stop: Stop | None = None,
) -> None:
    """Run the quickstart into `target`; the warm start's own folder lies in there.

    `seed` is that of order and noise; the problems are the same for all. With `resume` an earlier
    one is gone on with: its model and its warm start are kept if they are complete, and each stage
    goes on from its last checkpoint.

    Raises: Stopped as `stop` asks; RatoonError of all kinds.
    """
    sft, rl = ({**part, "seed": seed} for part in ((TINY_SFT, TINY_RL) if tiny else (SFT, RL)))
    model = target / "start" if tiny else Path("models") / MODEL
    warm = {"output_dir": str(target), "name": "warm-start", "model": {"path": str(model)}}
    sft_config = with_machine(build_config(SFTConfig, {**sft, **warm}))
    where = {"output_dir": str(target.parent), "name": target.name}
    start = {"path": str(target / "warm-start" / "model")}
    rl_config = with_machine(build_config(RLConfig, {**rl, **where, "model": start}))
    folder = open_folder(rl_config, resume=resume)
    with observer.within(folder) as inner:
        inner.phase("model")
        if not tiny:
            fetch(MODEL, model)
        elif not model.exists():
            make_tiny_model(model)
        if not rl_config.model.path.exists():
            began = is_occupied(sft_config.output_dir / sft_config.name)
            sft_folder = open_folder(sft_config, resume=began)
            with inner.within(sft_folder) as warm_observer:
                run_sft(sft_config, sft_folder, warm_observer, stop)
        run_rl(rl_config, folder, inner, stop)
