"""A daemon under clients that flood, do not read, break rules or die, and on a machine that runs out of things."""

from __future__ import annotations

import itertools
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import photos as samples
import pytest
import zmq
from service import Daemon, Trainer, Truth, stream, until

from headrace import protocol
from headrace.channel import Channel, Closed
from headrace.connect import connect
from headrace.errors import ConnectionLost
from headrace.pipeline.fake import HANG
from headrace.protocol import Chunk, Failed, Get, Goodbye, Hello, Indexing, Ping, Release, Unknown, Welcome
from headrace.slots import Ring

TIMEOUT = 30.0


class RawClient:
    """A client that does what it is told, right or wrong."""

    def __init__(self, address: str) -> None:
        self.channel: Channel = connect(address, timeout=TIMEOUT)
        self.channel.send(protocol.encode(Hello(stream=None, client="raw")), timeout=TIMEOUT)
        while True:
            frame, fds = self.channel.recv(timeout=TIMEOUT)
            message = protocol.decode_session_reply(frame)
            if not isinstance(message, Indexing):
                break
        assert isinstance(message, Welcome), message
        self.welcome = message
        self.ring = Ring.attach(fds[0], message.layout, message.slots)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.connect(message.endpoint)

    def get(self, request: int, chunk: int, epoch: int = 0) -> None:
        self.socket.send(protocol.encode(Get(token=self.welcome.token, request=request, epoch=epoch, chunk=chunk)))

    def release(self, request: int) -> None:
        self.socket.send(protocol.encode(Release(token=self.welcome.token, request=request)))

    def answer(self) -> Chunk | Failed | Unknown:
        assert self.socket.poll(int(TIMEOUT * 1000)), "no answer"
        return protocol.decode_daemon(self.socket.recv())

    def told(self) -> Any:
        return protocol.decode_session_reply(self.channel.recv(timeout=TIMEOUT)[0])

    def close(self) -> None:
        self.channel.close()
        self.ring.close()
        self.socket.close()
        self.context.term()


@pytest.fixture(scope="module")
def lasting(photos: Path, session_home: Path) -> Iterator[Daemon]:
    folder = Path(tempfile.mkdtemp(dir=session_home))
    with Daemon(folder, {"train": stream(samples.links(photos, folder / "many", 200))}, slots=4) as made:
        yield made


@pytest.fixture
def daemon(lasting: Daemon) -> Iterator[Daemon]:
    """For tests that leave it as it was."""
    yield lasting
    until(lambda: lasting.ping().sessions == 0, "the end of all sessions")


@pytest.fixture
def client(daemon: Daemon) -> Iterator[RawClient]:
    made = RawClient(daemon.address)
    yield made
    made.close()


@pytest.fixture
def own(many: Callable[[int], Path], home: Path) -> Iterator[Daemon]:
    """For tests after which it is not what it was."""
    with Daemon(home, {"train": stream(many(200))}, workers=2, slots=4) as made:
        yield made


def epoch_is_whole(daemon: Daemon, home: Path) -> None:
    with Trainer(daemon.address, home / "honest.jsonl") as trainer:
        trainer.wait()
    assert trainer.rows() == Truth(daemon.config, home / "cache").rows(0)


def test_a_flood_of_nonsense_keeps_nobody_waiting(own: Daemon, home: Path) -> None:
    client = RawClient(own.address)
    flood = f"""
import zmq
context = zmq.Context()
socket = context.socket(zmq.DEALER)
socket.setsockopt(zmq.SNDHWM, 1000)
socket.setsockopt(zmq.LINGER, 0)
socket.connect({client.welcome.endpoint!r})
while True:
    try:
        for _ in range(1000):
            socket.send(b"x" * 20, zmq.NOBLOCK)
    except zmq.Again:
        pass
"""
    process = subprocess.Popen([sys.executable, "-c", flood])
    try:
        time.sleep(1)
        assert own.ping().pid == own.pid
        epoch_is_whole(own, home)
        assert process.poll() is None
        assert own.stop() == 0
        assert own.log.stat().st_size < 100_000
    finally:
        process.kill()
        process.wait()
        client.close()


def test_a_client_that_asks_and_does_not_read_is_put_out(daemon: Daemon) -> None:
    channel = connect(daemon.address, timeout=TIMEOUT)
    ping = protocol.encode(Ping())
    with pytest.raises(Closed):
        for _ in range(200_000):
            channel.send(ping, timeout=TIMEOUT)
    channel.close()
    assert daemon.ping().sessions == 0


@pytest.mark.parametrize("rule", ["a chunk that is none", "a number in use", "a second Hello", "garbage"])
def test_who_breaks_a_rule_is_put_out_and_told_why(daemon: Daemon, client: RawClient, home: Path, rule: str) -> None:
    if rule == "a chunk that is none":
        client.get(1, 50)
    elif rule == "a number in use":
        client.get(1, 0), client.get(1, 1)
    elif rule == "a second Hello":
        client.channel.send(protocol.encode(Hello(stream=None)), timeout=TIMEOUT)
    else:
        client.channel.send(bytes([protocol.VERSION]) + b"garbage", timeout=TIMEOUT)
    told = client.told()
    assert isinstance(told, Goodbye | protocol.Refused)
    epoch_is_whole(daemon, home)


def test_what_an_expelled_reader_has_leased_stays_untouched_until_it_ends(
    daemon: Daemon, client: RawClient, home: Path
) -> None:
    client.get(1, 7)
    chunk = client.answer()
    assert isinstance(chunk, Chunk)
    before = client.ring.views[chunk.slot].images.tobytes()
    client.get(2, 50)  # there is no such chunk
    assert isinstance(client.told(), Goodbye)
    epoch_is_whole(daemon, home)  # through the other slots
    assert client.ring.generation[chunk.slot] == chunk.generation
    assert client.ring.views[chunk.slot].images.tobytes() == before
    client.get(3, 8)
    while not isinstance(client.answer(), Unknown):
        pass


def test_a_session_may_have_as_many_requests_outstanding_as_the_protocol_says(
    daemon: Daemon, client: RawClient
) -> None:
    for request in range(protocol.MAX_OUTSTANDING):
        client.get(request, request % 50)
    for _ in range(protocol.MAX_OUTSTANDING):
        answer = client.answer()
        assert isinstance(answer, Chunk)
        client.release(answer.request)


def rendered(client: RawClient, request: int, chunk: int) -> bool:
    client.get(request, chunk)
    answer = client.answer()
    if isinstance(answer, Chunk):
        client.release(request)
    return isinstance(answer, Chunk)


def test_when_no_worker_can_start_requests_fail_with_the_reason(
    many: Callable[[int], Path], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker's interpreter that ends at once stands for an installation that was broken under a running daemon."""
    broken = home / "broken"
    (broken / "code").mkdir(parents=True)
    (broken / "code" / "sitecustomize.py").write_text(
        "import os, sys\n"
        f"if 'headrace.workers.worker' in sys.orig_argv and os.path.exists({str(broken / 'now')!r}):\n"
        "    os._exit(3)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(broken / "code"))
    with Daemon(home, {"train": stream(many(200))}, workers=2, slots=4) as daemon:
        client = RawClient(daemon.address)
        client.get(1, 0)
        assert isinstance(client.answer(), Chunk)
        client.release(1)
        (broken / "now").touch()
        for pid in daemon.ping().workers:
            os.kill(pid, signal.SIGKILL)
        client.get(2, 1)
        answer = client.answer()
        assert isinstance(answer, Failed) and "before they are ready" in answer.text
        client.get(3, 2)
        answer = client.answer()
        assert isinstance(answer, Failed) and answer.request == 3
        (broken / "now").unlink()
        # A process that was started is no worker yet: one that looked for the file just before may still end.
        requests = itertools.count(4)
        until(lambda: rendered(client, next(requests), 3), "workers to come back")
        epoch_is_whole(daemon, home)
        client.close()


def has_room(daemon: Daemon) -> bool:
    try:
        return daemon.ping().sessions == 0
    except ConnectionLost:
        return False


def test_a_daemon_without_descriptors_left_goes_on_serving(many: Callable[[int], Path], home: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    daemon = Daemon(home, {"train": stream(many(40))}, slots=4)
    daemon.start(limit_descriptors=100)
    strangers = []
    try:
        client = RawClient(daemon.address)
        for _ in range(100):
            stranger = socket.socket(socket.AF_UNIX)
            stranger.settimeout(5)
            stranger.connect(daemon.address.removeprefix("ipc://"))
            strangers.append(stranger)
        time.sleep(1)
        client.get(1, 0)
        assert isinstance(client.answer(), Chunk)
        for stranger in strangers:
            stranger.close()
        client.close()
        until(lambda: has_room(daemon), "room for newcomers")
        epoch_is_whole(daemon, home)
    finally:
        for stranger in strangers:
            stranger.close()
        assert daemon.stop() == 0
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (soft, hard)


@pytest.mark.kills
def test_workers_die_with_a_killed_daemon_even_in_the_middle_of_a_picture(
    many: Callable[[int], Path], home: Path
) -> None:
    folder = many(8)
    for file in folder.glob("*/*"):
        data = file.read_bytes()
        file.unlink()
        file.write_bytes(data + HANG)
    with Daemon(home, {"train": stream(folder)}, workers=2, backend="fake") as daemon:
        client = RawClient(daemon.address)
        client.get(1, 0), client.get(2, 1)
        workers = daemon.ping().workers
        time.sleep(0.5)
        daemon.kill()
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers), "the workers to end", 10)
        client.close()


def test_a_daemon_whose_lock_was_swept_away_keeps_its_address(own: Daemon, home: Path) -> None:
    Path(f"{own.address.removeprefix('ipc://')}.lock").unlink()
    command = [sys.executable, "-m", "headrace.server", "serve", str(own.config)]
    second = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert second.returncode == 2 and "something listens" in second.stderr
    epoch_is_whole(own, home)


def test_slow_reading_is_progress(many: Callable[[int], Path], home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file takes a while, a chunk longer than a worker may be silent."""
    code = home / "code"
    code.mkdir()
    (code / "sitecustomize.py").write_text(
        "import sys\n"
        "if 'headrace.workers.worker' in sys.orig_argv:\n"
        "    import time\n"
        "    from headrace.pipeline import dataset\n"
        "    read = dataset.FileSource.read\n"
        "    dataset.FileSource.read = lambda self, i: (time.sleep(0.3), read(self, i))[1]\n"
        "if 'serve' in sys.orig_argv:\n"
        "    from headrace.workers import supervisor\n"
        "    supervisor.Supervisor.__init__.__kwdefaults__['hang_timeout'] = 2.0\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(code))
    with Daemon(home, {"train": stream(many(16), chunk=16)}, workers=1) as daemon:
        with Trainer(daemon.address, home / "a.jsonl") as trainer:
            trainer.wait()
        assert daemon.ping().deaths == 0
    monkeypatch.delenv("PYTHONPATH")
    assert trainer.rows() == Truth(daemon.config, home / "cache").rows(0)
