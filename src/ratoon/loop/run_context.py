"""What every part of an RL run works with."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ratoon.cluster.local import LocalWorkers
from ratoon.config.rl import RLConfig
from ratoon.coordinator.memory import PlannerMemory
from ratoon.coordinator.versions import VersionLedger
from ratoon.models.tokenizer import Tokenizer
from ratoon.observe.observer import Observer
from ratoon.records import Prompt
from ratoon.rl.rewards.pool import RewardPool
from ratoon.stopping import Stop


@dataclass(slots=True)
class RunContext:
    """What a run works with; `steps_done` are complete.

    `recovery` is a folder for what survives a lost worker, `restarts` counts how often one was
    replaced, `is_recorded` says that workers keep the state before the last step for a replay.
    `prompts_drawn` is its place in the training data; `notes` are for whoever reads its summary.
    """

    config: RLConfig
    tokenizer: Tokenizer
    train: Sequence[Prompt]
    held_out: Sequence[Prompt]
    workers: LocalWorkers
    pool: RewardPool
    observer: Observer
    ledger: VersionLedger
    planner_memory: PlannerMemory
    stop: Stop
    recovery: Path
    has_drafter: bool = False
    restarts: int = 0
    is_recorded: bool = False
    steps_done: int = 0
    prompts_drawn: int = 0
    notes: tuple[str, ...] = ()
    marked_memory: PlannerMemory | None = None

    def mark(self) -> None:
        """What rollouts teach from here on is given up if a stop cuts them short."""
        self.workers.call_all("mark")
        self.marked_memory = copy.deepcopy(self.planner_memory)

    def abandon(self) -> None:
        """Go back to what was known at `mark`; the workers only answer calls from here on."""
        self.workers.call_busy("abandon")
        if self.marked_memory is not None:
            self.planner_memory = self.marked_memory
