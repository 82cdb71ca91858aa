"""How long an ending takes, whoever ends first.

Claim: each takes 2 s at most, over shared memory and over tcp: a Loader that is closed with requests outstanding, or
dropped after one batch, 500 of them on one daemon; a trainer that exits with a live Loader, or that gets Ctrl-C in
`next()`, while its daemon is stopped and answers nothing; a daemon that is asked to end with trainers at it; a Loader
whose daemon was killed. The exit status says whether they do.

    python benchmarks/endings.py [--loaders 500] [--data DIR]
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common

from headrace import Loader
from headrace.errors import HeadraceError

LIMIT = 2.0
BATCH = 8
TRAINER = """
import sys
from headrace import Loader
loader = Loader(sys.argv[1], batch_size=8, output="numpy", transport=sys.argv[2])
next(iter(loader))
print("going", flush=True)
sys.stdin.readline()
if sys.argv[3] == "next":
    print("going", flush=True)
    while True:
        list(loader)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loaders", type=int, default=500, help="that are dropped, one after another")
    parser.add_argument("--data", type=Path, help="class folders of photos to make the pictures from")
    args = parser.parse_args()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell that starts us in the background has it so
        signal.signal(signal.SIGINT, signal.default_int_handler)
    took: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as temporary:
        folder = Path(temporary)
        sources = common.sources(args.data)
        common.imagenet_like(sources, folder, max(100, len(sources)))  # one of each class at least
        for transport in ("shm", "tcp"):
            with common.Daemon(folder, workers=1, backend="pillow", stream={"chunk": BATCH}) as daemon:
                measured = {
                    f"the slowest of {args.loaders} dropped Loaders": dropped(daemon, transport, args.loaders),
                    "close() with requests outstanding": closed(daemon, transport),
                    "exit with a live Loader": left(daemon, transport, "exit", stopped=False),
                    "the same, and the daemon is stopped": left(daemon, transport, "exit", stopped=True),
                    "Ctrl-C in next(), and the daemon is stopped": left(daemon, transport, "next", stopped=True),
                }
            measured |= servers(folder, transport)
            took |= {f"{transport}: {name}": seconds for name, seconds in measured.items()}
    return common.conclude([common.Claim(name, seconds, LIMIT, most=True) for name, seconds in took.items()])


def open_loader(daemon: common.Daemon, transport: str, **more: Any) -> Loader:
    usual = {"batch_size": BATCH, "output": "numpy", "rank": 0, "world_size": 1, "transport": transport}
    return Loader(daemon.address, **(usual | more))


def timed(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def dropped(daemon: common.Daemon, transport: str, count: int) -> float:
    """The longest of so many, each after one batch; the daemon has to have nobody left at the end."""
    longest = 0.0
    for _ in range(count):
        loaders = [open_loader(daemon, transport)]
        next(iter(loaders[0]))
        longest = max(longest, timed(loaders.clear))
    gc.collect()
    deadline = time.monotonic() + LIMIT
    while (sessions := daemon.ping().sessions) and time.monotonic() < deadline:
        time.sleep(0.01)
    if sessions:
        sys.exit(f"{sessions} sessions of Loaders that are gone are at the daemon still")
    return longest


def closed(daemon: common.Daemon, transport: str) -> float:
    loader = open_loader(daemon, transport, batch_size=50, prefetch=8)
    next(iter(loader))
    return timed(loader.close)


def left(daemon: common.Daemon, transport: str, where: str, *, stopped: bool) -> float:
    """From the last line that a trainer is given, or from Ctrl-C, to the end of its process."""
    child = subprocess.Popen(
        [sys.executable, "-c", TRAINER, daemon.address, transport, where],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert child.stdin is not None and child.stdout is not None
    with child.stdin, child.stdout:
        child.stdout.readline()
        if stopped:
            os.kill(daemon.pid, signal.SIGSTOP)
        began = time.perf_counter()
        try:
            child.stdin.write(b"\n")
            child.stdin.flush()
            if where == "next":
                child.stdout.readline()
                time.sleep(0.5)
                began = time.perf_counter()
                child.send_signal(signal.SIGINT)
            child.wait(60)
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
            child.kill()
    return time.perf_counter() - began


def servers(folder: Path, transport: str) -> dict[str, float]:
    """Daemons that end before their trainers do."""
    took = {}
    for name, number in (("asked to end with a trainer at it", signal.SIGTERM), ("killed", signal.SIGKILL)):
        with common.Daemon(folder, workers=1, backend="pillow", stream={"chunk": BATCH}) as daemon:
            loader = open_loader(daemon, transport)
            next(iter(loader))
            os.kill(daemon.pid, number)
            # It stays for `common.Daemon` to reap.
            seconds = timed(lambda: os.waitid(os.P_PID, daemon.pid, os.WEXITED | os.WNOWAIT))
            if number == signal.SIGTERM:
                took[f"a daemon that is {name}"] = seconds
            took[f"close() of a Loader whose daemon was {name.split()[0]}"] = timed(loader.close)
            try:
                next(iter(loader))
            except HeadraceError:
                continue
            sys.exit("a closed Loader gave a batch")
    return took


if __name__ == "__main__":
    sys.exit(main())
