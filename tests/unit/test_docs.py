"""What the documents say is true: files exist, commands parse, snippets and examples run.

README's figures and picture follow from the committed record; ARCHITECTURE keeps to its length and
speaks of every package.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest
import typer.main

from ratoon.config import CONFIGS, RLConfig, SFTConfig, build_config, load_config
from ratoon.config.load import apply_overrides, parse_yaml
from ratoon.errors import ConfigError
from ratoon.observe.summary import OPTIONAL, SUMMARY

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("[0-9]*.py"))
# Files that stand for the reader's own.
INVENTED = ("my_rewards.py", "file.py", "path/to/file.py")
# The last line that an example prints begins with this.
LAST_LINES = {
    "01_verify_one_tree": "none    : the same in 8 steps",
    "02_same_tokens": "tokens and log-probabilities are the same: ",
    "03_train_a_drafter": "trained drafter:",
    "04_custom_reward": "  failures: {'not_a_number': 1, 'raised': 1, 'timeout': 1}",
    "05_reinforcement_learning": "numerics",
}


@dataclass(frozen=True)
class Block:
    """A fenced block of a document."""

    document: Path
    language: str
    text: str

    def __str__(self) -> str:
        first = self.text.strip().splitlines()[0]
        return f"{self.document.name}: {first[:40]}"


def blocks(language: str) -> list[Block]:
    fence = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
    return [
        Block(document, found[1], found[2])
        for document in DOCUMENTS
        for found in fence.finditer(document.read_text(encoding="utf-8"))
        if found[1] == language
    ]


def commands() -> Iterator[tuple[Path, list[str]]]:
    """The commands of all shell blocks, without settings of the environment before them."""
    for block in blocks("bash"):
        for line in block.text.splitlines():
            for part in line.partition("#")[0].split("&&"):
                words = shlex.split(part)
                while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                    words.pop(0)
                if words:
                    yield block.document, words


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def load_figures() -> ModuleType:
    path = ROOT / "docs" / "figures.py"
    spec = importlib.util.spec_from_file_location("figures", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Text


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files_and_headings(document: Path) -> None:
    text = without_code(document.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        path = (document.parent / name).resolve() if name else document
        assert path.exists(), f"{document.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = [re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings]
            assert anchor in slugs, f"{document.name} links to {target}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_are_named_exist(document: Path) -> None:
    """Paths in code spans are relative to the repository, the package, the tests, or the text."""
    text = without_code(document.read_text(encoding="utf-8"))
    folders = (ROOT, ROOT / "src" / "ratoon", ROOT / "tests", document.parent)
    neighbours = {path.name for path in (ROOT / "src" / "ratoon").rglob("*.py")}
    for name in re.findall(r"`([\w./-]+\.(?:py|md|toml|svg|sh))(?::\w+)?`", text):
        if name in INVENTED or ("/" not in name and name in neighbours):
            continue
        assert any((folder / name).exists() for folder in folders), f"{document.name}: {name}"


def test_tests_and_objects_that_papers_name_exist() -> None:
    text = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
    named = re.findall(r"`([\w/]+\.py)` `([\w.]+)`", text)
    assert len(named) > 40
    for file, name in named:
        folder = ROOT / ("tests" if name.startswith("test_") else "src/ratoon")
        source = (folder / file).read_text(encoding="utf-8")
        for part in name.split("."):
            assert re.search(rf"^\s*(def|class) {part}\b", source, re.MULTILINE), f"{file} {name}"


def test_the_documents_speak_of_the_project_alone() -> None:
    texts = [*DOCUMENTS, *EXAMPLES, ROOT / "docs" / "figures.py"]
    for path in texts:
        text = path.read_text(encoding="utf-8")
        found = re.search(r"/tmp\b|/work/|/root/|\bissue #?\d|\bsession of the project\b", text)
        assert found is None, f"{path.name}: {found and found[0]}"


# Commands and configurations


@pytest.mark.parametrize(
    ("document", "words"),
    list(commands()),
    ids=lambda value: value.name if isinstance(value, Path) else " ".join(value),
)
def test_commands_of_the_documents_parse(document: Path, words: list[str]) -> None:
    program, *arguments = words
    if program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(arguments) <= set(targets)
    elif program == "ratoon":
        check_ratoon(arguments)
    elif program == "python":
        assert (ROOT / arguments[0]).is_file()
    elif program == ".ci/run":
        assert os.access(ROOT / program, os.X_OK)
    else:
        assert program in ("git", "cd"), f"{document.name}: what is {program}?"


def check_ratoon(arguments: list[str]) -> None:
    """Parse a command as `ratoon` would, without running it; check the configuration it names."""
    from ratoon.cli.main import app

    command: Any = typer.main.get_command(app)
    words = list(arguments)
    while hasattr(command, "commands"):
        assert words, "a verb is missing"
        assert words[0] in command.commands, f"{words[0]} is no verb"
        name = words.pop(0)
        command = command.commands[name]
    values = command.make_context(name, words).params
    if name in CONFIGS and "config" in values:
        check_recipe(CONFIGS[name], ROOT / values["config"], values["overrides"] or ())


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_in_running_text_exist(document: Path) -> None:
    from ratoon.cli.main import app

    verbs: Any = typer.main.get_command(app)
    text = without_code(document.read_text(encoding="utf-8"))
    for span in re.findall(r"`((?:ratoon|python|make) [^`]+)`", text):
        program, word, *rest = span.split()
        if program == "python":
            assert (ROOT / word).is_file(), span
        elif program == "make":
            assert f"\n{word}:" in (ROOT / "Makefile").read_text(encoding="utf-8"), span
        elif not word.startswith("-"):
            verb = verbs.commands[word]
            assert not hasattr(verb, "commands") or not rest or rest[0] in verb.commands, span


def check_recipe(kind: type[RLConfig] | type[SFTConfig], path: Path, overrides: Any) -> None:
    """Validate everything but whether the model and data files are there."""
    values = parse_yaml(path.read_text(encoding="utf-8"), path.name)
    apply_overrides(kind, values, overrides)
    build_config(kind, values)


@pytest.mark.parametrize("block", blocks("yaml"), ids=str)
def test_configurations_of_the_documents_are_valid(block: Block) -> None:
    values = {
        "name": "snippet",
        "model": {"path": "models/smollm2-135m"},
        "data": {"train": {"kind": "arithmetic"}},
        "rewards": [{"kind": "number"}],
    }
    build_config(RLConfig, values | parse_yaml(block.text, str(block)))


def test_a_wrong_snippet_would_be_found(tmp_path: Path) -> None:
    recipe = ROOT / "recipes" / "grpo_smollm2_arithmetic.yaml"
    with pytest.raises(ConfigError, match="stepz"):
        check_recipe(RLConfig, recipe, ["stepz=3"])
    with pytest.raises(Exception, match="No such option"):
        check_ratoon(["report", "runs/first", "--colour"])
    with pytest.raises(ConfigError):
        load_config(RLConfig, tmp_path / "missing.yaml")


@pytest.mark.parametrize("block", blocks("python"), ids=str)
def test_python_snippets_run(block: Block) -> None:
    exec(compile(block.text, block.document.name, "exec"), {})


# Examples


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_examples_run(example: Path, tmp_path: Path) -> None:
    source = str(ROOT / "src")
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, str(example)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1].startswith(LAST_LINES[example.stem])


def test_examples_are_short_and_numbered() -> None:
    assert [path.stem[:2] for path in EXAMPLES] == [f"{n:02}" for n in range(1, len(EXAMPLES) + 1)]
    for path in EXAMPLES:
        assert len(path.read_text(encoding="utf-8").splitlines()) < 80, path.name


# Architecture and run folders


def test_the_architecture_fits_and_names_every_package_and_layer() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 250
    package = ROOT / "src" / "ratoon"
    for part in package.iterdir():
        is_package = (part / "__init__.py").is_file()
        if is_package or (part.suffix == ".py" and part.stem != "__init__"):
            assert re.search(rf"^\|.*`{part.stem}`.*\|", text, re.MULTILINE), part.name
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    layers = project["tool"]["importlinter"]["contracts"][0]["layers"]
    for layer in layers:
        assert f"\n    {re.sub('[()]', '', layer)}\n" in text


def test_the_summary_is_explained_key_by_key() -> None:
    text = (ROOT / "docs" / "runs.md").read_text(encoding="utf-8")
    table = text.partition("## Reading the summary")[2]
    named = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (.*?) \|", table, re.MULTILINE))))
    assert named <= SUMMARY.keys() | OPTIONAL.keys()
    assert named >= SUMMARY.keys() - {"seconds"}


# Figures


def test_the_readme_and_its_picture_follow_from_the_committed_record() -> None:
    figures = load_figures()
    readme = figures.README.read_text(encoding="utf-8")
    record = figures.read_record()
    assert readme == figures.with_figures(readme, record), "run: python docs/figures.py"
    if record is not None:
        assert figures.PICTURE.read_text(encoding="utf-8") == figures.draw(record)


def make_run(folder: Path, speedup: float) -> Path:
    """A finished run of two workers, of which one trains the drafter; then its replays."""
    spans = [
        ("rollout", 0, 10.0, 16.0, 3),
        ("rollout", 1, 10.0, 12.0, 3),
        ("drafter_training", 1, 12.0, 16.1, 3),
        ("update", 0, 16.2, 18.0, 3),
        ("update", 1, 16.2, 18.0, 3),
        ("rollout", 0, 1.0, 9.0, 2),
        ("idle", 1, 19.0, 25.0, 3),
    ]
    lanes = [
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": n, "args": {"name": f"worker {n}"}}
        for n in (0, 1)
    ]
    events = lanes + [
        {
            "name": name,
            "ph": "X",
            "ts": start * 1e6,
            "dur": (end - start) * 1e6,
            "pid": 1,
            "tid": worker,
            "args": {"step": step},
        }
        for name, worker, start, end, step in spans
    ]
    folder.mkdir()
    lines = ",\n".join(json.dumps(event) for event in events)
    (folder / "timeline.json").write_text(f"[\n{lines}\n]\n")
    summary = dict.fromkeys(SUMMARY, 0.5) | {
        "tokens_identical": True,
        "flips": 0,
        "numerics": "invariant",
        "rollout_speedup": speedup,
        "responses_compared": 64,
        "tokens_compared": 3181,
        "steps": 3,
        "replays": [{"plain_s": 8.0, "ratoon_s": 8.0 / speedup}],
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    provenance = {
        "started": "2026-11-30T12:00:00+00:00",
        "command": ["ratoon", "quickstart", "--output", "somewhere/secret"],
        "code": {"commit": "0123456789abcdef"},
        "machine": {"processor": "A & B <core>", "cores": 2, "memory_gb": 25.3},
        "versions": {"torch": "2.13.0"},
    }
    (folder / "provenance.json").write_text(json.dumps(provenance))
    return folder


def test_figures_are_those_of_the_run_and_its_last_step(tmp_path: Path) -> None:
    figures = load_figures()
    record = figures.make_record(make_run(tmp_path / "quickstart", speedup=1.3))
    assert record["step"] == 3
    assert record["spans"][0] == ["worker 0", "rollout", 0.0, 6.0]
    assert all(activity != "idle" for _, activity, _, _ in record["spans"])
    assert "secret" not in json.dumps(record)
    text = figures.figures(record)
    assert "**1.30× as fast**" in text
    assert "3,181 tokens of 64 responses compared, all the same" in text
    assert "SmolLM2-135M-Instruct" in text
    assert "2026-11-30" in text
    picture = ElementTree.fromstring(figures.draw(record))
    assert len([element for element in picture.iter() if element.tag.endswith("rect")]) >= 7


def test_losses_are_said_as_plainly_as_gains(tmp_path: Path) -> None:
    figures = load_figures()
    record = figures.make_record(make_run(tmp_path / "quickstart", speedup=0.8))
    record["summary"] |= {"tokens_identical": False, "flips": 2}
    text = figures.figures(record)
    assert "0.80× as fast (slower)" in text
    assert "**2 responses differ**" in text
