"""The files in docker/, without an engine: what they name exists, and they agree with the package and each other."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from service import Daemon, stream
from typer.main import get_command

from headrace.pipeline.spec import Config
from headrace.server.cli import app

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
COMPOSE: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
DOCKERFILES = ("Dockerfile.cpu", "Dockerfile.gpu")

each = pytest.mark.parametrize("name", DOCKERFILES)


def stages(name: str) -> list[list[tuple[str, str]]]:
    """Instructions and their arguments: those before the first FROM, then of each stage."""
    lines = [line for line in (DOCKER / name).read_text().splitlines() if not line.startswith("#")]
    found: list[list[tuple[str, str]]] = [[]]
    for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        if line:
            instruction, _, arguments = line.partition(" ")
            assert instruction.isupper(), line
            if instruction == "FROM":
                found.append([])
            found[-1].append((instruction, arguments))
    return found


def named(stage: list[tuple[str, str]], instruction: str) -> list[str]:
    return [arguments for name, arguments in stage if name == instruction]


def commands_of(arguments: list[str]) -> None:
    """Fails for what is no command line of headrace."""
    name, *options = arguments
    commands = get_command(app).commands  # type: ignore[attr-defined]
    commands[name].make_context(name, options)


@each
def test_the_base_is_pinned_and_new_enough(name: str) -> None:
    (before, build, final) = stages(name)
    (base,) = named(before, "ARG")
    found = re.fullmatch(r"BASE=python:(\d+)\.(\d+)\.\d+-slim-\w+", base)
    assert found is not None
    assert (int(found[1]), int(found[2])) >= (3, 11)
    assert named(build, "FROM") == ["${BASE} AS build"] and named(final, "FROM") == ["${BASE}"]


@each
def test_what_is_copied_exists_is_in_the_context_and_is_all_of_the_package(name: str) -> None:
    (_, build, final) = stages(name)
    sources = {source for copy in named(build, "COPY") for source in copy.split()[:-1]}
    assert all((ROOT / source).exists() for source in sources)
    ignore = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert ignore[0] == "*"
    assert {line.removeprefix("!") for line in ignore if line.startswith("!")} == sources
    project = PROJECT["project"]
    needed = {*PROJECT["tool"]["setuptools"]["package-dir"].values(), project["readme"], *project["license-files"]}
    assert sources == needed | {"pyproject.toml", "constraints.txt"}
    (copy,) = named(final, "COPY")
    assert copy == "--from=build /opt/headrace /opt/headrace"


@each
def test_every_installation_is_constrained_and_names_no_version_of_its_own(name: str) -> None:
    (_, build, _) = stages(name)
    (extras,) = named(build, "ARG")
    assert set(extras.removeprefix("EXTRAS=").split(",")) <= PROJECT["project"]["optional-dependencies"].keys()
    installations = [run for run in named(build, "RUN") if " install " in run]
    assert len(installations) == 2
    for run in installations:
        assert "--constraint constraints.txt" in run and "==" not in run


@each
def test_the_final_stage_installs_nothing_and_runs_as_nobody_special(name: str) -> None:
    (_, _, final) = stages(name)
    assert not re.search(r"\b(?:pip|apt|apt-get|curl|gcc)\b", " ".join(named(final, "RUN")))
    assert named(final, "USER") == ["10001:10001"]
    assert "--gid 10001 headrace" in named(final, "RUN")[0] and "--uid 10001" in named(final, "RUN")[0]
    assert json.loads(named(final, "ENTRYPOINT")[0]) == ["headrace"] and "headrace" in PROJECT["project"]["scripts"]
    commands_of(json.loads(named(final, "CMD")[0]))


def test_the_two_images_differ_in_what_a_gpu_needs_and_in_nothing_else() -> None:
    cpu, gpu = ({line for stage in stages(name) for line in stage} for name in DOCKERFILES)
    assert {instruction for instruction, _ in cpu ^ gpu} == {"ARG", "ENV"}
    assert {extra for name, extra in gpu - cpu if name == "ARG"} == {"EXTRAS=heif,dali"}


def test_what_compose_mounts_and_builds_exists() -> None:
    build = SERVICES["daemon"]["build"]
    assert (DOCKER / build["context"]).resolve() == ROOT
    assert (ROOT / build["dockerfile"]).is_file()
    for service in SERVICES.values():
        for volume in service["volumes"]:
            source, target, *_ = re.sub(r"\$\{[^}]*\}", "$DATA", volume).split(":")
            assert target.startswith("/")
            if source.startswith("."):
                assert (DOCKER / source).is_file()
            else:
                assert source in COMPOSE["volumes"] or source == "$DATA"
        assert service["read_only"] and service["cap_drop"] == ["ALL"] and service["network_mode"] == "none"


def test_daemon_trainer_and_health_check_name_the_same_socket_in_a_folder_that_both_mount() -> None:
    daemon, trainer = SERVICES["daemon"], SERVICES["trainer"]
    config = Config.load(DOCKER / "headrace.yaml")
    (address,) = config.listen
    kind, *check = daemon["healthcheck"]["test"]
    assert (kind, check) == ("CMD", ["headrace", "ping", address])
    commands_of(check[1:])
    assert trainer["command"] == [address]
    folder = str(Path(address.removeprefix("ipc://")).parent)
    assert f"sockets:{folder}" in daemon["volumes"] and f"sockets:{folder}:ro" in trainer["volumes"]
    (_, served) = config.stream(None)
    assert any(volume.endswith(f":{served.dataset.folder}:ro") for volume in daemon["volumes"])
    for name in DOCKERFILES:
        (_, _, final) = stages(name)
        made = {shlex.split(part)[-1] for part in named(final, "RUN")[0].split("&&")}
        assert {v.split(":")[1] for v in daemon["volumes"] if v.split(":")[0] in COMPOSE["volumes"]} <= made
        (command,) = named(final, "CMD")
        assert f"./headrace.yaml:{json.loads(command)[1]}:ro" in daemon["volumes"]


def test_the_trainer_trains(
    photos: Path, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    normal = {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]}
    with Daemon(home, {"train": stream(photos, chunk=16, size=64, output=normal)}) as daemon:
        monkeypatch.setattr("sys.argv", ["trainer.py", daemon.address])
        runpy.run_path(str(DOCKER / "trainer.py"), run_name="__main__")
    losses = re.findall(r"^epoch \d: 2 batches over shm, loss (\d\.\d{3})$", capsys.readouterr().out, re.M)
    assert len(losses) == 5
    assert float(losses[-1]) < float(losses[0])
