"""The chunks of a PNG, for what Pillow does not tell."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

_SIGNATURE = 8
_ANCILLARY = 0x20  # in the first byte of a type, which is then a small letter
_IDAT = zlib.crc32(b"IDAT")
_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
_ADAM7 = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))


def chunks(data: bytes) -> Iterator[tuple[bytes, memoryview]]:
    """(type, content) of each, as far as they go."""
    view, at = memoryview(data), _SIGNATURE
    while at + 8 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, at)
        yield kind, view[at + 8 : at + 8 + length]
        at += 12 + length


def exif_after_pixels(data: bytes) -> bytes | None:
    """The content of an eXIf chunk that comes after the pixels, or None."""
    if data.rfind(b"eXIf") < 0:
        return None
    return next((b"Exif\0\0" + bytes(content) for kind, content in chunks(data) if kind == b"eXIf"), None)


def bare(data: bytes) -> bytes:
    """What pixels and orientation need of a PNG: the critical chunks, and EXIF."""
    parts, at = [data[:_SIGNATURE]], _SIGNATURE
    for kind, content in chunks(data):
        end = at + 12 + len(content)
        if not kind[0] & _ANCILLARY or kind == b"eXIf":
            parts.append(data[at:end])
        at = end
    return b"".join(parts)


def until_end_of_pixels(data: bytes) -> bytes:
    """The PNG up to the end of its compressed pixels; itself where nothing but its end marker follows."""
    at = end = _SIGNATURE
    for kind, content in chunks(data):
        at += 12 + len(content)
        if kind == b"IDAT":
            end = at
    return data if end == _SIGNATURE or len(data) <= end + 12 else data[:end]


def damaged_pixels(data: bytes) -> bool:
    """Whether a chunk of the compressed pixels does not match its checksum. Pillow does not look at these."""
    view, at = memoryview(data), _SIGNATURE
    for kind, content in chunks(data):
        end = at + 8 + len(content)
        stored = view[end : end + 4]
        if kind == b"IDAT" and len(stored) == 4 and zlib.crc32(content, _IDAT) != int.from_bytes(stored, "big"):
            return True
        at = end + 4
    return False


def missing_pixels(data: bytes) -> bool:
    """Whether the compressed pixels end before the picture does. Inflates them: costs a third of decoding."""
    stream = [content for kind, content in chunks(data) if kind == b"IDAT"]
    _, header = next(chunks(data))
    width, height, depth, colour, _, _, interlaced = struct.unpack_from(">IIBBBBB", header)
    left = _inflated_size(width, height, depth * _CHANNELS[colour], bool(interlaced))
    inflate = zlib.decompressobj()
    for content in stream:
        rest: bytes | memoryview = content
        while rest and left > 0 and not inflate.eof:
            left -= len(inflate.decompress(rest, 1 << 20))
            rest = inflate.unconsumed_tail
    # Only where all came in is what a flush brings bounded.
    return left > 0 and left > len(inflate.flush())


def _inflated_size(width: int, height: int, bits: int, interlaced: bool) -> int:
    passes = _ADAM7 if interlaced else ((0, 0, 1, 1),)
    size = 0
    for x, y, dx, dy in passes:
        columns, rows = -(-(width - x) // dx), -(-(height - y) // dy)
        if columns > 0 and rows > 0:
            size += rows * (1 + -(-columns * bits // 8))
    return size
