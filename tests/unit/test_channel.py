"""Frames and descriptors over a Unix stream socket."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.channel import Channel, Closed
from headrace.errors import DeadlineError, ProtocolError

Pair = tuple[Channel, Channel]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Two ends; the second takes two descriptors a frame."""
    one, other = (Channel(sock, descriptors=n) for sock, n in zip(socket.socketpair(), (0, 2), strict=True))
    yield one, other
    one.close()
    other.close()


@pytest.fixture
def raw() -> Iterator[tuple[socket.socket, Channel]]:
    """A bare socket that writes what it likes to a channel with a limit of 100 bytes and two descriptors."""
    sock, other = socket.socketpair()
    channel = Channel(other, limit=100, descriptors=2)
    yield sock, channel
    sock.close()
    channel.close()


def frame(data: bytes, descriptors: int = 0) -> bytes:
    return len(data).to_bytes(4, "little") + bytes([descriptors]) + data


def same_file(fd: int, path: Path) -> bool:
    return os.path.samestat(os.fstat(fd), path.stat())


def test_frames_arrive_whole_and_in_order(pair: Pair) -> None:
    one, other = pair
    sent = [b"", b"a", bytes(100_000), b"last"]

    def send_all() -> None:
        for data in sent:
            one.send(data, timeout=10)

    sender = threading.Thread(target=send_all)
    sender.start()
    assert [other.recv(timeout=10) for _ in sent] == [(data, []) for data in sent]
    sender.join()


def test_both_directions_work_at_once(pair: Pair) -> None:
    one, other = pair
    one.post(b"to other")
    other.post(b"to one")
    assert one.recv(timeout=10) == (b"to one", [])
    assert other.recv(timeout=10) == (b"to other", [])


def test_a_frame_may_arrive_byte_by_byte(raw: tuple[socket.socket, Channel]) -> None:
    sock, channel = raw
    stream = frame(b"one") + frame(b"") + frame(b"three")
    got = []
    for i in range(len(stream)):
        sock.send(stream[i : i + 1])
        got += channel.receive()
    assert got == [(b"one", []), (b"", []), (b"three", [])]


@given(frames=st.lists(st.binary(max_size=60), max_size=8), cuts=st.lists(st.integers(1, 40), max_size=20))
def test_frames_survive_any_fragmentation(frames: list[bytes], cuts: list[int]) -> None:
    sock, other = socket.socketpair()
    channel = Channel(other)
    stream = b"".join(map(frame, frames))
    got = []
    for cut in [*cuts, len(stream)]:
        sock.sendall(stream[:cut])
        stream = stream[cut:]
        got += channel.receive()
    assert got == [(data, []) for data in frames]
    sock.close()
    channel.close()


def test_descriptors_arrive_with_their_frame(pair: Pair, tmp_path: Path) -> None:
    one, other = pair
    paths = [tmp_path / name for name in "abc"]
    for path in paths:
        path.touch()
    fds = [os.open(path, os.O_RDONLY) for path in paths]
    one.post(b"none")
    one.post(b"a and b", fds[:2])
    one.post(b"none again")
    one.post(b"c", fds[2:])
    for fd in fds:
        os.close(fd)  # the channel has its own
    assert other.recv(timeout=10) == (b"none", [])
    text, got = other.recv(timeout=10)
    assert text == b"a and b" and same_file(got[0], paths[0]) and same_file(got[1], paths[1])
    assert other.recv(timeout=10) == (b"none again", [])
    text, last = other.recv(timeout=10)
    assert text == b"c" and same_file(last[0], paths[2])
    assert not any(os.get_inheritable(fd) for fd in got + last)
    for fd in got + last:
        os.close(fd)


def test_descriptors_wait_in_the_queue_behind_a_reader_that_lags(pair: Pair, tmp_path: Path) -> None:
    one, other = pair
    big = bytes(4 << 20)
    (tmp_path / "file").touch()
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    one.post(big)
    one.post(b"with a descriptor", [fd])
    os.close(fd)
    assert one.pending and one.queued_bytes > 1 << 20
    got: list[tuple[bytes, list[int]]] = []
    deadline = time.monotonic() + 30
    while len(got) < 2 and time.monotonic() < deadline:
        got += other.receive()
        one.flush()
    assert not one.pending and one.queued_bytes == 0
    assert got[0] == (big, [])
    assert got[1][0] == b"with a descriptor" and same_file(got[1][1][0], tmp_path / "file")
    os.close(got[1][1][0])


def test_descriptors_are_refused_where_none_are_taken(pair: Pair) -> None:
    one, other = pair
    other.post(b"unwanted", [0])
    with pytest.raises(ProtocolError, match="announces 1 descriptors; at most 0"):
        one.recv(timeout=10)


def test_more_descriptors_than_are_taken_are_refused(raw: tuple[socket.socket, Channel]) -> None:
    sock, channel = raw
    socket.send_fds(sock, [frame(b"x", 3)], [0, 1, 2])
    with pytest.raises(ProtocolError, match="announces 3 descriptors"):
        channel.recv(timeout=10)


def test_descriptors_that_no_frame_announces_are_refused(raw: tuple[socket.socket, Channel]) -> None:
    sock, channel = raw
    socket.send_fds(sock, [frame(b"x")], [0])
    with pytest.raises(ProtocolError, match="1 descriptors came that no frame announces"):
        channel.recv(timeout=10)


def test_a_frame_over_the_limit_is_refused_by_its_head_alone(raw: tuple[socket.socket, Channel]) -> None:
    sock, channel = raw
    sock.send(frame(bytes(100)))
    assert channel.recv(timeout=10) == (bytes(100), [])
    sock.send(frame(bytes(101))[:5])
    with pytest.raises(ProtocolError, match="a frame of 101 bytes; at most 100 are taken"):
        channel.recv(timeout=10)


def test_the_end_comes_after_the_last_frame(pair: Pair) -> None:
    one, other = pair
    one.post(b"first")
    one.post(b"last")
    one.close()
    assert other.receive() == [(b"first", []), (b"last", [])]
    for _ in range(2):
        with pytest.raises(Closed):
            other.receive()
        with pytest.raises(Closed):
            other.recv(timeout=10)


def test_a_frame_cut_by_the_end_is_not_delivered(raw: tuple[socket.socket, Channel]) -> None:
    sock, channel = raw
    sock.send(frame(b"whole") + frame(b"cut")[:-1])
    sock.close()
    assert channel.recv(timeout=10) == (b"whole", [])
    with pytest.raises(Closed):
        channel.recv(timeout=10)


def test_posting_to_an_end_that_is_gone_says_closed(pair: Pair) -> None:
    one, other = pair
    other.close()
    with pytest.raises(Closed):
        one.post(b"x")


def test_sending_to_a_peer_that_ends_in_the_middle_says_closed(pair: Pair) -> None:
    one, other = pair
    timer = threading.Timer(0.1, other.close)
    timer.start()
    with pytest.raises(Closed):
        one.send(bytes(8 << 20), timeout=30)
    timer.join()


def test_waiting_has_a_deadline_in_both_directions(pair: Pair) -> None:
    one, other = pair
    with pytest.raises(DeadlineError):
        one.recv(timeout=0.05)
    with pytest.raises(DeadlineError):
        one.send(bytes(8 << 20), timeout=0.05)
    with pytest.raises(DeadlineError):
        other.send(bytes(8 << 20), timeout=0)


def test_a_drip_of_bytes_does_not_move_the_deadline(raw: tuple[socket.socket, Channel]) -> None:
    sock, channel = raw
    stop = threading.Event()

    def drip() -> None:
        sock.send(frame(bytes(90))[:5])
        while not stop.wait(0.02):
            sock.send(b"x")

    dripper = threading.Thread(target=drip)
    dripper.start()
    with pytest.raises(DeadlineError):
        channel.recv(timeout=0.3)
    stop.set()
    dripper.join()


def test_a_poller_sees_what_arrived(pair: Pair) -> None:
    one, other = pair
    poll = select.poll()
    poll.register(other, select.POLLIN)
    assert poll.poll(0) == []
    assert other.receive() == []
    one.post(b"x")
    assert poll.poll(10_000) == [(other.fileno(), select.POLLIN)]
    assert other.receive() == [(b"x", [])]


@pytest.mark.parametrize("after", ["queued", "delivered", "announced", "refused", "closed"])
def test_closing_leaks_no_descriptor(tmp_path: Path, after: str) -> None:
    (tmp_path / "file").touch()
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    before = set(os.listdir("/proc/self/fd"))
    one, other = (Channel(sock, descriptors=2) for sock in socket.socketpair())
    match after:
        case "queued":
            one.post(bytes(8 << 20))
            one.post(b"x", [fd, fd])
        case "delivered":
            one.post(b"x", [fd])
            one.post(b"y")
            assert other.recv(timeout=10)[0] == b"x" or pytest.fail("another frame")
            one.post(b"z", [fd, fd])
            other.recv(timeout=10)
        case "announced":
            socket.send_fds(one.sock, [frame(b"cut", 1)[:-1]], [fd])
            assert other.receive() == []
        case "refused":
            socket.send_fds(one.sock, [frame(b"x", 2)], [fd])
            with pytest.raises(ProtocolError):
                other.receive()
        case "closed":
            one.close()
            with pytest.raises(Closed):
                one.post(b"x", [fd])
    for channel in (one, other, one, other):
        channel.close()
    left = set(os.listdir("/proc/self/fd")) - before
    handed_out = [int(n) for n in left if os.path.exists(f"/proc/self/fd/{n}") and same_file(int(n), tmp_path / "file")]
    # What was handed out is the caller's.
    assert len(handed_out) == (1 if after == "delivered" else 0)
    for n in [*handed_out, fd]:
        os.close(n)


def test_who_sends_without_end_is_left_for_the_next_turn(raw: tuple[socket.socket, Channel]) -> None:
    sock, other = socket.socketpair()
    channel = Channel(other, limit=100, turn=1000)
    try:
        sock.sendall(frame(b"x" * 5) * 1000)
        taken = 0
        while taken < 1000:
            frames = channel.receive()
            assert 0 < len(frames) <= 101
            taken += len(frames)
        assert channel.receive() == []
    finally:
        sock.close()
        channel.close()


def test_descriptors_that_come_bit_by_bit_are_refused_as_soon_as_they_are_too_many(
    raw: tuple[socket.socket, Channel],
) -> None:
    sock, channel = raw
    before = len(os.listdir("/proc/self/fd"))
    with open(os.devnull) as file, pytest.raises(ProtocolError, match="^3 descriptors came"):
        for byte in frame(b"x" * 90, 2):
            socket.send_fds(sock, [bytes([byte])], [file.fileno()])
            assert channel.receive() == []
    channel.close()
    assert len(os.listdir("/proc/self/fd")) == before - 1
