"""The comparison of arms: what each changes of a recipe, and what is made of their figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ratoon.bench.rl import ARMS, Comparison, arm_config, summarise
from ratoon.errors import ConfigError
from ratoon.report.arms import render_arms

RECIPE: dict[str, Any] = {
    "name": "recipe",
    "seed": 3,
    "model": {"path": "models/tiny"},
    "data": {
        "train": {"kind": "arithmetic", "size": 20, "seed": 1},
        "eval": {"kind": "arithmetic", "size": 5, "seed": 2},
    },
    "rewards": [{"kind": "number"}],
    "speculation": {"max_rows": 64},
    "drafter": {"window": 64},
    "spot": {"publish_every_steps": 2},
    "evaluation": {"prompts": 5},
    "replay_last_step": True,
}


def comparison(tmp_path: Path, *arms: str) -> Comparison:
    return Comparison(RECIPE, arms or tuple(ARMS), 1, tmp_path, tmp_path / "work")


def test_a_recipe_that_switches_off_what_is_compared_is_refused(tmp_path: Path) -> None:
    for section in ("speculation", "spot"):
        values = RECIPE | {section: {"enabled": False}}
        with pytest.raises(ConfigError, match=rf"{section}\.enabled = false"):
            Comparison(values, tuple(ARMS), 1, tmp_path, tmp_path / "work")
    with pytest.raises(ConfigError, match="nowhere: holds no drafter"):
        Comparison(RECIPE, tuple(ARMS), 1, tmp_path, tmp_path / "work", Path("nowhere"))


def cell(arm: str, number: int, rollouts: list[float], said: str = "a") -> dict[str, Any]:
    """A cell whose steps take a second besides their rollout."""
    steps = [
        {
            "step": step,
            "rollout_s": seconds,
            "reward_s": 0.0,
            "update_s": 1.0,
            "weights_s": 0.0,
            "step_s": seconds + 1.0,
            "idle": 0.2,
            "idle_filled": None if arm == "plain" else 0.95,
            "acceptance_length": None if arm == "plain" else 2.0,
            "drafter_tokens": 10,
            "entropy_per_token": 0.5,
            "kl": None,
            "reward": 0.5,
            "said": f"{said}{step}",
        }
        for step, seconds in enumerate(rollouts, 1)
    ]
    return {
        "arm": arm,
        "round": number,
        "cpu_s": 9.0,
        "numerics": "invariant",
        "steps": steps,
        "provenance": {},
    }


def test_ratios_are_those_of_the_same_step_in_the_same_round() -> None:
    cells = [
        cell("tlt", 1, [8.0, 3.0]),
        cell("plain", 0, [4.0, 12.0]),
        cell("tlt", 0, [2.0, 6.0]),
        cell("plain", 1, [16.0, 6.0]),
    ]
    record = summarise(cells)
    row = next(row for row in record["rows"] if row["arm"] == "tlt")
    assert (row["rollout_low"], row["rollout"], row["rollout_high"]) == (2.0, 2.0, 2.0)
    assert record["tokens_identical"]
    assert record["rollout_share_plain"] == 38 / 42
    # Steps gain 5/3, 13/7, 17/9 and 7/4; Amdahl allows 1 / (1 - s + s / 2) = 42 / 23.
    assert row["amdahl_share"] == pytest.approx((13 / 7 + 7 / 4) / 2 / (42 / 23))
    assert all(record["bars_met"].values())


def test_a_slower_arm_meets_no_bar_and_the_page_says_so() -> None:
    cells = [cell("plain", 0, [4.0, 4.0]), cell("tlt", 0, [5.0, 5.0])]
    record = summarise(cells)
    assert not record["bars_met"]["rollout >= 1.8x"]
    page = render_arms(record)
    assert "no arm rolls out faster" in page
    assert "the same tokens in all arms" in page


def test_other_tokens_are_found() -> None:
    cells = [cell("plain", 0, [4.0]), cell("tlt", 0, [2.0], said="b")]
    record = summarise(cells)
    assert not record["tokens_identical"]
    assert "other tokens in some" in render_arms(record)


def test_arms_change_how_responses_are_guessed_and_nothing_else(tmp_path: Path) -> None:
    wanted = comparison(tmp_path)
    drafter = tmp_path / "drafter"
    configs = {arm: arm_config(wanted, arm, drafter) for arm in ARMS}
    assert not configs["plain"].speculation.enabled
    assert configs["sd-suffix"].speculation.drafters == ("suffix",)
    assert configs["sd-suffix"].speculation.max_rows == 64
    assert not configs["sd-frozen"].spot.enabled
    assert configs["sd-frozen"].drafter == configs["tlt"].drafter
    assert configs["tlt"].drafter.path == drafter
    assert configs["tlt"].spot.publish_every_steps == 2
    planners = {arm: config.rollout.planner for arm, config in configs.items()}
    assert planners.pop("tlt+planner") == "longest_first"
    assert set(planners.values()) == {"first_come"}
    decoding = {"speculation", "drafter", "spot", "rollout"}
    rest = [config.model_dump(exclude=decoding) for config in configs.values()]
    assert all(values == rest[0] for values in rest)
    assert rest[0]["data"]["eval"] is None
    assert RECIPE["data"]["eval"] is not None


def test_plain_decoding_is_always_among_the_arms(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="plain is missing"):
        comparison(tmp_path, "tlt")
    with pytest.raises(ConfigError, match=r"arms = plain, nonsense: nonsense; give plain"):
        comparison(tmp_path, "plain", "nonsense")
