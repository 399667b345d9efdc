"""The three ways in which a reward function may be written, told apart by its parameters.

- ours: three positional parameters, `(response, answer, fields) -> float`;
- TRL's: `(prompts, completions, **columns) -> list[float]`, called with lists of one;
- verl's: `(data_source, solution_str, ground_truth, extra_info) -> float | dict`.

Each may be `async`. TRL's and verl's are known by the names `completions`, `solution_str` and
`ground_truth`, whatever the order; functions of both, or of neither with other than three
parameters, are refused.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from ratoon.errors import ConfigError, RewardError
from ratoon.records import Prompt

# What comes back is checked where it is summed.
Judge = Callable[[Prompt, str], Any]
Function = Callable[..., Any]

_TRL, _VERL = frozenset({"completions"}), frozenset({"solution_str", "ground_truth"})
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def judge_of(function: Function, target: str) -> Judge:
    """How `function` judges one response; `target` names it in errors.

    Raises:
        ConfigError: it is written in none of the three ways, or in two.
    """
    call = _synchronous(function)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        # Some functions written in C do not tell.
        return _ours(call)
    names = {name for name, p in signature.parameters.items() if p.kind in _BY_NAME}
    if names & _TRL and names & _VERL:
        raise ConfigError(
            f"Reward function {target!r} takes {signature}: `completions` is TRL's and "
            f"{' and '.join(f'`{name}`' for name in sorted(names & _VERL))} verl's; keep to one."
        )
    if names & _TRL:
        return _trl(call, signature, target)
    if names & _VERL:
        return _verl(call, signature, target)
    try:
        signature.bind("response", "answer", {})
    except TypeError as error:
        raise ConfigError(
            f"Reward function {target!r} takes {signature}, but is called with "
            f"(response, answer, fields): {error}. Give it three positional parameters, or those "
            "of TRL (prompts, completions, **columns) or verl (data_source, solution_str, "
            "ground_truth, extra_info) by these names."
        ) from None
    return _ours(call)


def _ours(function: Function) -> Judge:
    return lambda prompt, text: function(text, prompt.answer, dict(prompt.fields))


def _verl(function: Function, signature: inspect.Signature, target: str) -> Judge:
    def arguments(prompt: Prompt, text: str) -> dict[str, Any]:
        return {
            "data_source": prompt.fields.get("data_source", prompt.dataset),
            "solution_str": text,
            "ground_truth": prompt.answer,
            "extra_info": prompt.fields.get("extra_info") or {},
        }

    # Which arguments there are does not depend on the prompt.
    known = arguments(Prompt("", 0, "", ()), "")
    if missing := _required(signature) - known.keys():
        raise ConfigError(
            f"Reward function {target!r} takes {signature} like verl's, which are called with "
            f"{', '.join(known)}; give {_words(missing)} a default or remove it."
        )

    return lambda prompt, text: _score_of(function(**_accepted(signature, arguments(prompt, text))))


def _score_of(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    if "score" not in value:
        raise RewardError(
            f"a function like verl's returned a dict without `score` (keys: {', '.join(value)})"
        )
    return value["score"]


def _trl(function: Function, signature: inspect.Signature, target: str) -> Judge:
    def judge(prompt: Prompt, text: str) -> Any:
        conversation = prompt.messages is not None
        completion = [{"role": "assistant", "content": text}] if conversation else text
        row = {
            "answer": prompt.answer,
            **prompt.fields,
            "prompts": list(prompt.messages or ()) if conversation else prompt.text,
            "completions": completion,
        }
        if missing := _required(signature) - row.keys():
            raise RewardError(
                f"{target} takes the column {_words(missing)}, which the data do not have; "
                f"columns found: {', '.join(prompt.fields)}"
            )
        columns = {name: [value] for name, value in row.items()}
        return _only(function(**_accepted(signature, columns)), target)

    return judge


def _only(value: Any, target: str) -> Any:
    try:
        (score,) = value
    except (TypeError, ValueError):
        raise RewardError(
            f"{target} must return a list with one score for each completion, here one, but "
            f"returned {value!r:.100}"
        ) from None
    # TRL's word for a reward that does not apply to this prompt.
    return 0.0 if score is None else score


def _required(signature: inspect.Signature) -> set[str]:
    return {
        name
        for name, parameter in signature.parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    }


def _accepted(signature: inspect.Signature, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the arguments that the function takes by name."""
    parameters = signature.parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(arguments)
    return {name: value for name, value in arguments.items() if name in parameters}


def _synchronous(function: Function) -> Function:
    """`function`, waited for where it is `async`."""

    def call(*arguments: Any, **named: Any) -> Any:
        value = function(*arguments, **named)
        return asyncio.run(_result_of(value)) if inspect.isawaitable(value) else value

    return call


async def _result_of(value: Any) -> Any:
    return await value


def _words(names: set[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))
