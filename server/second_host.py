"""Two hosts on one machine: network namespaces joined by a virtual cable, as far from each other as two computers.

What runs in one reaches the other only through the cable: no Unix socket, no shared memory, no loopback. Needs no root:
the namespaces belong to a user namespace of their own. Some machines and containers forbid that.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headrace.errors import HeadraceError

#: A block for tests of networks (RFC 2544), which nobody's network uses.
ADDRESSES = ("198.18.77.1", "198.18.77.2")

_TIMEOUT = 10.0


class NotPossible(HeadraceError):
    """This machine does not let us."""


@dataclass(frozen=True, slots=True)
class Host:
    """One end of the cable.

    Attributes:
        ip: its address.
        pid: of a process that keeps its network.
    """

    ip: str
    pid: int

    def command(self, *args: str) -> list[str]:
        """What to run so that `args` run there."""
        return ["nsenter", f"--target={self.pid}", "--user", "--net", "--preserve-credentials", "--", *args]


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts that reach each other; gone at the end, with whatever still runs on their networks' addresses.

    Raises:
        NotPossible: says why.
    """
    with contextlib.ExitStack() as stack:
        first = Host(ADDRESSES[0], _keep(stack, ["unshare", "--user", "--map-root-user", "--net"], "user", "net"))
        inside = ["nsenter", f"--target={first.pid}", "--user", "--preserve-credentials", "--", "unshare", "--net"]
        second = Host(ADDRESSES[1], _keep(stack, inside, "net"))
        _run(first.command("ip", "link", "add", "cable0", "type", "veth", "peer", "name", "cable1"))
        _run(first.command("ip", "link", "set", "cable1", "netns", str(second.pid)))
        for host, end in ((first, "cable0"), (second, "cable1")):
            _run(host.command("ip", "address", "add", f"{host.ip}/30", "dev", end))
            _run(host.command("ip", "link", "set", end, "up"))
            _run(host.command("ip", "link", "set", "lo", "up"))
        yield first, second


def _keep(stack: contextlib.ExitStack, unshare: Sequence[str], *kinds: str) -> int:
    """The process that keeps new namespaces; once they are there."""
    try:
        # `exec` as the last step: the process that we know is the one that sleeps, in its namespaces.
        process = subprocess.Popen(
            [*unshare, "sleep", "infinity"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
    except OSError as error:
        raise NotPossible(f"{unshare[0]}: {error.strerror}") from error
    stack.callback(_end, process)
    deadline = time.monotonic() + _TIMEOUT
    while not _asleep(process.pid, kinds):
        if process.poll() is not None:
            assert process.stderr is not None
            raise NotPossible(process.stderr.read().decode(errors="replace").strip() or f"{unshare[0]} failed")
        if time.monotonic() > deadline:
            raise NotPossible(f"{unshare[0]} does not make namespaces within {_TIMEOUT:g} s")
        time.sleep(0.01)
    return process.pid


def _asleep(pid: int, kinds: Sequence[str]) -> bool:
    """Whether the process has come to `sleep`, in other namespaces than ours."""
    try:
        with open(f"/proc/{pid}/comm") as comm:
            asleep = comm.read().strip() == "sleep"
        return asleep and all(os.readlink(f"/proc/{pid}/ns/{k}") != os.readlink(f"/proc/self/ns/{k}") for k in kinds)
    except OSError:
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    assert process.stderr is not None
    process.stderr.close()


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotPossible(f"{command[0]}: {error}") from error
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip()
        raise NotPossible(said or f"{' '.join(command)} ended with status {done.returncode}")
