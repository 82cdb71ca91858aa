"""Rows over tcp on loopback, against a bare pyzmq program that sends the same frames.

Claim: the daemon moves chunks at 0.9 or more of what the bare program moves.

    python benchmarks/tcp.py [--rounds 11] [--chunks 3000] [--window 8]

The stream has chunks of 32 pictures of 224x224, 4.8 MB, all of them in the daemon's memory before the time counts;
pictures are of the backend `fake`. The client asks for chunk after chunk, keeps `window` requests outstanding, and
drops what it gets. The bare program is a ROUTER that answers each request of a DEALER by a head and the same four
fields without copying them, out of as much memory, and waits with using a buffer again until it has left. Each side is
two processes that do something. Beside the claim, for information: several data connections, which gain where there
are processors for them, and a `Loader` that takes uint8.

Seen on 2 cores of a virtual machine that did nothing else, by the command above with `--sides bare "1 connection"
Loader`:

    side          images/s  (quartiles)       ratio  (quartiles)     others  CPU ms per image
    bare          31452     (29974 to 32096)  1.00   (1.00 to 1.00)  2%      daemon 0.03, client 0.02
    1 connection  29030     (28060 to 30283)  0.90   (0.88 to 0.98)  -0%     daemon 0.03, client 0.02
    Loader        20924     (19943 to 21090)  0.66   (0.64 to 0.68)  1%      daemon 0.03, client 0.06
    bare: 4.73 GB/s
    1 connection: 4.37 GB/s
    Loader: 3.15 GB/s
    holds  the daemon over the bare program, median of the rounds' ratios: 0.9005 >= 0.9

and a little before, by compare.py, 0.94 (0.92 to 0.95). Both CPUs are at work without a pause, so that whatever either
side does beside the copies counts, as do the messages that have types.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import common
import numpy as np
import zmq
from PIL import Image

from headrace import Loader, protocol
from headrace.connect import connect
from headrace.keys import Keys, read_pair
from headrace.protocol import Attach, Attached, Get, Hello, Rows, Welcome

CHUNK, SIZE = 32, 224
CHUNKS = 32  # of an epoch
SLOTS = CHUNKS + 8
SIDES = {"bare": 0, "1 connection": 1, "2 connections": 2, "4 connections": 4, "Loader": 0}
TIMEOUT = 60

Socket = zmq.Socket[bytes]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--chunks", type=int, default=3000, help="taken by each side in a round")
    parser.add_argument("--window", type=int, default=8, help="requests outstanding")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--router", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--secret-key", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.router:
        bare_router(args.threads, args.secret_key)
        return 0
    if args.side is not None:
        print(json.dumps(side(args)))
        return 0
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as made:
        folder = pictures(Path(made))
        options = ("--folder", folder, "--chunks", args.chunks, "--window", args.window)
        rounds = common.interleaved(
            args.sides, args.rounds, lambda name: common.fresh(__file__, "--side", name, *options)
        )
    common.speeds(rounds)
    for name, results in rounds.items():
        common.say(f"    {name}: {common.median(results, 'gigabytes_per_s'):.2f} GB/s")
    claims = []
    if {"bare", "1 connection"} <= set(rounds):
        pairs = zip(rounds["1 connection"], rounds["bare"], strict=True)
        _, ratio, _ = common.quartiles([ours["images_per_s"] / theirs["images_per_s"] for ours, theirs in pairs])
        claims.append(common.Claim("the daemon over the bare program, median of the rounds' ratios", ratio, 0.9))
    return common.conclude(claims, rounds=rounds)


def pictures(folder: Path) -> Path:
    """An epoch's worth of small pictures."""
    listed = folder / "listed"
    (listed / "class").mkdir(parents=True)
    rng = np.random.default_rng(0)
    for n in range(16):
        Image.fromarray(rng.integers(0, 256, (64, 64, 3), np.uint8)).save(folder / f"{n}.jpg")
    for n in range(CHUNK * CHUNKS):
        (listed / "class" / f"{n:05}.jpg").hardlink_to(folder / f"{n % 16}.jpg")
    return listed


def side(args: argparse.Namespace) -> dict[str, Any]:
    """One side of one round."""
    if args.side == "bare":
        return bare(args.chunks, args.window)
    stream = {"chunk": CHUNK, "transforms": [{"random_resized_crop": {"size": SIZE}}]}
    with common.Daemon(args.folder, workers=1, backend="fake", stream=stream, memory=f"{SLOTS} slots") as daemon:
        if args.side == "Loader":
            return loader(daemon, args.chunks)
        return session(daemon, SIDES[args.side], args.chunks, args.window)


def session(daemon: common.Daemon, count: int, chunks: int, window: int) -> dict[str, Any]:
    """What a client gets that does nothing with it, over `count` data connections."""
    channel = connect(daemon.address, timeout=TIMEOUT)
    channel.send(protocol.encode(Hello(stream=None, transport="tcp")), timeout=TIMEOUT)
    while not isinstance(welcome := protocol.decode_session_reply(channel.recv(timeout=TIMEOUT)[0]), Welcome):
        pass
    with zmq.Context(io_threads=count) as context:
        control, *lanes = (dealer(context, welcome.endpoint) for _ in range(1 + count))
        attach(welcome, enumerate((control, *lanes)))
        measured = fetch(daemon, welcome, control, lanes, chunks, window)
    channel.close()
    return measured


def attach(welcome: Welcome, sockets: Iterable[tuple[int, Socket]]) -> None:
    """Take connections into the session, by number."""
    for number, socket in sockets:
        socket.send(protocol.encode(Attach(token=welcome.token, lane=number)))
        assert isinstance(protocol.decode_remote_reply(socket.recv()), Attached)


def fetch(
    daemon: common.Daemon, welcome: Welcome, control: Socket, lanes: Sequence[Socket], chunks: int, window: int
) -> dict[str, Any]:
    """Chunk after chunk of one epoch, by connections that are closed then."""

    def ask(number: int) -> None:
        get = Get(token=welcome.token, request=number, epoch=0, chunk=number % CHUNKS)
        control.send(protocol.encode(get))

    def took(head: bytes) -> None:
        assert isinstance(protocol.decode_remote_reply(head), Rows)

    take(lanes, range(CHUNKS), window, ask, took)
    meter = common.Meter(daemon=[daemon.pid], client=[os.getpid()])
    nbytes = take(lanes, range(CHUNKS, CHUNKS + chunks), window, ask, took)
    used = meter.read()
    for socket in (control, *lanes):
        socket.close()
    return result(chunks, nbytes, used)


def bare(chunks: int, window: int, *, lanes: int = 1, threads: int = 1, keys: Keys | None = None) -> dict[str, Any]:
    """The same from a ROUTER with nothing around it.

    Args:
        lanes: connections.
        threads: of ZeroMQ, on both sides.
        keys: to encrypt with; the router's secret one lies beside the public one.
    """
    line = [sys.executable, __file__, "--router", "--threads", str(threads)]
    if keys is not None:
        line += ["--secret-key", str(keys.server_file.with_suffix(".key_secret"))]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as router:
        assert router.stdout is not None
        with zmq.Context(io_threads=threads) as context:
            endpoint = router.stdout.readline().strip()
            sockets = [dealer(context, endpoint, keys) for _ in range(lanes)]
            request = bytes(len(protocol.encode(Get(token=bytes(16), request=1 << 20, epoch=0, chunk=CHUNKS))))

            def ask(number: int) -> None:
                sockets[number % lanes].send(request)

            take(sockets, range(CHUNKS), window, ask, len)
            meter = common.Meter(daemon=[router.pid], client=[os.getpid()])
            nbytes = take(sockets, range(chunks), window, ask, len)
            used = meter.read()
            for socket in sockets:
                socket.close()
        router.kill()
    return result(chunks, nbytes, used)


def bare_router(threads: int, secret_key: Path | None) -> None:
    """Answers every request with the frames of a chunk, out of buffers that are used in turn."""
    with zmq.Context(io_threads=threads) as context:
        router = context.socket(zmq.ROUTER)
        if secret_key is not None:
            router.curve_server, router.curve_secretkey = True, read_pair(secret_key, "--secret-key").secret
        router.bind("tcp://127.0.0.1:*")
        print(router.last_endpoint.decode(), flush=True)
        head = protocol.encode(
            Rows(request=1 << 20, first=0, count=CHUNK, split=CHUNK, render_id="fake/1", window=SLOTS, rejects=[])
        )
        images = np.random.default_rng(0).integers(0, 256, (SLOTS, CHUNK, SIZE, SIZE, 3), np.uint8)
        numbers, status = np.zeros(CHUNK, np.int64), np.zeros(CHUNK, np.uint8)
        free, sent = deque(range(SLOTS)), deque[tuple[int, zmq.MessageTracker]]()
        while True:
            identity, _ = router.recv_multipart()
            while sent and (not free or sent[0][1].done):
                slot, tracker = sent.popleft()
                tracker.wait()
                free.append(slot)
            slot = free.popleft()
            frame = zmq.Frame(images[slot].reshape(-1).data, track=True)
            sent.append((slot, frame.tracker))
            router.send_multipart([identity, head, frame, numbers, numbers, status], copy=False)
            del frame


def dealer(context: zmq.Context[Socket], endpoint: str, keys: Keys | None = None) -> Socket:
    made = context.socket(zmq.DEALER)
    made.linger, made.rcvhwm = 0, 0
    if keys is not None:
        keys.secure(made)
    made.connect(endpoint)
    return made


def take(
    lanes: Sequence[Socket],
    numbers: range,
    window: int,
    ask: Callable[[int], None],
    took: Callable[[bytes], object],
) -> int:
    """Ask for the numbers, so many at a time, and drop what comes; returns how many bytes of images that was."""
    left = iter(numbers)
    poller = zmq.Poller()
    for lane in lanes:
        poller.register(lane, zmq.POLLIN)
    for _, number in zip(range(window), left, strict=False):
        ask(number)
    open_, nbytes = len(numbers), 0
    while open_:
        for lane, _ in poller.poll(1000 * TIMEOUT):
            head, *frames = lane.recv_multipart(copy=False)
            took(head.bytes)
            nbytes += len(frames[0])
            open_ -= 1
            if (number := next(left, None)) is not None:
                ask(number)
    return nbytes


def loader(daemon: common.Daemon, chunks: int) -> dict[str, Any]:
    """What a Loader hands out, in batches of two chunks."""
    epochs = max(1, chunks // CHUNKS)
    with Loader(daemon.address, batch_size=2 * CHUNK, rank=0, world_size=1, transport="tcp", dtype="uint8",
                layout="NHWC", output="numpy", prefetch=4) as made:  # fmt: skip
        for _ in made:
            pass
        meter = common.Meter(daemon=[daemon.pid], client=[os.getpid()])
        nbytes = 0
        for _ in range(epochs):
            made.set_epoch(0)
            nbytes += sum(images.nbytes for images, _ in made)
        used = meter.read()
    return result(epochs * CHUNKS, nbytes, used)


def result(chunks: int, nbytes: int, used: dict[str, float]) -> dict[str, Any]:
    images = chunks * CHUNK
    rates = {"images_per_s": images / used["seconds"], "gigabytes_per_s": nbytes / used["seconds"] / 1e9}
    return {"images": images} | rates | used


if __name__ == "__main__":
    sys.exit(main())
