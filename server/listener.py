"""The daemon's addresses: a Unix socket that clients say Hello on, ZeroMQ's socket beside it, and a lock; ports of tcp.

`ipc://PATH` names the Unix socket, `PATH.zmq` ZeroMQ's, `PATH.lock` the lock. Without the lock a second bind on an
ipc path silently takes the first daemon's clients away. What a killed daemon left is taken over with its lock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import grp
import ipaddress
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import zmq

from headrace.connect import LONGEST_PATH
from headrace.errors import ConfigError

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
        if len(os.fsencode(self.zmq_path)) > LONGEST_PATH:
            raise ConfigError(
                f"listen: {path} is {len(os.fsencode(path))} bytes long; with .zmq a Unix socket's path has at most "
                f"{LONGEST_PATH}: choose a shorter folder, for a private daemon by XDG_RUNTIME_DIR or TMPDIR"
            )
        self._group = None if group is None else _group_id(group)
        self._lock = self._take_lock()
        self._ours: dict[Path, int] = {}
        self._spare = -1
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            for left in (self.path, self.zmq_path):
                _remove_dead(left)
            self.socket.setblocking(False)
            with _private_files():
                self.socket.bind(os.fsencode(path))
            self._admit(path)
            self.socket.listen(_BACKLOG)
            self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise ConfigError(f"listen: {path}: {error.strerror}") from error
            raise

    @property
    def address(self) -> str:
        return f"ipc://{self.path}"

    @property
    def zmq_endpoint(self) -> str:
        return f"ipc://{self.zmq_path}"

    def bind_zmq(self, socket: zmq.Socket[bytes]) -> None:
        """Bind ZeroMQ's socket beside the other one."""
        with _private_files():
            socket.bind(self.zmq_endpoint)
        self._admit(self.zmq_path)

    def touch(self) -> None:
        """Keep the files young, for those who sweep old ones out of temporary folders."""
        for path in (self.path, self.zmq_path, self._lock_path):
            with contextlib.suppress(OSError):
                os.utime(path)

    def _admit(self, path: Path) -> None:
        """The socket that was just bound there is ours, and open to the configured group."""
        self._ours[path] = path.lstat().st_ino
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
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    return  # it gave up while it waited
                self._turn_away()
                return
            yield connection, *peer(connection)

    def _turn_away(self) -> None:
        """No descriptor is left: one more would wait for ever, and poll would report it for ever."""
        os.close(self._spare)
        with contextlib.suppress(OSError):
            self.socket.accept()[0].close()
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def stop(self) -> None:
        """Take no more connections: those that wait are told so by their end. May be called twice."""
        self.socket.close()
        for path, inode in self._ours.items():
            with contextlib.suppress(OSError):
                if path.lstat().st_ino == inode:
                    path.unlink()
        self._ours.clear()
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1

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


def tcp_endpoint(address: str, *, insecure: bool, keys: bool = False) -> str:
    """What ZeroMQ is to bind for `tcp://HOST:PORT`: the address in numbers.

    Args:
        insecure: whether it may be one that other hosts reach.
        keys: whether clients are asked for keys, so that it may.

    Raises:
        ConfigError: there is no such host, or others could reach it and must not.
    """
    host, port, loopback = _place(address.removeprefix("tcp://"), f"listen: {address}")
    if not insecure and not keys and not loopback:
        raise ConfigError(
            f"listen: {address} can be reached from other hosts, where anybody could read the pictures and labels, for "
            "nothing is encrypted and no keys are asked for: make keys with `headrace keygen DIR` and name them in "
            f"`curve`, or listen at a loopback address, such as tcp://127.0.0.1:{port}, or say `headrace serve "
            "--insecure`"
        )
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def metrics_place(place: str, *, insecure: bool) -> tuple[str, int]:
    """Where the metrics' port is to be bound for `HOST:PORT`: the address in numbers, and the port, 0 for a free one.

    Args:
        insecure: whether it may be one that other hosts reach.

    Raises:
        ConfigError: there is no such host, or others could reach it and must not.
    """
    host, port, loopback = _place(place, f"metrics: {place}")
    if not insecure and not loopback:
        raise ConfigError(
            f"metrics: {place} can be reached from other hosts, where anybody could read who trains on what: take a "
            f"loopback address, such as 127.0.0.1:{port}, or say `headrace serve --insecure`"
        )
    return host, 0 if port == "*" else int(port)


def _place(place: str, what: str) -> tuple[str, str, bool]:
    """Of `HOST:PORT` the address in numbers, IPv4 where there is one; the port; whether all of the host is loopback."""
    host, _, port = place.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if host == "*":
        found = ["0.0.0.0"]
    else:
        try:
            found = [str(place[0]) for *_, place in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
        except (OSError, UnicodeError) as error:
            raise ConfigError(f"{what}: there is no host {host!r}: {error}") from None
    loopback = all(ipaddress.ip_address(place).is_loopback for place in found)
    return next((place for place in found if ":" not in place), found[0]), port, loopback


def private_folder() -> Path:
    """Where private daemons of this user listen: a folder of mode 0700.

    Raises:
        ConfigError: it belongs to somebody else, or others may enter it.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK | os.X_OK):  # after `su` it is another user's
        folder = Path(runtime) / "headrace"
    else:
        import tempfile

        folder = Path(tempfile.gettempdir()) / f"headrace-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be made: {error.strerror}; set XDG_RUNTIME_DIR to a folder of yours"
        ) from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ConfigError(f"{folder} must be a folder of yours with mode 0700: remove it, or set XDG_RUNTIME_DIR")
    return folder


@contextlib.contextmanager
def _private_files() -> Iterator[None]:
    before = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(before)


def _remove_dead(path: Path) -> None:
    """Remove a socket that nobody listens on any more."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"listen: {path} exists and is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(os.fsencode(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except BlockingIOError:  # so many wait already
            pass
    # Whoever it is, it has lost its lock, or never had one.
    raise Taken(f"listen: something listens on {path} already")


def _group_id(name: str) -> int:
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise ConfigError(f"socket.group: there is no group {name!r} on this machine") from None
