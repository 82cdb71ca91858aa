"""What is shipped, what importing it costs, and that versions agree everywhere."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

import headrace

ROOT = Path(__file__).parents[2]
FOLDERS = ("client", "pipeline", "workers", "server")
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PINNED = re.compile(r"(?P<name>[a-z0-9][a-z0-9-]*)==(?P<version>[0-9][0-9a-z.]*)")


def normalized(requirement: str) -> str:
    """The name of a requirement in the one spelling that constraints.txt uses."""
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match is not None
    return re.sub(r"[-_.]+", "-", match[0]).lower()


def constraints() -> dict[str, str]:
    lines = [line.partition("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    matches = [(line, PINNED.fullmatch(line)) for line in lines if line]
    assert not [line for line, match in matches if match is None], "not NAME==VERSION"
    return {match["name"]: match["version"] for _, match in matches if match is not None}


def test_every_folder_is_mapped_and_every_file_in_it_shipped() -> None:
    setuptools = PROJECT["tool"]["setuptools"]
    on_disk = {file.parent.relative_to(ROOT).as_posix() for d in FOLDERS for file in (ROOT / d).rglob("*.py")}
    assert set(setuptools["package-dir"].values()) == on_disk
    assert set(setuptools["package-dir"]) == set(setuptools["packages"])


def test_the_tests_run_against_this_checkout() -> None:
    assert headrace.__file__ is not None
    # In a strict editable install a link to the file, in the default one the file.
    assert Path(headrace.__file__).resolve() == ROOT / "client" / "__init__.py"


def test_every_public_name_is_there() -> None:
    assert set(headrace.__all__) == set(dir(headrace))
    for name in headrace.__all__:
        getattr(headrace, name)
    with pytest.raises(AttributeError, match="no attribute 'client'"):
        headrace.client  # noqa: B018


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_headrace_imports_nothing_heavy() -> None:
    loaded = set(run("import headrace, sys; print(*sys.modules)").split())
    assert "headrace" in loaded
    heavy = {name.partition(".")[0] for name in loaded} & {"torch", "nvidia", "numpy", "PIL", "pydantic", "zmq"}
    assert not heavy
    assert not {
        name for name in loaded if name.startswith(("headrace.pipeline", "headrace.workers", "headrace.server"))
    }


#: DALI's own modules: imported when its backend is made, and by nothing else. And that of Triton's kernel, which is
#: imported when Triton is tried.
THEIRS = {"headrace.pipeline.dali", "headrace.pipeline.dali_colour", "headrace.pipeline.graph", "headrace.fused"}


def test_no_module_needs_torch_or_dali_to_be_imported() -> None:
    """The base install has neither; who asks for torch output, or for DALI, is told what to install."""
    modules = {
        f"{package}.{file.stem}"
        for package, folder in PROJECT["tool"]["setuptools"]["package-dir"].items()
        for file in (ROOT / folder).glob("*.py")
        if file.stem not in ("__init__", "__main__")
    }
    code = (
        "import importlib, sys\n"
        # None: ImportError
        "sys.modules.update(torch=None, nvidia=None, triton=None, torchvision=None, skimage=None)\n"
        f"for name in {sorted(modules - THEIRS)!r}: importlib.import_module(name)\n"
        f"for name in {sorted(THEIRS)!r}:\n"
        "    try: importlib.import_module(name)\n"
        "    except ModuleNotFoundError: continue\n"
        "    raise SystemExit(f'{name} is none of those that need DALI or Triton')"
    )
    assert THEIRS <= modules
    assert run(code) == ""


def test_the_client_imports_nothing_above_it() -> None:
    """But for `__init__`, which hands names on when they are asked for; import-linter watches the other layers."""
    for file in (ROOT / "client").glob("*.py"):
        if file.name != "__init__.py":
            assert not re.findall(
                r"^\s*(?:from|import) headrace\.(?:pipeline|workers|server)\b", file.read_text(), re.M
            )


def test_changelog_package_and_project_have_the_same_version() -> None:
    newest = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert newest is not None
    assert newest[1] == headrace.__version__ == PROJECT["project"]["version"]


def test_the_extras_have_their_names() -> None:
    assert set(PROJECT["project"]["optional-dependencies"]) == {"torch", "heif", "dali", "dali-cuda12", "demo", "dev"}


def test_every_requirement_is_pinned() -> None:
    extras = PROJECT["project"]["optional-dependencies"].values()
    requirements = [*PROJECT["project"]["dependencies"], *PROJECT["build-system"]["requires"], *sum(extras, [])]
    names = {normalized(requirement) for requirement in requirements} - {"headrace"}
    assert names <= constraints().keys()


def test_what_the_requirements_bring_with_them_is_pinned_too() -> None:
    wanted, seen = [("headrace", frozenset({"dev"}))], set[str]()
    while wanted:
        name, extras = wanted.pop()
        seen.add(normalized(name))
        for requirement in map(Requirement, metadata.requires(name) or ()):
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in {"", *extras}):
                known = normalized(requirement.name) in seen and not requirement.extras
                if not known:
                    wanted.append((requirement.name, frozenset(requirement.extras)))
    assert len(seen) > 40
    assert seen - {"headrace"} <= constraints().keys()


def test_nothing_is_kept_under_a_name_in_dev_shm() -> None:
    """Shared memory is a memfd; `shared_memory` would bring names, a size limit in containers and a tracker process."""
    for folder in FOLDERS:
        for file in (ROOT / folder).glob("*.py"):
            code = file.read_text()
            assert "shared_memory" not in code and "shm_open" not in code, file
            assert "multiprocessing" not in re.findall(r"^\s*(?:from|import) (\w+)", code, re.M), file


def test_nothing_is_unpickled_or_evaluated() -> None:
    for folder in FOLDERS:
        for file in (ROOT / folder).glob("*.py"):
            imported = re.findall(r"^\s*(?:from|import) (\w+)", file.read_text(), re.M)
            assert not {"pickle", "marshal", "shelve", "dill"} & set(imported), file
            assert not re.search(r"(?<![\w.])(?:eval|exec)\(", file.read_text()), file
