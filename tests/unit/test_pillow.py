from __future__ import annotations

import csv
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from pictures import BLUE, GREEN, RED, YELLOW, chunk, corners, encode, exif, noise, quadrants, stored
from PIL import Image, ImageChops
from torchvision_shim import torchvision

from headrace.pipeline import pillow, png
from headrace.pipeline.pillow import PillowBackend
from headrace.pipeline.probe import BadPicture, probe
from headrace.pipeline.spec import Decode
from headrace.pipeline.transforms import (
    CenterCrop,
    Letterbox,
    Pad,
    Params,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomVerticalFlip,
    Resize,
    Transform,
    output_size,
    plan,
)

Pixels = NDArray[np.uint8]

#: Lossless, and written by Pillow for RGB.
LOSSLESS = ["PNG", "BMP", "DIB", "TIFF", "PPM", "TGA", "QOI"]
CUT = [*LOSSLESS, "JPEG", "GIF", "WEBP", "AVIF", "JPEG2000", "ICO"]


def show(data: bytes, transforms: Sequence[Transform] = (), first: int = 0, **decode: bool) -> Pixels:
    """The picture by the backend; without transforms at its own size.

    Raises:
        BadPicture: the verdict.
    """
    picture = probe(data, Decode(**decode))
    chain = transforms or [Resize((picture.height, picture.width))]
    params = plan(chain, 0, 0, first, np.array([picture.height]), np.array([picture.width]))
    out = np.full((*params.size, 3), 77, np.uint8)
    [verdict] = PillowBackend().render([picture], params, [out], lambda i: None)
    if verdict is not None:
        assert not out.any()
        raise verdict
    return out


def window(
    data: bytes,
    box: Sequence[float],
    size: tuple[int, int],
    interpolation: str = "bilinear",
    fill: tuple[int, int, int] = (0, 0, 0),
) -> Pixels:
    picture = probe(data, Decode())
    no = np.zeros(1, np.bool_)
    out = np.empty((*size, 3), np.uint8)
    params = Params(np.array([box], float), no, no, size, interpolation, fill)
    assert PillowBackend().render([picture], params, [out], lambda i: None) == [None]
    return out


def rejected(data: bytes) -> str:
    with pytest.raises(BadPicture) as caught:
        show(data)
    return caught.value.reason


def far(a: Any, b: Any) -> int:
    """The largest difference, in levels."""
    return int(np.abs(np.asarray(a).astype(int) - np.asarray(b).astype(int)).max())


# which pixels


@pytest.mark.parametrize("format", LOSSLESS)
def test_at_its_own_size_a_picture_is_shown_as_stored(format: str) -> None:
    picture = noise(48, 64)
    np.testing.assert_array_equal(show(encode(picture, format)), np.asarray(picture))


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "lanczos"])
@pytest.mark.parametrize("height, width", [(300, 400), (400, 300), (64, 64), (40, 90), (31, 37)])
def test_pillow_parity_with_torchvision_of_resize_and_center_crop(height: int, width: int, interpolation: str) -> None:
    t = torchvision("transforms")
    mode = t.InterpolationMode(interpolation)
    picture = noise(height, width)
    for size, crop in ((64, 56), (64, 64), (32, 48), (50, (20, 60))):
        theirs = t.CenterCrop(crop)(t.Resize(size, mode)(picture))
        ours = show(encode(picture), [Resize(size, interpolation), CenterCrop(crop)])
        # The same filter at the same places. But which axis goes first Pillow decides by the size that is asked for, so
        # the rounding between its two passes differs: by one level, which lanczos weighs with more than 1.
        assert far(ours, theirs) <= (2 if interpolation == "lanczos" else 1)


def test_pillow_parity_with_torchvision_of_random_resized_crop_inside_its_border() -> None:
    t = torchvision("transforms")
    picture = noise(300, 400)
    for position in range(40):
        chain = [RandomResizedCrop(64)]
        box = plan(chain, 0, 0, position, np.array([300]), np.array([400])).box[0]
        x0, y0, x1, y1 = (int(v) for v in box)
        theirs = t.functional.resized_crop(picture, y0, x0, y1 - y0, x1 - x0, [64, 64])
        ours = show(encode(picture), chain, position)
        # At the border it differs by design: torchvision's filter ends at the crop, ours sees the picture beyond it.
        # A bilinear filter reaches one pixel of the coarser side: two of the result when shrinking, `enlarged` else.
        enlarged = int(np.ceil(max(1.0, 64 / min(x1 - x0, y1 - y0)))) + 1
        inside = np.s_[enlarged:-enlarged, enlarged:-enlarged]
        assert far(ours[inside], np.asarray(theirs)[inside]) <= 1


def test_the_filter_sees_the_picture_beyond_the_window() -> None:
    # White left of the window, black in it: the first column of the result is grey.
    pixels = np.zeros((40, 80, 3), np.uint8)
    pixels[:, :40] = 255
    column = window(encode(Image.fromarray(pixels)), (40, 0, 80, 40), (10, 10))[:, 0]
    assert 5 < column.min() and column.max() < 128


def test_stripes_become_grey() -> None:
    stripes = np.zeros((1024, 1024), np.uint8)
    stripes[:, ::2] = 255
    for pixels in (stripes, stripes.T):
        out = show(encode(Image.fromarray(pixels)), [Resize(224), CenterCrop(224)])
        assert abs(out.mean() - 127.5) < 1 and far(out, 127) <= 20


def test_a_padded_picture_is_black_around_and_exact_inside() -> None:
    picture = noise(10, 13)
    out = show(encode(picture), [CenterCrop(20)])
    np.testing.assert_array_equal(out[5:15, 3:16], np.asarray(picture))
    out[5:15, 3:16] = 0
    assert not out.any()


def test_a_picture_padded_after_resizing_is_as_torchvision_pads_it() -> None:
    t = torchvision("transforms")
    picture = noise(30, 41)
    theirs = t.CenterCrop(50)(t.Resize(20)(picture))
    ours = show(encode(picture), [Resize(20), CenterCrop(50)])
    assert far(ours, theirs) <= 1
    np.testing.assert_array_equal(ours.any(axis=2), np.asarray(theirs).any(axis=2))


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_padding_after_resizing_is_as_torchvision_pads_it_in_its_colour(mode: str) -> None:
    t = torchvision("transforms")
    picture = noise(61, 83).convert(mode)
    theirs = t.Pad([3, 5, 7, 2], (9, 200, 30))(t.Resize((40, 50))(picture.convert("RGB")))
    ours = show(encode(picture), [Resize((40, 50)), Pad([3, 5, 7, 2], (9, 200, 30))])
    assert far(ours, theirs) <= 1
    ours[5:45, 3:53] = np.asarray(theirs)[5:45, 3:53]
    np.testing.assert_array_equal(ours, np.asarray(theirs))


@pytest.mark.parametrize("seed", range(40))
def test_any_chain_that_is_accepted_shows_what_torchvision_shows_step_by_step(seed: int) -> None:
    t = torchvision("transforms")
    rng = np.random.default_rng(seed)
    picture = noise(*(int(side) for side in rng.integers(4, 40, 2)))
    accepted = 0
    while accepted < 5:
        fill = int(rng.choice([0, 77]))
        ours: list[Transform] = []
        theirs = []
        for kind in rng.integers(0, 4, rng.integers(1, 6)):
            numbers = rng.integers(0, 12, 4).tolist()
            size = rng.integers(1, 44, 2).tolist()
            made = [
                (Pad(numbers, fill), t.Pad(numbers, fill)),
                (CenterCrop(size), t.CenterCrop(size)),
                (RandomHorizontalFlip(1.0), t.RandomHorizontalFlip(1.0)),
                (RandomVerticalFlip(1.0), t.RandomVerticalFlip(1.0)),
            ][kind]
            ours.append(made[0])
            theirs.append(made[1])
        try:
            output_size(ours)
        except ValueError:
            continue
        accepted += 1
        np.testing.assert_array_equal(show(encode(picture), ours), np.asarray(t.Compose(theirs)(picture)), str(ours))


def test_a_random_crop_out_of_padding_is_a_copy_of_the_pixels() -> None:
    picture, chain = noise(32, 32), [RandomCrop(32, padding=4, fill=17), RandomHorizontalFlip()]
    framed = np.pad(np.asarray(picture), ((4, 4), (4, 4), (0, 0)), constant_values=17)
    windows = [framed[y : y + 32, x : x + 32] for y in range(9) for x in range(9)]
    expected = {w[:, ::step].tobytes() for w in windows for step in (1, -1)}
    seen = {show(encode(picture), chain, first).tobytes() for first in range(40)}
    assert seen <= expected and len(seen) > 20


@pytest.mark.parametrize("height, width, top, left", [(30, 60, 10, 0), (60, 31, 0, 9), (7, 40, 16, 0)])
def test_a_letterbox_has_the_whole_picture_in_the_middle(height: int, width: int, top: int, left: int) -> None:
    picture = noise(height, width)
    ours = show(encode(picture), [Letterbox(40, 114)])
    inside = np.s_[top : 40 - top, left : 40 - left - (1 if left else 0)]
    if height == 7:
        inside = np.s_[16:23, :]
        np.testing.assert_array_equal(ours[inside], np.asarray(picture))
    size = ours[inside].shape[1::-1]
    assert far(ours[inside], picture.resize(size, Image.Resampling.BILINEAR)) <= 1
    ours[inside] = 114
    assert (ours == 114).all()


def test_a_window_wholly_outside_the_picture_is_fill() -> None:
    assert not window(encode(noise(10, 10)), (20, 20, 30, 30), (8, 8)).any()
    for mode in ("RGB", "L"):
        out = window(encode(noise(10, 10).convert(mode)), (20, 20, 30, 30), (8, 8), fill=(1, 2, 3))
        assert (out == (1, 2, 3)).all()


def test_pixels_of_the_result_are_black_where_their_middle_is_outside() -> None:
    white = encode(Image.new("RGB", (10, 10), (255, 255, 255)))
    out = window(white, (-5.2, 0, 4.8, 10), (10, 10))
    assert not out[:, :5].any() and (out[:, 5:] == 255).all()


@pytest.mark.parametrize("x, y", [(False, True), (True, False), (True, True)])
def test_mirrors_turn_the_result(x: bool, y: bool) -> None:
    picture = noise(48, 64)
    flips = [RandomHorizontalFlip(float(x)), RandomVerticalFlip(float(y))]
    out = show(encode(picture), [*flips, Resize((48, 64))])
    np.testing.assert_array_equal(out[:: -1 if y else 1, :: -1 if x else 1], np.asarray(picture))


@pytest.mark.parametrize("format", ["PNG", "TIFF", "JPEG", "WEBP"])
def test_all_eight_orientations_look_alike(format: str) -> None:
    chain = [RandomResizedCrop(40), RandomHorizontalFlip(), RandomVerticalFlip(), CenterCrop((40, 24))]
    upright = noise(90, 120)
    lossy = {"JPEG": {"quality": 100, "subsampling": "4:4:4"}, "WEBP": {"lossless": True}}.get(format, {})
    for first in range(4):
        expected = show(encode(upright), chain, first)
        for orientation in range(1, 9):
            data = encode(stored(upright, orientation), format, exif=exif(orientation), **lossy)
            # Turned ones are resampled in the other order of axes, with a rounding between.
            assert far(show(data, chain, first), expected) <= (4 if format == "JPEG" else 1), orientation


@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_oriented_picture_is_upright(orientation: int) -> None:
    data = encode(stored(quadrants(), orientation), exif=exif(orientation))
    assert corners(show(data)) == [RED, GREEN, BLUE, YELLOW]


@pytest.mark.parametrize("format", ["PNG", "TIFF", "JPEG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_picture_is_shown_as_it_is_stored_where_orientations_are_ignored(format: str, orientation: int) -> None:
    image = stored(noise(48, 32), orientation)
    lossy = {"JPEG": {"quality": 100, "subsampling": "4:4:4"}, "WEBP": {"lossless": True}}.get(format, {})
    plain, turned = (encode(image, format, exif=exif(each), **lossy) for each in (1, orientation))
    np.testing.assert_array_equal(show(turned, ignore_orientation=True), show(plain))
    chain = [RandomResizedCrop(16), RandomHorizontalFlip()]
    assert far(show(turned, chain, ignore_orientation=True), show(plain, chain)) <= 1


@pytest.mark.parametrize("height, width", [(1, 1), (1, 300), (300, 1), (2, 2), (60000, 1), (1, 60000)])
@pytest.mark.parametrize(
    "chain", [[RandomResizedCrop(64)], [Resize(64), CenterCrop(56)], [CenterCrop(64)], [Resize((64, 64))]]
)
def test_the_thinnest_pictures_can_be_shown(height: int, width: int, chain: list[Transform]) -> None:
    level = show(encode(Image.new("RGB", (width, height), (200, 100, 50))), chain)
    seen = level[level.any(axis=2)]
    assert len(seen) and far(seen, (200, 100, 50)) == 0


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "lanczos"])
@pytest.mark.parametrize(
    "box, size", [((10, 5, 40, 900), (9, 300)), ((3.3, 0, 31.7, 1000), (50, 64)), ((0, 0, 60, 30), (8, 90))]
)
def test_both_orders_of_passes_show_the_same(
    box: Any, size: tuple[int, int], interpolation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = encode(noise(1000, 60))
    across_first = window(data, box, size, interpolation)
    monkeypatch.setattr(pillow, "_MAX_BETWEEN", 0)
    # One rounding between the passes, of values that differ by less than a level each.
    assert far(window(data, box, size, interpolation), across_first) <= 2


# colours


@pytest.mark.parametrize("mode", ["L", "1", "RGBA", "LA", "P", "CMYK", "YCbCr", "LAB"])
def test_every_mode_comes_out_as_rgb(mode: str) -> None:
    image = quadrants().convert(mode) if mode != "LAB" else _lab(quadrants())
    out = show(encode(image, "TIFF" if mode in ("CMYK", "YCbCr", "LAB") else "PNG"))
    if mode in ("CMYK", "YCbCr", "LAB"):
        # A level of a or b of Lab is some levels of red or blue.
        assert far(out[16::32, 24::48], [[RED, GREEN], [BLUE, YELLOW]]) <= (8 if mode == "LAB" else 2)
    else:
        without_alpha = {"RGBA": "RGB", "LA": "L"}.get(mode, mode)
        np.testing.assert_array_equal(out, np.asarray(quadrants().convert(without_alpha).convert("RGB")))


def _lab(image: Image.Image) -> Image.Image:
    from PIL import ImageCms

    profiles = ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB")
    lab = ImageCms.profileToProfile(image, *profiles, outputMode="LAB")
    assert lab is not None
    return lab


def test_palettes_are_looked_up_with_and_without_transparency() -> None:
    picture = quadrants().quantize(4)
    expected = np.asarray(picture.convert("RGB"))
    for options in ({}, {"transparency": 1}, {"transparency": b"\0\x80\xff"}):
        np.testing.assert_array_equal(show(encode(picture, **options)), expected)
    np.testing.assert_array_equal(show(encode(picture, "GIF", transparency=0)), expected)


def test_transparency_is_dropped_and_the_stored_colours_stand() -> None:
    pixels = np.dstack([np.asarray(noise(32, 32)), np.zeros((32, 32), np.uint8)])
    for format in ("PNG", "TIFF"):
        np.testing.assert_array_equal(show(encode(Image.fromarray(pixels), format)), pixels[..., :3])
    keyed = encode(noise(32, 32), transparency=(1, 2, 3))
    np.testing.assert_array_equal(show(keyed), np.asarray(noise(32, 32)))


@pytest.mark.parametrize("format", ["PNG", "TIFF", "JPEG2000", "PPM"])
def test_sixteen_bits_are_scaled_and_not_clipped(format: str) -> None:
    levels = np.linspace(0, 65535, 64 * 64).astype(np.uint16).reshape(64, 64)
    out = show(encode(Image.fromarray(levels), format))
    assert far(out, np.rint(levels / 257)[..., None]) <= 1
    assert out.min() == 0 and out.max() == 255


@pytest.mark.parametrize("mode", ["I", "F"])
def test_samples_without_a_white_are_refused(mode: str) -> None:
    data = encode(noise(8, 8).convert("L").convert(mode), "TIFF")
    assert "nothing says what is black and what is white" in rejected(data)


def test_inverted_inks_are_those_of_adobe_only() -> None:
    marker = b"\xff\xee\x00\x0eAdobe\x00\x64\x00\x00\x00\x00\x00"
    inks = quadrants().convert("CMYK")
    # Pillow writes them inverted; newer ones say so in a marker.
    plain = encode(ImageChops.invert(inks), "JPEG", quality=95).replace(marker, b"")
    adobe = encode(inks, "JPEG", quality=95).replace(marker, b"")
    adobe = adobe[:2] + marker + adobe[2:]
    for data in (plain, adobe):
        assert far(np.array(corners(show(data))), [RED, GREEN, BLUE, YELLOW]) <= 6


@pytest.mark.parametrize("format", ["PNG", "GIF", "WEBP", "TIFF", "MPO"])
def test_of_several_frames_the_first_is_shown(format: str) -> None:
    magenta = Image.new("RGB", (96, 64), (255, 0, 255))
    data = encode(quadrants(), format, save_all=True, append_images=[magenta])
    assert far(np.array(corners(show(data))), [RED, GREEN, BLUE, YELLOW]) <= 8


def test_a_thumbnail_is_not_the_picture() -> None:
    data = encode(quadrants(), "JPEG", exif=b"Exif\0\0" + encode(Image.new("RGB", (48, 32), (255, 0, 255)), "JPEG"))
    assert far(np.array(corners(show(data))), [RED, GREEN, BLUE, YELLOW]) <= 8


def test_what_follows_the_picture_is_ignored() -> None:
    data = encode(quadrants(), "JPEG")
    for tail in (b"\n", bytes(100), encode(Image.new("RGB", (48, 32), (255, 0, 255)), "JPEG")):
        np.testing.assert_array_equal(show(data + tail), show(data))


# JPEGs decoded at a reduced size


def test_without_dct_scaling_nothing_is_reduced_and_with_it_only_jpegs_that_shrink_to_half() -> None:
    chain: list[Transform] = [Resize((50, 50))]
    for format, side, reduced in (("JPEG", 100, True), ("JPEG", 99, False), ("PNG", 400, False), ("MPO", 200, True)):
        data = encode(noise(side, side), format)
        assert (show(data, chain, dct_scaling=True) != show(data, chain)).any() == reduced
        # Neither in one direction alone.
        np.testing.assert_array_equal(
            show(data, [Resize((side, 10))], dct_scaling=True), show(data, [Resize((side, 10))])
        )


@pytest.mark.parametrize("reduction", [2, 4, 8])
@pytest.mark.parametrize("height, width", [(240, 320), (241, 321), (247, 327), (255, 333), (250, 65)])
@pytest.mark.parametrize("subsampling", ["4:4:4", "4:2:0"])
def test_a_reduced_jpeg_shows_the_same_window(height: int, width: int, subsampling: str, reduction: int) -> None:
    y, x = np.mgrid[0:height, 0:width]
    waves = np.stack([np.cos(x / 20) + np.cos(y / 20), np.sin(x / 20), np.sin(y / 20)], axis=2)
    image = Image.fromarray((128 + 60 * waves).astype(np.uint8))
    data = encode(image, "JPEG", quality=100, subsampling=subsampling)
    size = (height // reduction, width // reduction)
    for chain in ([Resize(size)], [Resize(size), CenterCrop((25, 7))], [Resize(size), Pad(3, 128)]):
        ours, exact = (show(data, chain, dct_scaling=scaling).astype(float) for scaling in (True, False))
        assert far(ours, exact) <= 5
        for axis in (0, 1):
            slope = np.gradient(exact, axis=axis)
            shift = ((ours - exact) * slope).sum() / (slope**2).sum()
            assert abs(shift) < 0.06, f"{shift} pixels along axis {axis}"


def test_a_reduced_jpeg_is_turned_and_cropped_like_the_whole() -> None:
    chain = [RandomResizedCrop(20, scale=(0.5, 1)), RandomHorizontalFlip(), RandomVerticalFlip(), CenterCrop((20, 12))]
    upright = noise(203, 301).resize((301, 203)).reduce(3).resize((301, 203), Image.Resampling.BICUBIC)
    for first in range(4):
        expected = show(encode(upright), chain, first)
        for orientation in range(1, 9):
            data = encode(
                stored(upright, orientation), "JPEG", quality=100, subsampling="4:4:4", exif=exif(orientation)
            )
            assert far(show(data, chain, first, dct_scaling=True), expected) <= 5, orientation


@pytest.mark.parametrize("mode", ["L", "CMYK", "RGB"])
def test_every_mode_of_jpeg_can_be_reduced(mode: str) -> None:
    data = encode(quadrants(256, 384).convert(mode), "JPEG", quality=95)
    chain: list[Transform] = [Resize((32, 48))]
    assert far(corners(show(data, chain, dct_scaling=True)), corners(show(data, chain))) <= 1


DAMAGES: dict[str, Any] = {
    "cut": lambda data, share: data[: int(len(data) * share)],
    "closed after a cut": lambda data, share: data[: int(len(data) * share)] + b"\xff\xd9",
    "zeros": lambda data, share: data[: int(len(data) * share)] + bytes(200) + data[int(len(data) * share) + 200 :],
    "a hole": lambda data, share: data[: int(len(data) * share)] + data[int(len(data) * share) + 200 :],
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"restart_marker_blocks": 3}, {"subsampling": "4:2:0"}])
def test_the_verdict_on_a_jpeg_is_the_same_for_every_window(damage: str, options: dict[str, Any]) -> None:
    for mode in ("RGB", "L", "CMYK"):
        whole = encode(noise(203, 301).convert(mode), "JPEG", **options)
        for share in (0.3, 0.6, 0.9, 0.97, 0.99, 0.999, 1.0):
            data = DAMAGES[damage](whole, share)
            verdicts = {verdict(data, Resize((203 // part, 301 // part))) for part in (1, 2, 4, 8)}
            assert len(verdicts) == 1, (mode, share, verdicts)


def verdict(data: bytes, transform: Transform) -> str | None:
    try:
        show(data, [transform], dct_scaling=True)
    except BadPicture as bad:
        return f"{bad.stage}: {bad.reason}"
    return None


def test_the_verdict_on_an_extra_sample_is_the_same_for_every_window(extra_samples: Path) -> None:
    files = [file for file in (extra_samples / "hard").rglob("*") if file.is_file()]
    for file in files:
        data = file.read_bytes()
        try:
            picture = probe(data, Decode())
        except BadPicture:
            continue
        sides = picture.height, picture.width
        picture.take().close()
        if picture.format in ("JPEG", "MPO"):
            sizes = {tuple(min(max(side // part, 1), 16384) for side in sides) for part in (1, 2, 4, 8)}
            assert len({verdict(data, Resize(size)) for size in sizes}) == 1, file


# bad pictures


@pytest.mark.parametrize("format", CUT)
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.97])
def test_pillow_bad_input_that_was_cut_off_is_a_reject(format: str, share: float) -> None:
    data = encode(noise(64, 64), format)
    assert rejected(data[: int(len(data) * share)])


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_pillow_bad_input_that_was_cut_off_is_a_reject_when_progressive(share: float) -> None:
    data = encode(noise(64, 64), "JPEG", progressive=True)
    assert rejected(data[: int(len(data) * share)])


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("share", [0.5, 0.7, 0.9])
def test_pillow_bad_input_closed_after_a_cut_is_a_reject(mode: str, share: float) -> None:
    data = encode(noise(64, 96).convert(mode), "JPEG")
    assert rejected(data[: int(len(data) * share)] + b"\xff\xd9") == "JPEG whose data end before the picture does"


def test_a_grey_corner_alone_is_no_sign_of_damage() -> None:
    for mode, level in (("RGB", (128, 128, 128)), ("L", 128)):
        assert (show(encode(Image.new(mode, (64, 48), level), "JPEG")) == 128).all()


def test_pillow_bad_input_that_claims_a_larger_size_is_a_reject() -> None:
    data = bytearray(encode(noise(64, 96), "JPEG"))
    at = data.find(b"\xff\xc0")
    data[at + 5 : at + 9] = (400).to_bytes(2, "big") + (600).to_bytes(2, "big")
    assert rejected(bytes(data)) == "JPEG whose data end before the picture does"


@pytest.mark.parametrize("rows", [0, 10, 63])
def test_pillow_bad_input_of_a_png_with_too_few_rows_is_a_reject(rows: int) -> None:
    whole = encode(noise(64, 96))
    stream = zlib.compress(zlib.decompress(b"".join(c for k, c in png.chunks(whole) if k == b"IDAT"))[: rows * 289])
    data = whole[: whole.find(b"IDAT") - 4] + chunk(b"IDAT", stream) + chunk(b"IEND", b"")
    assert rejected(data)


def test_pillow_bad_input_of_a_tiff_with_too_few_strips_is_a_reject() -> None:
    data = bytearray(encode(noise(64, 96), "TIFF", tiffinfo={278: 10}))
    directory = int.from_bytes(data[4:8], "little")
    for entry in range(directory + 2, directory + 2 + 12 * data[directory], 12):
        if int.from_bytes(data[entry : entry + 2], "little") in (273, 279):
            data[entry + 4] = 3
    assert rejected(bytes(data)) == "TIFF with fewer strips or tiles than the picture needs"


def test_a_black_last_row_alone_is_no_sign_of_damage() -> None:
    assert not show(encode(Image.new("RGB", (20, 10)))).any()


@pytest.mark.parametrize("format", [*CUT, "TIFF-lzw", "TIFF-jpeg", "JPEG-progressive"])
def test_pillow_bad_input_of_any_kind_never_raises(format: str) -> None:
    name, _, variant = format.partition("-")
    options: dict[str, Any] = {"lzw": {"compression": "tiff_lzw"}, "jpeg": {"compression": "jpeg"}}.get(variant, {})
    data = encode(noise(48, 48), name, **options, **({"progressive": True} if variant == "progressive" else {}))
    rng = np.random.default_rng(CUT.index(name))
    verdicts = 0
    for i in range(120):
        damaged = bytearray(data)
        for _ in range(rng.integers(1, 5)):
            damaged[rng.integers(0, len(damaged) if i % 2 else 64)] = rng.integers(0, 256)
        try:
            assert show(bytes(damaged), [CenterCrop(32)]).shape == (32, 32, 3)
        except BadPicture as bad:
            assert bad.reason
            verdicts += 1
    assert verdicts


def test_a_verdict_names_the_format_and_the_reason() -> None:
    data = encode(noise(64, 64), "JPEG")
    picture = probe(data[:-40], Decode())
    out = np.full((8, 8, 3), 9, np.uint8)
    params = plan([RandomResizedCrop(8)], 0, 0, 0, np.array([64]), np.array([64]))
    [verdict] = PillowBackend().render([picture], params, [out], lambda i: None)
    assert verdict is not None and verdict.stage == "decode"
    # It would keep the pixels of the picture alive.
    assert verdict.__traceback__ is None and verdict.__context__ is None
    assert re.match(r"JPEG: image file is truncated", verdict.reason)


# purity, resources


def test_pillow_purity_of_a_render_over_repeats_and_company() -> None:
    data = [encode(noise(60 + i, 90, seed=i), "JPEG") for i in range(6)]
    chain = [RandomResizedCrop(32), RandomHorizontalFlip()]

    def render(which: Sequence[int]) -> list[Pixels]:
        pictures = [probe(data[i], Decode()) for i in which]
        sizes = np.array([(60 + i, 90) for i in range(6)]).T
        params = plan(chain, 0, 0, 0, sizes[0], sizes[1]).take(np.array(which))
        out = [np.empty((32, 32, 3), np.uint8) for _ in which]
        assert PillowBackend().render(pictures, params, out, lambda i: None) == [None] * len(which)
        return out

    together = render(range(6))
    for i in range(6):
        np.testing.assert_array_equal(render([i])[0], together[i])
    for ours, again in zip(together, render(range(6)), strict=True):
        np.testing.assert_array_equal(ours, again)


def test_the_pixels_of_a_rendered_picture_are_given_back() -> None:
    picture = probe(encode(noise(64, 64)), Decode())
    params = plan([RandomResizedCrop(8)], 0, 0, 0, np.array([64]), np.array([64]))
    PillowBackend().render([picture], params, [np.empty((8, 8, 3), np.uint8)], lambda i: None)
    assert picture.image is None


def test_the_render_id_names_the_libraries() -> None:
    assert re.fullmatch(
        r"pillow/\d+\.\d+\.\d+\S*/libjpeg-turbo-\d+\.\d+\.\d+(/pillow-heif-[\d.]+)?", PillowBackend().render_id
    )


# the extra samples


def levels_apart(extra_samples: Path, chain: list[Transform]) -> Pixels:
    """Between photographs that were reduced while decoding and those that were not."""
    files = sorted((extra_samples / "photos").rglob("*.jpg"))[::8]
    pairs = [
        [show(file.read_bytes(), chain, i, dct_scaling=scaling).astype(int) for scaling in (True, False)]
        for i, file in enumerate(files)
    ]
    return np.array([np.abs(ours - exact) for ours, exact in pairs])


@pytest.mark.parametrize("size", [224, 128])
def test_photographs_decoded_at_a_reduced_size_differ_by_as_little_as_the_page_says(
    extra_samples: Path, size: int
) -> None:
    apart = levels_apart(extra_samples, [RandomResizedCrop(size)])
    assert 0 < apart.mean() < 1 and np.percentile(apart, 99) <= 9 and apart.max() <= 50


def test_photographs_differ_from_torchvision_at_the_border_by_as_little_as_the_page_says(extra_samples: Path) -> None:
    t = torchvision("transforms")
    apart = []
    for position, file in enumerate(sorted((extra_samples / "photos").rglob("*.jpg"))[::8]):
        picture = Image.open(file).convert("RGB")
        if picture.getexif().get(0x0112, 1) != 1:
            continue
        sides = np.array([picture.height]), np.array([picture.width])
        x0, y0, x1, y1 = (int(v) for v in plan([RandomResizedCrop(224)], 0, 0, position, *sides).box[0])
        theirs = t.functional.resized_crop(picture, y0, x0, y1 - y0, x1 - x0, [224, 224])
        apart.append(far(show(file.read_bytes(), [RandomResizedCrop(224)], position), theirs))
    assert 5 < max(apart) <= 25


#: Four inks, said by nothing to be Adobe's and coded like theirs: which colours were meant cannot be known.
UNKNOWABLE = {"jpeg_cmyk/ycck_marker_removed.jpg"}


def test_the_verdicts_of_the_hard_samples(extra_samples: Path) -> None:
    hard = extra_samples / "hard"
    if not (hard / "INDEX.tsv").is_file():
        pytest.skip("no hard samples")
    with open(hard / "INDEX.tsv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    wrong = {row["path"]: why for row in rows if row["verdict"] != "skip" and (why := _disagrees(hard, row))}
    assert not wrong


def _disagrees(hard: Path, row: dict[str, str]) -> str | None:
    path = row["path"].encode("latin-1", "backslashreplace").decode("unicode_escape").encode("latin-1")
    with open(bytes(hard) + b"/" + path, "rb") as file:
        data = file.read()
    try:
        picture = probe(data, Decode())
        size = picture.height, picture.width
        picture.take().close()
        # The mean hardly depends on the size.
        out = show(data, [Resize((min(size[0], 512), min(size[1], 512)))])
    except BadPicture as bad:
        return f"{bad} (should decode)" if row["verdict"] == "decode" else None
    if row["verdict"] == "reject":
        return "should be rejected"
    if row["expect_hw"] and row["expect_hw"] != f"{size[0]}x{size[1]}":
        return f"is {size[0]}x{size[1]}, not {row['expect_hw']}"
    if row["ref_mean_rgb"] and row["path"] not in UNKNOWABLE:
        mean = out.reshape(-1, 3).mean(axis=0)
        reference = np.array([float(v) for v in row["ref_mean_rgb"].split(",")])
        if np.abs(mean - reference).max() > (12 if row["kind"] in ("jpeg_cmyk", "avif") else 3):
            return f"mean {mean.round(1)}, not {reference}"
    return None
