"""The daemon's address: a Unix socket that clients say Hello on, ZeroMQ's socket beside it, and a lock.

`ipc://PATH` names the Unix socket, `PATH.zmq` ZeroMQ's, `PATH.lock` the lock. Without the lock a second bind on an
ipc path silently takes the first daemon's clients away. What a killed daemon left is taken over with its lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import grp
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from headrace.errors import ConfigError

#: Bytes of the longest path of a Unix socket, without the closing zero.
_LONGEST = 107
_BACKLOG = 128


class Taken(ConfigError):
    """Another daemon listens there."""


class Listener:
    """
    Args:
        path: of the Unix socket.
        group: name of the group that may connect beside the user; None for the user alone.

    Raises:
        Taken: another daemon holds the lock.
        ConfigError: the path is too long, the folder is missing or not writable, something else lies there,
            or the group is unknown.
    """

    def __init__(self, path: Path, *, group: str | None = None) -> None:
        self.path = path
        self.zmq_path = Path(f"{path}.zmq")
        self._lock_path = Path(f"{path}.lock")
        if len(os.fsencode(self.zmq_path)) > _LONGEST:
            raise ConfigError(
                f"listen: {path} is {len(os.fsencode(path))} bytes long; with .zmq a Unix socket's path has at most "
                f"{_LONGEST}: choose a shorter folder"
            )
        self._group = None if group is None else _group_id(group)
        self._lock = self._take_lock()
        try:
            for left in (self.path, self.zmq_path):
                _remove_socket(left)
            self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.socket.setblocking(False)
            with self.private_files():
                self.socket.bind(os.fsencode(path))
            self.admit(path)
            self.socket.listen(_BACKLOG)
        except OSError as error:
            os.close(self._lock)
            raise ConfigError(f"listen: {path}: {error.strerror}") from error
        except BaseException:
            os.close(self._lock)
            raise

    @property
    def address(self) -> str:
        return f"ipc://{self.path}"

    @property
    def zmq_endpoint(self) -> str:
        return f"ipc://{self.zmq_path}"

    @contextlib.contextmanager
    def private_files(self) -> Iterator[None]:
        """Sockets bound within are nobody else's until `admit`."""
        before = os.umask(0o177)
        try:
            yield
        finally:
            os.umask(before)

    def admit(self, path: Path) -> None:
        """Let the configured group in."""
        if self._group is not None:
            os.chown(path, -1, self._group)
            os.chmod(path, 0o660)

    def accept(self) -> Iterator[tuple[socket.socket, int, int]]:
        """Every connection that waits: `(socket, pid, uid)`; pid 0 is a process of another PID namespace."""
        while True:
            try:
                connection, _ = self.socket.accept()
            except BlockingIOError:
                return
            except OSError:  # it gave up while it waited, or descriptors ran out: the next poll tries again
                return
            yield connection, *peer(connection)

    def stop(self) -> None:
        """Take no more connections: those that wait are told so by their end. May be called twice."""
        self.socket.close()
        for path in (self.path, self.zmq_path):
            with contextlib.suppress(OSError):
                path.unlink()

    def close(self) -> None:
        """Stop, and give the address free. May be called twice."""
        self.stop()
        if self._lock >= 0:
            with contextlib.suppress(OSError):
                self._lock_path.unlink()
            os.close(self._lock)
            self._lock = -1

    def _take_lock(self) -> int:
        while True:
            try:
                fd = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            except OSError as error:
                raise ConfigError(f"listen: {self._lock_path} cannot be made: {error.strerror}") from error
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                raise Taken(f"listen: another daemon listens on {self.address}") from None
            # Its last owner may have removed the file between our open and our lock.
            with contextlib.suppress(FileNotFoundError):
                if os.stat(self._lock_path).st_ino == os.fstat(fd).st_ino:
                    return fd
            os.close(fd)


def peer(connection: socket.socket) -> tuple[int, int]:
    """`(pid, uid)` of the process that connected, by the kernel's word."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(data[:4], "little"), int.from_bytes(data[4:8], "little")


def private_folder() -> Path:
    """Where private daemons of this user listen: a folder of mode 0700.

    Raises:
        ConfigError: it belongs to somebody else, or others may enter it.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.path.isdir(runtime):
        folder = Path(runtime) / "headrace"
    else:
        import tempfile

        folder = Path(tempfile.gettempdir()) / f"headrace-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ConfigError(f"{folder} must be a folder of yours with mode 0700: remove it, or set XDG_RUNTIME_DIR")
    return folder


def _remove_socket(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"listen: {path} exists and is no socket")
    path.unlink()


def _group_id(name: str) -> int:
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise ConfigError(f"socket.group: there is no group {name!r} on this machine") from None
