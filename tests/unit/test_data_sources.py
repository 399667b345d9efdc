"""Where rows come from and how they are read: formats, conversations, others' columns."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from ratoon.config import RLConfig, SFTConfig, build_config, resolved_yaml
from ratoon.config.load import parse_yaml
from ratoon.data.examples import load_examples
from ratoon.data.prompts import PromptStyle, load_prompts
from ratoon.errors import CapabilityError, ConfigError, DataError
from ratoon.models.tiny import make_tiny_model
from ratoon.models.tokenizer import Tokenizer
from ratoon.records import Prompt

ROWS = [{"question": "1+1", "gold": "2"}, {"question": 'a "b",\nc', "gold": "é\u2028"}]
COLUMNS = {"prompt": "question", "answer": "gold"}
TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
STYLE = PromptStyle()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny_model(path, hidden_size=16, intermediate_size=16, num_layers=1)
    return Tokenizer.load(path)


def _write(folder: Path, kind: str, rows: list[dict[str, Any]]) -> Path:
    path = folder / f"set.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    elif kind == "json":
        path.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    elif kind == "csv":
        with path.open("w", newline="", encoding="utf-8-sig") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        pytest.importorskip("pyarrow", reason="the extra `parquet` is not installed")
        from pyarrow import Table, parquet

        parquet.write_table(Table.from_pylist(rows), path)
    return path


def _prompts(
    path: Path, tokenizer: Tokenizer, columns: Any = COLUMNS, style: PromptStyle = STYLE
) -> list[Prompt]:
    """As a configuration with these columns, or a name for them, loads them."""
    data = {"kind": path.suffix[1:], "path": str(path), "columns": columns}
    values = {
        "name": "run",
        "model": {"path": "model"},
        "rewards": [{"kind": "exact"}],
        "data": {"train": data},
    }
    config = build_config(RLConfig, values)
    again = build_config(RLConfig, parse_yaml(resolved_yaml(config), "resolved"))
    assert again == config
    return load_prompts(config.data.train.model_dump(), tokenizer, split="train", style=style)


@pytest.mark.parametrize("kind", ["json", "csv", "parquet"])
def test_every_format_gives_the_prompts_of_json_lines(
    tmp_path: Path, tokenizer: Tokenizer, kind: str
) -> None:
    expected = _prompts(_write(tmp_path, "jsonl", ROWS), tokenizer)
    assert [prompt.answer for prompt in expected] == ["2", "é\u2028"]
    assert _prompts(_write(tmp_path, kind, ROWS), tokenizer) == expected


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("x.json", "{}", "holds a dict, expected a list"),
        ("x.json", "[1]", r"x\.json, row 0: holds a int"),
        ("x.json", "[]", r"x\.json: holds no rows"),
        ("x.json", '[{"question": "a"}]', r"x\.json, row 0: has no column 'gold'"),
        ("x.json", "[", "not valid JSON.*kind: jsonl"),
        ("x.csv", "question,gold\na\n", "row 0: has not as many values"),
        ("x.csv", "question,gold\na,b,c\n", "row 0: has not as many values"),
        ("x.csv", 'question,gold\na,"b\n', "not valid CSV"),
        ("x.csv", "question,gold\n", "holds no rows"),
        ("x.csv", "", "holds no rows"),
        ("x.parquet", "none", "damaged or no Parquet file"),
    ],
)
def test_damaged_files_are_refused_by_name(
    tmp_path: Path, tokenizer: Tokenizer, name: str, content: str, complaint: str
) -> None:
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow", reason="the extra `parquet` is not installed")
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=complaint):
        _prompts(tmp_path / name, tokenizer)
    (tmp_path / name).unlink()
    with pytest.raises(DataError, match=f"{name}: (no such file|cannot be read)"):
        _prompts(tmp_path / name, tokenizer)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_rows_of_verl_need_only_their_name(tmp_path: Path, tokenizer: Tokenizer, kind: str) -> None:
    row = {
        "data_source": "sums",
        "prompt": [{"role": "system", "content": "add"}, {"role": "user", "content": "1+1"}],
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"index": 7},
    }
    (prompt,) = _prompts(_write(tmp_path, kind, [row]), tokenizer, "verl")
    assert prompt.ids == tokenizer.chat(row["prompt"])  # type: ignore[arg-type]
    assert (prompt.text, prompt.answer) == ("1+1", "2")
    assert prompt.messages == tuple(row["prompt"])
    assert prompt.fields == {key: row[key] for key in row if key != "prompt"}


def test_rows_of_openrlhf_and_trl_need_only_their_names(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    path = _write(tmp_path, "jsonl", [{"input": "1+1", "label": "2", "prompt": "p"}])
    (prompt,) = _prompts(path, tokenizer, "openrlhf")
    assert (prompt.text, prompt.answer) == ("1+1", "2")
    (prompt,) = load_prompts(
        {"kind": "jsonl", "path": path, "columns": {"prompt": "prompt", "answer": None}},
        tokenizer,
        split="train",
        style=STYLE,
    )
    assert (prompt.text, prompt.answer, prompt.fields["label"]) == ("p", None, "2")
    with pytest.raises(ConfigError, match="'ours': must be one of trl, verl, openrlhf"):
        _prompts(path, tokenizer, "ours")


def test_columns_are_joined_and_a_name_with_a_dot_comes_before_a_path(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    rows = [{"Body": " A b. ", "Question": "c?", "x.y": "flat", "x": {"y": "deep", "z": {"w": 3}}}]
    path = _write(tmp_path, "json", rows)
    for column, value in (("x.y", "flat"), ("x.z.w", "3")):
        columns = {"prompt": ["Body", "Question"], "answer": column}
        (prompt,) = _prompts(path, tokenizer, columns)
        assert (prompt.text, prompt.answer) == ("A b. c?", value)
        assert prompt.fields.keys() == {"x.y", "x"}


def test_a_conversation_is_shown_up_to_the_answer(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = _write(tmp_path, "jsonl", [{"messages": TURNS}])
    columns = {"prompt": "messages", "answer": None}
    (prompt,) = _prompts(path, tokenizer, columns)
    assert (prompt.ids, prompt.text) == (tokenizer.prompt("hi"), "hi")
    assert prompt.messages == (TURNS[0],)
    (prompt,) = _prompts(path, tokenizer, columns, PromptStyle("be brief"))
    assert prompt.ids == tokenizer.prompt("hi", system="be brief")


@pytest.mark.parametrize(
    ("value", "style", "complaint"),
    [
        ([], STYLE, "a conversation without messages"),
        ([{"role": "user", "content": None}], STYLE, "holds the message"),
        (["hi"], STYLE, "holds the message 'hi'"),
        (TURNS[1:], STYLE, "the prompt is empty"),
        (TURNS, PromptStyle(chat_template=False), "needs a chat template"),
        ([{"role": "system", "content": "a"}], PromptStyle("b"), "system message of its own"),
    ],
)
def test_conversations_that_cannot_be_shown_are_refused(
    tmp_path: Path, tokenizer: Tokenizer, value: Any, style: PromptStyle, complaint: str
) -> None:
    path = _write(tmp_path, "jsonl", [{"messages": value}])
    with pytest.raises(DataError, match=rf"row 0.*{complaint}"):
        _prompts(path, tokenizer, {"prompt": "messages", "answer": None}, style)


def _examples(path: Path, tokenizer: Tokenizer, columns: Any) -> list[Any]:
    values = {
        "name": "run",
        "model": {"path": "model"},
        "epochs": 1,
        "data": {"train": {"kind": path.suffix[1:], "path": str(path), "columns": columns}},
    }
    section = build_config(SFTConfig, values).data.train.model_dump()
    return load_examples(section, tokenizer, split="train", style=STYLE)


def test_examples_are_texts_or_conversations(tmp_path: Path, tokenizer: Tokenizer) -> None:
    row = {"messages": TURNS, "prompt": TURNS[:1], "completion": TURNS[1:], "q": "hi", "a": "ho"}
    path = _write(tmp_path, "json", [row])
    plain = _examples(path, tokenizer, {"prompt": "q", "completion": "a"})
    assert plain[0].completion_ids == tokenizer.completion("ho")
    assert _examples(path, tokenizer, "messages") == plain
    assert _examples(path, tokenizer, "trl") == plain
    with pytest.raises(DataError, match=r"must end with one turn of the assistant.*found: user"):
        _examples(path, tokenizer, {"prompt": "q", "completion": "prompt"})
    with pytest.raises(ConfigError, match=r"columns\.prompt would have no effect"):
        _examples(path, tokenizer, {"prompt": "q", "messages": "messages"})


def test_long_rows_are_dropped_only_where_that_is_said(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    texts = ["a", "a" * 30, "b", "a" * 40]
    path = _write(tmp_path, "jsonl", [{"question": text, "gold": "1"} for text in texts])
    said: list[str] = []
    style = PromptStyle(max_tokens=20, limit="max_length", say_too_long=said.append)
    assert [prompt.row for prompt in _prompts(path, tokenizer, style=style)] == [0, 2]
    assert said == [
        "set/train: 2 of 4 rows have more than 20 tokens (`max_length`); the longest is row 3 with "
        "42. They are left out."
    ]
    with pytest.raises(DataError, match=r"2 of 4 rows .*too_long: drop"):
        _prompts(path, tokenizer, style=PromptStyle(max_tokens=20))
    with pytest.raises(DataError, match="4 of 4 rows"):
        _prompts(path, tokenizer, style=PromptStyle(max_tokens=1, say_too_long=said.append))


def test_a_set_of_the_hub_is_read_as_rows(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = {
        "kind": "hub",
        "name": str(tmp_path),
        "subset": None,
        "split": "train",
        "revision": None,
        "columns": COLUMNS,
    }
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "datasets", None)
        with pytest.raises(CapabilityError, match=r"ratoon\[hub\]"):
            load_prompts(section, tokenizer, split="train", style=STYLE)
    datasets = pytest.importorskip("datasets", reason="the extra `hub` is not installed")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    path = _write(tmp_path, "jsonl", ROWS)
    found = load_prompts(section, tokenizer, split="train", style=STYLE)
    assert [prompt.ids for prompt in found] == [p.ids for p in _prompts(path, tokenizer)]
    with pytest.raises(DataError, match="split 'none': cannot be loaded"):
        load_prompts({**section, "split": "none"}, tokenizer, split="train", style=STYLE)


def test_rows_without_an_answer_are_dropped_only_where_that_is_said(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    rows: list[dict[str, Any]] = [{"question": "a", "gold": "1"}]
    rows += [{"question": "b", "gold": None}, {"question": "c", "gold": " "}]
    path = _write(tmp_path, "json", rows)
    assert [prompt.answer for prompt in _prompts(path, tokenizer)] == ["1", None, " "]
    said: list[str] = []
    (prompt,) = _prompts(path, tokenizer, style=PromptStyle(say_no_answer=said.append))
    assert prompt.row == 0
    assert said == ["set/train: 2 of 3 rows have no answer, the first is row 1. They are left out."]
    none = _write(tmp_path, "jsonl", rows[1:])
    with pytest.raises(DataError, match="no row has an answer"):
        _prompts(none, tokenizer, style=PromptStyle(say_no_answer=said.append))
