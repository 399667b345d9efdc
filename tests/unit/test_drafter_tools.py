"""`ratoon drafter`: what it trains is accepted more, and what it measures is what decoding does."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ratoon.cli.main import app
from ratoon.cluster.drafter_unit import new_trainer
from ratoon.config import build_config, resolved_yaml
from ratoon.config.rl import RLConfig
from ratoon.drafter.checkpoint import load_drafter
from ratoon.drafter.learned import LearnedDrafter
from ratoon.drafter.model import default_taps
from ratoon.errors import CheckpointError
from ratoon.loop.setup import check_drafter, rl_specs
from ratoon.models.hf_io import load_decoder
from ratoon.models.tiny import make_tiny_model
from ratoon.models.tokenizer import Tokenizer
from ratoon.observe.completions import stored, write_completions
from ratoon.observe.run_folder import RunFolder
from ratoon.offline.material import Given, is_held_out, read_material
from ratoon.offline.recorded import Source, forced, record
from ratoon.offline.responses import DEPTH, Counts, Responses, wide_tree
from ratoon.records import Prompt, Request, SamplingParams
from ratoon.rollout.native.drafting import Drafting
from ratoon.rollout.native.engine import Finished, RolloutEngine
from ratoon.rollout.native.forward import InferenceModel
from ratoon.speculation.calibration import Calibration
from ratoon.speculation.proposer import CoupledProposer
from ratoon.speculation.tuner import RuleTuner

# Cold enough that a random model says something that can be learned.
TEMPERATURE = 0.3
LETTERS = "abcdefghijklmnop"
NODES, STEPS = 8, 40


def sharpen(model: Path) -> None:
    """Let layers say more than the embedding does, so that there is something to learn."""
    weights = load_file(model / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight *= 4.0
    save_file(weights, model / "model.safetensors", {"format": "pt"})


class World:
    """A tiny model and two steps of a run of it."""

    def __init__(self, folder: Path) -> None:
        shape = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 4}
        self.model = make_tiny_model(folder / "model", characters=LETTERS, **shape)
        wider = shape | {"hidden_size": 64}
        sharpen(self.model)
        self.other = make_tiny_model(folder / "other", characters=LETTERS, **wider)
        self.tokenizer = Tokenizer.load(self.model)
        decoder = load_decoder(self.model)
        texts = [f"{a}{b}{a}" for a in LETTERS[:8] for b in LETTERS[:8]]
        self.source = Source(
            decoder=decoder,
            model=InferenceModel(
                decoder, num_positions=64, dtype=torch.float32, taps=default_taps(4)
            ),
            prompts=[self.tokenizer.encode(text) for text in texts],
            eos_ids=self.tokenizer.eos_ids,
            vocab_limit=self.tokenizer.vocab_size,
            max_tokens=28,
        )
        self.finished = record(self.source, range(len(texts)), TEMPERATURE)
        self.run = RunFolder(folder / "run")
        self.run.completions.mkdir(parents=True)
        self.run.config.write_text(resolved_yaml(self.config()), encoding="utf-8")
        rows = [
            stored(
                item.completion,
                Prompt("letters", row, texts[row], item.completion.prompt_ids, None, {}),
                response="",
                reward=0.0,
            )
            for row, item in enumerate(self.finished)
        ]
        for step, part in ((1, rows[:32]), (2, rows[32:])):
            write_completions(self.run.completions, "train", step, part)

    def config(self, model: Path | None = None, **settings: Any) -> RLConfig:
        values = {
            "name": "run",
            "model": {"path": str(model or self.model), "dtype": "float32"},
            "data": {"train": {"kind": "arithmetic", "size": 8, "seed": 0}},
            "rewards": [{"kind": "number"}],
            "sampling": {"temperature": TEMPERATURE, "max_tokens": 28},
            "workers": {"count": 1},
        }
        return build_config(RLConfig, values | settings)

    @property
    def held_out(self) -> list[Finished]:
        return [item for item in self.finished if is_held_out(item.completion.prompt_ids)]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("drafter"))


def ratoon(*arguments: object) -> int:
    """Exit code of `ratoon drafter`."""
    with pytest.raises(SystemExit) as left:
        app(args=["drafter", *map(str, arguments)])
    assert isinstance(left.value.code, int)
    return left.value.code


@pytest.fixture(scope="module")
def drafters(world: World, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Drafters by the steps that they were trained."""
    folder = tmp_path_factory.mktemp("drafters")
    for steps in (1, STEPS):
        output = folder / str(steps)
        options = ("--rollouts", world.run.path, "--steps", steps, "--output", output)
        assert ratoon("train", world.model, *options) == 0
    return {steps: folder / str(steps) for steps in (1, STEPS)}


def measured(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    capsys.readouterr()
    assert ratoon("eval", *arguments, "--json") == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_training_on_rollouts_raises_acceptance_on_held_out_ones(
    world: World, drafters: dict[int, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--rollouts", world.run.path, "--temperatures", TEMPERATURE, "--nodes", NODES)
    before, after = (
        measured(capsys, world.model, drafters[steps], *options)["rows"] for steps in (1, STEPS)
    )
    for new, trained in zip(before, after, strict=True):
        assert trained["stored"]
        assert trained["responses"] == len(world.held_out)
        assert trained["tokens"] == sum(len(i.completion.token_ids) for i in world.held_out)
        assert trained["tokens_per_verification"] > 1.05 * new["tokens_per_verification"]
        assert drafts_accepted(trained) > 1.05 * drafts_accepted(new)
        assert trained["low"] <= trained["tokens_per_verification"] <= trained["high"]


def drafts_accepted(row: dict[str, Any]) -> float:
    """Drafts accepted in a step: what the shares say that are stated depth by depth."""
    shares = [share or 0.0 for share in row["accepted"]]
    return sum(math.prod(shares[: depth + 1]) for depth in range(DEPTH))


def decoded(world: World, drafter: Path, item: Finished) -> list[int]:
    """Tokens of each step of the engine that really speculates; it gives the recorded ones."""
    loaded, source, completion = load_drafter(drafter), world.source, item.completion
    learned = LearnedDrafter(
        loaded.config,
        num_rows=1,
        num_positions=64,
        num_tree_slots=DEPTH * DEPTH,
        dtype=source.model.dtype,
    )
    drafting = Drafting(
        num_rows=1, vocab_limit=source.vocab_limit, max_nodes=NODES + 1, learned=learned
    )
    drafting.load(loaded, source.model.embedding)
    engine = RolloutEngine(
        source.model,
        max_rows=1,
        max_length=source.max_length,
        vocab_limit=source.vocab_limit,
        drafting=drafting,
        tuner=RuleTuner(lambda num_live: replace(wide_tree(NODES), use_suffix=False)),
        confirm=False,
    )
    params = SamplingParams(temperature=TEMPERATURE)
    ends = (source.max_tokens, source.eos_ids, params)
    engine.submit(Request(completion.key, completion.prompt_ids, *ends))
    finished: list[Finished] = []
    gained = []
    while engine.has_work:
        finished += engine.step()
        stats = engine.take_stats()
        gained += [stats.tokens] * stats.speculative_steps
    assert [one.completion.token_ids for one in finished] == [completion.token_ids]
    return gained


def walked(world: World, drafter: Path, item: Finished) -> Counts:
    responses = Responses(world.source, load_drafter(drafter), [item], TEMPERATURE)
    return responses.walk(responses.tree_step(CoupledProposer, wide_tree(NODES), Calibration()))


def test_a_walk_counts_what_the_engine_takes_that_speculates(
    world: World, drafters: dict[int, Path]
) -> None:
    """To the end of each response: as many steps, and as many drafts accepted at each depth."""
    depths = torch.arange(1, DEPTH + 1)
    for item in world.held_out[:8]:
        gained = decoded(world, drafters[STEPS], item)
        counts = walked(world, drafters[STEPS], item)
        assert counts.steps.tolist() == [len(gained)]
        assert counts.tokens.tolist() == [sum(gained)]
        if item.completion.finish == "length":
            # The target adds the last token of each step; of the response's last none is drafted.
            tokens = torch.tensor(gained)
            left = tokens.flip(0).cumsum(0).flip(0)
            useful = torch.minimum(tokens, left - 1)
            assert counts.accepted[0].tolist() == (tokens[:, None] > depths).sum(0).tolist()
            assert counts.tried[0].tolist() == (useful[:, None] >= depths).sum(0).tolist()


def test_stored_responses_get_the_states_that_decoding_saw(world: World) -> None:
    again = forced(world.source, [item.completion for item in world.finished[:9]])
    for one, other in zip(again, world.finished, strict=False):
        assert one.features is not None
        assert other.features is not None
        assert one.hidden is not None
        assert other.hidden is not None
        torch.testing.assert_close(one.features, other.features)
        torch.testing.assert_close(one.hidden, other.hidden)


def test_no_prompt_is_both_trained_on_and_measured_on(world: World) -> None:
    given = Given("run", "rollouts", world.run.path)
    sides = [
        read_material(given, world.tokenizer, held_out=side, limit=99) for side in (False, True)
    ]
    trained, kept = (set(side.prompts) for side in sides)
    assert not trained & kept
    assert trained | kept == {item.completion.prompt_ids for item in world.finished}
    assert 0.1 < len(kept) / len(world.finished) < 0.3
    # The newest first.
    newest = read_material(given, world.tokenizer, held_out=False, limit=3).prompts
    later = [item.completion.prompt_ids for item in world.finished[32:]]
    assert list(newest) == [prompt for prompt in later if not is_held_out(prompt)][:3]


def test_a_run_drafts_with_it_and_refuses_that_of_another_model(
    world: World, drafters: dict[int, Path], tmp_path: Path
) -> None:
    settings = {"drafter": {"path": str(drafters[STEPS])}}
    config = world.config(**settings)
    check_drafter(config)
    spec = rl_specs(config, world.tokenizer, tmp_path)[0]
    trainer = new_trainer(spec, load_decoder(world.model), torch.arange(16))
    loaded = load_drafter(drafters[STEPS]).state_dict()
    assert all(torch.equal(v, loaded[k]) for k, v in trainer.drafter.state_dict().items())
    with pytest.raises(CheckpointError, match="of another model: target_hidden_size 32 instead"):
        check_drafter(world.config(world.other, **settings))


def test_sources_are_told_apart_and_training_goes_on(
    world: World, drafters: dict[int, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = tmp_path / "asked.jsonl"
    lines = [json.dumps({"prompt": a + b}) for a in LETTERS[:6] for b in LETTERS[:6]]
    asked.write_text("\n".join(lines), encoding="utf-8")
    more = tmp_path / "more"
    options = ("--prompts", asked, "--max-tokens", 12, "--responses", 8)
    begun = ("--from", drafters[1], "--steps", 2, "--output", more)
    assert ratoon("train", world.model, *options, *begun) == 0
    assert json.loads((more / "trainer.json").read_text())["step"] == 3
    found = measured(
        capsys,
        world.model,
        more,
        *options,
        "--rollouts",
        f"run={world.run.path}",
        "--temperatures",
        f"0,{TEMPERATURE}",
    )
    rows = found["rows"]
    named = [(row["source"], row["temperature"], row["stored"]) for row in rows[::2]]
    assert named == [
        ("run", 0.0, False),
        ("run", TEMPERATURE, True),
        ("asked.jsonl", 0.0, False),
        ("asked.jsonl", TEMPERATURE, False),
    ]
    assert [row["way"] for row in rows] == ["tree", "chain"] * 4
    assert all(row["entropy_per_token"] == 0 for row in rows if row["temperature"] == 0)
    assert ratoon("eval", world.model, more, *options, "--temperatures", 1) == 0
    table = capsys.readouterr().out
    assert "accepted by depth" in table
    assert "asked.jsonl  chain" in table


def test_mistakes_end_with_a_message_and_exit_code_2(
    world: World, drafters: dict[int, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = RunFolder(tmp_path / "empty")
    empty.path.mkdir()
    empty.config.write_text(resolved_yaml(world.config()), encoding="utf-8")
    run, drafter = world.run.path, drafters[STEPS]
    new = ("--output", tmp_path / "new")
    train, evaluate = ("train", world.model), ("eval", world.model)
    of_run = ("--rollouts", run)
    cases: list[tuple[tuple[object, ...], str]] = [
        ((*train, *of_run, "--output", drafter), "nothing is overwritten"),
        ((*train, *new), "give --rollouts, --prompts or --text"),
        ((*train, *new, "--rollouts", tmp_path), "holds no run"),
        ((*train, *new, "--rollouts", empty.path), "holds no training rollouts"),
        ((*train, *new, *of_run, *of_run), "a name of its own"),
        ((*train, *new, *of_run, "--max-tokens", 9), "--max-tokens 9 would have no effect"),
        ((*train, *new, *of_run, "--from", drafter, "--draft-vocab-size", 16), "no effect"),
        ((*train, *new, *of_run, "--from", tmp_path), "is missing"),
        (("train", world.other, *new, *of_run, "--from", drafter), "of another model"),
        (("eval", world.other, drafter, *of_run), "of another model"),
        ((*evaluate, drafter, *of_run, "--max-tokens", 9999), "lower --max-tokens"),
        ((*evaluate, drafter, *of_run, "--temperatures", "-1"), "must lie from 0 to 10"),
    ]
    for arguments, words in cases:
        assert ratoon(*arguments) == 2, arguments
        assert words in capsys.readouterr().err, arguments
    assert not (tmp_path / "new").exists()
