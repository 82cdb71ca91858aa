"""Finding or starting the private daemon: what goes to it, and what comes of its answers."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from headrace.errors import ConfigError, ConnectionLost, DeadlineError, HeadraceError
from headrace.private import PrivateDaemon
from headrace.session import Interrupted

Act = Callable[[str], None]


@pytest.fixture
def act(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Act:
    """Plays the module that would become the daemon; its standard input goes to the file `request`."""

    def write(body: str) -> None:
        program = tmp_path / "python"
        program.write_text(
            f"#!{sys.executable}\nimport sys, time, json\n"
            "assert sys.argv[1:] == ['-P', '-m', 'headrace.server.private']\n"
            f"open({str(tmp_path / 'request')!r}, 'w').write(sys.stdin.read())\n{body}\n"
        )
        program.chmod(0o700)
        monkeypatch.setattr(sys, "executable", str(program))

    return write


@pytest.fixture
def stop() -> Iterator[int]:
    fd = os.eventfd(0, os.EFD_NONBLOCK)
    yield fd
    os.close(fd)


ANSWER = "print(json.dumps({'address': 'ipc:///run/x.sock', 'log': '/var/x.log'}))"


class Described:
    def plain(self) -> dict[str, Any]:
        return {"streams": {"a": {"seed": 1}}}


@pytest.mark.parametrize(
    ("source", "request_"),
    [
        ({"streams": {"a": {"dataset": {"folder": Path("/data/x")}}}},
         {"config": {"streams": {"a": {"dataset": {"folder": "/data/x"}}}}}),
        (Described(), {"config": {"streams": {"a": {"seed": 1}}}}),
        ({"streams": {"a": Described()}}, {"config": {"streams": {"a": {"streams": {"a": {"seed": 1}}}}}}),
        (MappingProxyType({"streams": MappingProxyType({"a": ({"seed": 1},)})}),
         {"config": {"streams": {"a": [{"seed": 1}]}}}),
        ("/etc/a b.yaml", {"path": "/etc/a b.yaml"}),
        (Path("/etc/x.yaml"), {"path": "/etc/x.yaml"}),
    ],
)  # fmt: skip
def test_the_configuration_goes_as_json_and_the_address_comes_back(
    act: Act, stop: int, tmp_path: Path, source: Any, request_: Any
) -> None:
    act(ANSWER)
    assert PrivateDaemon(source).address(timeout=20, stop=stop) == "ipc:///run/x.sock"
    assert json.loads((tmp_path / "request").read_text()) == request_ | {"folder": str(Path.cwd())}


def test_once_it_runs_it_is_started_again_with_the_configuration_that_it_runs_with(
    act: Act, stop: int, tmp_path: Path
) -> None:
    act("print(json.dumps({'address': 'ipc:///x', 'log': '/x', 'config': {'streams': {'a': {'seed': 3}}}}))")
    daemon = PrivateDaemon("x.yaml")
    daemon.address(timeout=20, stop=stop)
    daemon.address(timeout=20, stop=stop)
    assert json.loads((tmp_path / "request").read_text()) == {"config": {"streams": {"a": {"seed": 3}}}}


def test_any_timeout_can_be_waited_for(act: Act, stop: int) -> None:
    act(ANSWER)
    assert PrivateDaemon({}).address(timeout=float("inf"), stop=stop) == "ipc:///run/x.sock"


def test_a_relative_path_is_of_this_process(act: Act, stop: int, tmp_path: Path) -> None:
    act(ANSWER)
    PrivateDaemon("x.yaml").address(timeout=20, stop=stop)
    assert json.loads((tmp_path / "request").read_text())["path"] == str(Path.cwd() / "x.yaml")


def test_relative_paths_stay_relative_to_the_folder_that_the_loader_was_made_in(
    act: Act, stop: int, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    act(ANSWER)
    folder = Path.cwd()
    daemon = PrivateDaemon({"streams": {}})
    monkeypatch.chdir(home)
    daemon.address(timeout=20, stop=stop)
    assert json.loads((tmp_path / "request").read_text())["folder"] == str(folder)


def test_an_error_that_is_reported_is_raised_as_what_it_is(act: Act, stop: int) -> None:
    act("print(json.dumps({'kind': 'ConfigError', 'text': 'streams.a.chunk: 0 must be positive'}))")
    with pytest.raises(ConfigError, match=r"streams\.a\.chunk"):
        PrivateDaemon({}).address(timeout=20, stop=stop)


def test_a_daemon_that_dies_without_an_answer_is_quoted(act: Act, stop: int) -> None:
    act("sys.exit('ImportError: no such library')")
    with pytest.raises(HeadraceError, match="could not be started: ImportError: no such library"):
        PrivateDaemon({}).address(timeout=20, stop=stop)


@pytest.mark.parametrize("answer", ["nonsense", "[1]", "{}", '{"kind": 3}'])
def test_an_answer_that_is_none_is_quoted(act: Act, stop: int, answer: str) -> None:
    act(f"print({answer!r})")
    with pytest.raises(HeadraceError, match="could not be started"):
        PrivateDaemon({}).address(timeout=20, stop=stop)


def test_a_daemon_that_does_not_get_ready_runs_into_the_deadline(act: Act, stop: int) -> None:
    act("time.sleep(100)")
    before = time.monotonic()
    with pytest.raises(DeadlineError, match="does not get ready"):
        PrivateDaemon({}).address(timeout=0.3, stop=stop)
    assert time.monotonic() - before < 20


def test_closing_interrupts_the_wait(act: Act, stop: int) -> None:
    act("time.sleep(100)")
    os.eventfd_write(stop, 1)
    with pytest.raises(Interrupted):
        PrivateDaemon({}).address(timeout=60, stop=stop)


def test_it_is_started_again_three_times_a_minute_at_most(act: Act, stop: int) -> None:
    act(ANSWER)
    daemon = PrivateDaemon({})
    for _ in range(4):
        daemon.address(timeout=20, stop=stop)
    with pytest.raises(ConnectionLost, match="ended 4 times within 60 s"):
        daemon.address(timeout=20, stop=stop)


def test_a_configuration_that_contains_itself_is_refused() -> None:
    source: dict[str, Any] = {}
    source["streams"] = source
    with pytest.raises(ConfigError, match="contains itself"):
        PrivateDaemon(source)


def test_a_name_that_is_a_number_is_refused_as_in_a_file() -> None:
    with pytest.raises(ConfigError, match="the key 1 is not text"):
        PrivateDaemon({"streams": {1: {}}})


@pytest.mark.parametrize("source", [3, None, object(), {"a": object()}, {"a": {1, 2}}])
def test_something_that_is_no_configuration_is_refused(source: Any) -> None:
    with pytest.raises(ConfigError, match="source"):
        PrivateDaemon(source)
