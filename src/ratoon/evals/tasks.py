"""The tasks of `ratoon eval`: where their rows lie, how they are asked and graded."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ratoon.data.arithmetic import Split
from ratoon.data.prompts import PromptStyle, load_prompts, prompt_ids
from ratoon.data.rows import open_rows
from ratoon.errors import ConfigError, DataError
from ratoon.models.tokenizer import Tokenizer
from ratoon.records import Prompt

_SPLIT: Split = "eval"
_NUMBER = 'Solve the problem step by step. End with a line "Answer:" and the number.'
_BOXED = r"Solve the problem step by step. Put the final answer in \boxed{}."
_CODE = "Write the function in Python, in one fenced code block."
_TAGGED = 'Solve the problem. End with a line "Answer:" and the answer.'
GYM = "reasoning-gym:"
_GYM_SIZE, _GYM_SEED = 200, 2024


@dataclass(frozen=True, slots=True)
class Task:
    """One task.

    Attributes:
        name: as the command line names it; prompts' uids are (name, row).
        source: `kind` and arguments of the rows, as in a configuration; a `path` is relative to the
            folder of data.
        instruction: system message that says how to answer.
        reward: how a response is graded, 1 or 0, as in a configuration.
        max_tokens: longest response unless another is asked for.
        shots: file of worked examples with the columns `question` and `answer`, or None.
    """

    name: str
    source: Mapping[str, Any]
    instruction: str
    reward: Mapping[str, Any]
    max_tokens: int = 512
    shots: str | None = None


def _file(kind: str, path: str, prompt: str, answer: str | None) -> dict[str, Any]:
    return {"kind": kind, "path": path, "columns": {"prompt": prompt, "answer": answer}}


_SVAMP = _file("json", "svamp/SVAMP.json", "", "Answer")
_SVAMP["columns"]["prompt"] = ("Body", "Question")
_TASKS = (
    Task(
        "gsm8k",
        _file("jsonl", "gsm8k/test.jsonl", "question", "answer"),
        _NUMBER,
        {"kind": "number"},
        shots="gsm8k/train.jsonl",
    ),
    Task(
        "math500",
        _file("jsonl", "math/math500.jsonl", "problem", "answer"),
        _BOXED,
        {"kind": "math_verify"},
        max_tokens=1024,
    ),
    Task("svamp", _SVAMP, _NUMBER, {"kind": "number"}, max_tokens=256),
    Task(
        "multiarith",
        _file("jsonl", "mawps/multiarith.jsonl", "input", "target"),
        _NUMBER,
        {"kind": "number"},
        max_tokens=256,
    ),
    Task(
        "mbpp",
        _file("json", "code/mbpp_sanitized_399.json", "instruction", None),
        _CODE,
        {"kind": "code", "tests": ("test_imports", "test_list")},
    ),
)
TASKS: Mapping[str, Task] = {task.name: task for task in _TASKS}


def find_task(name: str) -> Task:
    """The task of this name. Raises: ConfigError, with those there are."""
    if name.startswith(GYM) and len(name) > len(GYM):
        source = {
            "kind": "reasoning_gym",
            "name": name.removeprefix(GYM),
            "size": _GYM_SIZE,
            "seed": _GYM_SEED,
        }
        return Task(name, source, _TAGGED, {"kind": "reasoning_gym"})
    if name not in TASKS:
        raise ConfigError(f"--tasks {name!r}: must be one of {', '.join(TASKS)}, {GYM}NAME")
    return TASKS[name]


def load_task(
    task: Task,
    folder: Path | None,
    tokenizer: Tokenizer,
    *,
    limit: int | None = None,
    few_shot: int = 0,
    style: PromptStyle | None = None,
) -> list[Prompt]:
    """The task's prompts, with so many worked examples before each.

    Args:
        task: which.
        folder: where the tasks' files lie.
        tokenizer: the model's.
        limit: the first rows only.
        few_shot: examples, from the task's training file on.
        style: how prompts are shown; by default with the task's own instruction where the model
            has a chat template.

    Raises:
        ConfigError: no folder was given, or the task has no worked examples.
        DataError: a file is missing or damaged.
        CapabilityError: a package that the task needs is missing.
    """
    style = style or default_style(task, tokenizer)
    source = dict(task.source)
    if "path" in source:
        source["path"] = _found(task, folder, str(source["path"]))
        source["limit"] = limit
    elif limit is not None:
        source["size"] = min(limit, source["size"])
    prompts = [
        replace(prompt, dataset=task.name)
        for prompt in load_prompts(source, tokenizer, split=_SPLIT, style=style)
    ]
    if not few_shot:
        return prompts
    shots = _worked_examples(task, folder, few_shot)
    return [_after(prompt, shots, tokenizer, style) for prompt in prompts]


def default_style(task: Task, tokenizer: Tokenizer) -> PromptStyle:
    """The task's instruction as system message, where there is a chat template to show it."""
    return PromptStyle(task.instruction if tokenizer.has_chat_template else None)


def _found(task: Task, folder: Path | None, name: str) -> Path:
    if folder is None:
        raise ConfigError(f"the task {task.name} is read from a file; name its folder by --data")
    path = folder / name
    if not path.is_file():
        raise DataError(
            f"{path}: no such file, from which the task {task.name} is read; docs/evaluation.md "
            "names the files that --data must hold"
        )
    return path


def _worked_examples(task: Task, folder: Path | None, count: int) -> list[tuple[str, str]]:
    if task.shots is None:
        having = ", ".join(task.name for task in TASKS.values() if task.shots)
        raise ConfigError(
            f"--few-shot {count}: the task {task.name} has no worked examples; only {having} has"
        )
    path = _found(task, folder, task.shots)
    rows = open_rows("jsonl", {"path": path, "limit": count})
    return [(row["question"], _solution(row["answer"])) for _, row in rows.rows]


def _solution(answer: str) -> str:
    """GSM8K's worked answer in plain words, without its calculator's marks."""
    return re.sub(r"<<.*?>>", "", answer).replace("####", "Answer:")


def _after(
    prompt: Prompt, shots: Sequence[tuple[str, str]], tokenizer: Tokenizer, style: PromptStyle
) -> Prompt:
    where = f"{prompt.dataset}, row {prompt.row}"
    if style.chat_template is False or not tokenizer.has_chat_template:
        text = "\n\n".join([*(f"{asked}\n{told}" for asked, told in shots), prompt.text + "\n"])
        return replace(prompt, ids=prompt_ids(text, tokenizer, style, where))
    turns = [
        {"role": role, "content": words}
        for shot in shots
        for role, words in zip(("user", "assistant"), shot, strict=True)
    ]
    conversation = (*turns, {"role": "user", "content": prompt.text})
    return replace(prompt, ids=prompt_ids(conversation, tokenizer, style, where))
