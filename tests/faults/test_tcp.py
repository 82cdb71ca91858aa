"""A daemon on tcp under clients that do not read, read slowly, vanish, come back, break rules, or are no clients."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import photos as samples
import pytest
from remote import TIMEOUT, BareClient, RemoteClient
from service import Daemon, Trainer, Truth, signal_, stream, until, with_timings

from headrace import protocol
from headrace.channel import Closed
from headrace.connect import connect
from headrace.protocol import (
    Attach,
    Attached,
    Cancel,
    Get,
    Goodbye,
    Hello,
    Indexing,
    Leave,
    Message,
    Ping,
    Pong,
    Refused,
    Release,
    Unknown,
    Welcome,
)

SLOTS = 5
WORKERS = 1
CHUNKS = 40

#: Seconds after which the daemon of these tests holds peers for gone.
QUICK = {"heartbeat": 0.3, "silence": 2.0, "stuck": 2.0, "probe": 0.3, "attach": 2.0}


def described(home: Path, pictures: Path) -> Daemon:
    """A daemon whose chunks are too large for the kernel to take one that nobody reads."""
    streams = {"train": stream(pictures, size=512)}
    return Daemon(home, streams, workers=WORKERS, slots=SLOTS, backend="fake", tcp=True)


@pytest.fixture
def patient(many: Callable[[int], Path], home: Path) -> Iterator[Daemon]:
    """For tests after which it is not what it was, and those that bear no sign of life."""
    with described(home, many(4 * CHUNKS)) as made:
        yield made


@pytest.fixture
def quick(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Daemons that lose their patience soon."""
    monkeypatch.setenv("PYTHONPATH", str(with_timings(home / "quick", QUICK)))


@pytest.fixture
def hasty(quick: None, patient: Daemon) -> Daemon:
    return patient


@pytest.fixture(scope="module")
def lasting(photos: Path, session_home: Path) -> Iterator[Daemon]:
    """Patient with those who are there, and soon aware of those who are not."""
    folder = Path(tempfile.mkdtemp(dir=session_home))
    daemon = described(folder, samples.links(photos, folder / "many", 4 * CHUNKS))
    with pytest.MonkeyPatch.context() as patch:
        seen = {name: QUICK[name] for name in ("probe", "attach")}
        patch.setenv("PYTHONPATH", str(with_timings(folder / "code", seen)))
        daemon.start()
    yield daemon
    daemon.stop()


@pytest.fixture
def daemon(lasting: Daemon) -> Iterator[Daemon]:
    """For tests that leave it as it was."""
    yield lasting
    until(lambda: lasting.ping().sessions == 0, "the end of all sessions")


@pytest.fixture
def clients() -> Iterator[list[RemoteClient | BareClient]]:
    made: list[RemoteClient | BareClient] = []
    yield made
    for client in made:
        client.close()


def epoch_is_whole(daemon: Daemon, home: Path, name: str = "honest", **options: object) -> None:
    """Also over tcp, while whatever else is going on."""
    with Trainer(daemon.tcp_address, home / f"{name}.jsonl", transport="tcp", **options) as trainer:
        trainer.wait()
    assert trainer.rows() == Truth(daemon.config, home / "cache").rows(0)


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# -- clients that do not read -----------------------------------------------------------------------------------


def test_a_client_that_never_reads_holds_its_share_and_others_get_their_epoch(
    patient: Daemon, clients: list[RemoteClient | BareClient], home: Path
) -> None:
    bare = BareClient(patient.tcp_address, receive_buffer=4096)
    clients.append(bare)
    token = joined(bare)
    lane = BareClient(patient.tcp_address, receive_buffer=4096)
    clients.append(lane)
    lane.say(Attach(token=token, lane=1))
    assert lane.told() == Attached(lane=1)
    for request in range(CHUNKS):
        bare.say(Get(token=token, request=request, epoch=0, chunk=request))
    share = SLOTS - WORKERS  # of who is alone
    until(lambda: patient.status().delivered >= share, "its share")
    time.sleep(1)
    assert patient.status().delivered == share  # the kernel holds less than a chunk, so none has left
    epoch_is_whole(patient, home)
    until(lambda: patient.ping().sessions == 1, "the end of the honest session")
    delivered = patient.status().delivered  # the honest trainer's with it, and what it was sent of the next epoch
    before = cpu_seconds(patient.pid)
    time.sleep(3)
    assert cpu_seconds(patient.pid) - before < 0.3
    assert patient.status().delivered == delivered


def test_a_client_that_takes_nothing_is_put_out_and_its_slots_come_back(
    hasty: Daemon, clients: list[RemoteClient | BareClient], home: Path
) -> None:
    """Again and again: what was sent to it is not counted as free before it has left."""
    for _ in range(3):
        client = RemoteClient(hasty.tcp_address, unread=1)
        clients.append(client)
        for request in range(CHUNKS):
            client.get(request, request)
        until(lambda: hasty.ping().sessions == 0, "the end of a session that takes nothing")
    epoch_is_whole(hasty, home)


def test_a_client_that_reads_a_byte_at_a_time_gets_what_it_asked_for_and_keeps_nobody_waiting(
    daemon: Daemon, clients: list[RemoteClient | BareClient], home: Path
) -> None:
    bare = BareClient(daemon.tcp_address)
    clients.append(bare)
    token = joined(bare)
    lane = BareClient(daemon.tcp_address, receive_buffer=4096)  # not before, or it is cut off where that takes long
    clients.append(lane)
    lane.say(Attach(token=token, lane=1))
    lane.told()
    bare.say(Get(token=token, request=1, epoch=0, chunk=3, first=1, count=1))
    head = b""
    with Trainer(daemon.tcp_address, home / "honest.jsonl", transport="tcp") as trainer:
        while trainer.running:
            head += lane.socket.recv(1)
            time.sleep(0.001)
        trainer.wait()
    assert trainer.rows() == Truth(daemon.config, home / "cache").rows(0)
    other = RemoteClient(daemon.tcp_address)
    clients.append(other)
    other.get(1, 3, first=1, count=1)
    picture = other.rows()[1]["images"].tobytes()
    while picture not in head:
        more = lane.socket.recv(1 << 20)
        assert more and len(head) < 2 * len(picture)
        head += more


def joined(bare: BareClient) -> bytes:
    bare.say(Hello(stream=None, transport="tcp"))
    welcome = bare.told()
    assert isinstance(welcome, Welcome)
    return welcome.token


# -- clients that vanish, and come back -------------------------------------------------------------------------


@pytest.mark.parametrize("of", ["the trainer", "the daemon"])
def test_who_is_stopped_for_longer_than_the_heartbeat_comes_back_and_goes_on(
    hasty: Daemon, home: Path, of: str
) -> None:
    with Trainer(hasty.tcp_address, home / "a.jsonl", transport="tcp", pause=0.05) as trainer:
        until(lambda: len(trainer.batches) >= 2, "2 batches")
        assert trainer.process is not None
        pid = trainer.process.pid if of == "the trainer" else hasty.pid
        os.kill(pid, signal.SIGSTOP)
        if of == "the trainer":
            until(lambda: hasty.ping().sessions == 0, "the end of the stopped session")
            epoch_is_whole(hasty, home)
        else:
            time.sleep(4)
        os.kill(pid, signal.SIGCONT)
        trainer.wait()
    assert trainer.rows() == Truth(hasty.config, home / "cache").rows(0)


def test_a_trainer_that_is_killed_leaves_nothing_and_the_next_goes_on(daemon: Daemon, home: Path) -> None:
    for lives in range(1, 4):
        with Trainer(daemon.tcp_address, home / "a.jsonl", transport="tcp", pause=0.05) as trainer:
            until(lambda lives=lives, trainer=trainer: len(trainer.batches) >= 2 * lives, "2 batches more")
            trainer.kill()
        until(lambda: daemon.ping().sessions == 0, "the end of the dead session")
    with Trainer(daemon.tcp_address, home / "a.jsonl", transport="tcp") as trainer:
        trainer.wait()
    assert trainer.rows() == Truth(daemon.config, home / "cache").rows(0)


@pytest.mark.kills
def test_a_daemon_that_is_killed_and_started_again_changes_nothing(patient: Daemon, home: Path) -> None:
    with Trainer(patient.tcp_address, home / "a.jsonl", transport="tcp", pause=0.05) as trainer:
        for batches in (2, 5):
            until(lambda batches=batches: len(trainer.batches) >= batches, f"{batches} batches")
            patient.kill()
            patient.start()
        trainer.wait()
    assert trainer.rows() == Truth(patient.config, home / "cache").rows(0)


def test_a_session_whose_data_connection_ends_is_over_and_its_client_is_told(
    daemon: Daemon, clients: list[RemoteClient | BareClient]
) -> None:
    client = RemoteClient(daemon.tcp_address, lanes=2)
    clients.append(client)
    client.get(1, 0)
    client.rows(client.lanes[1])
    client.lanes[0].close()
    time.sleep(0.2)
    client.get(2, 1)
    assert isinstance(client.told(), Goodbye)
    until(lambda: daemon.ping().sessions == 0, "the end of the session")


def test_a_client_that_leaves_is_gone_at_once_and_one_that_vanishes_soon(
    daemon: Daemon, clients: list[RemoteClient | BareClient]
) -> None:
    leaving, vanishing = RemoteClient(daemon.tcp_address), RemoteClient(daemon.tcp_address)
    clients.append(leaving)
    assert daemon.ping().sessions == 2
    leaving.say(Leave(token=leaving.welcome.token))
    until(lambda: daemon.ping().sessions == 1, "one session less")
    vanishing.close()
    until(lambda: daemon.ping().sessions == 0, "no session")


# -- clients that break rules -----------------------------------------------------------------------------------


RULES: dict[str, Callable[[RemoteClient], object]] = {
    "a chunk that is none": lambda client: client.get(1, CHUNKS),
    "rows that are none": lambda client: client.get(1, 0, first=2, count=3),
    "a number in use": lambda client: (client.get(7, 0), client.get(7, 1)),
    "a second Hello": lambda client: client.say(Hello(stream=None, transport="tcp")),
    "garbage": lambda client: client.control.send(bytes([protocol.VERSION]) + b"garbage"),
    "a foreign message": lambda client: client.say(Release(token=client.welcome.token, request=1)),
}


def test_who_breaks_a_rule_is_put_out_and_told_why(
    patient: Daemon, clients: list[RemoteClient | BareClient], home: Path, subtests: pytest.Subtests
) -> None:
    for rule, break_it in RULES.items():
        with subtests.test(rule):
            client = RemoteClient(patient.tcp_address)
            clients.append(client)
            break_it(client)
            assert isinstance(client.told(), Goodbye | Refused)
            assert patient.ping().sessions == 0
            client.get(2, 0)
            assert client.hears_nothing_more(0.3)
    epoch_is_whole(patient, home)


def test_a_get_before_a_data_connection_ends_the_session(
    daemon: Daemon, clients: list[RemoteClient | BareClient]
) -> None:
    client = RemoteClient(daemon.tcp_address, lanes=0)
    clients.append(client)
    client.get(1, 0)
    refused = client.told(Refused)
    assert isinstance(refused, Refused) and "before a data connection" in refused.text


def test_a_session_without_a_data_connection_is_ended_after_a_while(
    daemon: Daemon, clients: list[RemoteClient | BareClient]
) -> None:
    client = RemoteClient(daemon.tcp_address, lanes=0)
    clients.append(client)
    goodbye = client.told(Goodbye)
    assert isinstance(goodbye, Goodbye) and "no data connection within 2 s" in goodbye.reason
    assert daemon.ping().sessions == 0


def test_a_lane_is_attached_once_and_who_tries_again_does_not_end_the_session(
    daemon: Daemon, clients: list[RemoteClient | BareClient]
) -> None:
    client = RemoteClient(daemon.tcp_address)
    clients.append(client)
    for lane in (1, 0):
        other = client.connect()
        client.lanes.append(other)
        client.say(Attach(token=client.welcome.token, lane=lane), other)
        refused = client.told(Refused, other)
        assert isinstance(refused, Refused) and f"lane {lane} of the session is attached already" in refused.text
    client.get(1, 0)
    client.rows()


def test_a_token_that_was_guessed_opens_nothing(daemon: Daemon, clients: list[RemoteClient | BareClient]) -> None:
    client = RemoteClient(daemon.tcp_address)
    clients.append(client)
    stranger = client.connect()
    client.lanes.append(stranger)
    guesses = [bytes(16), bytes(15) + b"\x01", bytes([*client.welcome.token[:15], client.welcome.token[15] ^ 1])]
    messages: list[Message] = []
    for token in guesses:
        messages += [Attach(token=token, lane=1), Get(token=token, request=1, epoch=0, chunk=0)]
        messages += [Cancel(token=token, request=1), Leave(token=token)]
    for message in messages:
        client.say(message, stranger)
        assert isinstance(client.told(at=stranger), Unknown)
    # The right token from a connection that is not the session's own is no better.
    for message in (Leave(token=client.welcome.token), Get(token=client.welcome.token, request=1, epoch=0, chunk=0)):
        client.say(message, stranger)
        assert isinstance(client.told(at=stranger), Unknown)
    client.get(1, 0)
    client.rows()


def test_a_session_on_the_unix_socket_is_not_reached_over_tcp(
    daemon: Daemon, clients: list[RemoteClient | BareClient]
) -> None:
    client = RemoteClient(daemon.tcp_address)
    clients.append(client)
    welcomes = []
    channels = []
    for transport in ("shm", "tcp"):
        channel = connect(daemon.address, timeout=TIMEOUT)
        channels.append(channel)
        channel.send(protocol.encode(Hello(stream=None, transport=transport)), timeout=TIMEOUT)
        while not isinstance(
            message := protocol.decode_session_reply((received := channel.recv(timeout=TIMEOUT))[0]), Welcome
        ):
            assert isinstance(message, Indexing)
        for fd in received[1]:
            os.close(fd)
        welcomes.append(message)
    shm, tcp = welcomes
    assert (shm.transport, tcp.transport) == ("shm", "tcp") and tcp.endpoint.startswith("tcp://127.0.0.1:")
    for welcome in welcomes:
        stranger = client.connect()
        client.lanes.append(stranger)
        client.say(Attach(token=welcome.token, lane=1), stranger)
        assert isinstance(client.told(at=stranger), Unknown)
    # And the port for sessions of the Unix socket takes no strangers.
    client.address = tcp.endpoint
    for greeting in (Hello(stream=None, transport="tcp"), Ping()):
        stranger = client.connect()
        client.lanes.append(stranger)
        client.say(greeting, stranger)
        refused = client.told(Refused, stranger)
        assert isinstance(refused, Refused) and "Unix socket" in refused.text
    for channel in channels:
        channel.close()


def test_another_version_is_told_which_one_this_is(daemon: Daemon, clients: list[RemoteClient | BareClient]) -> None:
    client = RemoteClient(daemon.tcp_address)
    clients.append(client)
    stranger = client.connect()
    client.lanes.append(stranger)
    stranger.send(bytes([protocol.VERSION + 1]) + protocol.encode(Hello(stream=None))[1:])
    refused = client.told(Refused, stranger)
    assert isinstance(refused, Refused)
    assert f"protocol version {protocol.VERSION + 1}, this side speaks {protocol.VERSION}" in refused.text


@pytest.mark.parametrize(
    ("hello", "says"),
    [
        (Hello(stream="other", transport="tcp"), "there is no 'other' here, only: train"),
        (Hello(stream=None, transport="shm"), "'shm' is not offered here, only 'tcp'"),
    ],
)
def test_who_asks_for_what_there_is_not_is_told_what_there_is(
    daemon: Daemon, clients: list[RemoteClient | BareClient], hello: Hello, says: str
) -> None:
    bare = BareClient(daemon.tcp_address)
    clients.append(bare)
    bare.say(hello)
    refused = bare.told()
    assert isinstance(refused, Refused) and refused.kind == "ConfigError" and says in refused.text


# -- strangers --------------------------------------------------------------------------------------------------


def test_a_flood_of_strangers_keeps_nobody_waiting(patient: Daemon, home: Path) -> None:
    """Nonsense, Hellos and Pings whose answers are not read, as fast as they go."""
    flood = f"""
import zmq
from headrace import protocol
from headrace.protocol import Get, Hello, Ping
messages = [b"x" * 20, protocol.encode(Hello(stream=None, transport="tcp")), protocol.encode(Ping()),
            protocol.encode(Get(token=bytes(16), request=1, epoch=0, chunk=0))]
while True:
    context = zmq.Context()
    sockets = [context.socket(zmq.DEALER) for _ in range(20)]
    for s in sockets:
        s.linger, s.rcvhwm = 0, 1
        s.connect({patient.tcp_address!r})
    for n in range(3000):
        try:
            sockets[n % 20].send(messages[n % 20 % 4], zmq.NOBLOCK)
        except zmq.Again:
            pass
    context.destroy(0)
"""
    process = subprocess.Popen([sys.executable, "-c", flood])
    try:
        time.sleep(1)
        epoch_is_whole(patient, home)
        assert isinstance(patient.ping(), Pong)
        assert process.poll() is None
        assert patient.stop() == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("size", [1, 60_000])
def test_a_message_without_end_is_cut_off(
    daemon: Daemon, clients: list[RemoteClient | BareClient], home: Path, size: int
) -> None:
    """libzmq keeps all of its frames until the last one has come."""
    stranger = BareClient(daemon.tcp_address)
    clients.append(stranger)
    frame = b"\x03" + size.to_bytes(8, "big") + bytes(size)
    began = time.monotonic()
    with contextlib.suppress(ConnectionError):
        stranger.socket.sendall(frame * (1 + (1 << 20) // len(frame)))
        while stranger.read(1):
            pass
    assert time.monotonic() - began < TIMEOUT / 2  # after TIMEOUT it is cut off because it answers no heartbeats
    epoch_is_whole(daemon, home)


def test_messages_of_many_frames_are_cut_off_and_keep_nobody_waiting(patient: Daemon, home: Path) -> None:
    flood = f"""
from remote import BareClient
stranger = BareClient({patient.tcp_address!r})
message = b"\\x01\\x01x" * 60_000 + b"\\x00\\x01x"
try:
    while True:
        stranger.socket.sendall(message)
except OSError:
    pass
"""
    process = subprocess.Popen([sys.executable, "-c", flood], cwd=Path(__file__).parent.parent)
    try:
        time.sleep(2)
        epoch_is_whole(patient, home)
        assert patient.stop() == 0
    finally:
        process.kill()
        process.wait()


def test_a_client_that_says_much_is_not_cut_off(daemon: Daemon, clients: list[RemoteClient | BareClient]) -> None:
    client = RemoteClient(daemon.tcp_address)
    clients.append(client)
    for request in range(20_000):  # more than a megabyte
        client.say(Cancel(token=client.welcome.token, request=request))
    time.sleep(1)
    client.get(20_000, 0)
    client.rows()


def test_connections_without_end_do_not_end_the_daemon(many: Callable[[int], Path], home: Path) -> None:
    """libzmq ends a process that has no descriptor left for a client on its Unix socket."""
    daemon = Daemon(home, {"train": stream(many(40))}, slots=4, backend="fake", tcp=True)
    daemon.start(limit_descriptors=150)
    host, _, port = daemon.tcp_address.removeprefix("tcp://").rpartition(":")
    strangers = []
    try:
        strangers += (socket.create_connection((host, int(port)), timeout=5) for _ in range(300))
        time.sleep(0.5)
        before = cpu_seconds(daemon.pid)
        with Trainer(daemon.address, home / "shm.jsonl") as trainer:
            trainer.wait()
        time.sleep(1)
        assert cpu_seconds(daemon.pid) - before < 1.5
        assert len(os.listdir(f"/proc/{daemon.pid}/fd")) < 150
        for stranger in strangers:
            stranger.close()
        epoch_is_whole(daemon, home)
    finally:
        for stranger in strangers:
            stranger.close()
        assert daemon.stop() == 0


# -- the end ----------------------------------------------------------------------------------------------------


def test_a_daemon_with_rows_on_their_way_to_a_stopped_client_ends_in_time(
    patient: Daemon, clients: list[RemoteClient | BareClient], home: Path
) -> None:
    """Clients that read are told; what one that does not still has to get is dropped."""
    reader = RemoteClient(patient.tcp_address)
    clients.append(reader)
    with Trainer(patient.tcp_address, home / "a.jsonl", transport="tcp", pause=0.05) as trainer:
        until(lambda: len(trainer.batches) >= 2, "2 batches")
        assert trainer.process is not None
        os.kill(trainer.process.pid, signal.SIGSTOP)
        assert patient.process is not None
        patient.process.terminate()
        goodbye = reader.told(Goodbye)
        assert isinstance(goodbye, Goodbye) and "stopping" in goodbye.reason
        assert patient.process.wait(15) == 0
        patient.stop()
        patient.start()
        signal_(trainer.process.pid, signal.SIGCONT)
        trainer.wait()
    assert trainer.rows() == Truth(patient.config, home / "cache").rows(0)
    assert "Traceback" not in patient.log.read_text()


def test_the_unix_connection_of_a_session_over_tcp_is_its_life(
    daemon: Daemon, clients: list[RemoteClient | BareClient]
) -> None:
    channel = connect(daemon.address, timeout=TIMEOUT)
    channel.send(protocol.encode(Hello(stream=None, transport="tcp")), timeout=TIMEOUT)
    while not isinstance(message := protocol.decode_session_reply(channel.recv(timeout=TIMEOUT)[0]), Welcome):
        pass
    control = BareClient(message.endpoint)
    clients.append(control)
    control.say(Attach(token=message.token, lane=0))
    assert control.told() == Attached(lane=0)
    assert daemon.ping().sessions == 1
    channel.close()
    until(lambda: daemon.ping().sessions == 0, "the end of the session")
    with pytest.raises(Closed):
        channel.recv(timeout=TIMEOUT)
