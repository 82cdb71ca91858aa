"""What an interrupted `headrace verify` has judged already: a file beside the index, a line for each chunk.

    {"verify": 1, "data": ..., "render_id": ..., ...}       what the verdicts depend on: the key of `Journal.begin`
    [chunk, [[row, stage, reason], ...]]                    a chunk that is judged, and what was found in it

Lines are only ever added, by whoever has the file locked: two do not judge the same data side by side.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import msgspec

from headrace.errors import ConfigError
from headrace.server.tally import Found

log = logging.getLogger(__name__)

_line = msgspec.json.Decoder(tuple[int, Found])


class Taken(ConfigError):
    """Another process is at work on it."""


class Journal:
    """
    Args:
        fd: of the file, locked; None: nothing is kept.
        file: where it lies.
    """

    def __init__(self, fd: int | None = None, file: Path | None = None) -> None:
        self._fd = fd
        self._file = file
        self._end = 0  # of the last whole line
        self._complained = False

    @classmethod
    def open(cls, file: Path | None, what: str) -> Journal:
        """Lock the file, which is made if there is none. Where that cannot be, nothing is kept, and the log says why.

        Args:
            file: None: there is no place for it.
            what: is verified.

        Raises:
            Taken: by another process.
        """
        if file is None:
            log.warning("%s: the cache cannot be written, so this run starts anew if it is interrupted", what)
            return cls()
        try:
            return cls(_lock(file), file)
        except BlockingIOError:
            raise Taken(f"{what}: another `headrace verify` is at work on it, which has {file} locked") from None
        except OSError as error:
            log.warning("%s: this run starts anew if it is interrupted: %s: %s", what, file, error.strerror)
            return cls()

    @property
    def kept(self) -> bool:
        """Whether everything that was added outlives this process."""
        return self._fd is not None and not self._complained

    def begin(self, key: dict[str, Any], *, restart: bool = False) -> Iterator[tuple[int, Found]]:
        """The chunks that are judged already, one that stands there twice in its latest form last; to be read to the
        end before others are added.

        Args:
            key: everything that the verdicts depend on. A file with another one is started anew.
            restart: start anew in any case.
        """
        if self._fd is None:
            return
        head = msgspec.json.encode({"verify": 1} | key) + b"\n"
        try:
            with open(self._fd, "rb", closefd=False) as lines:
                before = lines.readline()
                if before == head and not restart:
                    self._end = len(head)
                    for line in lines:
                        if (judged := _whole(line)) is None:
                            break
                        self._end += len(line)
                        yield judged
                elif before and not restart:
                    log.info("%s is about other data or other pictures: started anew", self._file)
            os.ftruncate(self._fd, self._end)
        except OSError as error:
            self._complain(error)
        if not self._end:
            self._write(head)

    def add(self, chunk: int, found: Found) -> None:
        """A chunk that is judged. One that cannot be kept is logged, once, and will be judged again."""
        self._write(msgspec.json.encode((chunk, found)) + b"\n")

    def _write(self, line: bytes) -> None:
        if self._fd is None:
            return
        try:
            if os.write(self._fd, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._end += len(line)
        except OSError as error:
            self._complain(error)
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._end)  # nothing can be added behind half a line

    def _complain(self, error: OSError) -> None:
        if not self._complained:
            log.warning("not all is kept, should this run be interrupted: %s: %s", self._file, error.strerror)
        self._complained = True

    def forget(self) -> None:
        """The run is finished: the next one starts anew."""
        if self._fd is not None and self._file is not None:
            with contextlib.suppress(OSError):
                self._file.unlink()

    def close(self) -> None:
        """Unlock; what was added stays. May be called twice."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _whole(line: bytes) -> tuple[int, Found] | None:
    """None for one that was cut by a full disk, or by the end of the machine."""
    try:
        return _line.decode(line) if line.endswith(b"\n") else None
    except msgspec.DecodeError:
        return None


def _lock(file: Path) -> int:
    while True:
        fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_uid != os.geteuid():
                raise PermissionError(errno.EPERM, "it belongs to another user")
            # Its last owner may have removed the file between our open and our lock.
            if os.stat(file).st_ino == os.fstat(fd).st_ino:
                return fd
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
