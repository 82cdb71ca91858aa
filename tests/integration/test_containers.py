"""Daemon and trainer in containers of their own: other numbers of processes, other paths, the same socket.

A container is played by namespaces (user, PID, mount), which needs no root. Some machines forbid that.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from service import Daemon, stream

from headrace import Loader
from headrace.server.connection import _SO_PEERPIDFD

CONTAINER = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", "--kill-child"]

#: What a trainer in a container does: it takes an epoch, and writes what was in it.
TRAINER = """
import json, os, sys, headrace
with headrace.Loader(sys.argv[1], batch_size=16, output="numpy", dtype="uint8", transport="shm") as loader:
    print(json.dumps([os.getpid(), *([int(i), int(image.sum())] for b in loader for i, image in zip(b.indices, b[0]))]))
"""

#: The daemon's end of one connection.
SERVER = """
import sys
from pathlib import Path
from headrace.server.connection import UnixConnection
from headrace.server.listener import Listener
from headrace.workers.loop import Loop

loop, ended = Loop(), []
listener = Listener(Path(sys.argv[1]))
loop.watch(listener.socket, lambda: None)
print("listening", flush=True)
while not (come := list(listener.accept())):
    loop.run_once(30)
loop.unwatch(listener.socket)
connection = UnixConnection(*come[0], {}, loop, lambda connection: print("heard"), ended.append)
print(connection.name, flush=True)
loop.run_once(30)
print("ended" if ended == [connection] else "nothing", flush=True)
connection.close()
listener.close()
"""

#: A client whose child keeps a copy of its connection, and goes on when the client has been killed.
FORKED = """
import os, signal, socket, sys
client = socket.socket(socket.AF_UNIX)
client.connect(sys.argv[1])
if child := os.fork():
    print(child, flush=True)
signal.pause()
"""


@pytest.fixture(scope="module", autouse=True)
def _allowed() -> None:
    try:
        tried = subprocess.run([*CONTAINER, "mount", "--bind", "/tmp", "/tmp"], capture_output=True, timeout=20)
    except FileNotFoundError:
        pytest.skip("containers cannot be played on this machine: there is no unshare")
    if tried.returncode:
        pytest.skip(f"containers cannot be played on this machine: {tried.stderr.decode().strip()}")


def first_process(unshare: int) -> int:
    """The container's process 1, by its number out here."""
    return int(Path(f"/proc/{unshare}/task/{unshare}/children").read_text())


def test_a_trainer_in_another_container_gets_the_same_pictures_through_a_folder_that_lies_elsewhere_there(
    many: Callable[[int], Path], home: Path
) -> None:
    sockets, elsewhere = home / "sockets", home / "elsewhere"
    sockets.mkdir()
    elsewhere.mkdir()
    daemon = Daemon(sockets, {"train": stream(many(24))})
    daemon.start(prefix=CONTAINER)
    try:
        inside = f'mount --bind {sockets} {elsewhere} && mount -t tmpfs none {sockets} && exec "$@"'
        trainer = [*CONTAINER, "sh", "-c", inside, "sh", sys.executable, "-c", TRAINER, f"ipc://{elsewhere}/d.sock"]
        done = subprocess.run(trainer, capture_output=True, text=True, timeout=60)
        with Loader(daemon.address, batch_size=16, output="numpy", dtype="uint8") as loader:
            ours = [[int(i), int(image.sum())] for b in loader for i, image in zip(b.indices, b[0], strict=True)]
    finally:
        assert daemon.process is not None
        os.kill(first_process(daemon.pid), signal.SIGTERM)
        ended = daemon.process.wait(30)
        daemon.stop()
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [1, *ours]
    assert len(ours) == 24
    assert ended == 0


def test_the_end_of_a_client_outside_is_seen_though_its_child_keeps_the_connection(home: Path) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        try:
            os.close(ours.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD))
        except OSError:
            pytest.skip("a kernel before 6.5 does not tell: the connection's end must do")
    command = [*CONTAINER, sys.executable, "-c", SERVER, str(home / "s")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == b"listening\n"
        with subprocess.Popen([sys.executable, "-c", FORKED, str(home / "s")], stdout=subprocess.PIPE) as client:
            assert client.stdout is not None
            child = int(client.stdout.readline())
            try:
                assert server.stdout.readline() == b"client of another PID namespace (uid 0)\n"
                client.kill()
                assert server.stdout.readline() == b"ended\n"
            finally:
                os.kill(child, signal.SIGKILL)
        assert server.wait(30) == 0
