"""The daemon's address: one owner, no strangers, left-overs taken over."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.server.listener import Listener, Taken, metrics_place, private_folder, tcp_endpoint


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "d.sock"


def test_a_second_daemon_on_one_address_is_refused(path: Path) -> None:
    listener = Listener(path)
    with pytest.raises(Taken, match="another daemon"):
        Listener(path)
    listener.close()
    Listener(path).close()


def test_what_a_killed_daemon_left_is_taken_over(path: Path) -> None:
    code = f"""
import os
from pathlib import Path
from headrace.server.listener import Listener
listener = Listener(Path({str(path)!r}))
os.kill(os.getpid(), 9)
"""
    subprocess.run([sys.executable, "-c", code], check=False)
    assert path.exists()
    listener = Listener(path)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        [(connection, pid, uid)] = list(listener.accept())
        connection.close()
    assert (pid, uid) == (os.getpid(), os.getuid())
    listener.close()


def test_closing_leaves_no_file(path: Path) -> None:
    listener = Listener(path)
    listener.close()
    listener.close()
    assert list(path.parent.iterdir()) == []


def test_a_file_that_is_no_socket_is_not_removed(path: Path) -> None:
    path.write_text("precious")
    with pytest.raises(ConfigError, match="no socket"):
        Listener(path)
    assert path.read_text() == "precious"


def test_nobody_but_the_user_may_connect(path: Path) -> None:
    listener = Listener(path)
    assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0
    listener.close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root may give a file to any group")
def test_the_configured_group_may_connect(path: Path) -> None:
    import grp

    group = next(g for g in grp.getgrall() if g.gr_gid != os.getgid())
    listener = Listener(path, group=group.gr_name)
    status = path.stat()
    assert status.st_gid == group.gr_gid and stat.S_IMODE(status.st_mode) == 0o660
    listener.close()


def test_an_unknown_group_is_named(path: Path) -> None:
    with pytest.raises(ConfigError, match="no group 'nosuchgroup'"):
        Listener(path, group="nosuchgroup")


def test_a_path_too_long_for_a_unix_socket_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at most 107"):
        Listener(tmp_path / ("x" * 120))


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nosuch"):
        Listener(tmp_path / "nosuch" / "d.sock")


def test_the_private_folder_must_be_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = private_folder()
    assert folder == tmp_path / "headrace" and stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o755)
    with pytest.raises(ConfigError, match="0700"):
        private_folder()


@pytest.mark.parametrize(
    ("address", "endpoint"),
    [
        ("tcp://127.0.0.1:5555", "tcp://127.0.0.1:5555"),
        ("tcp://127.1.2.3:*", "tcp://127.1.2.3:*"),
        ("tcp://[::1]:0", "tcp://[::1]:0"),
        ("tcp://localhost:7", "tcp://127.0.0.1:7"),
    ],
)
def test_a_loopback_address_is_bound_in_numbers(address: str, endpoint: str) -> None:
    assert tcp_endpoint(address, insecure=False) == tcp_endpoint(address, insecure=True) == endpoint


@pytest.mark.parametrize("host", ["*", "0.0.0.0", "192.0.2.1", "[::]", "[2001:db8::1]"])
def test_an_address_that_others_reach_needs_the_word_insecure(host: str) -> None:
    with pytest.raises(ConfigError, match=r"can be reached from other hosts.*127.0.0.1:5555.*--insecure"):
        tcp_endpoint(f"tcp://{host}:5555", insecure=False)
    assert tcp_endpoint(f"tcp://{host}:5555", insecure=True) == f"tcp://{host.replace('*', '0.0.0.0')}:5555"


@pytest.mark.parametrize(
    ("place", "bound"),
    [("127.0.0.1:9400", ("127.0.0.1", 9400)), ("localhost:*", ("127.0.0.1", 0)), ("[::1]:0", ("::1", 0))],
)
def test_metrics_are_bound_in_numbers(place: str, bound: tuple[str, int]) -> None:
    assert metrics_place(place, insecure=False) == bound


@pytest.mark.parametrize("host", ["*", "0.0.0.0", "[::]"])
def test_metrics_that_others_reach_need_the_word_insecure(host: str) -> None:
    with pytest.raises(ConfigError, match=r"^metrics: .*can be reached from other hosts.*127.0.0.1:9400.*--insecure"):
        metrics_place(f"{host}:9400", insecure=False)
    assert metrics_place(f"{host}:9400", insecure=True) == (host.strip("[]").replace("*", "0.0.0.0"), 9400)


def test_a_host_that_is_none_is_named(path: Path) -> None:
    with pytest.raises(ConfigError, match="no host 'no.such.host.invalid'"):
        tcp_endpoint("tcp://no.such.host.invalid:5555", insecure=True)
    with pytest.raises(ConfigError, match="metrics: no.such.host.invalid:9400: there is no host"):
        metrics_place("no.such.host.invalid:9400", insecure=True)
