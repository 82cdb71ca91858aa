"""The leak check of `conftest.py` sees each kind of thing that a test can leave behind."""

from __future__ import annotations

import mmap
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import leaks
import pytest
import zmq

ROOT = Path(__file__).parents[2]


def test_nothing_new_is_nothing_left() -> None:
    assert leaks.left(leaks.take()) == []


def test_a_thread_is_seen_by_its_object_even_under_a_known_name() -> None:
    stop = threading.Event()
    known = threading.Thread(target=stop.wait, name="same", daemon=True)
    known.start()
    before = leaks.take()
    other = threading.Thread(target=stop.wait, name="same", daemon=True)
    other.start()
    assert leaks.left(before) == ["thread 'same' (daemon)"]
    stop.set()
    known.join()
    other.join()
    assert leaks.settled(before) == []


def test_a_context_of_zeromq_is_seen_by_its_native_threads_and_descriptors() -> None:
    before = leaks.take()
    context = zmq.Context()
    context.socket(zmq.PULL).close()
    lines = leaks.left(before)
    assert any(line.startswith("native thread") for line in lines)
    assert any(line.startswith("descriptor") for line in lines)
    context.term()
    assert leaks.settled(before) == []


def test_a_child_is_seen_running_and_as_a_zombie() -> None:
    before = leaks.take()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={})
    assert any(f"process {child.pid} " in line for line in leaks.left(before))
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert any(f"process {child.pid} in state Z" in line for line in leaks.left(before))
    child.communicate()
    assert leaks.settled(before) == []


def test_a_daemon_handed_to_init_is_seen_by_the_token_and_can_be_killed() -> None:
    before = leaks.take()
    script = (
        "import subprocess, sys;"
        "print(subprocess.Popen(['sleep', '60'], stdout=-3, stderr=-3, start_new_session=True).pid)"
    )
    grandchild = int(subprocess.run([sys.executable, "-c", script], check=True, capture_output=True).stdout)
    assert any(f"process {grandchild} " in line for line in leaks.left(before))
    leaks.kill(before)
    assert leaks.settled(before) == []


def test_a_grandchild_without_the_token_is_seen_as_a_descendant() -> None:
    before = leaks.take()
    script = "import subprocess; p = subprocess.Popen(['sleep', '60'], env={}); print(p.pid, flush=True); p.wait()"
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert child.stdout is not None
    grandchild = int(child.stdout.readline())
    assert any(f"process {grandchild} " in line for line in leaks.left(before))
    os.kill(grandchild, signal.SIGKILL)
    child.communicate()
    assert leaks.settled(before) == []


def test_a_descriptor_is_seen_even_under_a_known_number(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.touch()
    second.touch()
    fd = os.open(first, os.O_RDONLY)
    before = leaks.take()
    os.close(fd)
    assert os.open(second, os.O_RDONLY) == fd
    assert leaks.left(before) == [f"descriptor {fd}: {second}"]
    os.close(fd)
    assert leaks.left(before) == []


def test_a_socket_is_seen() -> None:
    before = leaks.take()
    one, other = socket.socketpair()
    assert sum("socket:" in line for line in leaks.left(before)) == 2
    one.close()
    other.close()
    assert leaks.left(before) == []


@pytest.mark.parametrize("access", [mmap.ACCESS_READ, mmap.ACCESS_WRITE])
def test_a_mapped_memfd_is_seen_even_under_a_known_name(access: int) -> None:
    known_fd = os.memfd_create("same")
    os.ftruncate(known_fd, mmap.PAGESIZE)
    known = mmap.mmap(known_fd, 0, access=access)
    before = leaks.take()
    fd = os.memfd_create("same")
    os.ftruncate(fd, mmap.PAGESIZE)
    mapped = mmap.mmap(fd, 0, access=access)
    os.close(fd)
    (line,) = [line for line in leaks.left(before) if "mapping" in line]
    assert "mapping of 4096 bytes" in line and "memfd:same" in line
    mapped.close()
    assert leaks.left(before) == []
    known.close()
    os.close(known_fd)


def test_a_mapped_file_is_seen(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(100))
    before = leaks.take()
    with file.open("rb") as opened:
        mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    (line,) = [line for line in leaks.left(before) if "mapping" in line]
    assert str(file) in line
    mapped.close()
    assert leaks.left(before) == []


def test_shared_anonymous_memory_is_seen() -> None:
    before = leaks.take()
    mapped = mmap.mmap(-1, mmap.PAGESIZE)
    assert any("mapping of 4096 bytes" in line for line in leaks.left(before))
    mapped.close()
    assert leaks.left(before) == []


def test_much_private_memory_is_seen_and_little_is_not() -> None:
    before = leaks.take()
    little = mmap.mmap(-1, 8 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    assert leaks.left(before) == []
    much = mmap.mmap(-1, 2 * leaks.LARGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    (line,) = leaks.left(before)
    assert line.startswith("memory: ")
    little.close()
    much.close()
    assert leaks.left(before) == []


def test_what_is_ending_is_waited_for() -> None:
    before = leaks.take()
    thread = threading.Thread(target=time.sleep, args=(0.3,))
    thread.start()
    assert leaks.settled(before) == []


def test_what_only_the_garbage_collector_holds_is_not_left() -> None:
    before = leaks.take()
    cycle: list[object] = [mmap.mmap(-1, mmap.PAGESIZE)]
    cycle.append(cycle)
    del cycle
    assert leaks.settled(before) == []


def test_the_fixture_fails_the_test_that_leaks_and_no_other(tmp_path: Path, home: Path) -> None:
    (tmp_path / "test_sample.py").write_text(
        "import os, socket, subprocess, threading, time\n"
        "import leaks, pytest\n"
        "leaks.PATIENCE = 0.3\n"
        "def bind(home):\n"
        "    with socket.socket(socket.AF_UNIX) as s:\n"
        "        s.bind(str(home / 's'))\n"
        "def test_thread(): threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
        "def test_process(): os.system('sleep 600 &')\n"
        "def test_descriptor(): os.dup(2)\n"
        "def test_socket_file(home): bind(home)\n"
        "@pytest.mark.kills\n"
        "def test_kills(home): bind(home)\n"
        "def test_clean(): assert os.environ['HOME'].startswith('/tmp/hr-')\n"
    )
    options = ["-q", "-c", str(ROOT / "pyproject.toml"), "-p", "conftest", "-p", "no:cacheprovider"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests")},
        capture_output=True,
        text=True,
    )
    assert "6 passed, 4 errors" in run.stdout, run.stdout + run.stderr
    for name in ("thread", "process", "descriptor", "socket_file"):
        assert re.search(rf"ERROR .*test_sample.py::test_{name}", run.stdout)
    assert "descriptor" in run.stdout and "native" not in run.stdout
    assert not (home / "s").exists()
