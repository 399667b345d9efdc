"""What runs in vLLM's own environment, where Ratoon is not installed: decodes as it is told.

Reads one JSON object a line: first the engine's settings, then one for each round, with prompts,
temperature, tokens to generate and a seed. Answers each with one line.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from typing import IO, Any


def main() -> None:
    """Answer until the input ends; what libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    vllm = importlib.import_module("vllm")
    engine = vllm.LLM(**json.loads(sys.stdin.readline())).llm_engine
    _tell(answers, {"version": vllm.__version__})
    for number, line in enumerate(sys.stdin):
        _tell(answers, _decode(vllm, engine, number, **json.loads(line)))


def _tell(answers: IO[str], answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def _decode(
    vllm: Any,
    engine: Any,
    number: int,
    *,
    prompts: list[list[int]],
    temperature: float,
    tokens: int,
    seed: int,
) -> dict[str, Any]:
    """Tokens and seconds of the steps in which every prompt was being answered."""
    for row, prompt in enumerate(prompts):
        params = vllm.SamplingParams(
            temperature=temperature,
            seed=seed + row if temperature else None,
            max_tokens=tokens,
            ignore_eos=True,
            detokenize=False,
        )
        engine.add_request(f"{number}/{row}", {"prompt_token_ids": prompt}, params)
    counts: dict[str, int] = {}
    started: float | None = None
    first = last = 0
    seconds = 0.0
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = time.perf_counter()
        counts.update({out.request_id: len(out.outputs[0].token_ids) for out in outputs})
        total = sum(counts.values())
        if started is None and len(counts) == len(prompts):
            started, first = now, total
        elif started is not None and not last:
            seconds = now - started
            if any(out.finished for out in outputs):
                last = total
    return {"tokens": last - first, "seconds": seconds}


if __name__ == "__main__":
    main()
