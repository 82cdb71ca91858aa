"""The segments of a JPEG, for what Pillow does not tell."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_ALONE = {0x01, *range(0xD0, 0xDA)}  # markers without a length: TEM, RSTn, SOI, EOI
_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
_SOS, _EOI, _DRI, _APP0, _APP14 = 0xDA, 0xD9, 0xDD, 0xE0, 0xEE
_PROGRESSIVE = (2, 10)
_ARITHMETIC = 9  # and above
_RESTART = re.compile(rb"\xff([\xd0-\xd7])")
_END_OF_SCAN = re.compile(rb"\xff[\x01-\xcf\xd8-\xfe]")


@dataclass(frozen=True, slots=True)
class Frame:
    """The frame header of a JPEG: which process, how deep, how large.

    Attributes:
        process: 0 baseline, 1 extended, 2 progressive, 3 lossless, from 9 on arithmetic.
        precision: bits per sample.
        height, width: as stored.
        components: their identifiers.
        sampling: (horizontal, vertical) factors of each component.
    """

    process: int
    precision: int
    height: int
    width: int
    components: bytes
    sampling: tuple[tuple[int, int], ...]

    @property
    def progressive(self) -> bool:
        """Whether coefficients come bit by bit."""
        return self.process in _PROGRESSIVE


@dataclass(frozen=True, slots=True)
class Header:
    """What comes before the first scan's data.

    Attributes:
        frame: or None if there is none.
        restart: MCUs between two restart markers, 0 without.
        scan: components of the first scan.
        pixels: where its entropy-coded data begin, 0 if there are none.
        transform: colours as Adobe's marker says, 0 none, 1 YCbCr, 2 YCCK; -1 without such a marker.
        jfif: whether it has the marker of JFIF.
    """

    frame: Frame | None
    restart: int
    scan: int
    pixels: int
    transform: int = -1
    jfif: bool = False

    @property
    def colours(self) -> str:
        """What the components are: "grey", "YCbCr" or "other", as libjpeg tells it."""
        components = self.frame.components if self.frame is not None else b""
        if len(components) == 1:
            return "grey"
        if len(components) != 3 or (not self.jfif and (self.transform == 0 or components == b"RGB")):
            return "other"
        return "YCbCr"

    @property
    def planar(self) -> bool:
        """Whether components come one after another, as a whole each."""
        return self.frame is not None and not self.frame.progressive and self.scan < len(self.frame.components)


def header(data: bytes) -> Header:
    """Read the segments up to the first scan."""
    frame, restart, transform, jfif = None, 0, -1, False
    for marker, content, end in _segments(data):
        if marker in _FRAMES and len(content) >= 6:
            sampling = tuple((v >> 4, v & 15) for v in content[7::3])
            height, width = int.from_bytes(content[1:3], "big"), int.from_bytes(content[3:5], "big")
            frame = Frame(marker - 0xC0, content[0], height, width, content[6::3], sampling)
        elif marker == _DRI and len(content) >= 2:
            restart = int.from_bytes(content[:2], "big")
        elif marker == _APP0 and content[:5] == b"JFIF\0":
            jfif = True
        elif marker == _APP14 and content[:5] == b"Adobe" and len(content) >= 12:
            transform = content[11]
        elif marker == _SOS and content:
            return Header(frame, restart, content[0], end, transform, jfif)
    return Header(frame, restart, 0, 0, transform, jfif)


def _segments(data: bytes) -> Iterator[tuple[int, bytes, int]]:
    """(marker, content, where it ends) of each, up to the end of the picture."""
    at = 2
    while (at := data.find(b"\xff", at)) >= 0 and at + 2 <= len(data):
        marker = data[at + 1]
        if marker == _EOI:
            yield marker, b"", at + 2
            return
        if marker in (0x00, 0xFF) or marker in _ALONE:
            at += 1 if marker == 0xFF else 2
            continue
        length = int.from_bytes(data[at + 2 : at + 4], "big")
        end = at + 2 + length
        yield marker, data[at + 4 : end], end
        at = end
        if marker == _SOS:
            mark = _END_OF_SCAN.search(data, end)
            at = mark.start() if mark else len(data)


def unsupported(data: bytes) -> str | None:
    """Why a JPEG whose header was refused is not decoded, if the header says so."""
    frame = header(data).frame
    if frame is not None and frame.precision != 8:
        return f"JPEG with {frame.precision}-bit samples, of which only 8-bit ones are decoded"
    return None


def reducible(data: bytes) -> bool:
    """Whether blocks can be decoded to fewer pixels, which needs a process with cosines, and show there what is missing
    of the picture.
    """
    head = header(data)
    return head.frame is not None and head.frame.process in (0, 1, *_PROGRESSIVE, 9) and not head.planar


def closed(data: bytes) -> bool:
    """Whether the picture's end is marked where its data end. Some decoders look no further than to the last row, and
    take what others find there to be damage.
    """
    head = header(data)
    if head.frame is None or not head.pixels:
        return False
    if head.planar or head.frame.progressive:
        return any(marker == _EOI for marker, _, _ in _segments(data))
    mark = _END_OF_SCAN.search(data, head.pixels)
    return mark is not None and data[mark.start() + 1] == _EOI


def missing_parts(data: bytes) -> str | None:
    """What the markers say is missing of a JPEG, or None. Decoders resynchronise or stop there without a word."""
    head = header(data)
    if head.frame is None or not head.pixels:
        return None
    if head.planar or head.frame.progressive:
        return _unfinished(data, head.frame)
    if head.restart and head.frame.process < 2:
        return _restarts(data, head, head.frame)
    return None


def may_end_early(data: bytes, last: bytes) -> bool:
    """Whether data may be missing, by the levels of the last pixel; `with_more_data` will tell."""
    head = header(data)
    if head.frame is not None and head.frame.process >= _ARITHMETIC:
        # Its data go on with any number of zeros that are not stored, so that more data change a whole picture too.
        return False
    # Where its data end early libjpeg leaves the rest mid-grey, 127 where inks are inverted. So may be a picture.
    return head.planar or set(last) <= {127, 128}


def _restarts(data: bytes, head: Header, frame: Frame) -> str | None:
    end = _END_OF_SCAN.search(data, head.pixels)
    found = [n[0] - 0xD0 for n in _RESTART.findall(data, head.pixels, end.start() if end else len(data))]
    expected = -(-_mcus(frame) // head.restart) - 1
    if len(found) < expected:
        return f"JPEG with {len(found)} of {expected} restart markers: a part of the picture is missing"
    if found[:expected] != [n % 8 for n in range(expected)]:
        return "JPEG with restart markers out of order: a part of the picture is missing or repeated"
    return None


def _unfinished(data: bytes, frame: Frame) -> str | None:
    # The low bits of each coefficient that no scan has brought yet, at first all of them.
    owed = {(component, k): 8 for component in frame.components for k in range(64)}
    for marker, content, _ in _segments(data):
        if marker == _SOS and content and len(content) >= 4 + 2 * content[0]:
            first, last, bits = (content[-3], content[-2], content[-1] & 15) if frame.progressive else (0, 63, 0)
            for component in content[1:-3:2]:
                owed.update(((component, k), bits) for k in range(first, min(last, 63) + 1))
    return "JPEG whose last scans are missing" if any(owed.values()) else None


def _mcus(frame: Frame) -> int:
    if len(frame.sampling) == 1:  # one component is not interleaved: its units are single blocks
        return -(-frame.width // 8) * -(-frame.height // 8)
    h = max(h for h, _ in frame.sampling)
    v = max(v for _, v in frame.sampling)
    return -(-frame.width // (8 * h)) * -(-frame.height // (8 * v))


def with_more_data(data: bytes) -> bytes:
    """The same JPEG with some bytes more at the end of its last scan. A decoder that had enough ignores them."""
    # Not simply before the last EOI: previews, further frames and other pictures may follow.
    scans = [end for marker, _, end in _segments(data) if marker == _SOS]
    mark = _END_OF_SCAN.search(data, scans[-1]) if scans else None
    end = mark.start() if mark else len(data)
    return data[:end] + bytes(range(7, 247)) * 4 + data[end:]
