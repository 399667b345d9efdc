"""From text to token files: tokenizer, split, ids. What `ratoon data prepare` does."""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ratoon.data.documents import documents
from ratoon.data.token_file import TokenHeader, TokenWriter
from ratoon.errors import ConfigError, DataError
from ratoon.models.directories import whole_directory
from ratoon.models.hf_config import write_json
from ratoon.models.hf_io import CARRIED_FILES
from ratoon.models.tokenizer import Tokenizer

TRAIN, HELD_OUT = "train.tokens", "eval.tokens"
END_OF_TEXT = "<|endoftext|>"
# A byte-level vocabulary holds each byte, and the end of a text.
SMALLEST_VOCABULARY = 257
_DOCUMENTS_AT_ONCE = 64
# What makes ids out of text; other files of a tokenizer do not change them.
_DEFINING_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")


@dataclass(frozen=True, slots=True)
class Prepared:
    """What was made: the headers of both files; no `held_out` where nothing was held out."""

    train: TokenHeader
    held_out: TokenHeader | None


def prepare(
    paths: Sequence[Path],
    destination: Path,
    *,
    tokenizer: Path | None = None,
    train_bpe: int | None = None,
    column: str = "text",
    held_out: float = 0.01,
    seed: int = 0,
    progress: Callable[[str, int], None] = lambda _, __: None,
) -> Prepared:
    """Write a folder of token files with the tokenizer that made them.

    Documents are read twice if a tokenizer is trained, and never all held in memory. Which ones are
    held out depends on the seed and their number alone; a trained tokenizer does not see them.

    Args:
        paths: files and folders; see `documents`.
        destination: a path that does not exist yet.
        tokenizer: a directory with a Hugging Face tokenizer; or else
        train_bpe: train a byte-level BPE of this many tokens on the corpus.
        column: field of JSONL and Parquet rows that holds the text.
        held_out: share of documents that is kept for validation, in [0, 1).
        seed: of the split.
        progress: told what is going on and how many documents are done.

    Raises:
        ConfigError: not exactly one tokenizer is named, or a number is out of range.
        DataError: the input is missing, damaged, not UTF-8, or too small to split.
        CheckpointError: the tokenizer's directory holds none that can be loaded, or `destination`
            holds something.
    """
    if (tokenizer is None) == (train_bpe is None):
        raise ConfigError("give either a tokenizer's directory or the size of a BPE to train")
    if train_bpe is not None and train_bpe < SMALLEST_VOCABULARY:
        raise ConfigError(f"--train-bpe {train_bpe}: must be >= {SMALLEST_VOCABULARY}")
    if not 0 <= held_out < 1:
        raise ConfigError(f"--held-out {held_out}: must lie in [0, 1)")
    if tokenizer is not None:
        # Before it is copied to where no error could name it.
        Tokenizer.load(tokenizer)
    with whole_directory(destination) as draft:
        if train_bpe is not None:
            texts = (text for text, out in _split(paths, column, held_out, seed) if not out)
            train_tokenizer(_counted(texts, "tokenizer", progress), train_bpe, draft)
        else:
            assert tokenizer is not None
            for name in CARRIED_FILES:
                if (tokenizer / name).is_file():
                    shutil.copyfile(tokenizer / name, draft / name)
        return _encode(_split(paths, column, held_out, seed), draft, held_out, progress)


def tokenizer_hash(directory: Path) -> str | None:
    """SHA-256 over the files that decide which ids a text has; None if there is none."""
    found = [directory / name for name in _DEFINING_FILES if (directory / name).is_file()]
    if not found:
        return None
    total = hashlib.sha256()
    for file in found:
        total.update(file.name.encode() + b"\0" + file.read_bytes())
    return total.hexdigest()


def train_tokenizer(texts: Iterable[str], vocab_size: int, directory: Path) -> None:
    """Train a byte-level BPE and write it as transformers loads it.

    Source: Sennrich, Haddow & Birch 2016, https://arxiv.org/abs/1508.07909, on bytes as in
    GPT-2 (Radford et al. 2019, section 2.2), with its pattern of words.

    Raises:
        DataError: the text is too small for so many tokens.
    """
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    found = backend.get_vocab_size()
    if found < vocab_size:
        raise DataError(
            f"the text gives a vocabulary of {found} tokens, not {vocab_size}; give more text or a "
            "smaller --train-bpe"
        )
    backend.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
    }
    write_json(directory / "tokenizer_config.json", settings)


def _split(
    paths: Sequence[Path], column: str, held_out: float, seed: int
) -> Iterator[tuple[str, bool]]:
    """Each document, and whether it is held out."""
    for number, text in enumerate(documents(paths, column)):
        digest = hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=8).digest()
        yield text, int.from_bytes(digest) < held_out * 2**64


def _counted(
    texts: Iterable[str], phase: str, progress: Callable[[str, int], None]
) -> Iterator[str]:
    for number, text in enumerate(texts):
        if number % _DOCUMENTS_AT_ONCE == 0:
            progress(phase, number)
        yield text


def _encode(
    split: Iterator[tuple[str, bool]],
    draft: Path,
    held_out: float,
    progress: Callable[[str, int], None],
) -> Prepared:
    tokenizer, made_with = Tokenizer.load(draft), tokenizer_hash(draft)
    assert made_with is not None
    writer = partial(
        TokenWriter,
        vocab_size=tokenizer.vocab_size,
        document_end=tokenizer.document_end_id,
        tokenizer=made_with,
    )
    done = 0
    with writer(draft / TRAIN) as train, writer(draft / HELD_OUT) as other:
        while batch := list(itertools.islice(split, _DOCUMENTS_AT_ONCE)):
            progress("tokens", done)
            for (_, out), ids in zip(
                batch, tokenizer.encode_documents([text for text, _ in batch]), strict=True
            ):
                (other if out else train).add(ids)
            done += len(batch)
    if not train.header.documents or (held_out and not other.header.documents):
        raise DataError(
            f"of {done} documents {train.header.documents} are for training and "
            f"{other.header.documents} held out; give more documents, or another --held-out "
            f"than {held_out}"
        )
    if not other.header.documents:
        (draft / HELD_OUT).unlink()
    _describe(draft, train.header, other.header)
    return Prepared(train.header, other.header if other.header.documents else None)


def _describe(draft: Path, train: TokenHeader, other: TokenHeader) -> None:
    """A file for people; nothing reads it."""
    values = {
        "tokens": train.count,
        "documents": train.documents,
        "held_out_tokens": other.count,
        "held_out_documents": other.documents,
        "vocab_size": train.vocab_size,
        "tokenizer_sha256": train.tokenizer,
    }
    (draft / "data.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
