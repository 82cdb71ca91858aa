"""What the pages say is so: every command and code block runs, every key, default and module is the code's."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel
from pydantic_core import PydanticUndefined
from service import Daemon, stream
from typer.main import get_command

import headrace
from headrace.errors import ConfigError
from headrace.pipeline.folder import EXTENSIONS
from headrace.pipeline.formats import DECODED
from headrace.pipeline.spec import SOURCE_KEYS, Config, Dataset, Stream
from headrace.pipeline.transforms import TRANSFORMS
from headrace.server.cli import app
from headrace.server.doctor import CHECKS, Finding

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
README, ARCHITECTURE, CONFIGURATION, PICTURES = (
    (ROOT / name).read_text(encoding="utf-8")
    for name in ("README.md", "docs/architecture.md", "docs/configuration.md", "docs/pictures.md")
)
FOLDERS = ("client", "pipeline", "workers", "server")


def section(page: str, heading: str) -> str:
    """The text below a heading, up to the next one of its level or above."""
    level = heading.index(" ")
    found = re.search(rf"^{re.escape(heading)}[^\n]*\n(.*?)(?=^#{{1,{level}}} |\Z)", page, re.M | re.S)
    assert found is not None, heading
    return found[1]


def rows(text: str) -> list[list[str]]:
    """The cells of the first table of a text, without its head."""
    table = re.search(r"(?:^\|.*\|\n)+", text, re.M)
    assert table is not None
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[0].splitlines()[2:]]


def blocks(page: str, language: str = "") -> list[str]:
    """Fenced blocks of a language."""
    return [text for name, text in re.findall(r"^```(\w*)\n(.*?)^```$", page, re.M | re.S) if name == language]


# -- all pages ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_targets_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for target in re.findall(r"^make ([a-z]+)|`make ([a-z]+)`", text, re.M):
        assert "".join(target) in targets
    commands = get_command(app).commands  # type: ignore[attr-defined]
    for line in re.findall(r"`headrace ([a-z][^`]*)`", text):
        name, *arguments = shlex.split(line)
        assert name in commands, line
        options = {option for p in commands[name].params for option in p.opts}
        assert {a for a in arguments if a.startswith("-")} <= options, line


# -- README ---------------------------------------------------------------------------------------------------


@pytest.fixture
def beside(photos: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the README's configuration and pictures."""
    shutil.copytree(photos, home / "photos")
    (configuration,) = blocks(README, "yaml")
    (home / "headrace.yaml").write_text(configuration)
    monkeypatch.chdir(home)
    return home


def test_the_trainers_of_the_readme_run(beside: Path) -> None:
    pytest.importorskip("torch")
    trainers = blocks(README, "python")
    assert len(trainers) == 3
    with Daemon(beside, {"train": stream(beside / "photos")}, workers=1) as daemon:
        for trainer in trainers:
            exec(compile(trainer, "README.md", "exec"), {"address": daemon.address})  # as a reader would
    assert (beside / "checkpoint.pt").exists()


def test_the_first_trainer_of_the_readme_is_ten_lines() -> None:
    lines = [line for line in blocks(README, "python")[0].splitlines() if line.strip()]
    assert len(lines) <= 12  # two of them imports


def test_the_readme_shows_what_the_demo_prints() -> None:
    (shown,) = (block for block in blocks(README) if "images/s" in block)
    source = inspect.getsource(__import__("headrace.server.demo", fromlist=["run"]))
    for piece in ("a private daemon", "transport ", " images/s, trainer waited ", "and from another host: "):
        assert piece in shown and piece in source


# -- architecture -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_map_names_every_module_and_none_that_does_not_exist(folder: str) -> None:
    named = [cells[0].strip("`") for cells in rows(section(ARCHITECTURE, f"### {folder}/"))]
    assert sorted(named) == sorted(file.stem for file in (ROOT / folder).glob("*.py"))


# -- guarantees -------------------------------------------------------------------------------------------------

GUARANTEES = (ROOT / "docs/guarantees.md").read_text(encoding="utf-8")
HOLD = re.findall(r"\[(test_\w+|Test\w+)\]\(\.\./(tests/[\w/]+\.py)\)", GUARANTEES)


def test_what_is_said_to_hold_a_promise_is_a_test() -> None:
    found: dict[str, set[str]] = {}
    for _, file in HOLD:
        if file not in found:
            body = ast.parse((ROOT / file).read_text(encoding="utf-8")).body
            found[file] = {node.name for node in body if isinstance(node, ast.FunctionDef)}
            found[file] |= {ast.unparse(node.targets[0]) for node in body if isinstance(node, ast.Assign)}
    assert [name for name, file in HOLD if name not in found[file]] == []


def test_every_promise_has_tests_that_hold_it() -> None:
    promised = GUARANTEES.partition("## What is not promised")[0]
    points = re.split(r"^- ", promised, flags=re.M)[1:]
    assert len(points) > 25
    for point in points:
        assert re.search(r"\[[tT]est\w+\]\(", point), point
    assert len(re.findall(r"\.\./tests/", GUARANTEES)) == len(HOLD)


# -- configuration ----------------------------------------------------------------------------------------------

STREAM: dict[str, Any] = {"dataset": {"folder": "/data"}, "transforms": [{"center_crop": {"size": 8}}]}
REQUIRED = {"streams", "dataset", "transforms"}


def keys(model: Any, leave_out: str = "") -> list[str]:
    """Keys with those of nested models behind a dot."""
    found = []
    for name, field in model.model_fields.items():
        inner = field.annotation
        if name != leave_out and isinstance(inner, type) and issubclass(inner, BaseModel):
            found += [f"{name}.{key}" for key in keys(inner)]
        elif dataclasses.is_dataclass(inner):
            found += [f"{name}.{f.name}" for f in dataclasses.fields(inner)]
        else:
            found.append(name)
    return found


@pytest.mark.parametrize(
    ("heading", "model", "place"),
    [
        ("## Keys of a daemon", Config, ()),
        ("## Keys of a stream", Stream, ("streams", "train")),
        ("## Keys of a dataset", Dataset, ("streams", "train", "dataset")),
    ],
)
def test_every_key_is_described_with_its_default(heading: str, model: Any, place: tuple[str, ...]) -> None:
    described = {cells[0].strip("`"): cells[1].strip("`") for cells in rows(section(CONFIGURATION, heading))}
    assert list(described) == keys(model, leave_out="dataset")
    bare = Config.load({"streams": {"train": STREAM}})
    for key, default in described.items():
        if key in REQUIRED or key in SOURCE_KEYS:
            assert default == ("required" if key in REQUIRED else "one of three")
            continue
        configuration: dict[str, Any] = {"streams": {"train": STREAM | {"dataset": dict(STREAM["dataset"])}}}
        at: dict[str, Any] = configuration
        for part in place:
            at = at[part]
        for part in key.split(".")[:-1]:
            at = at.setdefault(part, {})
        at[key.split(".")[-1]] = yaml.safe_load(default)
        assert Config.load(configuration) == bare, f"{key}: {default} is not its default"


def test_every_transform_is_described_with_its_arguments_and_defaults() -> None:
    text = section(CONFIGURATION, "## Transforms")
    assert re.findall(r"^### (\w+)$", text, re.M) == list(TRANSFORMS)
    for name, kind in TRANSFORMS.items():
        described = {cells[0].strip("`"): cells[1].strip("`") for cells in rows(section(text, f"### {name}"))}
        assert list(described) == list(kind.model_fields)
        for argument, default in described.items():
            value = kind.model_fields[argument].default
            if default == "required":
                assert value is PydanticUndefined
            else:
                assert yaml.safe_load(default) == (list(value) if isinstance(value, tuple) else value)


def test_the_configurations_of_the_page_are_valid_or_fail_as_it_says(home: Path) -> None:
    good, bad = blocks(CONFIGURATION, "yaml")
    (home / "headrace.yaml").write_text(good)
    assert list(Config.load(home / "headrace.yaml").streams) == ["train", "val"]
    (home / "headrace.yaml").write_text(bad)
    with pytest.raises(ConfigError) as caught:
        Config.load(home / "headrace.yaml")
    (said,) = (block for block in blocks(section(CONFIGURATION, "## Errors")) if block.startswith("headrace.yaml"))
    assert str(caught.value).replace(f"{home}/", "") == said.rstrip()


def test_the_endings_of_the_page_are_those_that_are_listed() -> None:
    (endings,) = (block for block in blocks(CONFIGURATION) if block.startswith("jpg"))
    assert set(endings.split()) == EXTENSIONS


def test_every_argument_of_the_loader_is_described_with_its_default() -> None:
    described = {c[0].strip("`"): c[1] for c in rows(section(CONFIGURATION, "## Arguments of the Loader"))}
    signature = inspect.signature(headrace.Loader).parameters
    assert list(described) == list(signature)
    for name, default in described.items():
        if default == "required":
            assert signature[name].default is inspect.Parameter.empty
        else:
            assert ast.literal_eval(default.strip("`")) == signature[name].default


def test_the_formats_of_the_page_are_those_that_are_decoded() -> None:
    listed = re.search(r"never the name: (.*?)\.", PICTURES, re.S)
    assert listed is not None and tuple(listed[1].split(", ")) == DECODED


def test_every_check_of_doctor_is_described_and_so_are_the_keys_that_programs_read() -> None:
    page = section(CONFIGURATION, "## Looking at a machine")
    assert [row[0].strip("`") for row in rows(page)] == list(CHECKS)
    fields = {field.name for field in dataclasses.fields(Finding)}
    assert {f"`{name}`" for name in {"usable", "findings", "check", *fields}} <= set(re.findall(r"`\w+`", page))
