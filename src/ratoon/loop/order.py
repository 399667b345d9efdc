"""Which prompts come next, and which responses are asked for: pure functions of seed and place."""

from __future__ import annotations

import random
from collections.abc import Sequence

from ratoon.records import DrawKey, Prompt, Request, SamplingParams, Stream

Group = tuple[Request, ...]


def next_prompts(prompts: Sequence[Prompt], position: int, count: int, seed: int) -> list[Prompt]:
    """The next `count` prompts after `position`: epoch after epoch, each in an order of its own."""
    chosen: list[Prompt] = []
    while len(chosen) < count:
        epoch, start = divmod(position + len(chosen), len(prompts))
        order = list(range(len(prompts)))
        random.Random(f"{seed}/{epoch}").shuffle(order)
        chosen += [prompts[row] for row in order[start : start + count - len(chosen)]]
    return chosen


def make_groups(
    prompts: Sequence[Prompt],
    *,
    seed: int,
    stream: Stream,
    round_index: int,
    group_size: int,
    max_tokens: int,
    eos_ids: tuple[int, ...],
    params: SamplingParams,
    stop_strings: tuple[str, ...],
    attempt: int = 0,
) -> list[Group]:
    """The requests of each prompt's group.

    A prompt that is drawn twice at once (a data set smaller than a step) gets other samples the
    second time; one that is drawn again in a later round of the step, another `attempt`.
    """
    seen: dict[int, int] = {}
    groups = []
    for prompt in prompts:
        first = seen.get(prompt.row, 0)
        seen[prompt.row] = first + group_size
        groups.append(
            tuple(
                Request(
                    key=DrawKey(
                        seed, stream, round_index, prompt.dataset, prompt.row, sample, attempt
                    ),
                    prompt_ids=prompt.ids,
                    max_tokens=max_tokens,
                    eos_ids=eos_ids,
                    params=params,
                    stop_strings=stop_strings,
                )
                for sample in range(first, first + group_size)
            )
        )
    return groups
