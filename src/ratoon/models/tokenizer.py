"""Text <-> token ids, as the model directory defines them.

A thin layer over transformers' tokenizer that answers the questions that generation and training
ask: which ids end a response, which ids may be sampled, how a prompt looks to the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from ratoon.errors import CapabilityError, CheckpointError, DataError
from ratoon.models.hf_config import Json, read_json

Message = Mapping[str, str]


class Tokenizer:
    """The tokenizer of one model directory.

    Attributes:
        eos_ids: ids that end a response: those of `generation_config.json`, of `config.json`, of
            the tokenizer, and the one that closes an assistant's turn in the chat template.
        end_id: the one of them that a completion should be trained to end with.
        bos_id: id that starts plain text, where the tokenizer adds one.
        pad_id: id for unused places, which carries no meaning.
        vocab_size: ids from here on stand for no text and must not be sampled.
    """

    def __init__(self, backend: Any, settings: Sequence[Json] = ()) -> None:
        """Wrap a transformers tokenizer (untyped there).

        Args:
            backend: transformers' tokenizer.
            settings: contents of the files that may name further end-of-sequence ids.
        """
        self._backend = backend
        self.vocab_size: int = max(backend.get_vocab().values()) + 1
        self.bos_id: int | None = backend.bos_token_id
        turn_end = self._turn_end()
        listed = [turn_end, backend.eos_token_id]
        for values in (raw.get("eos_token_id") for raw in settings):
            listed += values if isinstance(values, list) else [values]
        self.eos_ids: tuple[int, ...] = tuple(
            dict.fromkeys(token for token in listed if token is not None)
        )
        if not self.eos_ids:
            raise CheckpointError(
                "The model names no end-of-sequence token; set eos_token in tokenizer_config.json "
                "or eos_token_id in generation_config.json."
            )
        self.end_id: int = self.eos_ids[0]
        pad = backend.pad_token_id
        self.pad_id: int = self.end_id if pad is None else pad

    @classmethod
    def load(cls, path: Path | str) -> Tokenizer:
        """Load the tokenizer of a model directory; no network is used.

        Raises:
            CheckpointError: if the directory holds no tokenizer that transformers can load.
        """
        directory = Path(path)
        known = ("tokenizer.json", "tokenizer.model", "vocab.json")
        if not any((directory / name).is_file() for name in known):
            raise CheckpointError(f"{directory}: holds no tokenizer ({', '.join(known)}).")
        from transformers import AutoTokenizer

        try:
            backend = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        except Exception as error:
            # It also reads config.json, and what it raises about settings has no common base.
            raise CheckpointError(
                f"{directory}: the tokenizer cannot be loaded ({error})."
            ) from error
        files = (directory / "generation_config.json", directory / "config.json")
        return cls(backend, [read_json(file) for file in files if file.is_file()])

    @property
    def has_chat_template(self) -> bool:
        """Whether the model says how a conversation looks."""
        return bool(self._backend.chat_template)

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of `text` alone, nothing added; special tokens spelt out in it are recognised."""
        # Not verbose: what is too long for the model is refused with a message of our own.
        return tuple(self._backend.encode(text, add_special_tokens=False, verbose=False))

    def encode_documents(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of many texts; special tokens spelt out in them are text like any other."""
        found: list[list[int]] = self._backend(
            list(texts),
            add_special_tokens=False,
            split_special_tokens=True,
            return_attention_mask=False,
            verbose=False,
        )["input_ids"]
        return found

    @property
    def document_end_id(self) -> int:
        """The id that ends a document in pretraining, which need not end a turn of a chat."""
        end: int | None = self._backend.eos_token_id
        return self.end_id if end is None else end

    def decode(self, ids: Sequence[int], *, keep_special: bool = False) -> str:
        """Text of `ids`, without special tokens unless asked for."""
        text: str = self._backend.decode(
            list(ids), skip_special_tokens=not keep_special, clean_up_tokenization_spaces=False
        )
        return text

    def chat(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True
    ) -> tuple[int, ...]:
        """Ids of a conversation in the model's chat template.

        Args:
            messages: mappings with `role` and `content`.
            add_generation_prompt: also open the assistant's turn.

        Raises:
            CapabilityError: if the model has no chat template.
            DataError: if the template refuses these messages.
        """
        return self.encode(self._render(messages, add_generation_prompt))

    def prompt(
        self, text: str, *, system: str | None = None, chat_template: bool | None = None
    ) -> tuple[int, ...]:
        """Ids of a prompt as the policy sees it.

        With a chat template: one user turn, the assistant's opened. Without one: the plain text,
        after the id that the tokenizer puts before text. `chat_template` None takes a template
        where the model has one.

        Raises:
            CapabilityError: if a template, or a system message that needs one, is asked for and
                the model has none.
        """
        if chat_template is None:
            chat_template = self.has_chat_template
        if chat_template:
            turns = [{"role": "user", "content": text}]
            if system is not None:
                turns.insert(0, {"role": "system", "content": system})
            return self.chat(turns)
        if system is not None:
            raise CapabilityError(
                "A system message needs a chat template, and none is used: the model has none or "
                "it is switched off. Write the message into the prompts instead."
            )
        plain = self._backend.encode(text, add_special_tokens=True, verbose=False)
        # A few tokenizers also close the text; a prompt stays open.
        return tuple(plain[:-1] if plain and plain[-1] == self._backend.eos_token_id else plain)

    def completion(self, text: str) -> tuple[int, ...]:
        """Ids that a model should answer with: `text`, then the end of its turn."""
        return (*self.encode(text), self.end_id)

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        if not self.has_chat_template:
            raise CapabilityError(
                "The model has no chat template. Use plain prompts (data.chat_template: false), or "
                "an instruction-tuned model."
            )
        import jinja2

        try:
            text: str = self._backend.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except jinja2.TemplateError as error:
            raise DataError(f"The chat template refuses these messages: {error}") from error
        return text

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(self._backend.added_tokens_decoder) | set(self._backend.all_special_ids)

    def _turn_end(self) -> int | None:
        """The special token that follows an assistant's words in the chat template."""
        if not self.has_chat_template:
            return None
        marker = "0123456789"
        turns = [{"role": "user", "content": "0"}, {"role": "assistant", "content": marker}]
        try:
            _, found, rest = self._render(turns, add_generation_prompt=False).rpartition(marker)
        except DataError:
            return None  # The template wants another kind of conversation.
        following = self.encode(rest.lstrip())[:1] if found else ()
        return next((token for token in following if token in self._special_ids), None)
