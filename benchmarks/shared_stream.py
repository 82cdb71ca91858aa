"""Several clients on one stream: what they get together, against one client that takes float32.

Claims, on 2 cores: four clients that take float32 get at least 2.5 times the images per second of one such client,
and four that take uint8 at least 3.5 times; the daemon itself takes under 3 % of its workers' CPU time.

    python benchmarks/shared_stream.py [--rounds 7] [--epochs 3] [--workers 2] [--batch-sizes 64 64 64 64]
                                       [--photos imagenet-like|large] [--data DIR]

The stream has chunks of 32 and the default memory, the clients are processes of their own, without ranks: each takes
whole epochs. After an epoch to warm up they wait for one another; then the time counts from the common start until the
last has ended. A client takes one row of pixels of each batch and does nothing else. The first batch size is also the
single client's. While the clients keep pace no chunk is rendered twice.

Seen on 2 shared cores of a virtual machine, by the command above without options:

    side           images/s  (quartiles)     ratio  (quartiles)     others  CPU ms per image
    one, float32   445       (434 to 454)    1.00   (1.00 to 1.00)  0%      workers 4.06, clients 0.30, daemon 0.03
    four, float32  1389      (1330 to 1507)  3.23   (3.06 to 3.32)  0%      workers 1.08, clients 0.32, daemon 0.01
    four, uint8    1777      (1761 to 1849)  3.94   (3.86 to 4.09)  0%      workers 0.99, clients 0.11, daemon 0.01
    holds  four clients of float32 over one: 3.118 >= 2.5
    holds  four clients of uint8 over one of float32: 3.99 >= 3.5
    holds  the daemon's CPU time over its workers', one, float32: 0.00821 <= 0.03
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

import common

from headrace import Loader

CHUNK = 32
#: What each side's clients take, and how many they are.
SIDES = {"one, float32": ("float32", 1), "four, float32": ("float32", 4), "four, uint8": ("uint8", 4)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common.add_photo_options(parser)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--epochs", type=int, default=3, help="measured, after one to warm up")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch-sizes", type=int, nargs=4, default=[64, 64, 64, 64], metavar="B")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--client", nargs=3, metavar=("ADDRESS", "DTYPE", "B"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client is not None:
        address, dtype, batch_size = args.client
        client(address, dtype, int(batch_size), args.epochs)
        return 0
    if args.side is not None:
        print(json.dumps(together(args)))
        return 0
    with common.photo_set(args) as folder:
        options = ("--folder", folder, "--epochs", args.epochs, "--workers", args.workers)
        rounds = common.interleaved(
            list(SIDES),
            args.rounds,
            lambda side: common.fresh(__file__, "--side", side, *options, "--batch-sizes", *args.batch_sizes),
        )
    common.speeds(rounds)
    speed = {side: common.median(results, "images_per_s") for side, results in rounds.items()}
    claims = [
        common.Claim("four clients of float32 over one", speed["four, float32"] / speed["one, float32"], 2.5),
        common.Claim("four clients of uint8 over one of float32", speed["four, uint8"] / speed["one, float32"], 3.5),
    ]
    for side, results in rounds.items():
        again = common.median(results, "recomputed")
        claims.append(common.Claim(f"chunks rendered again, {side}", again, 0, most=True))
        share = common.median(results, "cpu_daemon") / common.median(results, "cpu_workers")
        claims.append(common.Claim(f"the daemon's CPU time over its workers', {side}", share, 0.03, most=True))
    return common.conclude(claims, rounds=rounds)


def together(args: argparse.Namespace) -> dict[str, Any]:
    """One side of one round: a daemon, its clients, and what they got together."""
    dtype, count = SIDES[args.side]
    with common.Daemon(args.folder, workers=args.workers, stream={"chunk": CHUNK}) as daemon:
        clients = [start(daemon.address, dtype, size, args.epochs) for size in args.batch_sizes[:count]]
        for process in clients:
            line(process)
        pids = [process.pid for process in clients]
        meter = common.Meter(workers=daemon.ping().workers, clients=pids, daemon=[daemon.pid])
        for process in clients:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        counts = [int(line(process)) for process in clients]
        used = meter.read()
        status = daemon.ping().streams["train"]
        for process in clients:
            process.communicate()  # they live until here, so that their CPU time could be asked
    assert status is not None
    images = sum(counts)
    return {"images": images, "images_per_s": images / used["seconds"], "recomputed": status.recomputed} | used


def start(address: str, dtype: str, batch_size: int, epochs: int) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--client", address, dtype, str(batch_size), "--epochs", str(epochs)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    text = process.stdout.readline()
    if not text:
        sys.exit(f"a client ended with status {process.wait()}")
    return text


def client(address: str, dtype: str, batch_size: int, epochs: int) -> None:
    """Warm up, say so, wait for the word, take the epochs, say how many images they had, wait for the end."""
    with Loader(address, batch_size=batch_size, rank=0, world_size=1, dtype=dtype, output="numpy") as loader:
        consume(loader)
        loader.set_epoch(2)  # the beginning of epoch 1 is being fetched already, for nothing
        print("ready", flush=True)
        sys.stdin.readline()
        print(sum(consume(loader) for _ in range(epochs)), flush=True)
        sys.stdin.read()


def consume(loader: Loader) -> int:
    """One epoch; how many images it had."""
    count = 0
    for images, labels in loader:
        float(images[-1, :, -1].sum())
        count += len(labels)
    return count


if __name__ == "__main__":
    sys.exit(main())
