"""Tar files for tests."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path

#: When everything in them, and the tars themselves, was last modified: long ago, so that an index trusts it.
OLD = 1_600_000_000


def packed(members: Mapping[str, bytes] | Iterable[tuple[str, bytes]], form: int = tarfile.PAX_FORMAT) -> bytes:
    """A tar with these members, as Python's tarfile writes it."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form, errors="surrogateescape") as out:
        for name, data in members.items() if isinstance(members, Mapping) else members:
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(data), OLD
            out.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def write(
    path: Path, members: Mapping[str, bytes] | Iterable[tuple[str, bytes]], form: int = tarfile.PAX_FORMAT
) -> Path:
    """The same as a file that was modified long ago."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(packed(members, form))
    return age(path)


def age(path: Path) -> Path:
    os.utime(path, (OLD, OLD))
    return path
