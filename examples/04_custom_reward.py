"""A reward of your own: a function of the response, the reference answer and the prompt's fields.

In a configuration the one below would be

    rewards:
      - {kind: python, function: examples/04_custom_reward.py:judge, weight: 1.0}

Rewards run in worker processes with a time limit, so a function that raises or hangs cannot stop
the rollout. Run: `python examples/04_custom_reward.py`
"""

import re
import time
from typing import Any

from ratoon.records import Prompt
from ratoon.rl.rewards import build_rewards
from ratoon.rl.rewards.pool import RewardPool


def judge(response: str, answer: str | None, fields: dict[str, Any]) -> float:
    """1 for the right number, less 0.01 for each word beyond `fields["max_words"]`."""
    numbers = re.findall(r"-?\d+", response)
    if not numbers or numbers[-1] != answer:
        return 0.0
    return max(0.0, 1.0 - 0.01 * max(0, len(response.split()) - fields["max_words"]))


def careless(response: str, answer: str | None, fields: dict[str, Any]) -> float:
    """What can go wrong: it hangs, raises, or gives no number."""
    if response == "hang":
        time.sleep(60)
    return {"fine": 1.0, "none": None}[response]  # type: ignore[return-value]


PROMPT = Prompt(
    dataset="example", row=0, text="What is 3 + 4?", ids=(1,), answer="7", fields={"max_words": 5}
)
RESPONSES = ("7", "It is 7", "3 plus 4 is as we all know 7", "It is 8", "no idea")


def score(function: str, responses: tuple[str, ...], on_error: str) -> None:
    """Score responses in a worker process and print each result."""
    rewards = build_rewards([{"kind": "python", "function": f"{__file__}:{function}"}])
    with RewardPool(rewards, timeout_s=2.0, on_error=on_error) as pool:  # type: ignore[arg-type]
        for index, text in enumerate(responses):
            pool.submit(index, PROMPT, text)
        for text, result in zip(responses, pool.drain(), strict=True):
            verdict = f"{result.score:.2f}" if result.failure is None else result.failure
            print(f"  {text!r:34} {verdict}")
        print(f"  failures: {dict(pool.failures)}")


if __name__ == "__main__":
    print("judge:")
    score("judge", RESPONSES, on_error="fail")
    print("careless, with on_error: count (with `fail` the first failure would end the run):")
    score("careless", ("fine", "none", "raise", "hang"), on_error="count")
