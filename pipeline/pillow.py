"""The backend on Pillow: decodes on one CPU core.

What Pillow leaves to its caller is settled here: 16 bits, transparency and inverted inks; files that end early and
decode without a word; windows that leave the picture. A picture always comes out as RGB, by these rules: the first
frame; grey copied to three channels; 16 bits scaled by 1/257; palettes looked up; transparency dropped, so that the
stored colours stand; CMYK without a profile, `R = (255 - C)(255 - K) / 255`.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import PIL
from numpy.typing import NDArray
from PIL import Image, ImageChops, features
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile

from headrace.pipeline import heif, jpeg, png
from headrace.pipeline.canvas import levels
from headrace.pipeline.paint import paint
from headrace.pipeline.probe import BadPicture, Picture, pillow_quiet
from headrace.pipeline.transforms import Params
from headrace.pipeline.view import View
from headrace.stages import Lap, unmeasured

_FILTERS = {
    "bilinear": (Image.Resampling.BILINEAR, 1),
    "bicubic": (Image.Resampling.BICUBIC, 2),
    "lanczos": (Image.Resampling.LANCZOS, 3),
}  # and how far each reaches, in pixels of the coarser side

#: Pixels between the two passes of a resample; beyond, the cheaper order of passes is taken.
_MAX_BETWEEN = 1 << 24

#: (transpose, then mirror left and right, then top and bottom).
_TRANSPOSE: dict[tuple[bool, bool, bool], Image.Transpose | None] = {
    (False, False, False): None,
    (False, True, False): Image.Transpose.FLIP_LEFT_RIGHT,
    (False, True, True): Image.Transpose.ROTATE_180,
    (False, False, True): Image.Transpose.FLIP_TOP_BOTTOM,
    (True, False, False): Image.Transpose.TRANSPOSE,
    (True, True, False): Image.Transpose.ROTATE_270,
    (True, True, True): Image.Transpose.TRANSVERSE,
    (True, False, True): Image.Transpose.ROTATE_90,
}

#: Tags of TIFF, and values of theirs.
_BITS, _COMPRESSION, _PHOTOMETRIC, _SAMPLES, _PLANAR = 258, 259, 262, 277, 284
_EXTRA_SAMPLES, _SAMPLE_FORMAT = 338, 339
_JPEG_IN_TIFF, _WHITE_IS_ZERO, _PREMULTIPLIED, _SIGNED = 7, 0, 1, 2

#: Levels between the grey of missing data and the last pixel of a reduced JPEG, from which on it is surely whole.
_NEARLY_GREY = 24

Box = tuple[float, float, float, float]


class PillowBackend:
    """See the module."""

    def __init__(self) -> None:
        self.render_id = f"pillow/{PIL.__version__}/libjpeg-turbo-{features.version('libjpeg_turbo')}"
        if (plugin := heif.version()) is not None:
            self.render_id += f"/pillow-heif-{plugin}"

    def render(
        self,
        pictures: Sequence[Picture],
        params: Params,
        out: Sequence[NDArray[np.uint8]],
        begin: Callable[[Sequence[int]], None],
        lap: Lap = unmeasured,
    ) -> list[BadPicture | None]:
        verdicts: list[BadPicture | None] = []
        for i, (picture, target) in enumerate(zip(pictures, out, strict=True)):
            begin([i])
            view = View.of(picture, params, i)
            reduction = _reduction(view) if picture.reducible else 1
            try:
                image = decode(picture, reduction)
            except BadPicture as bad:
                target[...] = 0
                verdicts.append(bad.with_traceback(None))
                lap("decode")
            else:
                lap("decode", nbytes=3 * image.width * image.height)
                image = show(image, view, params, reduction)
                lap("resize", nbytes=target.nbytes)
                if params.colour:
                    image = paint(image, params.colour, i)
                    lap("colour", nbytes=target.nbytes)
                target[...] = levels(image)
                lap("write", nbytes=target.nbytes)
                verdicts.append(None)
        return verdicts

    def close(self) -> None:
        pass


def decode(picture: Picture, reduction: int = 1) -> Image.Image:
    """All pixels as stored (orientation not applied), of mode L or RGB. Takes the picture's image.

    Args:
        reduction: 1, or of a reducible picture 2, 4 or 8: pixel (x, y) of the result is then the part of the picture
            from (x, y) * reduction to (x + 1, y + 1) * reduction, and the last ones may extend beyond it.

    Raises:
        BadPicture: (stage "decode") the data are damaged or incomplete; for every reduction the same.
    """
    try:
        return _decode(picture, reduction)
    # Whatever a decoder raises for some content is a verdict on that content, and content is all there is here.
    except Exception as error:
        reason = _reason(picture, error)
    # Raised out here, because an exception keeps the frames it came through, and they the pixels.
    raise BadPicture("decode", reason)


def _decode(picture: Picture, reduction: int) -> Image.Image:
    with pillow_quiet(picture.height * picture.width):
        image = picture.take()
        size = image.size
        if reduction > 1:
            # Pillow takes the largest reduction that leaves as many pixels as are asked for.
            image.draft(None, (size[0] // reduction, size[1] // reduction))
            size = -(-size[0] // reduction), -(-size[1] // reduction)
        if isinstance(image, JpegImageFile):
            _feed_at_once(image, picture.data)
        tiles = [*image.tile]  # loading forgets them
        image.load()
        if image.size != size:
            raise ValueError(f"the pixels are {image.size[0]}x{image.size[1]}, the header said {size[0]}x{size[1]}")
        if missing := _missing(image, picture, tiles, reduction):
            raise ValueError(missing)
        return _to_grey_or_rgb(image, picture)


def _feed_at_once(image: JpegImageFile, data: bytes) -> JpegImageFile:
    # Arithmetic coding cannot be interrupted, and Pillow would bring its data in pieces.
    image.decodermaxblock = max(image.decodermaxblock, len(data))
    return image


def _reopened(data: bytes) -> JpegImageFile:
    return _feed_at_once(JpegImageFile(io.BytesIO(data), b""), data)


def _reason(picture: Picture, error: Exception) -> str:
    text = str(error) or type(error).__name__
    return text if text.startswith(picture.format) else f"{picture.format}: {text}"


def _missing(image: Image.Image, picture: Picture, tiles: Sequence[Any], reduction: int) -> str | None:
    """What is missing of a picture that Pillow took for whole. Each check begins with a sign that costs nothing."""
    if isinstance(image, JpegImageFile):
        if picture.good:
            return None
        missing = _missing_of_jpeg(image, picture, reduction)
        frame = jpeg.header(picture.data).frame
        # What is good is not opened again, so both must have found the same header.
        picture.good = missing is None and frame is not None and (frame.width, frame.height) == picture.stored
        return missing
    if isinstance(image, TiffImageFile):
        return _missing_of_tiff(image, picture, tiles)
    if isinstance(image, PngImageFile):
        if png.damaged_pixels(picture.data):
            return "PNG whose data do not match their checksum"
        # Rows that never came are zero; interlaced ones are anywhere.
        suspect = image.info.get("interlace") or not image.crop((0, image.height - 1, *image.size)).getbbox()
        if suspect and png.missing_pixels(picture.data):
            return "PNG whose data end before the picture does"
    return None


def _missing_of_jpeg(image: Image.Image, picture: Picture, reduction: int) -> str | None:
    if why := jpeg.missing_parts(picture.data):
        return why
    corner = image.crop((image.width - 1, image.height - 1, *image.size)).tobytes()
    if reduction > 1:
        if any(abs(level - 128) > _NEARLY_GREY for level in corner):
            return None
        # The verdict is that on the whole picture, whose last pixel is one of several that make this one.
        return _missing_of_jpeg(_reopened(picture.data), picture, 1)
    if jpeg.may_end_early(picture.data, corner):
        if ImageChops.difference(image, _reopened(jpeg.with_more_data(picture.data))).getbbox():
            return "JPEG whose data end before the picture does"
    return None


def _missing_of_tiff(image: TiffImageFile, picture: Picture, tiles: Sequence[Any]) -> str | None:
    tags = image.tag_v2
    if tags.get(_COMPRESSION) == _JPEG_IN_TIFF:
        # libtiff fills what such a strip or tile lacks with grey, and warns at most.
        places, counts = (tags.get(strips, tags.get(tiled, ())) for strips, tiled in ((273, 324), (279, 325)))
        if any(picture.data.find(b"\xff\xd9", at, at + n) < 0 for at, n in zip(places, counts, strict=False)):
            return "TIFF whose JPEG data end before the picture does"
    # Strips or tiles that are not there at all: Pillow lists them, of planes that it reads by itself each.
    planes = tags.get(_SAMPLES, 1) if tags.get(_PLANAR) == 2 and tiles and tiles[0].codec_name == "raw" else 1
    areas = {(tile.extents, tile.args if planes > 1 else None) for tile in tiles}
    covered = sum((x1 - x0) * (y1 - y0) for (x0, y0, x1, y1), _ in areas)
    if 0 < covered < image.width * image.height * planes:
        return "TIFF with fewer strips or tiles than the picture needs"
    return None


def _to_grey_or_rgb(image: Image.Image, picture: Picture) -> Image.Image:
    # Pillow would try to carry a transparent colour over, and warn where it cannot.
    image.info.pop("transparency", None)
    mode = image.mode
    tags = image.tag_v2 if isinstance(image, TiffImageFile) else {}
    if _SIGNED in tags.get(_SAMPLE_FORMAT, ()):
        raise ValueError("signed samples, for which nothing says what is black and what is white")
    if mode in ("L", "RGB"):
        return image
    if mode == "LA" and tags.get(_EXTRA_SAMPLES) == (_PREMULTIPLIED,):
        return Image.frombytes("La", image.size, image.tobytes()).convert("LA").convert("L")
    if mode in ("1", "LA"):
        return image.convert("L")
    if mode == "La":
        return image.convert("LA").convert("L")
    if mode == "RGBa":
        return image.convert("RGBA").convert("RGB")
    if mode == "CMYK" and picture.format in ("JPEG", "MPO") and "adobe" not in image.info:
        # Pillow takes every CMYK JPEG for one of Adobe's, whose inks are inverted.
        return ImageChops.invert(image).convert("RGB")
    if mode.startswith("I;16"):
        scaled = _scaled(np.asarray(image), (1 << tags.get(_BITS, (16,))[0]) - 1)
        return ImageChops.invert(scaled) if tags.get(_PHOTOMETRIC) == _WHITE_IS_ZERO else scaled
    if mode == "I" and picture.format == "PPM":
        return _scaled(np.asarray(image), 65535)
    if mode in ("I", "F"):
        kind = "32-bit" if mode == "I" else "floating-point"
        raise ValueError(f"{kind} samples, for which nothing says what is black and what is white")
    return image.convert("RGB")


def _scaled(levels: NDArray[np.generic], top: int) -> Image.Image:
    wide = np.clip(levels.astype(np.uint32), 0, top)
    return Image.fromarray(((wide * 255 + top // 2) // top).astype(np.uint8))


def _reduction(view: View) -> int:
    """By how much the picture may be reduced before, and still is reduced after that: 1, 2, 4 or 8."""
    x0, y0, x1, y1 = view.box
    steps = (x1 - x0) / view.size[0], (y1 - y0) / view.size[1]
    return next(r for r in (8, 4, 2, 1) if r == 1 or r <= min(*steps, *view.whole))


def show(
    image: Image.Image, view: View, params: Params, reduction: int = 1, offset: tuple[int, int] = (0, 0)
) -> Image.Image:
    """What is to be seen, as an RGB image, upright.

    Args:
        image: the picture decoded with this reduction, of mode L or RGB; or a part of it that reaches as far as the
            filter does.
        offset: where the part begins, (x, y).
    """
    small = _window(image, view, params, reduction, offset)
    turn = _TRANSPOSE[view.transpose, view.mirror_x, view.mirror_y]
    if turn is not None:
        small = small.transpose(turn)
    return small if small.mode == "RGB" else small.convert("RGB")


def _window(image: Image.Image, view: View, params: Params, reduction: int, offset: tuple[int, int]) -> Image.Image:
    """The box resampled, with the fill where it leaves the picture.

    The filter sees the picture beyond the box, and at the picture's own border only what there is.
    """
    x, y = view.across, view.down
    if x.first >= x.last or y.first >= y.last:
        return Image.new("RGB", view.size, params.fill)
    box = (
        x.start / reduction - offset[0],
        y.start / reduction - offset[1],
        x.end / reduction - offset[0],
        y.end / reduction - offset[1],
    )
    part = _resample(image, box, x.last - x.first, y.last - y.first, params.interpolation)
    if part.size == view.size:
        return part
    framed = Image.new("RGB", view.size, params.fill)
    framed.paste(part, (x.first, y.first))
    return framed


def _resample(image: Image.Image, box: Box, width: int, height: int, interpolation: str) -> Image.Image:
    resample, reach = _FILTERS[interpolation]
    x0, y0, x1, y1 = box
    if width * (y1 - y0) <= max(_MAX_BETWEEN, height * (x1 - x0)):
        return image.resize((width, height), resample, box)
    # Pillow before 13 goes across first, which makes a giant of a very tall picture: go down first.
    margin = math.ceil(reach * max((x1 - x0) / width, 1.0)) + 1
    first, last = max(0, math.floor(x0) - margin), min(image.width, math.ceil(x1) + margin)
    down = image.resize((last - first, height), resample, (first, y0, last, y1))
    return down.resize((width, height), resample, (x0 - first, 0, x1 - first, height))
