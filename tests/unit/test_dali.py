"""The backend on DALI's CPU operators: Pillow's verdicts, nearly its pixels, and these a function of content alone."""

from __future__ import annotations

import ctypes
import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import kinds
import numpy as np
import pytest
from numpy.typing import NDArray
from pictures import encode, exif, noise, planar_jpeg, quadrants
from PIL import Image

from headrace.pipeline import dali, graph
from headrace.pipeline.backend import Backend, BackendFailed, Options, make
from headrace.pipeline.colour import Posterize
from headrace.pipeline.cuda import CudaError
from headrace.pipeline.probe import BadPicture, probe
from headrace.pipeline.spec import Decode
from headrace.pipeline.transforms import Params, parse, plan

Pixels = NDArray[np.uint8]


def sampled(luma: int, data: bytes, height: int, width: int) -> bytes:
    """The JPEG with its units laid out otherwise, each of as many blocks: for samplings that Pillow does not write."""
    frame = data.find(b"\xff\xc0") + 5
    sides = height.to_bytes(2, "big") + width.to_bytes(2, "big")
    return data[:frame] + sides + data[frame + 4 : frame + 6] + bytes([luma]) + data[frame + 7 :]


RGB, GREY = noise(61, 95), noise(61, 95, 1).convert("L")
JPEGS = {
    "4:4:4": encode(RGB, "JPEG", subsampling=0),
    "4:2:2": encode(RGB, "JPEG", subsampling=1),
    "4:2:0": encode(RGB, "JPEG", subsampling=2),
    "4:1:1": sampled(0x41, encode(noise(32, 96), "JPEG", subsampling=2), 13, 187),
    "1x4": sampled(0x14, encode(noise(32, 96), "JPEG", subsampling=2), 59, 45),
    "4:4:0": sampled(0x12, encode(noise(32, 96), "JPEG", subsampling=1), 61, 45),
    "grey": encode(GREY, "JPEG"),
    "progressive": encode(RGB, "JPEG", progressive=True),
    "grey progressive": encode(GREY, "JPEG", progressive=True),
    "restarts": encode(RGB, "JPEG", restart_marker_blocks=3),
    "planar": b"".join(planar_jpeg(RGB)),
    **{f"orientation {n}": encode(RGB, "JPEG", exif=exif(n)) for n in range(2, 9)},
}
#: DALI takes its header and refuses its pixels, and so does Pillow: the scan names a table that is not there.
BROKEN = JPEGS["4:2:0"].replace(b"\xff\xda\0\x0c\3\1\0", b"\xff\xda\0\x0c\3\1\x33")


@pytest.fixture(params=["windows", "through"])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """DALI decodes the windows, as on a CPU; or does all, as on a GPU."""
    made = dali.DaliBackend(Options(), through=request.param == "through")
    yield made
    made.close()


@pytest.fixture
def pillow() -> Backend:
    return make("pillow")


def params(box: Sequence[Sequence[float]], size: tuple[int, int] = (9, 14), **options: Any) -> Params:
    n = len(box)
    rows = {"mirror_x": np.zeros(n, np.bool_), "mirror_y": np.zeros(n, np.bool_), "interpolation": "bilinear"}
    return Params(np.array(box, np.float64), size=size, **(rows | options))


def windows(height: int, width: int, count: int, seed: int = 0, **options: Any) -> Params:
    """Anywhere inside, most at whole pixels; among them all of it and its corners."""
    rng = np.random.default_rng(seed)
    low = rng.uniform(0, 1, (count, 2)) * [width - 1, height - 1]
    high = low + np.maximum(1, rng.uniform(0, 1, (count, 2)) * ([width, height] - low))
    box = np.concatenate([low, np.minimum(high, [width, height])], axis=1)
    box[::4] = np.stack([*np.floor(box.T[:2]), *np.ceil(box.T[2:])], axis=1)[::4]
    box[:3] = [0, 0, width, height], [0, 0, 1, 1], [width - 1, height - 1, width, height]
    flags = rng.random((2, count)) < 0.5
    return params(box.tolist(), mirror_x=flags[0], mirror_y=flags[1], **options)


def render(
    backend: Backend, files: Sequence[bytes], params: Params, *, whole: bool = False
) -> tuple[Pixels, list[str | None], list[bool]]:
    """Pixels, reasons of rejects, and which are whole from now on."""
    pictures = [probe(data, Decode()) for data in files]
    for picture in pictures:
        picture.whole = whole
    out = np.full((len(files), *params.size, 3), 77, np.uint8)
    verdicts = backend.render(pictures, params, list(out), lambda now: None)
    reasons = [verdict and verdict.reason for verdict in verdicts]
    return out, reasons, [picture.whole for picture in pictures]


def extent(data: bytes) -> tuple[int, int]:
    picture = probe(data, Decode())
    return picture.height, picture.width


def full(files: Sequence[bytes], size: tuple[int, int] = (16, 24), **options: Any) -> Params:
    sizes = [extent(data) for data in files]
    return params([[0, 0, width, height] for height, width in sizes], size, **options)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "lanczos"])
@pytest.mark.parametrize("kind", ["4:2:0", "grey", "orientation 6", "orientation 7"])
def test_dali_cpu_parity_with_pillow(backend: Backend, pillow: Backend, kind: str, interpolation: str) -> None:
    given = windows(*extent(JPEGS[kind]), 24, interpolation=interpolation)
    files = [JPEGS[kind]] * len(given)
    ours, theirs = (render(of, files, given)[0].astype(int) for of in (backend, pillow))
    assert np.abs(ours - theirs).mean() < 0.3
    assert np.quantile(np.abs(ours - theirs), 0.999) <= 4


@pytest.mark.parametrize("kind", JPEGS)
def test_dali_cpu_purity_a_part_decoded_alone_is_that_of_the_whole_to_the_bit(backend: Backend, kind: str) -> None:
    files = [JPEGS[kind]] * 32
    for interpolation in ("bilinear", "lanczos"):
        given = windows(*extent(JPEGS[kind]), 32, interpolation=interpolation)
        whole, reasons, found = render(backend, files, given)
        assert reasons == [None] * 32 and all(found)
        part, reasons, _ = render(backend, files, given, whole=True)
        assert reasons == [None] * 32
        np.testing.assert_array_equal(part, whole)


def test_dali_cpu_purity_whoever_is_in_the_batch(backend: Backend) -> None:
    files = [*JPEGS.values()]
    given = full(files)
    together = render(backend, files, given)[0]
    for i, data in enumerate(files):
        rows = np.array([i])
        np.testing.assert_array_equal(render(backend, [data], given.take(rows))[0][0], together[i])
    order = np.random.default_rng(0).permutation(len(files))
    mixed = render(backend, [files[i] for i in order], given.take(order))[0]
    np.testing.assert_array_equal(mixed, together[order])


@pytest.mark.parametrize("whole", [False, True])
def test_dali_cpu_bad_input_costs_nobody_else_a_bit(backend: Backend, whole: bool) -> None:
    files = [*JPEGS.values()][:9]
    good = render(backend, files, full(files), whole=whole)[0]
    for bad in ([0], [8], [3, 4], [0, 1, 2, 5, 8]):
        spoilt = [BROKEN if i in bad else data for i, data in enumerate(files)]
        pixels, reasons, _ = render(backend, spoilt, full(spoilt), whole=whole)
        for i in range(len(files)):
            if i in bad:
                assert reasons[i] == "JPEG: broken data stream when reading image file" and not pixels[i].any()
            else:
                assert reasons[i] is None
                np.testing.assert_array_equal(pixels[i], good[i])


@pytest.mark.parametrize(("size", "interpolation", "resamples"), [
    ((12, 18), "bilinear", "dali"),
    ((12, 18), "lanczos", "pillow"),
    ((48, 64), "bilinear", "pillow"),
])  # fmt: skip
def test_who_resamples_on_a_cpu_follows_from_the_window_and_the_filter(
    size: tuple[int, int], interpolation: str, resamples: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [JPEGS["4:2:0"], JPEGS["orientation 6"]]
    sizes = [extent(data) for data in files]
    given = params([[7, 7, width - 7, height - 7] for height, width in sizes], size, interpolation=interpolation)
    pixels = {}
    for coarse in (0, dali._COARSE, 1e9):
        monkeypatch.setattr(dali, "_COARSE", coarse)
        with closing(dali.DaliBackend(Options(), through=coarse == 0)) as backend:
            pixels[coarse] = render(backend, files, given)[0]
    by = {"dali": pixels.pop(0), "pillow": pixels.pop(1e9)}
    [found] = pixels.values()
    assert not np.array_equal(by["dali"], by["pillow"])
    np.testing.assert_array_equal(found, by[resamples])


def test_what_dali_has_resampled_is_painted_like_the_rest() -> None:
    files = [JPEGS["4:2:0"]]
    chain = [
        parse({"resize": {"size": 16}}),
        parse({"center_crop": {"size": 12}}),
        parse({"random_solarize": {"threshold": 128, "p": 1.0}}),
    ]
    height, width = extent(files[0])
    given = plan(chain, 1, 0, 0, np.array([height]), np.array([width]))
    with closing(dali.DaliBackend(Options())) as backend:
        plain = render(backend, files, replace(given, colour=()))[0]
        painted = render(backend, files, given)[0]
    np.testing.assert_array_equal(painted, np.where(plain >= 128, 255 - plain, plain))


def test_who_is_worked_on_is_always_said_before(backend: Backend) -> None:
    files = [JPEGS["4:2:0"], kinds.jpeg()[:-30], encode(RGB), BROKEN, *[JPEGS["4:4:4"]] * 20]
    pictures, out = [probe(data, Decode()) for data in files], np.full((len(files), 16, 24, 3), 77, np.uint8)
    begun: set[int] = set()

    def begin(now: Sequence[int]) -> None:
        assert {i for i, pixels in enumerate(out) if (pixels != 77).any()} <= begun
        assert 0 < len(now) <= 8
        begun.update(now)

    backend.render(pictures, full(files), list(out), begin)
    assert begun == set(range(len(files)))


def test_who_is_decoded_again_by_pillow_is_said_alone(backend: Backend) -> None:
    files = [JPEGS["4:4:4"], encode(Image.new("RGB", RGB.size, (128, 128, 128)), "JPEG"), JPEGS["4:2:0"]]
    begun: list[list[int]] = []
    pictures, out = [probe(data, Decode()) for data in files], np.zeros((3, 16, 24, 3), np.uint8)
    assert backend.render(pictures, full(files), list(out), lambda now: begun.append([*now])) == [None] * 3
    assert begun == [[0, 1, 2], [1]]


def test_what_markers_leave_in_doubt_is_pillows_to_the_bit(backend: Backend, pillow: Backend) -> None:
    files = [JPEGS["4:2:0"][:-2] + b"\xff\xfe\0\2\xff\xd9", JPEGS["4:4:4"]]
    ours, reasons, whole = render(backend, files, full(files))
    assert reasons == [None, None] and whole == [False, True]
    np.testing.assert_array_equal(ours[0], render(pillow, files, full(files))[0][0])


def test_nothing_is_printed_about_damaged_pictures(backend: Backend, capfd: pytest.CaptureFixture[str]) -> None:
    files = [BROKEN, JPEGS["4:2:0"][:-200] + b"\xff\xd9", JPEGS["4:2:0"][:-2]]
    _, reasons, _ = render(backend, files, full(files))
    assert None not in reasons
    assert capfd.readouterr() == ("", "")


def test_the_memory_of_many_refusals_is_given_back(backend: Backend) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    files = [JPEGS["4:2:0"], BROKEN]
    for _ in range(10):
        render(backend, files, full(files))
    before = resident()
    for _ in range(40):
        render(backend, files, full(files))
    assert resident() - before < 8 << 20


def test_free_memory_goes_back_to_the_system_every_so_many_pixels(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    trims: list[int] = []
    monkeypatch.setattr(dali, "_trim", lambda: trims.append(1))
    monkeypatch.setattr(dali, "_TIDY_PIXELS", 4 * 61 * 95)
    for _ in range(11):
        render(backend, [JPEGS["4:2:0"]], full([JPEGS["4:2:0"]]))
    assert len(trims) == 2


def routed() -> dict[str, bytes]:
    """Pictures that are Pillow's, whoever is asked."""
    made = kinds.make()
    names = [name for name, kind in made.items() if kind.colours is not None and kind.size[0] * kind.size[1] < 1 << 16]
    theirs = [n for n in names if n.partition("/")[0] in ("inks", "png", "other") or "arithmetic" in n]
    rgb = encode(Image.merge("YCbCr", quadrants().split()), "JPEG", quality=95, subsampling=0)
    start = rgb.find(b"\xff\xdb")
    adobe = b"\xff\xee\0\x0eAdobe\0\x64\0\0\0\0\0"
    return {n: made[n].data for n in theirs} | {"jpeg/rgb.jpg": rgb[:2] + adobe + rgb[start:]}


def test_what_is_no_usual_jpeg_is_pillows_to_the_bit(backend: Backend, pillow: Backend) -> None:
    files = [*routed().values()]
    ours, reasons, whole = render(backend, files, full(files))
    np.testing.assert_array_equal(ours, render(pillow, files, full(files))[0])
    assert not any(reasons) and not any(whole)


def test_verdicts_are_pillows_on_files_of_every_kind_whole_or_by_a_window(backend: Backend, pillow: Backend) -> None:
    files = {}
    for name, kind in kinds.make().items():
        try:
            probe(kind.data, Decode())
            files[name] = kind.data
        except BadPicture:
            pass
    corner = params([[0, 0, 1, 1]] * len(files))
    for given in (full([*files.values()]), corner):
        ours, theirs = (render(of, [*files.values()], given) for of in (backend, pillow))
        assert dict(zip(files, ours[1], strict=True)) == dict(zip(files, theirs[1], strict=True))
        assert np.abs(ours[0].astype(int) - theirs[0]).mean() < 0.3


def test_seeded_mutations_get_the_verdict_that_pillow_gives(backend: Backend, pillow: Backend) -> None:
    files = [data for data in mutations(random.Random(7), 400) if is_opened(data)]
    given = full(files, (8, 8))
    ours, theirs = (render(of, files, given) for of in (backend, pillow))
    assert ours[1] == theirs[1]
    assert 50 < sum(reason is None for reason in ours[1]) < len(files) - 50
    again = [i for i, whole in enumerate(ours[2]) if whole]
    part, reasons, _ = render(backend, [files[i] for i in again], given.take(np.array(again)), whole=True)
    assert not any(reasons)
    np.testing.assert_array_equal(part, ours[0][again])


def is_opened(data: bytes) -> bool:
    try:
        probe(data, Decode(max_pixels=1 << 20))
        return True
    except BadPicture:
        return False


def mutations(rng: random.Random, count: int) -> Iterator[bytes]:
    """Damaged JPEGs of every kind."""
    sources = [encode(noise(24, 40), "JPEG", **options) for options in JPEG_OPTIONS]
    sources.append(b"".join(planar_jpeg(noise(24, 40))))
    marks = b"\xff\xd8", b"\xff\xd9", b"\xff\xda", b"\xff\xc4", b"\xff\xd0", b"\xff\xd3", b"\xff\xfe", b"\xff\x80"
    for _ in range(count):
        data, other = bytearray(rng.choice(sources)), rng.choice(sources)
        for _ in range(rng.choice((1, 1, 2, 3))):
            at = rng.randrange(2, len(data))
            if rng.random() < 0.7:
                at = rng.randrange(min(data.find(b"\xff\xda") % len(data), len(data) - 1), len(data))
            match rng.randrange(8):
                case 0:
                    data[at] = rng.randrange(256)
                case 1:
                    data[at] ^= 1 << rng.randrange(8)
                case 2:
                    del data[at : at + rng.randrange(1, 40)]
                case 3:
                    data[at:at] = rng.choice(marks)
                case 4:
                    del data[at:]
                    data += rng.choice((b"", b"\xff\xd9", other[rng.randrange(len(other)) :]))
                case 5:
                    data[at : at + 30] = bytes(30)
                case 6:
                    data[at:at] = other[rng.randrange(len(other)) :]
                case 7:
                    data[at:at] = rng.randbytes(rng.randrange(1, 20))
            if len(data) < 64:
                break
        yield bytes(data)


JPEG_OPTIONS: list[dict[str, Any]] = [
    {"subsampling": 0},
    {"subsampling": 2},
    {"progressive": True, "subsampling": 2},
    {"restart_marker_blocks": 2},
    {"optimize": True, "quality": 40},
]


def test_what_pillow_takes_and_dali_refuses_keeps_pillows_pixels_in_any_company(
    backend: Backend, pillow: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = dali.DaliBackend._outputs

    def refusing(self: Any, form: Any, fed: dict[str, Any], *into: Any) -> Any:
        for k, data in enumerate(fed["data"]):
            if data.tobytes() == JPEGS["4:2:2"]:
                raise dali._Refused(f"Failed to decode sample #{k} :")
        return real(self, form, fed, *into)

    monkeypatch.setattr(dali.DaliBackend, "_outputs", refusing)
    files = [JPEGS["4:4:4"], JPEGS["4:2:2"], JPEGS["4:2:0"]]
    pixels, reasons, whole = render(backend, files, full(files))
    assert reasons == [None] * 3 and whole == [True, False, True]
    np.testing.assert_array_equal(pixels[1], render(pillow, files, full(files))[0][1])
    np.testing.assert_array_equal(pixels[1], render(backend, files[1:2], full(files[1:2]))[0][0])


@pytest.mark.parametrize(
    "words",
    ["nvImageCodec failure: '#4'", "Failed to decode sample #17", "Unknown error", "Failed to decode sample #0"],
)
def test_whom_dali_does_not_name_is_found_nevertheless(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    real = dali.DaliBackend._outputs

    def vague(self: Any, form: Any, fed: dict[str, Any], *into: Any) -> Any:
        if any(data.tobytes() == BROKEN for data in fed["data"]):
            raise dali._Refused(words)
        return real(self, form, fed, *into)

    files = [JPEGS["4:4:4"], JPEGS["4:2:2"], BROKEN, JPEGS["4:2:0"]]
    alone = [render(backend, [data], full([data]))[0][0] for data in files]
    monkeypatch.setattr(dali.DaliBackend, "_outputs", vague)
    pixels, reasons, _ = render(backend, files, full(files))
    assert [reason is None for reason in reasons] == [True, True, False, True]
    np.testing.assert_array_equal(pixels, alone)


# -- DALI as a whole --------------------------------------------------------------------------------------------


def failing(text: str) -> Callable[..., Any]:
    def build(*args: object) -> Any:
        raise RuntimeError(text)

    return build


class Broken:
    """A module whose import raises what imports should not."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("a library is of another version")


@pytest.mark.parametrize("module", [None, Broken()], ids=["missing", "broken"])
def test_dali_that_cannot_be_imported_is_a_backend_that_failed(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "headrace.pipeline.dali", module)
    with pytest.raises(BackendFailed, match=r"DALI cannot be imported .*headrace\[dali\]"):
        make("dali-cpu")


def test_dali_that_refuses_a_good_picture_is_a_backend_that_failed(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph, "build", failing("an operator is missing"))
    with pytest.raises(BackendFailed, match="known to be good.*an operator is missing"):
        make("dali-cpu")
    with pytest.raises(BackendFailed, match="known to be good.*an operator is missing"):
        render(backend, [JPEGS["4:2:0"]], full([JPEGS["4:2:0"]]))


def test_no_memory_is_no_verdict_on_a_picture(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "build", failing("CUDA driver API error CUDA_ERROR_OUT_OF_MEMORY"))
    given = full([JPEGS["4:2:0"]], (5, 7))
    with pytest.raises(BackendFailed, match="OUT_OF_MEMORY"):
        render(backend, [JPEGS["4:2:0"]], given)


def test_why_dali_fails_is_said_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("libcudart.so is missing. Install it.\nStacktrace (9):\n[frame 0]\n", "an operator is missing\nat 7"):
        monkeypatch.setattr(graph, "build", failing(f"{text}\nCurrent pipeline object is no longer valid."))
        with pytest.raises(BackendFailed, match="missing") as failed:
            make("dali-cpu")
        assert "\n" not in str(failed.value) and "pipeline object" not in str(failed.value)


def test_a_pipeline_that_was_fed_in_part_is_not_used_again(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    files, given = [JPEGS["4:2:0"], JPEGS["4:4:4"]], full([JPEGS["4:2:0"], JPEGS["4:4:4"]])
    want = render(backend, files, given)[0]
    with monkeypatch.context() as patch:
        real = graph.inputs
        patch.setattr(graph, "inputs", lambda *of: real(*of) | {"roi_end": np.float32(0)})
        with pytest.raises(IndexError):
            render(backend, files[::-1], given)
    np.testing.assert_array_equal(render(backend, files, given)[0], want)


def test_after_dali_failed_the_same_backend_renders_again(backend: Backend) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph, "build", failing("gone"))
        with pytest.raises(BackendFailed):
            render(backend, [JPEGS["4:2:0"]], full([JPEGS["4:2:0"]], (5, 8)))
    assert render(backend, [JPEGS["4:2:0"]], full([JPEGS["4:2:0"]], (5, 8)))[1] == [None]


def test_dali_gpu_bad_input_is_a_machine_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "build", failing("Failed to load libcuda.so"))
    with pytest.raises(BackendFailed, match="libcuda"):
        make("dali-gpu", Options(device=0))


class Fetching:
    """A device whose memory is the host's."""

    def __init__(self, trouble: str = "") -> None:
        self.trouble = trouble
        self.fetched = 0

    def fetch(self, copies: Sequence[tuple[int, int, int]]) -> None:
        if self.trouble:
            raise CudaError(self.trouble)
        for to, start, nbytes in copies:
            ctypes.memmove(to, start, nbytes)
        self.fetched += len(copies)


def test_pixels_on_a_device_are_fetched_into_their_rows() -> None:
    files = [JPEGS["4:4:4"], BROKEN, JPEGS["4:2:0"], JPEGS["orientation 6"]]
    ours = dali.DaliBackend(Options(), through=True)
    want = render(ours, files, full(files))
    ours._gpu = device = Fetching()  # type: ignore[assignment]
    pixels, reasons, whole = render(ours, files, full(files))
    np.testing.assert_array_equal(pixels, want[0])
    assert (reasons, whole) == want[1:]
    assert device.fetched == 3


def test_a_device_that_does_not_give_its_pixels_has_failed() -> None:
    ours = dali.DaliBackend(Options(), through=True)
    ours._gpu = Fetching("cuStreamSynchronize: an illegal memory access")  # type: ignore[assignment]
    with pytest.raises(BackendFailed, match="CUDA: cuStreamSynchronize: an illegal"):
        render(ours, [JPEGS["4:2:0"]], full([JPEGS["4:2:0"]]))


@pytest.mark.parametrize(
    ("share", "part"), [(0.0, ""), (1.0, "jpeg-engine/"), (0.25, "hw_decoder_load-0.25/")], ids=["none", "all", "some"]
)
def test_the_render_id_of_a_gpu_says_which_kind_who_decodes_and_whether_pictures_depend_on_each_other(
    pillow: Backend, monkeypatch: pytest.MonkeyPatch, share: float, part: str
) -> None:
    class Device:
        kind = "NVIDIA H200 9.0"

    monkeypatch.setattr(dali, "_gpu", lambda number: Device())
    monkeypatch.setattr(dali.DaliBackend, "_check", lambda self: None)
    made = make("dali-gpu", Options(hw_decoder_load=share))
    versions = r"dali-gpu/\d+\.\d+\.\d+/nvimgcodec-[\d.]+"
    assert re.fullmatch(f"{versions}/NVIDIA H200 9\\.0/{part}{re.escape(pillow.render_id)}", made.render_id)


def test_the_render_id_of_a_cpu_names_dali_its_decoder_and_pillow(backend: Backend, pillow: Backend) -> None:
    assert re.fullmatch(r"dali-cpu/\d+\.\d+\.\d+/nvimgcodec-[\d.]+/(.*)", backend.render_id)
    assert backend.render_id.endswith(f"/{pillow.render_id}")


@pytest.mark.parametrize(("cpu", "judged"), [(True, 0), (False, 1)])
def test_the_grey_of_missing_data_need_not_be_a_gpus_to_the_level(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, cpu: bool, judged: int
) -> None:
    assert isinstance(backend, dali.DaliBackend)
    backend._cpu = cpu
    asked: list[object] = []
    monkeypatch.setattr(dali, "decode", asked.append)
    files = [encode(Image.new("RGB", (16, 16), (125, 125, 125)), "JPEG")]
    assert render(backend, files, full(files))[1] == [None]
    assert len(asked) == judged


# -- geometry ---------------------------------------------------------------------------------------------------


def test_a_frame_is_pillows_to_the_pixel(backend: Backend, pillow: Backend) -> None:
    boxes = [
        [-20, -30, 115, 91],
        [-40, 10, 60, 40],
        [50, 20, 140, 70],
        [0, 0, 95, 61],
        [95, 0, 200, 61],
        [-9, 61, 9, 99],
    ]
    for kind in ("4:2:0", "orientation 3", "orientation 8"):
        files = [JPEGS[kind]] * len(boxes)
        for flag in (False, True):
            mirror = {"mirror_x": np.full(len(boxes), flag), "mirror_y": np.full(len(boxes), not flag)}
            given = params(boxes, (16, 24), framed=True, fill=(1, 2, 3), **mirror)
            ours, theirs = (render(of, files, given)[0].astype(int) for of in (backend, pillow))
            np.testing.assert_array_equal((ours == [1, 2, 3]).all(axis=3), (theirs == [1, 2, 3]).all(axis=3))
            assert np.abs(ours - theirs).mean() < 0.3


def test_a_picture_of_which_nothing_shows_is_judged_all_the_same(backend: Backend) -> None:
    files = [JPEGS["4:2:0"], JPEGS["4:2:0"][:-60]]
    given = params([[200, 200, 300, 300]] * 2, framed=True, fill=(9, 8, 7))
    pixels, reasons, _ = render(backend, files, given)
    assert reasons[0] is None and "truncated" in str(reasons[1])
    assert (pixels[0] == [9, 8, 7]).all() and not pixels[1].any()


@pytest.mark.parametrize("size", [(1, 1), (1, 64), (64, 1), (4000, 3), (3, 4000)])
@pytest.mark.parametrize("out", [(1, 1), (7, 5)])
def test_pictures_of_odd_sizes_are_as_pillows(
    backend: Backend, pillow: Backend, size: tuple[int, int], out: tuple[int, int]
) -> None:
    files = [encode(noise(*size), "JPEG", quality=95)]
    ours, theirs = (render(of, files, full(files, out))[0].astype(int) for of in (backend, pillow))
    # Where its filter leaves the picture Pillow weighs what there is, and DALI's resize goes on with the last pixel.
    assert np.abs(ours - theirs).max() <= 6


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "lanczos"])
def test_what_is_around_a_window_is_as_much_as_the_filter_sees(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, interpolation: str
) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (200, 300, 3), np.uint8)
    files = [encode(Image.fromarray(pixels), "JPEG", quality=95)]
    for box in ([80, 50, 200, 150], [120.4, 70.7, 131.1, 79.2]):  # made smaller, made larger
        given = params([box], (30, 40), interpolation=interpolation)
        some = render(backend, files, given)[0].astype(int)
        with monkeypatch.context() as patch:
            patch.setattr(graph, "_FILTERS", {name: (kind, 99) for name, (kind, _) in graph._FILTERS.items()})
            assert np.abs(render(backend, files, given)[0] - some).max() <= 1


def test_colours_are_painted_upright(backend: Backend) -> None:
    files = [JPEGS["4:2:0"], JPEGS["orientation 6"]]
    step = Posterize(np.array([0b11000000, 0b10000000], np.uint8))
    plain, painted = (render(backend, files, full(files, colour=colour))[0] for colour in ((), (step,)))
    np.testing.assert_array_equal(painted, plain & step.mask[:, None, None, None])


def test_few_pipelines_are_kept_whatever_is_asked_for() -> None:
    backend = dali.DaliBackend(Options(), through=True)
    for side in range(1, 14):
        render(backend, [JPEGS["grey"]], full([JPEGS["grey"]], (side, side)))
    assert len(backend._pipelines) == dali._PIPELINES
    backend.close()


def test_a_batch_is_bounded_in_pictures_and_in_pixels() -> None:
    assert [*dali._cut([*range(10)], [1] * 10, 8, 100)] == [[*range(8)], [8, 9]]
    assert [*dali._cut([3, 4, 5, 6], [50, 50, 150, 1], 8, 100)] == [[3, 4], [5], [6]]
    assert [*dali._cut([], [], 8, 100)] == []
