"""What an evaluation is: everything that decides its responses and grades."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ratoon.errors import ConfigError
from ratoon.evals.tasks import Task
from ratoon.records import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class EvalPlan:
    """Everything that decides the responses and grades of an evaluation.

    Attributes:
        tasks: what to evaluate on.
        data: folder of the tasks' files.
        samples: responses to each prompt.
        ks: the k of pass@k, each at most `samples`.
        params: how responses are drawn.
        max_tokens: longest response; None = the task's own.
        limit: the first prompts of each task only.
        few_shot: worked examples before each prompt.
        system_prompt: instead of the tasks' own instructions.
        chat_template: as in `Tokenizer.prompt`.
        seed: of the noise.
        allow_code: run the code that models write.
    """

    tasks: tuple[Task, ...]
    data: Path | None = None
    samples: int = 1
    ks: tuple[int, ...] = (1,)
    params: SamplingParams = GREEDY
    max_tokens: int | None = None
    limit: int | None = None
    few_shot: int = 0
    system_prompt: str | None = None
    chat_template: bool | None = None
    seed: int = 0
    allow_code: bool = False


def check_plan(plan: EvalPlan) -> None:
    """Refuse what could not be evaluated or would have no effect. Raises: ConfigError."""
    if plan.samples > 1 and plan.params.temperature == 0:
        raise ConfigError(
            f"--samples {plan.samples}: at --temperature 0 all responses to a prompt are equal; "
            "raise the temperature"
        )
    if plan.params.temperature == 0 and plan.params != GREEDY:
        raise ConfigError("--top-p and --top-k have no effect at --temperature 0; remove them")
    if too_large := [k for k in plan.ks if not 1 <= k <= plan.samples]:
        raise ConfigError(
            f"--k {too_large[0]}: must lie between 1 and --samples, which is {plan.samples}"
        )
    if any(task.reward["kind"] == "code" for task in plan.tasks) and not plan.allow_code:
        raise ConfigError(
            "the task mbpp runs code that the model writes (confined: see docs/rewards.md); say "
            "--allow-code-execution to have that"
        )
