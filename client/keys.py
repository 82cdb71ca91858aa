"""CURVE keys for tcp: the files that hold them, and a client's own.

The files are pyzmq's certificates: NAME.key holds a public key, NAME.key_secret the same and its secret one. ZeroMQ
encrypts with them, and proves each side to the other; who may come is the daemon's matter, see `headrace.server.keys`.
"""

from __future__ import annotations

import os
import stat
import struct
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

from headrace.errors import ConfigError

#: Bytes that CURVE puts around a frame: command, nonce, authentication, flags. They count for a socket's bound.
OVERHEAD = 33

PUBLIC, SECRET = ".key", ".key_secret"

#: Bytes of the largest file that is looked at. One of `headrace keygen` has less than one KiB.
_LARGEST = 64 << 10

_MEMBERS = ("secret_key", "server")


@dataclass(frozen=True, slots=True)
class Pair:
    """A public key and its secret one, in Z85; `file` is where they are from."""

    file: Path
    public: bytes
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Keys:
    """What a client needs to connect over tcp.

    Attributes:
        own: proves it to the daemon.
        server: the daemon's public key, in Z85; `server_file` is where it is from.
    """

    own: Pair
    server: bytes
    server_file: Path

    @classmethod
    def load(cls, curve: Mapping[str, Any] | None) -> Keys | None:
        """Of `{"secret_key": FILE, "server": FILE}`; None of None.

        Raises:
            ConfigError: it is something else, or as `read_pair` and `read_public`.
        """
        if curve is None:
            return None
        if not isinstance(curve, Mapping) or set(curve) != set(_MEMBERS):
            raise ConfigError(
                'curve: must be {"secret_key": FILE, "server": FILE}: the file of this client\'s secret key, and that '
                "of the daemon's public one"
            )
        own, server = (_path(f"curve.{name}", curve[name]) for name in _MEMBERS)
        return cls(read_pair(own, "curve.secret_key"), read_public(server, "curve.server"), server)

    def secure(self, socket: zmq.Socket[bytes]) -> None:
        """What this socket connects to must be that daemon."""
        socket.curve_publickey, socket.curve_secretkey = self.own.public, self.own.secret
        socket.curve_serverkey = self.server


def read_pair(file: Path, what: str) -> Pair:
    """The keys of a file NAME.key_secret.

    Args:
        what: it is for, by which errors call it.

    Raises:
        ConfigError: it cannot be read, others can read it, or it holds no such pair.
    """
    status = _look(file, what)
    # What root hands to a group, as Kubernetes does, may be read by that group; nothing may be read by everybody.
    handed = status.st_uid == 0 != os.geteuid()
    if status.st_mode & (0o007 if handed else 0o077):
        mode = f"{stat.S_IMODE(status.st_mode):04o}"
        raise ConfigError(
            f"{what}: {file} is open to others (mode {mode}), and whoever reads it can pass for its owner: chmod 600 "
            f"{file}; if others may have read it, make a new pair with `headrace keygen`"
        )
    public, secret = _read(file, what)
    if secret is None:
        raise ConfigError(f"{what}: {file} holds a public key only; the secret one is in NAME{SECRET}")
    if zmq.curve_public(secret) != public:
        raise ConfigError(f"{what}: {file} holds a public and a secret key that are no pair: make a new one")
    return Pair(file, public, secret)


def read_public(file: Path, what: str) -> bytes:
    """The key of a file NAME.key, in Z85.

    Raises:
        ConfigError: it cannot be read, anybody can change it, or it is no such file.
    """
    status = _look(file, what)
    public, secret = _read(file, what)
    if secret is not None:
        raise ConfigError(
            f"{what}: {file} holds a secret key, which only its owner should have: name the file NAME{PUBLIC}"
        )
    check_closed(file, status, what)
    return public


def check_closed(place: Path, status: os.stat_result, what: str) -> None:
    """
    Raises:
        ConfigError: anybody may change this file or folder, and so say who is trusted.
    """
    # Folders of secrets in containers are open by their mode, and mounted so that nobody can write.
    if status.st_mode & 0o002 and not os.statvfs(place).f_flag & os.ST_RDONLY:
        mode = f"{stat.S_IMODE(status.st_mode):04o}"
        raise ConfigError(
            f"{what}: anybody on this machine can change {place} (mode {mode}), and so say whose keys are trusted: "
            f"chmod o-w {place}"
        )


def generate(folder: Path, name: str) -> tuple[Path, Path]:
    """Make a new pair in the files NAME.key and NAME.key_secret, which nobody else may read; returns their paths.

    Args:
        folder: is made if need be, with mode 0700.

    Raises:
        ConfigError: one of them is there already, or they cannot be written.
    """
    _check_curve()
    if not name or "/" in name or "\0" in name or name.startswith("."):
        raise ConfigError(f"--name: {name!r} cannot be the name of a file")
    from zmq.auth import create_certificates

    public, secret = folder / f"{name}{PUBLIC}", folder / f"{name}{SECRET}"
    made: list[Path] = []
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as private:  # pyzmq writes for everybody; this folder is ours
            for written, file in zip(create_certificates(private, "new"), (public, secret), strict=True):
                fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                made.append(file)
                with os.fdopen(fd, "wb") as target:
                    target.write(Path(written).read_bytes())
    except BaseException as error:
        for file in made:  # never half a pair
            file.unlink()
        if isinstance(error, FileExistsError):
            raise ConfigError(f"{error.filename} exists, and no key is written over: choose another name") from None
        if isinstance(error, OSError):
            raise ConfigError(f"the keys cannot be written to {folder}: {error.strerror}") from None
        raise
    return public, secret


def _path(what: str, value: Any) -> Path:
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value) or "\0" in os.fsdecode(value):
        raise ConfigError(f"{what}: must be the path of a file that `headrace keygen` has made")
    return Path(os.fsdecode(value)).expanduser()


def _look(file: Path, what: str) -> os.stat_result:
    try:
        status = file.stat()
    except OSError as error:
        raise ConfigError(f"{what}: {file} cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(status.st_mode) or status.st_size > _LARGEST:
        raise ConfigError(f"{what}: {file} is no file that `headrace keygen` has made")
    return status


def _read(file: Path, what: str) -> tuple[bytes, bytes | None]:
    """Public and secret key."""
    _check_curve()
    from zmq.auth import load_certificate

    try:
        public, secret = load_certificate(file)
    except OSError as error:
        raise ConfigError(f"{what}: {file} cannot be read: {error.strerror}") from None
    except (ValueError, IndexError):  # pyzmq's own words may hold what is in the file
        public, secret = b"", None
    if not _sound(public) or not (secret is None or _sound(secret)):
        raise ConfigError(f"{what}: {file} holds no key: it must be a file that `headrace keygen` has made")
    return public, secret


def _sound(key: bytes) -> bool:
    """Whether it is 32 bytes in Z85."""
    try:
        return len(key) == 40 and len(z85.decode(key)) == 32
    except (KeyError, struct.error):
        return False


def _check_curve() -> None:
    if not zmq.has("curve"):
        raise ConfigError("this ZeroMQ was built without CURVE, so it knows no keys: install pyzmq from its wheel")
