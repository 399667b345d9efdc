"""Token files and their preparation: what is written is read, and what is wrong is refused."""

from __future__ import annotations

import io
import json
import lzma
import tarfile
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from ratoon.cli.main import app
from ratoon.data.documents import documents
from ratoon.data.prepare import HELD_OUT, TRAIN, prepare, tokenizer_hash
from ratoon.data.token_file import SequenceOrder, TokenFile, TokenWriter, read_header
from ratoon.errors import CapabilityError, CheckpointError, ConfigError, DataError
from ratoon.models.tokenizer import Tokenizer

WORDS = ("seed", "root", "stalk", "leaf", "crop", "field", "rain", "sun")


def text(number: int) -> str:
    generator = np.random.default_rng(number)
    return " ".join(generator.choice(WORDS, 200)) + f" {number}"


def write_tokens(path: Path, *documents: list[int], vocab_size: int = 100) -> Path:
    with TokenWriter(path, vocab_size=vocab_size, document_end=0, tokenizer="t") as writer:
        for ids in documents:
            writer.add(ids)
    return path


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    file = tmp_path / "corpus.jsonl"
    file.write_text("".join(json.dumps({"text": text(i)}) + "\n" for i in range(40)))
    return file


# Files


@pytest.mark.parametrize(("vocab_size", "dtype"), [(1 << 16, "uint16"), ((1 << 16) + 1, "uint32")])
def test_what_is_written_is_read(tmp_path: Path, vocab_size: int, dtype: str) -> None:
    largest = vocab_size - 1
    path = write_tokens(tmp_path / "x", [1, largest, 3], [4, 5], vocab_size=vocab_size)
    file = TokenFile(path, 3)
    assert file.header.dtype == dtype
    assert file.header.documents == 2
    assert len(file) == 2
    found = file.sequences(np.array([1, 0]))
    assert found.tolist() == [[0, 4, 5, 0], [1, largest, 3, 0]]


def test_a_sequence_ends_with_the_first_token_of_the_next(tmp_path: Path) -> None:
    file = TokenFile(write_tokens(tmp_path / "x", list(range(1, 50))), 8)
    found = file.sequences(np.arange(len(file)))
    assert (found[:-1, -1] == found[1:, 0]).all()
    assert found[:, :-1].ravel().tolist() == list(range(1, 49))


def test_an_id_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"ids from 0 to 100.*tokenizer has 100"):
        write_tokens(tmp_path / "x", [100])
    with pytest.raises(DataError, match="not written to its end"):
        TokenFile(tmp_path / "x", 4)


@pytest.mark.parametrize("cut", [1, 10, 4096])
def test_a_truncated_file_is_refused(tmp_path: Path, cut: int) -> None:
    path = write_tokens(tmp_path / "x", list(range(1, 99)))
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(DataError, match=r"truncated|not written to its end"):
        TokenFile(path, 4)


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="ratoon data prepare"):
        TokenFile(tmp_path / "missing", 4)
    (tmp_path / "text").write_text("once upon a time")
    with pytest.raises(DataError, match="no token file"):
        TokenFile(tmp_path / "text", 4)
    with pytest.raises(DataError, match="fewer than one sequence of 200"):
        TokenFile(write_tokens(tmp_path / "x", [1, 2, 3]), 200)


# Order


def test_each_epoch_has_every_sequence_once_in_an_order_of_its_own() -> None:
    order = SequenceOrder(50, seed=3)
    epochs = [order.take(50 * epoch, 50).tolist() for epoch in range(3)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert epochs[0] != SequenceOrder(50, seed=4).take(0, 50).tolist()


def test_any_position_can_be_resumed_at() -> None:
    whole = SequenceOrder(7, seed=1).take(0, 40)
    for start in (0, 3, 7, 20, 39):
        assert (SequenceOrder(7, seed=1).take(start, 40 - start) == whole[start:]).all()


# Documents


def test_all_kinds_of_files_give_their_documents(tmp_path: Path, corpus: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.txt").write_text("one\ntwo")
    (folder / "b.txt").write_text(" \n")
    (folder / "c.jsonl.xz").write_bytes(lzma.compress(b'{"body": "three"}\n\n{"body": "four"}\n'))
    with tarfile.open(folder / "d.tar.xz", "w:xz") as archive:
        for name, data in (("x/e.txt", b"five"), ("f.jsonl", b'{"body": "six"}')):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    found = list(documents([folder], column="body"))
    assert found == ["one\ntwo", "three", "four", "five", "six"]
    assert len(list(documents([corpus, corpus]))) == 80


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("x.txt", b"jal\xe9 au lait", "not UTF-8 text .byte 0xe9 at 3"),
        ("x.jsonl", b'{"text": "a"}\n{"text": "jal\xe9"}\n', "line 2: is not UTF-8"),
        ("x.jsonl", b'{"text": "a"}\n{"text"', "line 2: not valid JSON"),
        ("x.jsonl", b'{"body": "a"}', r"no text in column 'text'; found: 'body'.*--column"),
        ("x.txt.xz", b"no archive", "x.txt.xz: cannot be read"),
        ("x.txt.xz", lzma.compress(b"a" * 9999)[:-40], "x.txt.xz: cannot be read"),
        ("x.tar", b"no archive", "x.tar: cannot be read"),
        ("x.txt.gz", b"\x1f\x8b\x08\x00garbage", "x.txt.gz: cannot be read"),
    ],
)
def test_bad_input_is_one_clear_error(tmp_path: Path, name: str, data: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=words):
        list(documents([tmp_path / name]))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nothing.txt: cannot be read"):
        list(documents([tmp_path / "nothing.txt"]))


def test_parquet_is_read_or_says_what_it_needs(tmp_path: Path) -> None:
    file = tmp_path / "x.parquet"
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        file.write_bytes(b"")
        with pytest.raises(CapabilityError, match=r"ratoon\[parquet\]"):
            list(documents([file]))
        return
    pyarrow.parquet.write_table(pyarrow.table({"text": ["one", "two"]}), file)
    assert list(documents([file])) == ["one", "two"]
    with pytest.raises(DataError, match="no column 'body'"):
        list(documents([file], column="body"))


# Preparation


def test_a_trained_tokenizer_gives_back_the_documents(tmp_path: Path, corpus: Path) -> None:
    made = prepare([corpus], tmp_path / "data", train_bpe=300, held_out=0.2)
    assert made.held_out is not None
    assert made.train.documents + made.held_out.documents == 40
    tokenizer = Tokenizer.load(tmp_path / "data")
    texts = []
    for name, header in ((TRAIN, made.train), (HELD_OUT, made.held_out)):
        assert read_header(tmp_path / "data" / name) == header
        assert header.tokenizer == tokenizer_hash(tmp_path / "data")
        file = TokenFile(tmp_path / "data" / name, header.count - 1)
        whole = tokenizer.decode(file.sequences(np.array([0]))[0].tolist(), keep_special=True)
        texts += whole.split("<|endoftext|>")[:-1]
    assert sorted(texts) == sorted(text(i) for i in range(40))


def test_a_given_tokenizer_makes_the_same_ids(tmp_path: Path, corpus: Path) -> None:
    first = prepare([corpus], tmp_path / "a", train_bpe=300, held_out=0.2)
    second = prepare([corpus], tmp_path / "b", tokenizer=tmp_path / "a", held_out=0.2)
    assert first == second
    other = prepare([corpus], tmp_path / "c", tokenizer=tmp_path / "a", held_out=0.2, seed=1)
    assert other.train.sha256 != first.train.sha256


def test_the_end_of_a_text_is_never_read_out_of_a_text(tmp_path: Path, corpus: Path) -> None:
    prepare([corpus], tmp_path / "data", train_bpe=300, held_out=0)
    tokenizer = Tokenizer.load(tmp_path / "data")
    (ids,) = tokenizer.encode_documents(["a <|endoftext|> b"])
    assert tokenizer.document_end_id not in ids


def test_what_cannot_be_prepared_leaves_nothing(tmp_path: Path, corpus: Path) -> None:
    target = tmp_path / "data"
    with pytest.raises(DataError, match="not 5000"):
        prepare([corpus], target, train_bpe=5000)
    with pytest.raises(DataError, match="0 held out"):
        prepare([corpus], target, train_bpe=300, held_out=1e-9)
    with pytest.raises(ConfigError, match="must lie in"):
        prepare([corpus], target, train_bpe=300, held_out=1.0)
    with pytest.raises(ConfigError, match="either a tokenizer"):
        prepare([corpus], target)
    with pytest.raises(CheckpointError, match=f"^{tmp_path / 'nowhere'}: holds no tokenizer"):
        prepare([corpus], target, tokenizer=tmp_path / "nowhere")
    assert not target.exists()
    assert not list(tmp_path.glob(".data*"))


def test_the_command_prepares_and_never_overwrites(tmp_path: Path, corpus: Path) -> None:
    arguments = ["data", "prepare", str(tmp_path / "data"), str(corpus), "--train-bpe", "300"]
    arguments += ["--held-out", "0.1"]
    first = CliRunner().invoke(app, arguments)
    assert first.exit_code == 0, first.output
    assert "vocabulary 300" in first.output
    assert CliRunner().invoke(app, arguments).exit_code == 2
