"""A child process at the other end of a socket pair: how workers and indexers are started, watched and ended.

Started with `subprocess` and `-m`, never `multiprocessing`: nothing is pickled, the user's script is not imported
again, no helper process stays behind. The child has its own session, so a terminal's signals miss it.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from headrace.channel import Channel
from headrace.pipeline.isolated import end_with


def attach_to_parent(argv: list[str]) -> socket.socket:
    """In a child, first of all: its end of the socket pair. From now on it dies with its parent, at once.

    The end of the socket pair would tell it too, but only when it is done with what it is doing.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to a terminal's whole group; the daemon decides
    end_with(int(argv[2]))
    gc.freeze()  # what is imported stays: no collection need look through it, least of all the one at the end
    return socket.socket(fileno=int(argv[1]))


class Child:
    """
    Args:
        module: run as `python -m module FD PID ARG...`: its end of the socket pair, and us.
        descriptors: how many descriptors one of its frames may bring.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, module: str, *args: str, descriptors: int = 0) -> None:
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours, descriptors=descriptors)
        try:
            with theirs:
                self._process = subprocess.Popen(
                    # -P: a file in the working directory must not stand in for a module.
                    [sys.executable, "-P", "-m", module, str(theirs.fileno()), str(os.getpid()), *args],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,
                )
            #: Becomes readable when the process has ended: its end is proved, not guessed.
            self.pidfd = os.pidfd_open(self._process.pid)
        except BaseException:
            self.channel.close()  # a process that was started ends by that
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def stopped(self) -> bool:
        """Whether somebody has stopped it (SIGSTOP, a debugger)."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
        except OSError:
            return False

    def kill(self) -> None:
        self._process.kill()

    def reap(self, timeout: float = 0.0) -> int | None:
        """The exit status if the process has ended within `timeout` seconds, else None.

        Descriptors stay open until `close`.
        """
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def close(self) -> None:
        """Close this end; the child sees the end of its channel. May be called twice."""
        self.channel.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1
