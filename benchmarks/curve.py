"""Rows over tcp with keys, so encrypted by CURVE, against a bare pyzmq program that encrypts the same frames.

Claim: the daemon moves chunks at 0.9 or more of what the bare program moves.

    python benchmarks/curve.py [--rounds 11] [--chunks 150] [--window 8]
    python benchmarks/curve.py --scaling [--rounds 5]

Frames, pictures and both sides are those of `tcp.py`, and so is what is measured; here the daemon is reached as from
another host, at a tcp address with keys, and the bare program has keys too. Beside the claim, for information: the
daemon without keys, and over several data connections. `--scaling` shows the bare program alone, with so many
connections and so many of ZeroMQ's threads on either side: each thread encrypts, or decrypts, one connection at a time,
so both are needed, and a processor for each thread.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common
import tcp
import zmq

from headrace import protocol
from headrace.keys import Keys, generate
from headrace.protocol import Hello, Welcome

#: Connections of each side; the daemon without keys is the last.
SIDES = {"bare": 1, "1 connection": 1, "2 connections": 2, "4 connections": 4, "without keys": 1}
COUNTS = (1, 2, 4)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--chunks", type=int, default=150, help="taken by each side in a round")
    parser.add_argument("--window", type=int, default=8, help="requests outstanding")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--scaling", action="store_true", help="the bare program by connections and threads instead")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side is not None:
        print(json.dumps(side(args)))
        return 0
    sides = [f"{n} x {t}" for n, t in itertools.product(COUNTS, COUNTS)] if args.scaling else args.sides
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as made:
        folder = Path(made)
        tcp.pictures(folder)
        for name in ("server", "client"):
            generate(folder / "keys", name)
        options = ("--folder", folder, "--chunks", args.chunks, "--window", args.window)
        rounds = common.interleaved(sides, args.rounds, lambda name: common.fresh(__file__, "--side", name, *options))
    if args.scaling:
        common.say("    sides: connections x threads of ZeroMQ on either side")
    common.speeds(rounds)
    for name, results in rounds.items():
        common.say(f"    {name}: {common.median(results, 'gigabytes_per_s'):.2f} GB/s")
    claims = []
    if {"bare", "1 connection"} <= set(rounds):
        ratio = common.paired(rounds, "1 connection", "bare")
        claims.append(common.Claim("the daemon over the bare program, median of the rounds' ratios", ratio, 0.9))
    return common.conclude(claims, rounds=rounds)


def side(args: argparse.Namespace) -> dict[str, Any]:
    """One side of one round."""
    keys = Keys.load({"secret_key": args.folder / "keys/client.key_secret", "server": args.folder / "keys/server.key"})
    if " x " in args.side:
        lanes, threads = map(int, args.side.split(" x "))
        return tcp.bare(args.chunks, args.window, lanes=lanes, threads=threads, keys=keys)
    if args.side == "bare":
        return tcp.bare(args.chunks, args.window, keys=keys)
    encrypted = args.side != "without keys"
    with serving(args.folder, encrypted=encrypted) as (daemon, address):
        return session(daemon, address, SIDES[args.side], args.chunks, args.window, keys if encrypted else None)


@contextlib.contextmanager
def serving(folder: Path, *, encrypted: bool) -> Iterator[tuple[common.Daemon, str]]:
    """A daemon, and the tcp address where it listens."""
    keys = folder / "keys"
    curve = {"secret_key": str(keys / "server.key_secret"), "clients": [str(keys / "client.key")]}
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    stream = {"chunk": tcp.CHUNK, "transforms": [{"random_resized_crop": {"size": tcp.SIZE}}]}
    with (
        tempfile.TemporaryDirectory(prefix="headrace-bench-") as made,
        common.Daemon(
            folder / "listed", workers=1, backend="fake", stream=stream, memory=f"{tcp.SLOTS} slots",
            listen=[f"ipc://{made}/d.sock", address], **({"curve": curve} if encrypted else {}),
        ) as daemon,
    ):  # fmt: skip
        yield daemon, address


def session(
    daemon: common.Daemon, address: str, count: int, chunks: int, window: int, keys: Keys | None
) -> dict[str, Any]:
    """What a client gets that does nothing with it, over `count` data connections."""
    with zmq.Context(io_threads=count) as context:
        control, *lanes = (tcp.dealer(context, address, keys) for _ in range(1 + count))
        control.send(protocol.encode(Hello(stream=None, transport="tcp")))
        while not isinstance(welcome := protocol.decode_remote_reply(control.recv()), Welcome):
            pass
        tcp.attach(welcome, enumerate(lanes, start=1))
        return tcp.fetch(daemon, welcome, control, lanes, chunks, window)


if __name__ == "__main__":
    sys.exit(main())
