"""Recipes of drafters: valid, comparable, stored one by one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from bench_tiny import tiny_source

from ratoon.bench import recipes as study
from ratoon.bench.corpus import Corpus
from ratoon.bench.recipes import recipes, run
from ratoon.errors import ConfigError
from ratoon.offline.recorded import record, select_taps
from ratoon.offline.training import Recipe

CORPUS = Corpus(responses=4, train_responses=8, steps=6)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a study says; it is of a tiny model and two recipes."""
    monkeypatch.setattr(study, "open_source", lambda *args, **options: tiny_source())

    def few(num_layers: int, steps: int) -> dict[str, Recipe]:
        base = Recipe(steps=steps, taps=(1, 2, 3), window=32)
        return {"default": base, "early": replace(base, taps=(0, 1, 2))}

    monkeypatch.setattr(study, "recipes", few)
    return []


def test_every_recipe_changes_the_default_and_sees_as_many_tokens() -> None:
    found = recipes(num_layers=30, steps=300)
    base = found["default"]
    assert len({str(recipe) for recipe in found.values()}) == len(found)
    for recipe in found.values():
        assert recipe.steps * recipe.options.batch_tokens == base.steps * base.options.batch_tokens
        assert recipe.taps is not None
        assert list(recipe.taps) == sorted(set(recipe.taps))


def test_finished_recipes_are_not_trained_again(
    said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run(Path("tiny"), tmp_path, CORPUS, names=["early"], say=said.append)
    assert [row["recipe"] for row in first["rows"]] == ["early"]
    both = run(Path("tiny"), tmp_path, CORPUS, say=said.append)
    assert {row["recipe"] for row in both["rows"]} == {"default", "early"}
    assert sum(text.startswith("early:") for text in said) == 1
    values = [row["tokens_per_verification"] for row in both["rows"]]
    assert values == sorted(values, reverse=True)
    assert min(values) >= 1.0
    monkeypatch.setattr(study, "train", None)
    assert run(Path("tiny"), tmp_path, CORPUS)["rows"] == both["rows"]


def test_an_unknown_recipe_is_refused(said: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nonsense"):
        run(Path("tiny"), tmp_path, CORPUS, names=["nonsense"])
    assert not said


def test_states_of_some_layers_are_those_recorded_for_them_alone() -> None:
    source = tiny_source()
    wide = record(source.with_taps((0, 1, 2, 3)), range(2), 1.0)
    narrow = record(source.with_taps((0, 2, 3)), range(2), 1.0)
    for one, other in zip(select_taps(wide, (0, 1, 2, 3), (0, 2, 3)), narrow, strict=True):
        assert one.features is not None
        assert other.features is not None
        assert one.features.equal(other.features)
        assert one.completion == other.completion
