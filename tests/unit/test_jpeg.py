from __future__ import annotations

import io
import itertools
import re

import numpy as np
import pytest
from pictures import encode, noise, planar_jpeg
from PIL import Image

from headrace.pipeline import jpeg

RESTART = re.compile(rb"\xff[\xd0-\xd7]")


def test_the_header_says_process_depth_size_and_sampling() -> None:
    head = jpeg.header(encode(noise(64, 96), "JPEG", subsampling="4:2:0"))
    assert head.frame == jpeg.Frame(0, 8, 64, 96, b"\1\2\3", ((2, 2), (1, 1), (1, 1)))
    assert head.restart == 0 and head.scan == 3 and head.pixels > 0
    progressive = jpeg.header(encode(noise(64, 96).convert("L"), "JPEG", progressive=True)).frame
    assert progressive is not None and progressive.process == 2 and len(progressive.sampling) == 1


@pytest.mark.parametrize(
    ("components", "jfif", "transform", "expected"),
    [
        (b"\1", False, -1, "grey"),
        (b"\1\2\3", True, -1, "YCbCr"),
        (b"\1\2\3", False, -1, "YCbCr"),
        (b"\1\2\3", False, 1, "YCbCr"),
        (b"\1\2\3", False, 0, "other"),
        (b"\1\2\3", True, 0, "YCbCr"),
        (b"RGB", False, -1, "other"),
        (b"RGB", True, -1, "YCbCr"),
        (b"\1\2\3\4", False, 2, "other"),
    ],
)
def test_markers_and_identifiers_tell_the_colours(components: bytes, jfif: bool, transform: int, expected: str) -> None:
    frame = jpeg.Frame(0, 8, 1, 1, components, ((1, 1),) * len(components))
    assert jpeg.Header(frame, 0, len(components), 1, transform, jfif).colours == expected


def test_segments_before_the_frame_do_not_matter() -> None:
    data = encode(noise(16, 24), "JPEG", comment=b"\xff\xc0" * 30_000)
    frame = jpeg.header(data).frame
    assert frame is not None and (frame.height, frame.width) == (16, 24)


@pytest.mark.parametrize("data", [b"\xff\xd8", b"\xff\xd8\xff", b"\xff\xd8\xff\xe0", b"\xff\xd8" + b"\xff" * 50, b""])
def test_a_header_that_ends_early_is_an_empty_one(data: bytes) -> None:
    assert jpeg.header(data) == jpeg.Header(None, 0, 0, 0)
    assert jpeg.missing_parts(data) is None


def test_twelve_bit_samples_are_named() -> None:
    data = bytearray(encode(noise(16, 16), "JPEG"))
    data[data.find(b"\xff\xc0") + 4] = 12
    assert jpeg.unsupported(bytes(data)) == "JPEG with 12-bit samples, of which only 8-bit ones are decoded"
    assert jpeg.unsupported(encode(noise(16, 16), "JPEG")) is None


@pytest.mark.parametrize("subsampling", ["4:4:4", "4:2:2", "4:2:0"])
@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("size", [(64, 96), (61, 95), (8, 8), (1, 1)])
@pytest.mark.parametrize("blocks", [1, 3, 1000])
def test_whole_pictures_have_all_their_restart_markers(
    size: tuple[int, int], mode: str, subsampling: str, blocks: int
) -> None:
    data = encode(noise(*size).convert(mode), "JPEG", subsampling=subsampling, restart_marker_blocks=blocks)
    assert jpeg.header(data).restart == blocks
    assert jpeg.missing_parts(data) is None


def test_a_restart_segment_that_was_cut_out_is_missed() -> None:
    data = encode(noise(64, 96), "JPEG", restart_marker_blocks=2)
    marks = [m.start() for m in RESTART.finditer(data, jpeg.header(data).pixels)]
    cut = data[: marks[2]] + data[marks[3] :]
    assert jpeg.missing_parts(cut) == f"JPEG with {len(marks) - 1} of {len(marks)} restart markers: " + PART
    swapped = data[: marks[2] + 1] + b"\xd6" + data[marks[2] + 2 :]
    assert "out of order" in (jpeg.missing_parts(swapped) or "")


PART = "a part of the picture is missing"


def test_a_progressive_picture_without_its_last_scans_is_unfinished() -> None:
    data = encode(noise(64, 96), "JPEG", progressive=True)
    assert jpeg.missing_parts(data) is None
    scans = [m.start() for m in re.finditer(rb"\xff\xda", data)]
    for start in scans[1:]:
        assert jpeg.missing_parts(data[:start] + b"\xff\xd9") == "JPEG whose last scans are missing"


def test_coefficients_of_which_no_scan_comes_are_missed() -> None:
    data = encode(noise(64, 96).convert("L"), "JPEG", progressive=True)
    starts = [m.start() for m in re.finditer(rb"\xff\xda", data)]
    scans = [data[a:b] for a, b in itertools.pairwise([*starts, len(data)])]
    # The constant terms with all their bits, as coders send them first that send each coefficient at once.
    constant = b"".join(scan for scan in scans if scan[7] == 0)
    assert 0 < len(constant) < len(data) / 2
    assert jpeg.missing_parts(data[: starts[0]] + constant + b"\xff\xd9") == "JPEG whose last scans are missing"


@pytest.mark.parametrize("size", [(64, 96), (1, 1), (33, 17)])
def test_of_components_that_come_one_after_another_all_must_come(size: tuple[int, int]) -> None:
    header, y, cb, cr, end = planar_jpeg(noise(*size))
    assert jpeg.missing_parts(header + y + cb + cr + end) is None
    assert jpeg.missing_parts(header + y + cb + end) == "JPEG whose last scans are missing"
    assert not jpeg.reducible(header + y + cb + cr + end)


@pytest.mark.parametrize(
    "kind, last, expected",
    [
        (b"\xc0", [128, 127, 128], True),
        (b"\xc0", [128, 126, 128], False),
        (b"\xc2", [128], True),
        (b"\xc9", [128] * 3, False),
    ],
)
def test_the_last_pixel_says_whether_data_may_be_missing_but_not_in_arithmetic_coding(
    kind: bytes, last: list[int], expected: bool
) -> None:
    data = encode(noise(16, 16), "JPEG").replace(b"\xff\xc0", b"\xff" + kind)
    assert jpeg.may_end_early(data, bytes(last)) is expected


def test_the_last_pixel_says_nothing_of_components_that_come_one_after_another() -> None:
    assert jpeg.may_end_early(b"".join(planar_jpeg(noise(16, 16))), b"\1\2\3")


def test_more_data_change_nothing_in_a_whole_picture_and_something_in_a_cut_one() -> None:
    data = encode(noise(64, 96), "JPEG")

    def pixels(jpeg: bytes) -> np.ndarray:
        return np.asarray(Image.open(io.BytesIO(jpeg)))

    np.testing.assert_array_equal(pixels(jpeg.with_more_data(data)), pixels(data))
    cut = data[: len(data) * 3 // 4] + b"\xff\xd9"
    assert (pixels(jpeg.with_more_data(cut)) != pixels(cut)).any()


def test_more_data_go_into_the_first_of_several_pictures() -> None:
    first, second = encode(noise(16, 16), "JPEG"), encode(noise(32, 32), "JPEG")
    assert jpeg.with_more_data(first + second) == jpeg.with_more_data(first) + second
