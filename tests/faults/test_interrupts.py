"""Ctrl-C anywhere in `next`: no hang, and no batch lost, handed out twice or of another epoch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

# `again` makes the iterator that goes on after an interrupt; a signal each 1.5 ms comes from another process, so that
# it arrives anywhere. Before the first line of `__next__` it is an interrupt of the loop, which ends the epoch.
STORM = """
import json, os, signal, subprocess, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from scripted import ScriptedDaemon, index_of
from headrace import Loader
from headrace.loader import _Batches

SAMPLES, ROWS, first = 400, 8, _Batches.__next__.__code__
interrupts = 0

def interrupt(number, frame):
    global interrupts
    while frame is not None and frame.f_code is not first:
        frame = frame.f_back
    if frame is not None and frame.f_lineno > first.co_firstlineno:
        interrupts += 1
        raise KeyboardInterrupt

sender = '''
import os, random, signal, sys, time
pick = random.Random(int(sys.argv[2]))
for _ in range(1200):
    time.sleep(pick.random() * 0.003)
    os.kill(int(sys.argv[1]), signal.SIGINT)
'''
with ScriptedDaemon(Path({socket!r}), samples=SAMPLES, slots=12, window=8) as daemon:
    address = daemon.address if {transport!r} == "shm" else daemon.tcp_address
    with Loader(address, batch_size=ROWS, output="numpy", dtype="uint8", timeout=20, transport={transport!r}) as loader:
        seen = []
        batches = iter(loader)
        batch = next(batches)
        signal.signal(signal.SIGINT, interrupt)
        child = subprocess.Popen([sys.executable, "-c", sender, str(os.getpid()), "{seed}"])
        while child.poll() is None:
            seen.append((batch.epoch, SAMPLES - 1 - int(batch.indices[0])))
            batch = None
            while batch is None:
                try:
                    for batch in batches:
                        break
                    else:
                        batches = iter(loader)
                except KeyboardInterrupt:
                    {again}
        sys.stdout.write(json.dumps([interrupts, seen]))
"""


@pytest.mark.parametrize(
    ("again", "seed", "transport"),
    [("pass", 1, "shm"), ("batches = iter(loader)", 2, "shm"), ("batches = iter(loader)", 3, "tcp")],
)
def test_every_batch_is_handed_out_once_however_often_next_is_interrupted(
    tmp_path: Path, again: str, seed: int, transport: str
) -> None:
    script = tmp_path / "storm.py"
    tests = str(Path(__file__).parents[1])
    script.write_text(
        STORM.format(tests=tests, socket=str(tmp_path / "s"), again=again, seed=seed, transport=transport)
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    interrupts, seen = json.loads(done.stdout)
    assert interrupts > 100
    assert seen == [[step // 50, step % 50 * 8] for step in range(len(seen))]


MAKING = """
import os, random, signal, sys, threading
sys.path.insert(0, {tests!r})
from pathlib import Path
from scripted import ScriptedDaemon, wait_until
from headrace import Loader

pick = random.Random(4)
made = interrupted = 0

def interrupt(number, frame):
    raise KeyboardInterrupt

signal.signal(signal.SIGALRM, interrupt)
with ScriptedDaemon(Path({socket!r})) as daemon:
    address = daemon.address if {transport!r} == "shm" else daemon.tcp_address
    before = None
    while interrupted < 40:
        loader = None
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.0001 + pick.random() * 0.02)
            loader = Loader(address, batch_size=8, output="numpy", timeout=20, transport={transport!r})
            signal.setitimer(signal.ITIMER_REAL, 0)
            made += 1
        except KeyboardInterrupt:
            interrupted += 1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        if loader is not None:
            loader.close()
        # This one and the daemon's; one that was interrupted in its start has still to find that it is to end.
        wait_until(lambda: sum(thread.is_alive() for thread in threading.enumerate()) == 2)
        if interrupted == 5:
            before = len(os.listdir("/proc/self/fd"))
    assert len(os.listdir("/proc/self/fd")) < before + 20
sys.stdout.write("fine")
"""


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_loader_whose_making_is_interrupted_leaves_nothing(tmp_path: Path, transport: str) -> None:
    script = tmp_path / "making.py"
    tests = str(Path(__file__).parents[1])
    script.write_text(MAKING.format(tests=tests, socket=str(tmp_path / "s"), transport=transport))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "fine"), done.stderr
