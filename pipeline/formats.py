"""Which format some bytes are in, told by how they begin: those that are decoded, and others by name.

The list of decoded formats is an allow-list: Pillow opens some forty, among them ones that run other programs.
"""

from __future__ import annotations

import re

#: Formats that are decoded, by their names in Pillow.
DECODED = (
    "JPEG",
    "PNG",
    "GIF",
    "BMP",
    "DIB",
    "WEBP",
    "TIFF",
    "PPM",
    "AVIF",
    "JPEG2000",
    "ICO",
    "PSD",
    "QOI",
    "TGA",
)

#: Decoded where an extra is installed.
HEIF = "HEIF"

_PATTERNS: tuple[tuple[str, bytes], ...] = (
    ("JPEG", rb"\xff\xd8\xff"),
    ("PNG", rb"\x89PNG\r\n\x1a\n"),
    ("GIF", rb"GIF8[79]a"),
    ("WEBP", rb"RIFF....WEBP"),
    ("TIFF", rb"II[\x2a\x2b]\0|MM\0[\x2a\x2b]"),
    ("JPEG2000", rb"\xff\x4f\xff\x51|\0\0\0\x0cjP  \r\n\x87\n"),
    ("PSD", rb"8BPS"),
    ("QOI", rb"qoif"),
    ("ICO", rb"\0\0\x01\0"),
    ("PPM", rb"P[1-7fy]\s"),
    ("BMP", rb"BM"),
    ("DIB", rb"[\x0c\x28\x34\x38\x40\x6c\x7c]\0\0\0"),
)

_OTHERS: tuple[tuple[str, bytes], ...] = (
    (
        "JPEG XL (whose decoders for Pillow make all pixels before they say how many there are)",
        rb"\xff\x0a|\0\0\0\x0cJXL \r\n\x87\n",
    ),
    ("JPEG XR", rb"II\xbc"),
    ("OpenEXR", rb"\x76\x2f\x31\x01"),
    ("Radiance HDR", rb"#\?(RADIANCE|RGBE)"),
    ("DDS", rb"DDS "),
    ("ICNS", rb"icns"),
    ("CUR", rb"\0\0\x02\0"),
    ("FITS", rb"SIMPLE  ="),
    ("HDF5", rb"\x89HDF\r\n\x1a\n"),
    ("EPS or PostScript", rb"%!PS|\xc5\xd0\xd3\xc6"),
    ("PDF", rb"%PDF-"),
    ("a Git LFS pointer (the file itself was never fetched: `git lfs pull`)", rb"version https://git-lfs"),
    ("a JPEG in base64", rb"/9j/"),
    ("a JPEG or other binary file that was converted to UTF-8 as if it were text", rb"\xc3\xbf\xc3\x98"),
    ("a picture file whose bytes were converted as if they were text", rb"\xef\xbf\xbd|\x89?PNG[\r\n]"),
    ("SVG", rb"\s*(<\?xml[^>]*>\s*)?(<!--.*?-->\s*)?<svg"),
    ("HTML", rb"(?i)\s*(<!doctype html|<html|<head|<body)"),
    ("XML", rb"\s*<\?xml"),
    ("JSON", rb"\s*[{\[]\s*[\"{\[]"),
    ("gzip", rb"\x1f\x8b"),
    ("zip", rb"PK[\x03\x05]"),
    ("7z", rb"7z\xbc\xaf\x27\x1c"),
    ("xz", rb"\xfd7zXZ\0"),
    ("Zstandard", rb"\x28\xb5\x2f\xfd"),
    ("bzip2", rb"BZh"),
    ("RAR", rb"Rar!"),
    ("Matroska or WebM video", rb"\x1a\x45\xdf\xa3"),
    ("RIFF (AVI or WAV)", rb"RIFF"),
    ("NumPy array", rb"\x93NUMPY"),
    ("an ELF program", rb"\x7fELF"),
)

_DECODED = [(name, re.compile(pattern, re.DOTALL)) for name, pattern in _PATTERNS]
_NAMED = [(name, re.compile(pattern, re.DOTALL)) for name, pattern in _OTHERS]

_HEIC = {b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis", b"hevm", b"hevs"}
_TGA_END = b"TRUEVISION-XFILE.\0"  # version 2; version 1 has no mark, and nearly anything could be one


def sniff(data: bytes) -> tuple[str | None, str]:
    """`(format, description)`: the format is one of `DECODED`, `HEIF`, or None where Headrace does not decode it.

    The description is what the bytes are, as well as can be told: "JPEG XL", "text: 'not a pict'".
    """
    for name, pattern in _DECODED:
        if pattern.match(data):
            return name, name
    if data[4:8] == b"ftyp":
        return _box_file(data)
    if data.endswith(_TGA_END):
        return "TGA", "TGA"
    for name, pattern in _NAMED:
        if pattern.match(data):
            return None, name
    return None, _unknown(data)


def _box_file(data: bytes) -> tuple[str | None, str]:
    # ISO base media: the brands say which of many formats. Files of the common image brand list theirs as compatible.
    size = min(int.from_bytes(data[:4], "big"), 256)
    brands = [data[8:12], *(data[i : i + 4] for i in range(16, size - 3, 4))]
    if b"avif" in brands or b"avis" in brands:
        return "AVIF", "AVIF"
    if _HEIC.intersection(brands) or brands[0] in (b"mif1", b"msf1"):
        return HEIF, "HEIC"
    return None, f"MP4 or another file of boxes (brand {ascii_of(brands[0])})"


def _unknown(data: bytes) -> str:
    head = data[:32]
    if not data.strip(b"\0"):
        return f"{len(data)} zero bytes"
    if all(32 <= c < 127 or c in b"\t\r\n" for c in head):
        return f"text: {ascii_of(head)}"
    return f"something that begins with {head[:16].hex(' ')}"


def ascii_of(data: bytes) -> str:
    """The bytes in quotes, those that are not printable as escapes."""
    return ascii(data)[1:]
