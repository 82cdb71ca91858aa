"""HEIC, which Pillow reads by a package of its own: the extra `headrace[heif]`."""

from __future__ import annotations

import functools
import importlib.metadata
import io
from collections.abc import Callable

from PIL import ImageFile

EXTRA = "headrace[heif]"
_PACKAGE = "pillow-heif"


@functools.cache
def version() -> str | None:
    """Of the package, which brings its libraries along; None where it is not installed."""
    try:
        return importlib.metadata.version(_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None


def opened(data: bytes) -> ImageFile.ImageFile:
    """The picture, its header read and no pixel decoded. It will come out upright: rotation is a part of the format.

    Raises:
        Exception: of whatever kind, for damaged content.
    """
    # Only here: it loads some 25 MB of libraries.
    import pillow_heif

    pillow_heif.options.DECODE_THREADS = 1  # a worker is one of as many as there are cores
    factory: Callable[[io.BytesIO, bytes], ImageFile.ImageFile] = pillow_heif.HeifImageFile
    return factory(io.BytesIO(data), b"")
