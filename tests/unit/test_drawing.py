"""Drawing a step's groups: in data order whatever arrives first, and never without end."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from ratoon.clock import ManualClock
from ratoon.cluster.messages import Generate, Responses
from ratoon.config import build_config
from ratoon.config.rl import RLConfig
from ratoon.coordinator.memory import PlannerMemory
from ratoon.coordinator.pace import Report
from ratoon.coordinator.versions import VersionLedger
from ratoon.loop.checkpoints import latest_checkpoint, restore, save_checkpoint
from ratoon.loop.drawing import Drawn
from ratoon.loop.learning import make_samples, with_advantages
from ratoon.loop.order import next_prompts
from ratoon.loop.rl_step import draw_groups
from ratoon.loop.run_context import RunContext
from ratoon.models.decoder import Decoder, DecoderConfig
from ratoon.observe.observer import Observer
from ratoon.observe.run_folder import RunFolder
from ratoon.records import Completion, DrawKey, Prompt, Request
from ratoon.rl.dynamic_sampling import DynamicSampling
from ratoon.rl.rewards.pool import RewardResult
from ratoon.rollout.native.engine import EngineStats
from ratoon.stopping import Stop
from ratoon.training.core import TrainerCore
from ratoon.training.optimizer import OptimizerSettings
from ratoon.training.policy_trainer import PolicyLossSettings, PolicyTrainer
from ratoon.training.samples import Sample

PROMPTS = [Prompt("data", row, f"prompt {row}", (1, 2 + row)) for row in range(12)]
Score = Callable[[DrawKey], float]


class Workers:
    """Two workers whose responses arrive one by one, in an order of chance, as time goes by."""

    def __init__(self, arrival: int, clock: ManualClock) -> None:
        self._source = random.Random(arrival)
        self._clock = clock
        self._waiting: list[tuple[int, Request]] = []
        self._version = 0

    def __len__(self) -> int:
        return 2

    def call_all(self, method: str, **arguments: object) -> list[object]:
        if method == "serve_policy":
            self._version = cast(int, arguments["version"])
        return [EngineStats(), EngineStats()]

    def call_some(self, indices: Sequence[int], method: str, **arguments: object) -> None:
        """What each alone knows is not this one's business."""

    def call(self, index: int, method: str, **arguments: object) -> None:
        """Saving and loading are not this one's business."""

    def send(self, index: int, message: object) -> None:
        assert isinstance(message, Generate)
        self._waiting += [(index, request) for request in message.requests]

    def receive(self, timeout_s: float | None = None) -> list[tuple[int, object]]:
        self._clock.advance(self._source.random())
        place = self._source.randrange(len(self._waiting))
        index, request = self._waiting.pop(place)
        key = request.key
        said = random.Random(f"{key.row}/{key.sample}/{key.attempt}")
        token_ids = tuple(said.randrange(20) for _ in range(said.randint(1, 9)))
        logprobs = tuple(-said.randrange(64) / 16 for _ in token_ids)
        done = Completion(key, request.prompt_ids, token_ids, logprobs, "stop", self._version)
        return [(index, Responses((done,), 0, Report()))]


class Pool:
    """Rewards that come all at the end, in an order of chance."""

    def __init__(self, arrival: int, score: Score) -> None:
        self._source = random.Random(arrival)
        self._score = score
        self._results: list[RewardResult] = []

    def submit(self, key: DrawKey, *_: object) -> None:
        self._results.append(RewardResult(key, self._score(key), {}, None, 0.0))

    def poll(self) -> list[RewardResult]:
        return []

    def drain(self) -> list[RewardResult]:
        self._source.shuffle(self._results)
        results, self._results = self._results, []
        return results


class Letters:
    eos_ids = (0,)

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(97 + token) for token in ids)


def make_run(score: Score, folder: Path, arrival: int = 0, **algorithm: Any) -> RunContext:
    config = build_config(
        RLConfig,
        {
            "name": "run",
            "model": {"path": str(folder)},
            "data": {"train": {"kind": "arithmetic"}},
            "rewards": [{"kind": "number"}],
            "algorithm": {"name": "dapo", "prompts_per_step": 3, "group_size": 2, **algorithm},
            "spot": {"enabled": False},
        },
    )
    clock = ManualClock()
    return RunContext(
        config,
        cast(Any, Letters()),
        PROMPTS,
        (),
        cast(Any, Workers(arrival, clock)),
        cast(Any, Pool(arrival, score)),
        Observer(clock=clock),
        VersionLedger(),
        PlannerMemory(2),
        Stop(),
        folder,
    )


def rows(drawn: Drawn) -> list[list[int]]:
    """The data rows that each round drew, in order."""
    return [[group[0].key.row for group in part.groups] for part in drawn.rounds]


def learned_rows(drawn: Drawn) -> list[int]:
    return [completion.key.row for completion in drawn.learned()[0]][::2]


def learned_samples(run: RunContext, drawn: Drawn) -> list[Sample]:
    completions, rewards = drawn.learned()
    samples = make_samples(completions, run.config.algorithm)
    return with_advantages(samples, rewards, run.config.algorithm)


def test_groups_that_teach_nothing_are_replaced_by_the_next_prompts_in_data_order(
    tmp_path: Path,
) -> None:
    order = [prompt.row for prompt in next_prompts(PROMPTS, 0, 12, 0)]
    dull = {order[1], order[2], order[3]}
    run = make_run(lambda key: key.row in dull or key.sample, tmp_path)
    drawn = draw_groups(run, 1)
    assert rows(drawn) == [order[:3], order[3:5], order[5:6]]
    assert learned_rows(drawn) == [order[0], order[4], order[5]]
    assert {c.key.attempt for part in drawn.rounds for c in part.rollout.completions} == {0, 1, 2}
    assert drawn.metrics() == {
        "reward/constant_groups_frac": 0.5,
        "sampling/rounds": 3,
        "sampling/resampled_groups": 3,
        "sampling/constant_groups": 0,
    }
    # Everything drawn is kept for the record, what is not learned from too.
    assert len(drawn.records()) == len(drawn.results()) == 12


def test_the_next_step_goes_on_behind_what_was_drawn(tmp_path: Path) -> None:
    run = make_run(lambda key: key.row % 2 or key.sample, tmp_path)
    seen: list[int] = []
    for step in (1, 2):
        drawn = draw_groups(run, step)
        run.prompts_drawn += sum(len(part.groups) for part in drawn.rounds)
        seen += [row for part in rows(drawn) for row in part]
    assert seen == [prompt.row for prompt in next_prompts(PROMPTS, 0, len(seen), 0)]


def test_a_resumed_run_goes_on_where_in_the_data_it_was(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", config_yaml="", provenance={})
    run, resumed = (make_run(lambda key: key.sample, tmp_path) for _ in range(2))
    run.prompts_drawn = 7
    save_checkpoint(run, folder, step=2, keep=1)
    checkpoint = latest_checkpoint(folder)
    assert checkpoint is not None
    restore(resumed, checkpoint)
    assert rows(draw_groups(resumed, 3)) == [[p.row for p in next_prompts(PROMPTS, 7, 3, 0)]]


def test_rewards_that_never_differ_end_after_the_last_round_with_a_full_step(
    tmp_path: Path,
) -> None:
    run = make_run(lambda key: 1.0, tmp_path, max_sampling_rounds=4)
    drawn = draw_groups(run, 1)
    order = [prompt.row for prompt in next_prompts(PROMPTS, 0, 12, 0)]
    assert rows(drawn) == [order[:3], order[3:6], order[6:9], order[9:]]
    assert learned_rows(drawn) == order[:3]
    assert drawn.metrics()["sampling/constant_groups"] == 3
    assert all(sample.advantage == 0 for sample in learned_samples(run, drawn))


def test_a_prompt_that_returns_within_a_step_gets_other_noise_and_a_group_of_its_own(
    tmp_path: Path,
) -> None:
    def score(key: DrawKey) -> float:
        return key.sample % 2 if key.attempt or key.sample < 2 else 1.0

    run = make_run(score, tmp_path)
    run.train = PROMPTS[:1]
    drawn = draw_groups(run, 1)
    keys = [c.key for part in drawn.rounds for c in part.rollout.completions]
    assert len(set(keys)) == len(keys) == 2 * (3 + 2)
    assert len({sample.group for sample in learned_samples(run, drawn)}) == 3


@pytest.mark.parametrize(
    "algorithm",
    [
        {"name": "dapo"},
        {"name": "gspo", "max_sampling_rounds": 3},
        {"name": "rloo"},
        {"name": "reinforce_plus_plus", "group_size": 1, "prompts_per_step": 9},
        {"name": "raft"},
    ],
    ids=lambda values: values["name"],
)
def test_what_arrives_first_changes_no_bit(tmp_path: Path, algorithm: dict[str, Any]) -> None:
    def score(key: DrawKey) -> float:
        return random.Random(f"{key.row}/{key.sample}/{key.attempt}").choice([0.0, 0.0, 1.0])

    seen = []
    for arrival in range(4):
        run = make_run(score, tmp_path, arrival, **algorithm)
        drawn = draw_groups(run, 1)
        samples = learned_samples(run, drawn)
        seen.append((samples, [part.records for part in drawn.rounds], trained(samples)))
    for samples, records, parameters in seen[1:]:
        assert samples == seen[0][0]
        assert records == seen[0][1]
        assert all(map(torch.equal, parameters, seen[0][2]))
    assert any(any(sample.advantages) for sample in seen[0][0])


def trained(samples: Sequence[Sample]) -> list[torch.Tensor]:
    """Parameters of a tiny policy after learning from the samples."""
    torch.manual_seed(0)
    config = DecoderConfig(
        family="llama", vocab_size=20, hidden_size=16, intermediate_size=16, num_layers=1,
        num_heads=2, num_kv_heads=2, head_dim=8,
    )  # fmt: skip
    core = TrainerCore(Decoder(config), OptimizerSettings(lr=1e-2), compute_dtype=torch.float32)
    PolicyTrainer(core, PolicyLossSettings()).update(samples, epochs=2)
    return [parameter.detach().clone() for parameter in core.decoder.parameters()]


def test_a_step_takes_what_teaches_first_and_fills_up_in_data_order() -> None:
    sampling = DynamicSampling(wanted=3, max_rounds=2)
    assert sampling.missing == 3
    sampling.add([[1, 1], [0, 1], [0, 0]])
    assert sampling.missing == 2
    sampling.add([[1, 1], [1, 0]])
    assert sampling.missing == 0
    assert sampling.chosen() == [0, 1, 4]
    complete = DynamicSampling(wanted=2, max_rounds=9)
    complete.add([[0, 1], [1, 0]])
    assert complete.missing == 0
    assert complete.rounds == 1
