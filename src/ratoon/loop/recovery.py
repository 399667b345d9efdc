"""What happens when a worker dies in a rollout: all start anew, and the run goes on.

The policy does not change in a rollout, so any survivor knows it, and what is drawn again under the
same keys is the same. Only what the lost worker alone had learned about guessing is gone.
"""

from __future__ import annotations

import shutil

from ratoon.errors import WorkerDiedError
from ratoon.loop.checkpoints import load_workers, save_workers
from ratoon.loop.run_context import RunContext


def replace_lost(run: RunContext, error: WorkerDiedError) -> None:
    """Replace all workers by new ones that know what the survivors knew before the rollout.

    Raises: `error` if none survived, or too many were lost before.
    """
    survivors, limit = run.workers.survivors(), run.config.workers.max_restarts
    if not survivors or run.restarts >= limit:
        error.add_note(
            f"workers lost and replaced before: {run.restarts} of workers.max_restarts = {limit}, "
            f"survivors: {len(survivors)} of {len(run.workers)}; go on with --resume from the last "
            "checkpoint"
        )
        raise error
    run.restarts += 1
    run.observer.note(f"{error}; all workers start anew, and what was not finished is drawn again")
    folder = run.recovery
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        run.workers.call_busy("abandon")
        save_workers(run, folder, survivors)
        run.workers.restart()
        load_workers(run, folder, survivors)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    run.workers.call_all("mark")
    if run.is_recorded:
        run.workers.call_all("record")
