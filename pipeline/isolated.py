"""What might crash or hang is asked of a process of its own: `python -m MODULE PARENT SECONDS ARGUMENT...`.

It has a deadline, ends with whoever has started it, and answers with one line of JSON. Nothing that a library does in
it stays behind: no CUDA context, no memory of a GPU, no thread, no handler.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from typing import BinaryIO, Generic, NoReturn, TypeVar

import msgspec

_PR_SET_PDEATHSIG = 1
#: Seconds that the deadline of the process itself is earlier than that of who waits for it.
_GRACE = 2.0
#: Bytes of its output that are looked at.
_END = 1 << 16

T = TypeVar("T")


class Failed(Exception):
    """There is no answer; says why, as what follows on "the process"."""


class Isolated(Generic[T]):
    """A question that somebody is at.

    Args:
        module: its `main` calls `attach` first of all, and `answer` in the end.
        arguments: for it.
        kind: of the answer.
        timeout: seconds until it counts as hung.
    """

    def __init__(self, module: str, arguments: Sequence[str], kind: type[T], *, timeout: float) -> None:
        self._kind = kind
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout + _GRACE
        self._process: subprocess.Popen[bytes] | None = None
        self._not_started = ""
        # Not pipes: nobody reads while others of its kind are waited for, and it must not wait for that.
        self._out, self._err = (open(os.memfd_create("headrace-isolated"), "rb", buffering=0) for _ in range(2))
        try:
            self._process = subprocess.Popen(
                # -P: a file in the working directory must not stand in for a module.
                [sys.executable, "-P", "-m", module, str(os.getpid()), str(timeout), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=self._out,
                stderr=self._err,
            )
        except OSError as error:  # no memory, too many processes or descriptors
            self._not_started = f"could not be started: {error.strerror}"

    def result(self) -> T:
        """Wait for it, until its deadline; then `close`.

        Raises:
            Failed: it has given no answer.
        """
        with closing(self):
            if self._process is None:
                raise Failed(self._not_started)
            try:
                code = self._process.wait(max(0.0, self._deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise Failed(self._too_long()) from None
            if code == 0:
                with suppress(msgspec.MsgspecError, UnicodeDecodeError):
                    return msgspec.json.decode(_end(self._out).rpartition(b"\n")[2], type=self._kind)
            if code == -signal.SIGALRM:
                raise Failed(self._too_long())
            last = _end(self._err).rpartition(b"\n")[2].decode(errors="replace")
            raise Failed(f"{_ended(code)}; its last words: {last.strip() or 'nothing'}")

    def close(self) -> None:
        """End it, if it goes on. May be called twice."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):  # what waits in a driver cannot be killed, and is left alone
                self._process.wait(_GRACE)
        self._out.close()
        self._err.close()

    def _too_long(self) -> str:
        return f"did not end within {self._timeout:g} seconds"


def attach(argv: Sequence[str]) -> list[str]:
    """In the process, first of all: its arguments. From now on it ends at its deadline and with its parent."""
    parent, timeout = int(argv[1]), float(argv[2])
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # which whoever started our parent may have ignored
    signal.setitimer(signal.ITIMER_REAL, timeout)  # ends it, whatever it waits for
    end_with(parent)
    return list(argv[3:])


def answer(value: object) -> NoReturn:
    """The one line. The process is over with it: what libraries print as they are unloaded is no part of the answer."""
    line = b"\n%b\n" % msgspec.json.encode(value)
    sys.stdout.flush()
    while line:
        line = line[os.write(1, line) :]
    os._exit(0)


def end_with(parent: int) -> None:
    """Have the kernel end this process with that one, which has started it."""
    # The signal comes when the *thread* that started us ends.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)  # it was gone before


def _end(file: BinaryIO) -> bytes:
    """Of what was written there, without space behind it."""
    size = os.fstat(file.fileno()).st_size
    return os.pread(file.fileno(), _END, max(0, size - _END)).rstrip()


def _ended(code: int) -> str:
    if code >= 0:
        return f"ended with status {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
