"""Whoever ends first, and however: at once, and nothing is left. `benchmarks/endings.py` measures what it takes."""

from __future__ import annotations

import gc
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from service import Daemon, stream, until

from headrace import Loader
from headrace.errors import HeadraceError

#: Seconds that an ending may take on a machine with much else to do.
SOON = 20


@pytest.fixture(scope="module")
def daemon(photos: Path, session_home: Path) -> Iterator[Daemon]:
    folder = Path(tempfile.mkdtemp(dir=session_home))
    with Daemon(folder, {"train": stream(photos, size=8)}, workers=1, slots=8, tcp=True) as made:
        yield made


def address(daemon: Daemon, transport: str) -> str:
    return daemon.tcp_address if transport == "tcp" else daemon.address


def open_loader(daemon: Daemon, transport: str = "shm", **more: Any) -> Loader:
    usual = {"batch_size": 8, "output": "numpy", "rank": 0, "world_size": 1, "transport": transport}
    return Loader(address(daemon, transport), **(usual | more))


def held(pid: int) -> tuple[int, int]:
    """Descriptors and threads of a process."""
    return len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))


def idle(daemon: Daemon) -> bool:
    """Nobody is there, and nobody's slots."""
    pong = daemon.ping()
    status = pong.streams["train"]
    return not pong.sessions and status is not None and not (status.leased or status.waiting or status.filling)


def settled(daemon: Daemon) -> list[tuple[int, int]]:
    """What this process and the daemon hold, once it stays the same."""
    gc.collect()
    until(lambda: idle(daemon), "the sessions' end")
    seen: list[list[tuple[int, int]]] = []

    def still() -> bool:
        seen.append([held(os.getpid()), held(daemon.pid)])
        return len(seen) >= 10 and all(each == seen[-1] for each in seen[-10:])

    until(still, "an end of changes")
    return seen[-1]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_five_hundred_loaders_each_dropped_after_one_batch_leave_nothing_at_either_end(
    daemon: Daemon, transport: str
) -> None:
    count = 500 if transport == "shm" else 100
    for number in range(count):
        loader = open_loader(daemon, transport)
        batch = next(iter(loader))
        assert len(batch.indices) == 8
        del loader, batch
        if number == 10:  # whatever is made once has been made
            before = settled(daemon)
    assert settled(daemon) == before


def test_many_loaders_at_once_go_when_they_are_dropped_together(daemon: Daemon) -> None:
    open_loader(daemon).close()
    before = settled(daemon)
    loaders = [open_loader(daemon) for _ in range(40)]
    for loader in loaders:
        assert len(next(iter(loader)).indices) == 8
    assert daemon.ping().sessions == 40
    del loader
    loaders.clear()
    assert settled(daemon) == before


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_the_client_first_with_requests_outstanding_gives_everything_back(daemon: Daemon, transport: str) -> None:
    for _ in range(5):
        loader = open_loader(daemon, transport, batch_size=20, prefetch=8)  # more than the ring
        batches = iter(loader)
        next(batches)
        loader.close()
        with pytest.raises(HeadraceError):
            next(batches)
    until(lambda: idle(daemon), "the sessions' end")


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("how", ["asked", pytest.param("killed", marks=pytest.mark.kills)])
def test_the_server_first_keeps_no_client_from_ending(photos: Path, home: Path, transport: str, how: str) -> None:
    made = Daemon(home, {"train": stream(photos, size=8)}, workers=1, slots=4, tcp=True).start()
    loader = open_loader(made, transport)
    batches = iter(loader)
    next(batches)
    if how == "asked":
        began = time.monotonic()
        assert made.stop() == 0
        assert time.monotonic() - began < SOON
    else:
        made.kill()
    taken = threading.Event()

    def take() -> None:
        try:
            while True:
                next(batches)
        except (HeadraceError, StopIteration):
            taken.set()

    waiting = threading.Thread(target=take)
    waiting.start()
    began = time.monotonic()
    loader.close()
    assert taken.wait(SOON)
    waiting.join(SOON)
    assert not waiting.is_alive() and time.monotonic() - began < SOON


@pytest.mark.kills
def test_what_is_killed_with_all_its_group_starts_again_at_once_and_leaves_nothing(photos: Path, home: Path) -> None:
    def lying_about() -> list[str]:
        places = [home / "run", home / "tmp", home]
        return [str(path) for place in places for path in sorted(place.iterdir())]

    made = Daemon(home, {"train": stream(photos, size=8)}, workers=2, slots=4)
    found: list[list[str]] = []
    for _ in range(3):
        made.start()
        workers = made.ping().workers
        with open_loader(made) as loader:
            batches = iter(loader)
            for _ in range(3):
                next(batches)
            os.killpg(made.pid, signal.SIGKILL)
            made.kill()
        until(lambda pids=workers: not any(Path(f"/proc/{pid}").exists() for pid in pids), "its workers' end")
        found.append(lying_about())
    assert found[1] == found[0] == found[2]


def test_a_thousand_kept_batches_cost_no_descriptors_at_either_end(daemon: Daemon) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, soft), hard))
    try:
        with open_loader(daemon, batch_size=1) as loader:
            kept = [next(iter(loader))]
            before = held(os.getpid())[0], held(daemon.pid)[0]
            while len(kept) < 1000:
                kept += loader
            assert (held(os.getpid())[0], held(daemon.pid)[0]) == before
        assert len({batch.images.__array_interface__["data"][0] for batch in kept}) == len(kept)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


TRAINER = """
import sys
from headrace import Loader
loader = Loader(sys.argv[1], batch_size=8, output="numpy", transport=sys.argv[2])
batches = iter(loader)
next(batches)
sys.stdout.write("going\\n")
sys.stdout.flush()
sys.stdin.readline()
{then}
"""


def trainer(daemon: Daemon, transport: str, then: str) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", TRAINER.format(then=then), address(daemon, transport), transport],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert child.stdout is not None and child.stdout.readline() == "going\n"
    return child


#: What a trainer does next, what is then done to it, and its status.
ENDINGS: dict[str, tuple[str, Callable[[subprocess.Popen[str]], object], int]] = {
    "exit with a live loader": ("", lambda child: None, 0),
    "an error with a live loader": ("raise SystemExit(3)", lambda child: None, 3),
    "Ctrl-C in next": (
        "sys.stdout.write('in\\n'); sys.stdout.flush()\ndel batches\nwhile True: list(loader)",
        lambda child: (child.stdout and child.stdout.readline(), time.sleep(0.2), child.send_signal(signal.SIGINT)),
        -signal.SIGINT,
    ),
}


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("ending", ENDINGS)
def test_a_trainer_ends_though_its_daemon_is_stopped(daemon: Daemon, transport: str, ending: str) -> None:
    """A daemon that answers nothing is the worst case of one that is busy."""
    then, act, status = ENDINGS[ending]
    child = trainer(daemon, transport, then)
    assert child.stdin is not None
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        child.stdin.write("\n")
        child.stdin.flush()
        act(child)
        _, said = child.communicate(timeout=SOON)
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
        if child.poll() is None:
            child.kill()
            child.communicate()
    assert child.returncode == status
    assert "Fatal" not in said and ("Traceback" in said) == (ending == "Ctrl-C in next"), said
    until(lambda: idle(daemon), "the session's end")
