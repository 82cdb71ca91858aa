"""What a test may leave behind: nothing. Everything is told apart by identity, never by name.

thread       a Python thread by its object, any other thread of this process by (tid, start time)
process      by (pid, start time): a descendant, or one that carries the session's token in its environment,
             which also finds a daemon that was handed to init
descriptor   by (number, device, inode); sockets, pipes and memfds are among them
mapping      shared or deleted files and memfds by (device, inode, start)
memory       anonymous ranges of this process, where more than `LARGE` bytes were not mapped before

Two looks at all of it are part of every test, so what cannot be a find is passed over at the first sign of it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

#: Inherited by every process that a test starts; its value is the session's nonce.
TOKEN = "HEADRACE_TEST_SESSION"

#: Bytes of new anonymous memory that count as left behind; a C heap of a thread that ended may keep 64 MiB.
LARGE = 96 << 20

#: Seconds that what is ending has to end.
PATIENCE = 20.0


@dataclass(frozen=True)
class Snapshot:
    """What this process holds at one moment: `identity: description` of each kind."""

    threads: dict[threading.Thread, str]
    tasks: dict[tuple[int, int], str]
    processes: dict[tuple[int, int], str]
    descriptors: dict[Hashable, str]
    mappings: dict[Hashable, str]
    anonymous: list[tuple[int, int]]


def take() -> Snapshot:
    """The present."""
    mappings, anonymous = _mappings()
    threads = {t: f"thread {t.name!r}{' (daemon)' if t.daemon else ''}" for t in threading.enumerate()}
    known = {t.native_id for t in threads}
    tasks = {key: text for key, text in _tasks() if key[0] not in known}
    return Snapshot(threads, dict(tasks), _processes(), _descriptors(), mappings, anonymous)


def left(before: Snapshot) -> list[str]:
    """A line for each thing that is there now and was not there `before`."""
    now = take()
    lines = [text for key, text in now.threads.items() if key not in before.threads]
    # A thread that Python knew before may be a bare one now, and the other way round.
    known = {t.native_id for t in before.threads}
    lines += [text for key, text in now.tasks.items() if key not in before.tasks and key[0] not in known]
    lines += [text for key, text in now.processes.items() if key not in before.processes]
    lines += [text for key, text in now.descriptors.items() if key not in before.descriptors]
    lines += [text for key, text in now.mappings.items() if key not in before.mappings]
    fresh = sum(end - start for start, end in _subtract(now.anonymous, before.anonymous))
    if fresh > LARGE:
        lines.append(f"memory: {fresh >> 20} MiB of anonymous mappings that were not there before")
    return lines


def settled(before: Snapshot) -> list[str]:
    """`left`, once what is ending has had `PATIENCE` to end."""
    lines = left(before)
    deadline = time.monotonic() + PATIENCE
    while lines and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.02)
        lines = left(before)
    return lines


def kill(before: Snapshot) -> None:
    """Ends every process that `left` names, so that the tests to come run undisturbed."""
    for pid, start in _processes().keys() - before.processes.keys():
        with contextlib.suppress(OSError):
            handle = os.pidfd_open(pid)
            try:
                if _stat(pid)[1] == start:  # else the pid is another's by now
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
            finally:
                os.close(handle)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


# -- what /proc says ------------------------------------------------------------------------------------------


def _read(path: str) -> bytes:
    """A file of /proc; without pathlib and io, which take longer than the kernel does."""
    fd = os.open(path, os.O_RDONLY)
    try:
        parts = []
        while part := os.read(fd, 1 << 20):
            parts.append(part)
        return b"".join(parts)
    finally:
        os.close(fd)


def _stat(pid: int | str, root: str = "/proc") -> tuple[int, int, str]:
    """(parent, start time in clock ticks, state) of a process or thread."""
    text = _read(f"{root}/{pid}/stat")
    fields = text[text.rindex(b")") + 2 :].split()
    return int(fields[1]), int(fields[19]), fields[0].decode()


def _tasks() -> Iterator[tuple[tuple[int, int], str]]:
    for tid in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):
            _, start, _ = _stat(tid, "/proc/self/task")
            name = _read(f"/proc/self/task/{tid}/comm").decode(errors="replace").strip()
            yield (int(tid), start), f"native thread {tid} ({name})"


def _processes() -> dict[tuple[int, int], str]:
    token = f"{TOKEN}={os.environ.get(TOKEN, '-')}".encode()
    found: dict[int, tuple[int, int, str, bool]] = {}
    _, born, _ = _stat("self")
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with contextlib.suppress(OSError):
                parent, start, state = _stat(entry)
                if start < born:  # nobody starts what is older than he is
                    continue
                environ = b""
                with contextlib.suppress(OSError):
                    environ = _read(f"/proc/{entry}/environ")
                found[int(entry)] = parent, start, state, token in environ.split(b"\0")
    ours = {os.getpid()}
    while more := {pid for pid, (parent, *_) in found.items() if parent in ours} - ours:
        ours |= more
    ours |= {pid for pid, (*_, marked) in found.items() if marked}
    ours.discard(os.getpid())
    return {(pid, found[pid][1]): _describe(pid, found[pid][2]) for pid in ours if pid in found}


def _describe(pid: int, state: str) -> str:
    command = ""
    with contextlib.suppress(OSError):
        command = _read(f"/proc/{pid}/cmdline").replace(b"\0", b" ").decode(errors="replace").strip()
    return f"process {pid} in state {state}: {command or '(no command line)'}"


def _descriptors() -> dict[Hashable, str]:
    found: dict[Hashable, str] = {}
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that lists them is closed by now
            status = os.fstat(int(entry))
            found[int(entry), status.st_dev, status.st_ino] = (
                f"descriptor {entry}: {os.readlink(f'/proc/self/fd/{entry}')}"
            )
    return found


def _mappings() -> tuple[dict[Hashable, str], list[tuple[int, int]]]:
    mapped: dict[Hashable, str] = {}
    anonymous = []
    for row in _read("/proc/self/maps").splitlines():
        # Hundreds of lines are private mappings of files; to take them apart is most of the work.
        row = row.rstrip()
        if row[row.index(b" ") + 4] != ord("s") and not row.endswith((b" (deleted)", b" 0")):
            continue
        line = row.decode(errors="replace")
        span, access, _, device, inode, *name = line.split(maxsplit=5)
        start, end = (int(part, 16) for part in span.split("-"))
        if access[3] == "s" or (name and name[0].endswith(" (deleted)")):
            mapped[device, inode, start] = f"mapping of {end - start} bytes, {access}: {''.join(name) or 'anonymous'}"
        elif inode == "0" and not name and access[:2] == "rw":
            anonymous.append((start, end))
    return mapped, anonymous


def _subtract(now: list[tuple[int, int]], before: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The parts of the sorted ranges `now` that no range of the sorted `before` covers."""
    same = set(before)
    for start, end in now:
        if (start, end) in same:
            continue
        for known_start, known_end in before:
            if known_end <= start or known_start >= end:
                continue
            if known_start > start:
                yield start, known_start
            start = known_end
        if start < end:
            yield start, end
