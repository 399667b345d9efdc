"""Rewards of a rollout's responses, computed while others still decode."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from ratoon.models.tokenizer import Tokenizer
from ratoon.observe.completions import StoredCompletion, stored
from ratoon.records import Completion, DrawKey, Prompt
from ratoon.rl.rewards.pool import RewardPool, RewardResult
from ratoon.sampling.stop_strings import text_before


class Scorer:
    """Sends responses to the reward workers as they arrive and hands all results out at the end.

    A reward that fails, and is to end the run, does so when the next response arrives.
    The text of a response goes up to the stop string that ended it, or includes it.
    """

    def __init__(
        self,
        pool: RewardPool,
        tokenizer: Tokenizer,
        prompts: Sequence[Prompt],
        *,
        keep_stop_string: bool,
    ) -> None:
        self._pool = pool
        self._tokenizer = tokenizer
        self._keep_stop_string = keep_stop_string
        self._prompts = {(prompt.dataset, prompt.row): prompt for prompt in prompts}
        self._texts: dict[DrawKey, str] = {}
        self._results: dict[Hashable, RewardResult] = {}

    def submit(self, completion: Completion) -> None:
        """Start scoring one response. Raises: RewardError, of an earlier one."""
        key = completion.key
        text = self._text_of(completion)
        self._texts[key] = text
        self._pool.submit(key, self.prompt_of(completion), text, len(completion.token_ids))
        self._collect(self._pool.poll())

    def _text_of(self, completion: Completion) -> str:
        decode, stop_string = self._tokenizer.decode, completion.stop_string
        if stop_string is None or self._keep_stop_string:
            return decode(completion.token_ids)
        return text_before(decode, completion.token_ids, stop_string)

    def prompt_of(self, completion: Completion) -> Prompt:
        """The prompt that a response answers."""
        return self._prompts[completion.key.dataset, completion.key.row]

    def results(self, completions: Sequence[Completion]) -> list[RewardResult]:
        """Wait for all results; in the order of `completions`. Raises: RewardError."""
        self._collect(self._pool.drain())
        return [self._results[completion.key] for completion in completions]

    def _collect(self, results: Sequence[RewardResult]) -> None:
        self._results |= {result.key: result for result in results}

    def records(
        self, completions: Sequence[Completion], results: Sequence[RewardResult]
    ) -> list[StoredCompletion]:
        """What is stored of each response."""
        return [
            stored(
                completion,
                self.prompt_of(completion),
                response=self._texts[completion.key],
                reward=result.score,
                reward_parts=result.parts,
            )
            for completion, result in zip(completions, results, strict=True)
        ]
