"""Two hosts on one machine: they reach each other, and nothing else reaches them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from headrace.server.second_host import Host, NotPossible, two_hosts

CONNECT = "import socket, sys; print(socket.create_connection((sys.argv[1], int(sys.argv[2])), 5).recv(99).decode())"
SERVE = (
    "import socket, sys\n"
    "server = socket.create_server((sys.argv[1], 0)); server.settimeout(20)\n"
    "print(server.getsockname()[1], flush=True); server.accept()[0].sendall(b'here')\n"
)


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    try:
        with two_hosts() as pair:
            yield pair
    except NotPossible as error:
        pytest.skip(f"two hosts cannot be played on this machine: {error}")


def python(*args: str) -> list[str]:
    return [sys.executable, "-c", *args]


def test_one_reaches_the_other_and_we_reach_neither(hosts: tuple[Host, Host]) -> None:
    server, client = hosts
    with subprocess.Popen(server.command(*python(SERVE, server.ip)), stdout=subprocess.PIPE, text=True) as serving:
        assert serving.stdout is not None
        port = serving.stdout.readline().strip()
        ours = subprocess.run(python(CONNECT, server.ip, port), capture_output=True, timeout=30, check=False)
        theirs = subprocess.run(client.command(*python(CONNECT, server.ip, port)), capture_output=True, timeout=30)
    assert ours.returncode != 0
    assert theirs.stdout == b"here\n"


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(NotPossible, match="unshare"), two_hosts():
        pass
