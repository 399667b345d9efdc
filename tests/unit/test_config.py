from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from ratoon.config import CONFIGS, RLConfig, SFTConfig, build_config, load_config, resolved_yaml
from ratoon.config.algorithm import PRESETS
from ratoon.config.load import apply_overrides, parse_yaml
from ratoon.config.reference import markdown
from ratoon.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


def rl_values(tmp_path: Path) -> dict[str, Any]:
    return {
        "name": "run",
        "model": {"path": str(tmp_path)},
        "data": {
            "train": {"kind": "arithmetic", "size": 10},
            "eval": {"kind": "arithmetic", "size": 10, "seed": 1},
        },
        "rewards": [{"kind": "number"}],
    }


def sft_values(tmp_path: Path) -> dict[str, Any]:
    return {
        "name": "run",
        "model": {"path": str(tmp_path)},
        "data": {"train": {"kind": "arithmetic"}},
        "epochs": 1,
    }


def write(tmp_path: Path, values: dict[str, Any]) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


def test_importing_the_configuration_imports_no_torch() -> None:
    code = "import sys, ratoon.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_resolved_configuration_loads_to_the_same_value(tmp_path: Path) -> None:
    for kind, values in ((RLConfig, rl_values(tmp_path)), (SFTConfig, sft_values(tmp_path))):
        config = build_config(kind, values)
        assert build_config(kind, yaml.safe_load(resolved_yaml(config))) == config
    apply_overrides(RLConfig, values := rl_values(tmp_path), ["speculation.enabled=false"])
    config = build_config(RLConfig, values)
    assert build_config(RLConfig, yaml.safe_load(resolved_yaml(config))) == config
    overrides = [
        "sampling.stop_strings=['\\n\\n', '</answer>']",
        "evaluation.sampling.logit_bias={5: -1, 7: 2.5}",
        "evaluation.sampling.suppress_tokens=[3]",
    ]
    apply_overrides(RLConfig, values := rl_values(tmp_path), overrides)
    config = build_config(RLConfig, values)
    assert config.evaluation.sampling.logit_bias == {5: -1, 7: 2.5}
    assert build_config(RLConfig, yaml.safe_load(resolved_yaml(config))) == config


def test_overrides_are_yaml_and_reach_sections_and_list_items(tmp_path: Path) -> None:
    path = write(tmp_path, rl_values(tmp_path))
    overrides = ["optimizer.lr=1e-5", "rewards.0.weight=2", "speculation.drafters=[suffix]"]
    config = load_config(RLConfig, path, [*overrides, "name=other"])
    assert config.optimizer.lr == 1e-5
    assert config.rewards[0].weight == 2
    assert config.speculation.drafters == ("suffix",)
    assert config.name == "other"


def test_switching_a_feature_off_drops_what_the_file_says_about_it(tmp_path: Path) -> None:
    values = rl_values(tmp_path)
    values |= {"speculation": {"depth": 3}, "drafter": {"lr": 1e-3}, "spot": {"enabled": True}}
    config = load_config(RLConfig, write(tmp_path, values), ["speculation.enabled=false"])
    assert not config.speculation.enabled
    assert not config.spot.enabled


def test_an_algorithm_brings_its_own_defaults_which_a_file_or_an_override_may_change(
    tmp_path: Path,
) -> None:
    values = rl_values(tmp_path) | {"algorithm": {"minibatches": 2}}
    path = write(tmp_path, values)
    gspo = load_config(RLConfig, path, ["algorithm.name=gspo", "algorithm.clip_high=1e-3"])
    assert gspo.algorithm.clip_low == 3e-4
    assert gspo.algorithm.clip_high == 1e-3
    assert gspo.algorithm.reduction == "sequence_mean"
    assert load_config(RLConfig, path).algorithm.reduction == "token_mean"
    # What is spelt out in a run's folder loads again, though some of it has no effect.
    for name in PRESETS:
        config = load_config(RLConfig, path, [f"algorithm.name={name}"])
        assert build_config(RLConfig, yaml.safe_load(resolved_yaml(config))) == config


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("sampling.temprature=1", ["sampling.temprature", "did you mean `temperature`"]),
        ("kl_coef=1", ["did you mean `algorithm.kl_coef`"]),
        ("rollout.workers=2", ["did you mean `workers`"]),
        ("lora=true", ["lora", "True", "section", "rank, alpha"]),
        ("data.train.sise=3", ["data.train.sise", "did you mean `size`"]),
        ("rewards.0.wait=3", ["rewards.0.wait", "did you mean `weight`"]),
        ("optimizer.lr=fast", ["optimizer.lr", "'fast'", "number"]),
        ("seed=1.0", ["seed", "1.0", "integer"]),
        ("sampling.max_tokens=0", ["sampling.max_tokens", "0", "greater than or equal to 1"]),
        ("sampling.temperature=0", ["sampling.temperature", "group_size = 8", "> 0"]),
        ("sampling.top_p=0.9", ["top_p", "policy itself"]),
        ("sampling.min_new_tokens=4", ["min_new_tokens", "policy itself", "evaluation.sampling"]),
        ("sampling.stop_strings=['']", ["sampling.stop_strings.0", "at least 1"]),
        ("sampling.keep_stop_string=true", ["keep_stop_string", "no effect"]),
        ("evaluation.sampling={temperature: 0, top_p: 0.9}", ["top_p", "no effect"]),
        ("evaluation={samples: 2, sampling: {temperature: 0}}", ["samples = 2", "set it to 1"]),
        ("evaluation.sampling.min_new_tokens=300", ["min_new_tokens = 300", "max_tokens = 256"]),
        ("evaluation.sampling.logit_bias={a: 1}", ["evaluation.sampling.logit_bias", "integer"]),
        ("evaluation.sampling.top_p=0", ["evaluation.sampling.top_p", "greater than 0"]),
        ("sampling.max_tokens=5000", ["sampling.max_tokens", "rollout.max_length = 1100"]),
        (
            "data.train={kind: jsonl, path: pyproject.toml, columns: {answer: null}}",
            ["data.train.columns.answer is null", "reward number", "name the column"],
        ),
        ("algorithm.name=ppo", ["algorithm.name", "'ppo'", "'grpo', 'dr_grpo'"]),
        ("algorithm.group_size=1", ["algorithm.group_size = 1", ">= 2", "reinforce_plus_plus"]),
        ("algorithm.clip_high=0.3", ["clip_high = 0.3", "no effect", "one epoch"]),
        ("algorithm.kl_in=reward", ["kl_in = 'reward'", "no effect", "kl_coef is 0"]),
        ("algorithm={name: rloo, scale_rewards: none}", ["scale_rewards", "scale of its own"]),
        (
            "algorithm={name: reinforce_plus_plus, max_sampling_rounds: 2}",
            ["max_sampling_rounds = 2", "compares no groups"],
        ),
        ("algorithm.importance_sampling_cap=1", ["importance_sampling_cap", "greater than 1"]),
        ("algorithm.kl_estimator=k1", ["kl_estimator", "no effect", "kl_coef"]),
        ("algorithm.minibatches=9", ["minibatches = 9", "prompts_per_step"]),
        ("spot={enabled: false, buffer_tokens: 2048}", ["spot.buffer_tokens", "no effect"]),
        ("spot={share: 0.5, deterministic_steps: 4}", ["spot.share", "deterministic_steps"]),
        ("speculation={enabled: false, depth: 3}", ["speculation.depth", "no effect"]),
        ("speculation.budget=3", ["budget = 3", "depth = 4"]),
        (
            "spot={buffer_tokens: 1024, publish_every_steps: 1}",
            ["rollout.max_length = 1100", "spot.buffer_tokens = 1024"],
        ),
        ("data.eval=null", ["evaluation.every", "data.eval is null"]),
        ("data.chat_template=false", ["data.system_prompt", "no effect"]),
        ("data.train.kind=sqlite", ["data.train", "'jsonl', 'json', 'csv', 'parquet', 'hub'"]),
        ("data.train.min_terms=9", ["data.train", "min_terms = 9"]),
        ("data.eval.seed=0", ["data.eval is the same as data.train"]),
        ("rewards=[]", ["rewards", "at least 1"]),
        ("rewards.0.kind=format", ["rewards.0.pattern", "required"]),
        ("rewards.0={kind: format, pattern: '('}", ["rewards.0", "regular expression"]),
        ("rewards.0={kind: python, function: f}", ["rewards.0.function", "pattern"]),
        ("rewards.0.kind=reasoning_gym", ["data.train.kind = reasoning_gym"]),
        ("rewards.1.weight=1", ["rewards.1.weight", "index"]),
        ("name.first=a", ["name", "plain value"]),
        ("model.path=/nowhere", ["model.path", "/nowhere", "ratoon models fetch"]),
        ("drafter.path=/nowhere", ["drafter.path", "/nowhere"]),
        ("data.train={kind: jsonl, path: gone.jsonl}", ["data.train.path", "gone.jsonl"]),
        ("optimizer.lr=.nan", ["optimizer.lr", "finite"]),
        ("seed", ["section.key=value"]),
    ],
)
def test_a_wrong_setting_is_named_with_its_value_and_what_is_allowed(
    tmp_path: Path, override: str, words: list[str]
) -> None:
    values = rl_values(tmp_path)
    values["data"]["system_prompt"] = "Think."
    values["evaluation"] = {"every": 5}
    values["rollout"] = {"max_length": 1100}
    path = write(tmp_path, values)
    load_config(RLConfig, path)
    with pytest.raises(ConfigError) as error:
        load_config(RLConfig, path, [override])
    for word in words:
        assert word in str(error.value)


def test_sft_takes_either_epochs_or_steps(tmp_path: Path) -> None:
    path = write(tmp_path, sft_values(tmp_path))
    with pytest.raises(ConfigError, match="epochs = 1 and steps = 3"):
        load_config(SFTConfig, path, ["steps=3"])
    assert load_config(SFTConfig, path, ["steps=3", "epochs=null"]).steps == 3


def test_yaml_has_no_octal_no_text_numbers_no_dates_and_no_double_keys() -> None:
    values = parse_yaml("{a: 1e-5, b: 010, c: 2026-01-01, d: 1_000, e: .5, f: -3, g: 1.}", "x")
    assert values == {"a": 1e-5, "b": 10, "c": "2026-01-01", "d": 1000, "e": 0.5, "f": -3, "g": 1.0}
    with pytest.raises(ConfigError, match=r"key `a` is given twice.*line 2"):
        parse_yaml("a: 1\na: 2\n", "x")
    for key in ("{a: 1}: 2", "? [a]\n: 2"):
        with pytest.raises(ConfigError, match="x: line 1 has a list or section as a key"):
            parse_yaml(key, "x")
    with pytest.raises(ConfigError, match="not valid YAML"):
        parse_yaml("a: [", "x")


def test_a_missing_or_empty_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.yaml does not exist"):
        load_config(RLConfig, tmp_path / "nothing.yaml")
    with pytest.raises(ConfigError, match="is a directory; give a YAML file"):
        load_config(RLConfig, tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"seed: 1\nname: No\xebl\n")
    with pytest.raises(ConfigError, match=r"not UTF-8 text \(byte 0xeb in line 2\)"):
        load_config(RLConfig, tmp_path / "latin.yaml")
    (tmp_path / "empty.yaml").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"empty\.yaml must hold"):
        load_config(RLConfig, tmp_path / "empty.yaml")


def test_every_field_says_what_it_means() -> None:
    for line in markdown().splitlines():
        if line.startswith("| `"):
            assert line.rstrip("| ").endswith("."), line


def test_the_written_reference_is_current() -> None:
    written = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert written == markdown(), "run `python docs/generate_configuration.py`"


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_recipe_is_valid(recipe: Path) -> None:
    values = parse_yaml(recipe.read_text(encoding="utf-8"), recipe.name)
    verb = recipe.stem.partition("_")[0]
    build_config(CONFIGS.get(verb, RLConfig), values, recipe.name)


@pytest.mark.parametrize(
    ("tuner", "key"),
    [("cost_model", "max_live_batch"), ("cost_model", "hysteresis"), ("bandit", "hysteresis")],
)
def test_limits_that_a_tuner_does_not_know_are_refused(
    tmp_path: Path, tuner: str, key: str
) -> None:
    with pytest.raises(ConfigError, match=f"speculation.{key} would have no effect"):
        build_config(RLConfig, rl_values(tmp_path) | {"speculation": {"tuner": tuner, key: 3}})
