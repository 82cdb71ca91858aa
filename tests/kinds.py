"""A file of every kind that people have, made on the spot, and what must become of it.

All but a few hold one picture: `pictures.quadrants()`, 96 wide and 64 high. Magenta shows that a thumbnail, a later
frame or a second picture was taken for it.
"""

from __future__ import annotations

import base64
import gzip
import io
import struct
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from pictures import BLUE, GREEN, RED, YELLOW, chunk, encode, exif, planar_jpeg, quadrants, stored, with_chunk
from PIL import Image, ImageChops

HEIGHT, WIDTH = 64, 96
Colour = tuple[int, int, int]


@dataclass(frozen=True)
class Kind:
    """
    Attributes:
        data: the file.
        colours: of the four quadrants, within `tolerance` levels; None: it must be rejected.
        reason: what the reject says.
        size: height and width, upright.
    """

    data: bytes
    colours: tuple[Colour, ...] | None = (RED, GREEN, BLUE, YELLOW)
    tolerance: int = 8
    reason: str = ""
    size: tuple[int, int] = (HEIGHT, WIDTH)


def make() -> dict[str, Kind]:
    """By path, KIND/NAME."""
    return (
        _jpeg()
        | _inks()
        | _upright()
        | _png()
        | _others()
        | _misnamed()
        | _damaged()
        | _no_picture()
        | _sizes()
        | _heic()
    )


PICTURE = quadrants()
MAGENTA = Image.new("RGB", (WIDTH // 2, HEIGHT // 2), (255, 0, 255))
GREYS = tuple((level,) * 3 for level in (94, 125, 87, 199))  # luma of the four colours


#: Mid-grey, as what is missing of a JPEG; nothing here writes arithmetic coding.
ARITHMETIC = base64.b64decode(
    "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDAAMCAgMCAgMDAwMEAwMEBQgFBQQEBQoHBwYIDAoMDAsKCwsNDhIQDQ4RDgsLEBYQERMUFRUVDA8XGBYU"
    "GBIUFRT/2wBDAQMEBAUEBQkFBQkUDQsNFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBT/yQARCAAQ"
    "ACADASIAAhEBAxEB/8wACgAQEAUBEBEF/9oADAMBAAIRAxEAPwAf/9k="
)


def jpeg(image: Image.Image = PICTURE, **options: Any) -> bytes:
    return encode(image, "JPEG", **{"quality": 95, "subsampling": 0} | options)


def bad(data: bytes, reason: str) -> Kind:
    return Kind(data, None, reason=reason)


def _segment(marker: int, content: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(content) + 2) + content


def _inserted(data: bytes, *segments: bytes) -> bytes:
    """A JPEG with more segments behind its first marker."""
    return data[:2] + b"".join(segments) + data[2:]


def _jpeg() -> dict[str, Kind]:
    jfif_end = 2 + 2 + int.from_bytes(jpeg()[4:6], "big")
    return {
        "jpeg/baseline.jpg": Kind(jpeg()),
        "jpeg/progressive.jpg": Kind(jpeg(progressive=True)),
        "jpeg/grey.jpg": Kind(jpeg(PICTURE.convert("L")), GREYS),
        "jpeg/grey-progressive.jpg": Kind(jpeg(PICTURE.convert("L"), progressive=True), GREYS),
        "jpeg/restarts.jpg": Kind(jpeg(restart_marker_rows=1)),
        "jpeg/4-2-2.jpg": Kind(jpeg(subsampling=1)),
        "jpeg/4-2-0.jpg": Kind(jpeg(subsampling=2)),
        "jpeg/planar.jpg": Kind(b"".join(planar_jpeg(PICTURE, quality=95))),
        "jpeg/arithmetic.jpg": Kind(ARITHMETIC, ((128,) * 3,) * 4, size=(16, 32)),
        "jpeg/arithmetic-behind-65536-bytes.jpg": Kind(
            _inserted(
                ARITHMETIC, *[_segment(0xE5, bytes(n - 4)) for n in (40000, 65536 - 40000 - len(ARITHMETIC) + 3)]
            ),
            ((128,) * 3,) * 4,
            size=(16, 32),
        ),
        "jpeg/long-comment.jpg": Kind(jpeg(comment=b"x" * 60000)),
        "jpeg/300-kB-before-the-picture.jpg": Kind(_inserted(jpeg(), *[_segment(0xE5, bytes(60000))] * 5)),
        "jpeg/no-jfif.jpg": Kind(jpeg()[:2] + jpeg()[jfif_end:]),
        "jpeg/fill-bytes.jpg": Kind(jpeg()[:-2] + b"\xff\xff\xff\xff\xd9"),
        "jpeg/newline-behind.jpg": Kind(jpeg() + b"\n"),
        "jpeg/second-behind.jpg": Kind(jpeg() + jpeg(MAGENTA)),
        "jpeg/thumbnail-before.jpg": Kind(jpeg(exif=b"Exif\0\0" + jpeg(MAGENTA))),
        "jpeg/damaged-exif.jpg": Kind(_inserted(jpeg(), _segment(0xE1, b"Exif\0\0MM\0*\xff\xff\xff\xff"))),
        "jpeg/empty-exif.jpg": Kind(_inserted(jpeg(), _segment(0xE1, b"Exif\0\0"))),
        "jpeg/damaged-profile.jpg": Kind(jpeg(icc_profile=b"no profile")),
        "jpeg/two-pictures.mpo": Kind(encode(PICTURE, "MPO", quality=95, save_all=True, append_images=[MAGENTA])),
    }


def _inks() -> dict[str, Kind]:
    inks = PICTURE.convert("CMYK")
    marker = b"\xff\xee\x00\x0eAdobe\x00\x64\x00\x00\x00\x00"
    # YCCK is YCbCr of three inks, and the fourth inverted, as all four are in Adobe's files. Pillow inverts what it
    # stores.
    ycc = Image.merge("RGB", inks.split()[:3]).convert("YCbCr").split()
    ycck = Image.merge("CMYK", (*(ImageChops.invert(band) for band in ycc), inks.getchannel("K")))

    def adobe(image: Image.Image, transform: int) -> bytes:
        data = encode(image, "JPEG", quality=95)
        at = data.find(marker)
        if at < 0:
            return _inserted(data, marker + bytes([transform]))
        return data[: at + len(marker)] + bytes([transform]) + data[at + len(marker) + 1 :]

    plain = encode(ImageChops.invert(inks), "JPEG", quality=95)
    return {
        "inks/cmyk-adobe.jpg": Kind(adobe(inks, 0), tolerance=12),
        "inks/ycck-adobe.jpg": Kind(adobe(ycck, 2), tolerance=12),
        "inks/cmyk-no-marker.jpg": Kind(plain.replace(marker + b"\x00", b""), tolerance=12),
        "inks/cmyk.tif": Kind(encode(inks, "TIFF")),
    }


def _upright() -> dict[str, Kind]:
    kinds = {
        f"orientation/{n}.jpg": Kind(jpeg(stored(PICTURE, n), **({"exif": exif(n)} if n else {}))) for n in range(1, 9)
    }
    turned = stored(PICTURE, 6)
    lossless = {"WEBP": {"lossless": True}}
    for format, name in (("PNG", "6.png"), ("WEBP", "6.webp"), ("TIFF", "6.tif")):
        kinds[f"orientation/{name}"] = Kind(encode(turned, format, exif=exif(6), **lossless.get(format, {})))
    for n in (0, 9, 65535):
        kinds[f"orientation/undefined-{n}.jpg"] = Kind(jpeg(exif=exif(n)))
    return kinds


def _raw_png(
    depth: int, colour: int, rows: list[bytes], interlaced: bool = False, passes: bytes | None = None
) -> bytes:
    header = struct.pack(">IIBBBBB", WIDTH, HEIGHT, depth, colour, 0, 0, interlaced)
    content = b"".join(b"\0" + row for row in rows) if passes is None else passes
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(content)) + chunk(b"IEND", b"")


def _adam7(pixels: np.ndarray[Any, Any]) -> bytes:
    """The rows of the seven passes of an interlaced PNG."""
    passes = ((0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1))
    return b"".join(b"\0" + row.tobytes() for y, x, dy, dx in passes for row in pixels[y::dy, x::dx])


def _png() -> dict[str, Kind]:
    pixels = np.asarray(PICTURE)
    deep = [row.tobytes() for row in (pixels.astype(">u2") * 257)]
    grey = np.asarray(PICTURE.convert("L"))
    opaque = np.full((HEIGHT, WIDTH, 1), 255, np.uint8)
    hidden = opaque.copy()
    hidden[: HEIGHT // 2, : WIDTH // 2] = 0
    rgba = Image.fromarray(np.concatenate([pixels, hidden], axis=2))
    palette = PICTURE.quantize(4)
    black, white = (0, 0, 0), (255, 255, 255)
    bilevel = PICTURE.convert("L").point(lambda level: 255 * (level > 110), "1")
    plain = encode(PICTURE)
    profile = b"x\0\0" + zlib.compress(b"no profile")
    animated = encode(PICTURE, save_all=True, append_images=[MAGENTA.resize(PICTURE.size)])
    return {
        "png/rgb.png": Kind(plain, tolerance=0),
        "png/grey.png": Kind(encode(PICTURE.convert("L")), GREYS, 1),
        "png/grey-alpha.png": Kind(encode(PICTURE.convert("LA")), GREYS, 1),
        "png/one-bit.png": Kind(encode(bilevel), (black, white, black, white), 0),
        "png/grey-16.png": Kind(encode(Image.fromarray(grey.astype(np.uint16) * 257)), GREYS, 1),
        "png/rgb-16.png": Kind(_raw_png(16, 2, deep), tolerance=1),
        "png/palette.png": Kind(encode(palette), tolerance=0),
        "png/palette-transparent.png": Kind(encode(palette, transparency=bytes([0, 128, 255, 7])), tolerance=0),
        "png/hidden-under-alpha.png": Kind(encode(rgba), tolerance=0),
        "png/transparent-colour.png": Kind(encode(PICTURE, transparency=RED), tolerance=0),
        "png/interlaced.png": Kind(_raw_png(8, 2, [], True, _adam7(pixels)), tolerance=0),
        "png/gamma.png": Kind(with_chunk(plain, b"gAMA", struct.pack(">I", 100000), b"IDAT"), tolerance=0),
        "png/damaged-profile.png": Kind(with_chunk(plain, b"iCCP", profile, b"IDAT"), tolerance=0),
        "png/profile-of-another-method.png": Kind(with_chunk(plain, b"iCCP", b"x\0\1no", b"IDAT"), tolerance=0),
        "png/animated.png": Kind(animated, tolerance=0),
    }


def _others() -> dict[str, Kind]:
    later = [MAGENTA.resize(PICTURE.size)]
    grey16 = Image.fromarray(np.asarray(PICTURE.convert("L")).astype(np.uint16) * 257)
    animated = {"save_all": True, "append_images": later}
    return {
        "other/still.gif": Kind(encode(PICTURE, "GIF")),
        "other/animated.gif": Kind(encode(PICTURE, "GIF", **animated)),
        "other/interlaced.gif": Kind(encode(PICTURE, "GIF", interlace=1)),
        "other/lossy.webp": Kind(encode(PICTURE, "WEBP", quality=95), tolerance=12),
        "other/lossless.webp": Kind(encode(PICTURE, "WEBP", lossless=True), tolerance=0),
        "other/animated.webp": Kind(encode(PICTURE, "WEBP", lossless=True, **animated), tolerance=1),
        "other/lossy.avif": Kind(encode(PICTURE, "AVIF", quality=90), tolerance=12),
        "other/lossless.jp2": Kind(encode(PICTURE, "JPEG2000"), tolerance=1),
        "other/grey-16.jp2": Kind(encode(grey16, "JPEG2000"), GREYS, 1),
        "other/rgb.bmp": Kind(encode(PICTURE, "BMP"), tolerance=0),
        "other/palette.bmp": Kind(encode(PICTURE.quantize(4), "BMP"), tolerance=0),
        "other/rgb.dib": Kind(encode(PICTURE, "DIB"), tolerance=0),
        "other/rgb.tif": Kind(encode(PICTURE, "TIFF"), tolerance=0),
        "other/grey-16.tif": Kind(encode(grey16, "TIFF"), GREYS, 1),
        "other/pages.tiff": Kind(encode(PICTURE, "TIFF", **animated), tolerance=0),
        "other/lab.tif": Kind(_lab_tiff(), tolerance=8),
        "other/rgb.ppm": Kind(encode(PICTURE, "PPM"), tolerance=0),
        "other/grey-16.pgm": Kind(encode(grey16, "PPM"), GREYS, 1),
        "other/rgb.tga": Kind(encode(PICTURE, "TGA"), tolerance=0),
        "other/rgb.qoi": Kind(encode(PICTURE, "QOI"), tolerance=0),
        "other/rgb.ico": Kind(encode(PICTURE, "ICO", sizes=[(96, 64)]), tolerance=0),
    }


def _lab_tiff() -> bytes:
    from PIL import ImageCms

    profiles = ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB")
    lab = ImageCms.profileToProfile(PICTURE, *profiles, outputMode="LAB")
    assert lab is not None
    return encode(lab, "TIFF")


def _misnamed() -> dict[str, Kind]:
    return {
        "misnamed/jpeg.png": Kind(jpeg()),
        "misnamed/png.jpg": Kind(encode(PICTURE), tolerance=0),
        "misnamed/gif.jpeg": Kind(encode(PICTURE, "GIF")),
        "misnamed/webp.JPG": Kind(encode(PICTURE, "WEBP", lossless=True), tolerance=0),
        "misnamed/avif.jpe": Kind(encode(PICTURE, "AVIF", quality=90), tolerance=12),
        "misnamed/jpeg.jfif": Kind(jpeg()),
    }


def _damaged() -> dict[str, Kind]:
    whole, png, progressive = jpeg(), encode(PICTURE), jpeg(progressive=True)
    scan = whole.find(b"\xff\xda")
    tables = whole.find(b"\xff\xc4")
    rows = zlib.decompress(png[png.find(b"IDAT") + 4 : png.find(b"IEND") - 8])
    per_row = len(rows) // HEIGHT
    few_rows = png[: png.find(b"IDAT") - 4] + chunk(b"IDAT", zlib.compress(rows[: 10 * per_row])) + chunk(b"IEND", b"")
    no_rows = png[: png.find(b"IDAT") - 4] + chunk(b"IEND", b"")
    header = png.find(b"IHDR") - 4
    kinds = {
        f"damaged/cut-at-{percent}.jpg": bad(whole[: len(whole) * percent // 100], "JPEG") for percent in (25, 50, 90)
    }
    return kinds | {
        "damaged/cut-late.jpg": bad(whole[:-40], "JPEG"),
        "damaged/no-end-marker.jpg": bad(whole[:-2], "JPEG"),
        "damaged/cut-before-the-scan.jpg": bad(whole[:scan], "JPEG"),
        "damaged/cut-in-a-table.jpg": bad(whole[: tables + 20], "JPEG"),
        "damaged/cut-and-closed.jpg": bad(
            whole[: scan + (len(whole) - scan) // 2] + b"\xff\xd9", "JPEG whose data end"
        ),
        "damaged/zeros-for-the-rest.jpg": bad(whole[: scan + 40].ljust(len(whole), b"\0"), "JPEG"),
        "damaged/progressive-cut.jpg": bad(progressive[: len(progressive) * 2 // 5], "JPEG"),
        "damaged/start-only.jpg": bad(b"\xff\xd8", "not a picture"),
        "damaged/thumbnail-whole-picture-cut.jpg": bad(jpeg(exif=b"Exif\0\0" + jpeg(MAGENTA))[:-100], "JPEG"),
        "damaged/impossible-table.jpg": bad(whole[: tables + 5] + b"\xff" * 16 + whole[tables + 21 :], "JPEG"),
        "damaged/restart-segment-missing.jpg": bad(_without_a_segment(jpeg(restart_marker_rows=1)), "restart markers"),
        "damaged/planar-cut-and-closed.jpg": bad(
            b"".join(planar_jpeg(PICTURE, quality=95))[:-40] + b"\xff\xd9", "JPEG whose data end"
        ),
        "damaged/planar-without-colour.jpg": bad(
            b"".join(planar_jpeg(PICTURE, quality=95)[:2]) + b"\xff\xd9", "JPEG whose last scans are missing"
        ),
        "damaged/claims-more-pixels.jpg": bad(
            _claiming(whole, 400, 600), "JPEG whose data end before the picture does"
        ),
        "damaged/12-bits.jpg": bad(_twelve_bits(whole), "12-bit"),
        "damaged/cut.png": bad(png[: len(png) // 2], "PNG"),
        "damaged/few-rows.png": bad(few_rows, "PNG whose data end before the picture does"),
        "damaged/no-rows.png": bad(no_rows, "PNG"),
        "damaged/impossible-colour-type.png": bad(_with_header(png, header, 25, 1), "PNG"),
        "damaged/impossible-depth.png": bad(_with_header(png, header, 24, 0), "PNG"),
        "damaged/line-ends-converted.png": bad(png.replace(b"\r\n", b"\n"), "converted as if they were text"),
        "damaged/cut.gif": bad(encode(PICTURE, "GIF")[:-40], "GIF"),
        "damaged/cut.webp": bad(encode(PICTURE, "WEBP")[:-40], "WEBP"),
        "damaged/cut.avif": bad(encode(PICTURE, "AVIF")[:-40], "AVIF"),
        "damaged/cut.jp2": bad(encode(PICTURE, "JPEG2000")[:-40], "JPEG2000"),
        "damaged/cut.bmp": bad(encode(PICTURE, "BMP")[:-40], "BMP"),
        "damaged/cut.tif": bad(encode(PICTURE, "TIFF")[:-400], "TIFF"),
        "damaged/float.tif": bad(encode(PICTURE.convert("L").convert("F"), "TIFF"), "nothing says what is black"),
        "damaged/no-width.gif": bad(encode(PICTURE, "GIF").replace(struct.pack("<HH", WIDTH, HEIGHT), bytes(4)), "GIF"),
        "damaged/bomb.png": bad(_claiming_png(60000), "over the limit of 178956970"),
        "damaged/bomb.jpg": bad(_claiming(whole, 65500, 65500), "over the limit of 178956970"),
        "damaged/bomb.gif": bad(b"GIF89a\xff\xff\xff\xff" + encode(PICTURE, "GIF")[10:], "GIF"),
    }


def _without_a_segment(data: bytes) -> bytes:
    first, second = data.find(b"\xff\xd1"), data.find(b"\xff\xd2")
    assert 0 < first < second
    return data[:first] + data[second:]


def _claiming(data: bytes, height: int, width: int) -> bytes:
    at = data.find(b"\xff\xc0")
    return data[: at + 5] + struct.pack(">HH", height, width) + data[at + 9 :]


def _twelve_bits(data: bytes) -> bytes:
    at = data.find(b"\xff\xc0")
    return data[: at + 1] + b"\xc1" + data[at + 2 : at + 4] + b"\x0c" + data[at + 5 :]


def _claiming_png(side: int) -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def _with_header(data: bytes, at: int, offset: int, value: int) -> bytes:
    """A PNG with another byte in its first chunk, and the check sum that belongs to it."""
    content = bytearray(data[at + 8 : at + 8 + 13])
    content[offset - 16] = value
    return data[:at] + chunk(b"IHDR", bytes(content)) + data[at + 8 + 13 + 4 :]


def _no_picture() -> dict[str, Kind]:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 1234\n"
    utf8 = jpeg().decode("latin-1").encode()
    return {
        "none/empty.jpg": bad(b"", "the file is empty"),
        "none/text.jpg": bad(b"this is a text file\n", "text"),
        "none/page.jpg": bad(b"<!DOCTYPE html><html><body>404</body></html>", "HTML"),
        "none/pointer.jpg": bad(pointer, "Git LFS pointer"),
        "none/base64.jpg": bad(base64.b64encode(jpeg()), "base64"),
        "none/zipped.jpg": bad(gzip.compress(jpeg()), "gzip"),
        "none/document.jpg": bad(b"%PDF-1.4\n%\xe2\xe3\xcf\xd3\n" + bytes(100), "PDF"),
        "none/noise.jpg": bad(np.random.default_rng(0).bytes(4096), "begins with"),
        "none/mangled.jpg": bad(utf8, "UTF-8"),
        "none/video.jpg": bad(b"\0\0\0\x18ftypmp42\0\0\0\0mp42isom" + bytes(100), "MP4"),
        "none/phone.heic": bad(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(100), "HEI"),
        "none/phone.jpg": bad(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(100), "HEI"),
        "none/codestream.jxl": bad(b"\xff\x0a" + bytes(100), "JPEG XL"),
        "none/boxes.jxl": bad(b"\0\0\0\x0cJXL \r\n\x87\n" + bytes(100), "JPEG XL"),
        "none/newline-before.jpg": bad(b"\n" + jpeg(), "begins with 0a ff d8"),
    }


def _sizes() -> dict[str, Kind]:
    sizes = [(1, 1), (1, 300), (300, 1), (2, 2), (1, 2000)]
    return {
        f"size/{h}x{w}.png": Kind(encode(Image.new("RGB", (w, h), RED)), (RED,) * 4, 0, size=(h, w)) for h, w in sizes
    }


def _heic() -> dict[str, Kind]:
    """Only where the extra is installed: nothing else writes it."""
    try:
        import pillow_heif
    except ImportError:
        return {}
    file = io.BytesIO()
    pillow_heif.from_pillow(PICTURE).save(file, quality=90)
    data = file.getvalue()
    return {"heic/named.heic": Kind(data), "heic/misnamed.jpg": Kind(data), "heic/cut.heif": bad(data[:-200], "HEI")}
