"""One worker process: it decodes, trains the drafter in idle time, and updates the policy.

The worker decides nothing. Between two units of work (a decode step, a micro-step) it reads its
pipe; a call is answered before work goes on.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from ratoon.cluster.drafter_unit import DrafterUnit, new_trainer, restored_trainer
from ratoon.cluster.failures import portable
from ratoon.cluster.heartbeat import start_beating
from ratoon.cluster.messages import (
    Call,
    Failed,
    Generate,
    Responses,
    Returned,
    Shutdown,
    SpotResult,
    TakeDrafter,
)
from ratoon.cluster.rollout_unit import RolloutUnit
from ratoon.cluster.spec import WorkerSpec
from ratoon.cluster.training_unit import TrainingUnit
from ratoon.drafter.model import DrafterConfig
from ratoon.drafter.trainer import DrafterTrainer
from ratoon.models.hf_io import load_decoder, save_decoder
from ratoon.processes import end_with_parent, survive_termination
from ratoon.rollout.native.engine import EngineStats

COLLECTIVE_TIMEOUT_S = 600


def callable_by_driver(method: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a method that a `Call` may name."""
    method.is_callable_by_driver = True  # type: ignore[attr-defined]
    return method


class Worker:
    """Owns one copy of the policy, an engine, a drafter and the trainers."""

    def __init__(self, spec: WorkerSpec, connection: Connection) -> None:
        self.spec = spec
        self._connection = connection
        self._decoder = load_decoder(spec.model.path, dtype=torch.float32)
        self._rollout = RolloutUnit(spec, self._decoder) if spec.rollout is not None else None
        self._drafter: DrafterUnit | None = None
        self._has_abandoned = False
        self._training = None
        if spec.training is not None:
            self._training = TrainingUnit(spec, spec.training, self._decoder)

    def run(self) -> None:
        """Serve until told to shut down, or the driver is gone."""
        while True:
            while not self._has_work() or self._connection.poll(0):
                try:
                    message = self._connection.recv()
                except EOFError:
                    return
                if isinstance(message, Shutdown):
                    return
                self._handle(message)
            self._work_once()

    def _has_work(self) -> bool:
        if self._has_abandoned:
            return False
        decoding = self._rollout is not None and self._rollout.engine.has_work
        return decoding or (self._drafter is not None and self._drafter.is_training)

    def _work_once(self) -> None:
        if self._rollout is not None and self._rollout.engine.has_work:
            self._decode_once(self._rollout)
            return
        assert self._drafter is not None
        self._drafter.run_and_rest(self._connection.poll)

    def _decode_once(self, rollout: RolloutUnit) -> None:
        engine = rollout.engine
        finished = rollout.step()
        if not finished:
            return
        if engine.collect and self._drafter is not None:
            for response in finished:
                self._drafter.add(response)
        completions = tuple(response.completion for response in finished)
        tokens = self._drafter.buffer.tokens if self._drafter is not None else 0
        self._connection.send(Responses(completions, tokens, rollout.take_report()))

    def _handle(self, message: object) -> None:
        if isinstance(message, Generate):
            assert self._rollout is not None
            for request in message.requests:
                self._rollout.engine.submit(request)
        elif isinstance(message, TakeDrafter):
            self._take_drafter(message)
        elif isinstance(message, Call):
            method = getattr(type(self), message.method, None)
            if not getattr(method, "is_callable_by_driver", False):
                raise ValueError(f"a worker has no callable method {message.method!r}")
            assert method is not None
            value = method(self, **message.arguments)
            self._connection.send(Returned(message.method, value))
        else:
            raise TypeError(f"a worker cannot handle {type(message).__name__}")

    def _take_drafter(self, message: TakeDrafter) -> None:
        assert self._drafter is not None
        assert self._rollout is not None
        self._drafter.take(message)
        self._rollout.load_drafter(self._drafter.served)

    @callable_by_driver
    def describe(self) -> dict[str, Any]:
        """What this worker turned out to be able to do."""
        report: dict[str, Any] = {"pid": os.getpid()}
        if self._rollout is not None:
            report["numerics"] = self._rollout.numerics
            invariance = self._rollout.invariance
            report["failures"] = invariance.failures if invariance is not None else ()
        return report

    @callable_by_driver
    def draft_vocabulary_size(self) -> dict[str, int]:
        """Size of the target's vocabulary, and of the draft vocabulary that is to be chosen."""
        assert self.spec.drafting is not None
        settings = self.spec.drafting.drafter
        config = DrafterConfig.for_target(
            self._decoder.config, settings.draft_vocab_size, settings.window
        )
        return {"total": config.vocab_size, "draft": config.draft_vocab_size}

    @callable_by_driver
    def make_drafter(self, vocabulary: Sequence[int]) -> None:
        """Make the learned drafter, with these ids as its draft vocabulary."""
        assert self.spec.drafting is not None
        ids = torch.tensor(vocabulary)
        trainer = new_trainer(self.spec, self._decoder, ids)
        self._use_drafter(trainer, version=0)

    @callable_by_driver
    def restore_drafter(self, folder: Path, version: int) -> None:
        """Continue with the drafter and optimizer that `save_drafter` wrote."""
        assert self.spec.drafting is not None
        self._use_drafter(restored_trainer(self.spec, folder), version)

    def _use_drafter(self, trainer: DrafterTrainer, version: int) -> None:
        assert self.spec.drafting is not None
        assert self._rollout is not None
        self._drafter = DrafterUnit(
            self.spec.drafting,
            trainer,
            folder=self.spec.folder,
            seed=self.spec.seed,
            version=version,
            send=self._connection.send,
        )
        self._rollout.load_drafter(self._drafter.served)

    @callable_by_driver
    def begin_rollout(self, *, speculate: bool, collect: bool) -> None:
        """Prepare for `Generate` messages."""
        assert self._rollout is not None
        collect = collect and self._drafter is not None
        self._rollout.begin(speculate=speculate, collect=collect)
        if collect:
            assert self._drafter is not None
            engine = self._rollout.engine
            self._drafter.begin_step(
                engine.policy_version, self._decoder.head_weight, engine.model.embedding
            )

    @callable_by_driver
    def end_rollout(self) -> EngineStats:
        """What the engine did since the last call."""
        assert self._rollout is not None
        return self._rollout.engine.take_stats()

    @callable_by_driver
    def start_spot(self, version: int) -> float:
        """Train the drafter until `stop_spot`; returns when it began."""
        assert self._drafter is not None
        self._drafter.start(version)
        return time.monotonic()

    @callable_by_driver
    def stop_spot(self) -> SpotResult:
        """End the drafter's training."""
        assert self._drafter is not None
        return self._drafter.stop(time.monotonic)

    @callable_by_driver
    def train_spot_steps(self, version: int) -> SpotResult:
        """Train the drafter for exactly the configured number of steps."""
        assert self._drafter is not None
        self._drafter.start(version)
        while self._drafter.run_once():
            pass
        return self._drafter.stop(time.monotonic)

    @callable_by_driver
    def divergences(self, **arguments: Any) -> list[tuple[float, ...]]:
        """Each token's divergence from the first policy, computed together with the others."""
        assert self._training is not None
        return self._training.divergences(**arguments)

    @callable_by_driver
    def update_policy(self, **arguments: Any) -> dict[str, float]:
        """One RL update on this worker's share of the samples, together with the others."""
        assert self._training is not None
        return self._training.update(**arguments)

    @callable_by_driver
    def train_batch(self, **arguments: Any) -> dict[str, float]:
        """One supervised step on this worker's share of the examples, together with the others."""
        assert self._training is not None
        return self._training.train_batch(**arguments)

    @callable_by_driver
    def evaluate_batch(self, **arguments: Any) -> float:
        """Loss on held-out examples, this worker's share."""
        assert self._training is not None
        return self._training.evaluate_batch(**arguments)

    @callable_by_driver
    def serve_policy(self, version: int) -> None:
        """Decode with the trained weights from here on."""
        assert self._rollout is not None
        self._rollout.serve(self._decoder, version)
        if self._drafter is not None:
            self._rollout.load_drafter(self._drafter.served)

    @callable_by_driver
    def record(self) -> None:
        """Keep the state before the next rollout for a replay."""
        assert self._rollout is not None
        self._rollout.record(self._drafter.served if self._drafter is not None else None)

    @callable_by_driver
    def rewind(self) -> None:
        """Go back to the recorded state."""
        assert self._rollout is not None
        self._rollout.rewind()

    @callable_by_driver
    def save_model(self, folder: Path) -> None:
        """Write the trained policy in Hugging Face format."""
        save_decoder(self._decoder, folder, source=self.spec.model.path)

    @callable_by_driver
    def save_adapter(self, folder: Path) -> None:
        """Write the policy's adapters as PEFT reads them."""
        assert self._training is not None
        self._training.save_adapter(folder, self.spec.model.path)

    @callable_by_driver
    def save_drafter(self, folder: Path) -> None:
        """Write the drafter and its optimizer."""
        assert self._drafter is not None
        self._drafter.save(folder)

    @callable_by_driver
    def save_training(self, folder: Path) -> None:
        """Write the policy's optimizer state."""
        assert self._training is not None
        self._training.save(folder)

    @callable_by_driver
    def load_training(self, folder: Path) -> None:
        """Take over the policy and optimizer that `save_training` wrote."""
        assert self._training is not None
        self._training.load(folder)

    @callable_by_driver
    def save_own(self, folder: Path) -> None:
        """Write what this worker alone knows: what rollouts taught it, and the drafter's data."""
        assert self._rollout is not None
        own = self._own(folder)
        own.mkdir()
        self._rollout.save(own / "rollout")
        if self._drafter is not None:
            self._drafter.save_buffer(own / "buffer")

    @callable_by_driver
    def load_own(self, folder: Path) -> None:
        """Go on from what `save_own` wrote."""
        assert self._rollout is not None
        own = self._own(folder)
        self._rollout.load(own / "rollout")
        if self._drafter is not None:
            self._drafter.load_buffer(own / "buffer")

    def _own(self, folder: Path) -> Path:
        return folder / f"worker_{self.spec.index}"

    @callable_by_driver
    def mark(self) -> None:
        """What comes from here on may be abandoned."""
        assert self._rollout is not None
        self._rollout.mark()
        if self._drafter is not None:
            self._drafter.mark()

    @callable_by_driver
    def abandon(self) -> None:
        """Go back to where `mark` was called, and from here on only answer calls."""
        assert self._rollout is not None
        self._has_abandoned = True
        self._rollout.abandon()
        if self._drafter is not None:
            self._drafter.abandon()


def main(spec: WorkerSpec, connection: Connection) -> None:
    """Entry point of the process: ends with a `Failed` message if anything is raised."""
    survive_termination()
    end_with_parent(lambda: shutil.rmtree(spec.folder, ignore_errors=True))
    start_beating(spec.folder, spec.index)
    try:
        torch.set_num_threads(spec.threads)
        if spec.count > 1:
            torch.distributed.init_process_group(
                "gloo",
                init_method=f"file://{spec.rendezvous}",
                rank=spec.index,
                world_size=spec.count,
                timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
            )
        worker = Worker(spec, connection)
        connection.send(Returned("start", worker.describe()))
        worker.run()
    except BaseException as error:  # noqa: BLE001 - the edge of the process: everything is reported
        failed = Failed(portable(error), traceback.format_exc(), time.monotonic())
        # Without a driver there is nobody to tell, and `end_with_parent` ends this process.
        with contextlib.suppress(OSError):
            connection.send(failed)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
