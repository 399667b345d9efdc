"""A whole run of reinforcement learning from Python, on a tiny model that knows nothing yet.

The reward is the share of vowels in what the model says. Two worker processes generate; whoever
has nothing left trains the drafter; at the end the last step is replayed without speculation to
check that it drew the same tokens. The same as YAML: `ratoon rl CONFIG`.
Run: `python examples/05_reinforcement_learning.py`
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from ratoon.config import RLConfig, build_config, resolved_yaml
from ratoon.models.tiny import make_tiny_model
from ratoon.observe.observer import Observer
from ratoon.observe.provenance import provenance
from ratoon.observe.run_folder import RunFolder


def vowels(response: str, answer: str | None, fields: dict[str, Any]) -> float:
    """Share of the characters that are vowels."""
    return sum(character in "aeiou" for character in response) / max(1, len(response))


def configure(folder: Path) -> RLConfig:
    """Write the data; return what `ratoon rl` would read from YAML, the rest by default."""

    def prompts(name: str, words: str) -> dict[str, Any]:
        path = folder / f"{name}.jsonl"
        rows = [json.dumps({"prompt": f"say {word}: "}) for word in words.split() * 4]
        path.write_text("\n".join(rows), encoding="utf-8")
        return {"kind": "jsonl", "path": str(path), "columns": {"answer": None}}

    return build_config(
        RLConfig,
        {
            "name": "vowels",
            "output_dir": str(folder),
            "steps": 6,
            "model": {"path": str(folder / "model")},
            "data": {
                "train": prompts("train", "something anything it more"),
                "eval": prompts("eval", "nothing everything this less"),
                "chat_template": False,
            },
            "rewards": [{"kind": "python", "function": f"{__file__}:vowels"}],
            "sampling": {"max_tokens": 48},
            "algorithm": {"prompts_per_step": 3, "group_size": 8},
            "optimizer": {"lr": 4e-3},
            "rollout": {"max_length": 64, "max_batch": 16},
            "drafter": {"window": 64},
            "workers": {"count": 2},
            "evaluation": {"prompts": 8},
            "replay_last_step": True,
        },
    )


def main() -> None:
    """Train, and show what came out."""
    from ratoon.loop.rl_run import run_rl

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_tiny_model(folder / "model")
        config = configure(folder)
        run = RunFolder.create(
            folder / config.name, config_yaml=resolved_yaml(config), provenance=provenance(0)
        )
        with Observer(run) as observer:
            run_rl(config, run, observer)
        summary = json.loads(run.summary.read_text())
        for key in ("reward_before", "reward_after", "tokens_identical", "spot_tokens", "numerics"):
            print(f"{key:18} {summary[key]}")


if __name__ == "__main__":
    main()
