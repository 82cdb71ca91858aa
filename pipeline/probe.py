"""What a file is, by its content alone: format, size and orientation, before any pixel is decoded."""

from __future__ import annotations

import io
import re
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

# Each registers its format; the formats beside them stay unloaded.
from PIL import (  # noqa: F401
    AvifImagePlugin,
    BmpImagePlugin,
    GifImagePlugin,
    IcoImagePlugin,
    Image,
    ImageFile,
    Jpeg2KImagePlugin,
    JpegImagePlugin,
    MpoImagePlugin,
    PngImagePlugin,
    PpmImagePlugin,
    PsdImagePlugin,
    QoiImagePlugin,
    TgaImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
)

from headrace.pipeline import heif, jpeg, png
from headrace.pipeline.formats import DECODED, HEIF, sniff

if TYPE_CHECKING:
    from headrace.pipeline.spec import Decode

Stage = Literal["read", "probe", "decode", "worker"]

#: Pixels; Pillow's resampling takes its window in 32-bit floating point, which is exact up to here.
MAX_LENGTH = 1 << 24

_ORIENTATION = 0x0112
#: The orientation that undoes another.
_INVERSE = {1: 1, 2: 2, 3: 3, 4: 4, 5: 5, 6: 8, 7: 7, 8: 6}

_SETTINGS = threading.Lock()

AvifImagePlugin.DEFAULT_MAX_THREADS = 1  # a worker is one of as many as there are cores


class BadPicture(Exception):
    """A verdict on content: the bytes are there, and they are no picture that can be shown.

    Attributes:
        stage: "read", "probe" or "decode"; "worker" for one convicted of killing those who render it.
        reason: one sentence with the real format or the limit; the file's name is the caller's to add.
    """

    def __init__(self, stage: Stage, reason: str) -> None:
        super().__init__(f"{stage}: {reason}")
        self.stage: Stage = stage
        self.reason = reason


@dataclass(slots=True)
class Picture:
    """An encoded picture that has been looked at.

    Attributes:
        data: the whole file.
        format: as Pillow names it, such as "JPEG" or "MPO".
        height: in pixels, after the orientation.
        width: likewise.
        orientation: EXIF's 1 to 8, what is still to be done to the image once it is loaded.
        image: opened, not loaded; None once it was taken, and of a picture that is `good` until then.
        reducible: whether it is a JPEG that may be decoded at a half, a quarter or an eighth of its size.
        good: whether it is a JPEG that was decoded as a whole and found good, now or before.
        whole: whether DALI was it who decoded it then, so that DALI may decode a part of it alone.
    """

    data: bytes
    format: str
    height: int
    width: int
    orientation: int
    image: ImageFile.ImageFile | None
    reducible: bool = False
    good: bool = False
    whole: bool = False
    taken: bool = False

    @property
    def stored(self) -> tuple[int, int]:
        """(width, height) before the orientation is applied."""
        return (self.width, self.height) if self.orientation < 5 else (self.height, self.width)

    def take(self) -> ImageFile.ImageFile:
        """The opened image, once. Decoding fills it, and the pixels of a whole chunk at full size are too many to keep:
        with whoever took it goes the memory.
        """
        if self.taken:
            raise ValueError("the picture was taken already: probe its bytes again")
        image, self.image, self.taken = self.image, None, True
        return _opened("JPEG", self.data) if image is None else image


def probe(data: bytes, decode: Decode) -> Picture:
    """Look at the header of an encoded picture.

    The name of the file plays no part. The orientation is EXIF's, or where there is none, that of XMP; a damaged one
    counts as 1, and so does every one where `decode.ignore_orientation` says so.

    Raises:
        BadPicture: (stage "probe") no picture, of a format that is not decoded, damaged, or over a limit.
    """
    kind, what = sniff(data)
    if kind is None:
        raise BadPicture("probe", _not_decoded(data, what))
    if kind == HEIF and heif.version() is None:
        raise BadPicture(
            "probe", f"{what}, which is decoded where the extra {heif.EXTRA} is installed, and here it is not"
        )
    with pillow_quiet(decode.max_pixels):
        try:
            image = _opened(kind, data)
        except Exception as error:
            raise BadPicture("probe", _broken(what, data, error, decode.max_pixels)) from error
        name = image.format or kind
        width, height = image.size
        _check_size(name, width, height, decode.max_pixels)
        orientation = _to_do(kind, image, data, ignore=decode.ignore_orientation)
    if orientation >= 5:
        width, height = height, width
    reducible = decode.dct_scaling and kind == "JPEG" and jpeg.reducible(data)
    return Picture(data, name, height, width, orientation, image, reducible)


def recall(data: bytes, orientation: int, decode: Decode) -> Picture:
    """A JPEG that `probe` has looked at before, and of which a backend has then set `good`.

    Args:
        orientation: of the picture that `probe` gave.
    """
    frame = jpeg.header(data).frame
    if frame is None:
        raise ValueError("this is no JPEG, let alone one that was found good")
    height, width = (frame.height, frame.width) if orientation < 5 else (frame.width, frame.height)
    reducible = decode.dct_scaling and jpeg.reducible(data)
    return Picture(data, "JPEG", height, width, orientation, None, reducible, good=True)


def _opened(kind: str, data: bytes) -> ImageFile.ImageFile:
    if kind == HEIF:
        return heif.opened(data)
    factory = Image.OPEN[kind][0]
    if kind == "PNG":
        data = png.until_end_of_pixels(data)  # what follows Pillow would read too, and refuse damaged or long texts
    try:
        return factory(io.BytesIO(data), b"")
    except Exception:
        # Profiles and texts are ignored and damaged EXIF too, so none must cost the picture.
        if kind == "PNG":
            return factory(io.BytesIO(png.bare(data)), b"")
        if kind == "AVIF" and b"Exif" in data:
            return factory(io.BytesIO(_without_exif(data)), b"")
        raise


def _without_exif(avif: bytes) -> bytes:
    # An item of a type that nobody knows is passed over. Types stand before the data.
    pixels = avif.find(b"mdat")
    return avif[:pixels].replace(b"Exif", b"skip") + avif[pixels:]


@contextmanager
def pillow_quiet(max_pixels: int) -> Iterator[None]:
    """Pillow without warnings, and its own limit on pixels out of the way of ours.

    A verdict must not depend on somebody's warning filters, nor on what was warned of before. Both settings are the
    process's, so of several threads one at a time is in here.
    """
    with _SETTINGS, warnings.catch_warnings():
        limit = Image.MAX_IMAGE_PIXELS
        warnings.simplefilter("ignore")
        Image.MAX_IMAGE_PIXELS = max_pixels / 2  # type: ignore[assignment]  # it warns from there on, refuses at twice
        try:
            yield
        finally:
            Image.MAX_IMAGE_PIXELS = limit


def _check_size(name: str, width: int, height: int, max_pixels: int) -> None:
    if width < 1 or height < 1:
        raise BadPicture("probe", f"{name} of {width}x{height} pixels (width x height): there is nothing to show")
    if width * height > max_pixels:
        raise BadPicture(
            "probe",
            f"{name} of {width}x{height} pixels (width x height) has {width * height}, "
            f"over the limit of {max_pixels} (decode: max_pixels)",
        )
    if max(width, height) > MAX_LENGTH:
        raise BadPicture("probe", f"{name} of {width}x{height} pixels: a side is over the limit of {MAX_LENGTH}")


def _to_do(kind: str, image: Image.Image, data: bytes, *, ignore: bool) -> int:
    """The orientation that is still to be applied to the image once it is loaded."""
    if kind == HEIF:
        return 1  # it comes upright
    if kind == "TIFF":  # so does this, and is turned back
        return _INVERSE[_orientation(image, data)] if ignore else 1
    return 1 if ignore and kind != "AVIF" else _orientation(image, data)  # whose rotation is a part of the format


def _orientation(image: Image.Image, data: bytes) -> int:
    try:
        if image.format == "PNG" and "exif" not in image.info and (exif := png.exif_after_pixels(data)):
            # Pillow would decode all pixels to get there.
            image.info["exif"] = exif
        value = Image.Image.getexif(image).get(_ORIENTATION, 1)
        return value if isinstance(value, int) and 1 <= value <= 8 else 1
    except Exception:  # damaged metadata says nothing about the picture
        return 1


def _not_decoded(data: bytes, what: str) -> str:
    if not data:
        return "the file is empty"
    return f"not a picture that is decoded, but {what}. Decoded are {', '.join(DECODED)}"


def _broken(kind: str, data: bytes, error: Exception, max_pixels: int) -> str:
    if isinstance(error, Image.DecompressionBombError):
        pixels = "".join(re.findall(r"\d+(?= pixels\) exceeds)", str(error)))
        return f"{kind} of {pixels} pixels, over the limit of {max_pixels} (decode: max_pixels)"
    if kind == "JPEG" and (why := jpeg.unsupported(data)):
        return why
    why = str(error) or type(error).__name__
    return f"{kind} with a damaged or unsupported header" + ("" if "not identified" in why else f": {why}")
