from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from pydantic import ValidationError
from torchvision_shim import torchvision

from headrace.draws import uniforms
from headrace.errors import ConfigError
from headrace.pipeline.transforms import (
    TRANSFORMS,
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
    named,
    output_size,
    parse,
    plan,
    unfit,
)

SIZES = [(853, 1280), (1280, 853), (375, 500), (224, 224), (1, 1), (1, 300), (300, 1), (2, 3), (17, 1000), (65500, 1)]


def planned(transforms: Sequence[Transform], sizes: Sequence[tuple[int, int]], seed: int = 0, epoch: int = 0) -> Params:
    heights, widths = np.array(sizes, np.int64).T
    return plan(transforms, seed, epoch, 0, heights, widths)


# parse, dump, arguments


def test_a_name_stands_for_its_defaults() -> None:
    assert parse("random_horizontal_flip") == RandomHorizontalFlip(0.5)
    assert parse({"random_vertical_flip": None}) == RandomVerticalFlip()


def test_arguments_come_as_a_mapping() -> None:
    assert parse({"random_resized_crop": {"size": 224, "scale": [0.2, 1]}}) == RandomResizedCrop(224, scale=(0.2, 1.0))


def test_a_transform_is_itself() -> None:
    crop = CenterCrop(5)
    assert parse(crop) is crop


def test_sizes_are_positional_as_in_torchvision() -> None:
    assert Resize(256).size == 256
    assert Resize([256]).size == 256
    assert Resize((100, 200)).size == (100, 200)
    assert CenterCrop(224).size == (224, 224)
    assert RandomResizedCrop(224, (0.5, 1.0)).scale == (0.5, 1.0)


def test_defaults_are_those_of_torchvision() -> None:
    t = torchvision("transforms")
    theirs, ours = t.RandomResizedCrop(224), RandomResizedCrop(224)
    assert (ours.scale, ours.ratio, ours.interpolation) == (theirs.scale, theirs.ratio, theirs.interpolation.value)
    assert Resize(5).interpolation == t.Resize(5).interpolation.value
    assert RandomHorizontalFlip().p == t.RandomHorizontalFlip().p
    assert RandomVerticalFlip().p == t.RandomVerticalFlip().p
    assert Resize(5).max_size is t.Resize(5).max_size is None
    crop = t.RandomCrop(5)
    assert (RandomCrop(5).pad_if_needed, RandomCrop(5).fill) == (crop.pad_if_needed, (crop.fill,) * 3)
    assert RandomCrop(5) == RandomCrop(5, crop.padding)
    assert Pad(5).fill == (t.Pad(5).fill,) * 3


@pytest.mark.parametrize("kind", TRANSFORMS.values(), ids=lambda kind: kind.__name__)
def test_type_checkers_are_told_the_fields_in_their_order_and_which_are_required(kind: type[Transform]) -> None:
    (written,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    (init,) = (node for node in ast.walk(written) if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    assert [argument.arg for argument in init.args.args] == ["self", *kind.model_fields]
    required = [name for name, field in kind.model_fields.items() if field.is_required()]
    assert len(init.args.args) - len(init.args.defaults) == 1 + len(required)


@pytest.mark.parametrize(
    "transform",
    [
        Resize(256),
        Resize((3, 4), "lanczos"),
        Resize(None, max_size=9),
        CenterCrop(9),
        RandomResizedCrop(8, ratio=(1, 2)),
        RandomCrop(32, 4, fill=114),
        Pad([1, 2, 3, 4], [5, 6, 7]),
        Letterbox(640, 114, False),
    ],
)
def test_dump_and_parse_are_inverse_and_defaults_are_filled_in(transform: Transform) -> None:
    plain = transform.plain()
    assert parse(plain) == transform
    assert set(plain[transform.name]) == set(type(transform).model_fields)


def test_equal_transforms_dump_equally_however_they_are_written() -> None:
    assert CenterCrop(5).plain() == CenterCrop([5, 5]).plain() == parse({"center_crop": {"size": [5]}}).plain()
    assert Pad(3).plain() == Pad([3, 3]).plain() == Pad((3, 3, 3, 3), [0]).plain() == Pad(3, [0, 0, 0]).plain()
    assert Pad([1, 2]).padding == Pad([1, 2, 1, 2]).padding
    assert RandomCrop(4, None).plain() == RandomCrop(4, 0).plain()


@pytest.mark.parametrize(
    "item, text",
    [
        ("resise", r"'resise' is not a transform \(did you mean resize\?\); there are random_resized_crop, resize, "),
        ("RandomResizedCrop", "did you mean random_resized_crop"),
        (7, "7 is not a transform: write a name or"),
        ({"a": {}, "b": {}}, "one per list item"),
        ({3: {}}, "3 is not a transform"),
        ("normalize", "'normalize' is not a transform: mean and std stand in the stream's output"),
        ({"Normalize": {"mean": [0], "std": [1]}}, "mean and std stand in the stream's output"),
        ("ToTensor", "'ToTensor' is not a transform: leave it out"),
        ("PILToTensor", "output: {dtype: uint8}"),
        ({"resize": 256}, "resize: 256 is not a mapping of arguments, which are size, interpolation"),
        ("resize", "resize: size: is required"),
    ],
)
def test_what_is_no_transform_is_refused_with_what_is(item: object, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        parse(item)


SIZE = "is not a whole number of pixels from 1 to 16384"
BAD_ARGUMENTS: list[tuple[str, dict[str, Any], str]] = [
    ("resize", {"size": 0}, f"size: 0 {SIZE}"),
    ("resize", {"size": 2.5}, f"size: 2.5 {SIZE}"),
    ("resize", {"size": True}, f"size: True {SIZE}"),
    ("resize", {"size": [1, 2, 3]}, "neither one number nor"),
    ("resize", {"size": 5, "interpolation": "nearest"}, "'bilinear', 'bicubic' or 'lanczos'"),
    ("resize", {"size": 5, "antialias": False}, "antialias: there is no such argument; there are size, interpolation"),
    ("resize", {"size": None}, "size: may be null only where max_size is given"),
    ("resize", {"size": [5, 6], "max_size": 7}, "max_size: belongs to a size of one number"),
    ("resize", {"size": 7, "max_size": 7}, "max_size: 7 is of the longer side and must be larger than size, 7"),
    ("resize", {"size": 7, "max_size": 0}, f"max_size: 0 {SIZE}"),
    ("random_crop", {}, "size: is required"),
    (
        "random_crop",
        {"size": 5, "padding": [1, 2, 3]},
        r"padding: \[1, 2, 3\] is neither one number nor \[left and right",
    ),
    ("random_crop", {"size": 5, "padding": -1}, "padding: -1 is not a number of pixels from 0 to 16384"),
    ("random_crop", {"size": 5, "pad_if_needed": 1}, "pad_if_needed: Input should be a valid boolean"),
    ("random_crop", {"size": 5, "padding_mode": "reflect"}, "padding_mode: there is no such argument; .* constant"),
    ("pad", {}, "padding: is required"),
    ("pad", {"padding": 1.5}, "padding: 1.5 is not a number of pixels"),
    ("pad", {"padding": 1, "fill": 256}, "fill: 256 is not a level from 0 to 255"),
    ("pad", {"padding": 1, "fill": [1, 2]}, r"fill: \[1, 2\] is neither one level nor \[red, green, blue\]"),
    ("pad", {"padding": 1, "fill": 0.5}, "fill: 0.5 is not a level"),
    ("pad", {"padding": 1, "padding_mode": "edge"}, "padding_mode: there is no such argument; .* constant"),
    ("letterbox", {"size": 0}, f"size: 0 {SIZE}"),
    ("letterbox", {"size": 5, "fill": "grey"}, "fill: 'grey' is not a level"),
    ("letterbox", {"size": 5, "scaleup": False}, "scaleup: there is no such argument; there are size, fill, upscale"),
    ("center_crop", {"size": -1}, f"size: -1 {SIZE}"),
    ("center_crop", {"size": "5"}, f"size: '5' {SIZE}"),
    ("random_resized_crop", {"size": 100_000}, SIZE),
    ("random_resized_crop", {"size": 5, "scale": [1, 0.5]}, r"scale: \[1, 0.5\] is not \[min, max\]"),
    ("random_resized_crop", {"size": 5, "scale": 0.08}, r"scale: 0.08 is not \[min, max\], two numbers"),
    ("random_resized_crop", {"size": 5, "scale": [0, 0]}, "0 <= min <= max"),
    ("random_resized_crop", {"size": 5, "ratio": [0, 1]}, "0 < min <= max"),
    ("random_resized_crop", {"size": 5, "ratio": [1, float("inf")]}, "0 < min <= max"),
    ("random_horizontal_flip", {"p": 1.5}, "less than or equal to 1"),
    ("random_vertical_flip", {"p": -0.1}, "greater than or equal to 0"),
]


def bad_arguments(name: str) -> None:
    """Each bad argument of this transform is refused, by the class and in a configuration, and says what is allowed."""
    cases = [(arguments, text) for n, arguments, text in BAD_ARGUMENTS if n == name]
    assert cases
    for arguments, text in cases:
        with pytest.raises(ValueError, match=text):
            parse({name: arguments})
        with pytest.raises(ConfigError):
            TRANSFORMS[name](**arguments)


def test_resize_bad_input_is_refused() -> None:
    bad_arguments("resize")


def test_center_crop_bad_input_is_refused() -> None:
    bad_arguments("center_crop")


def test_random_resized_crop_bad_input_is_refused() -> None:
    bad_arguments("random_resized_crop")


def test_random_crop_bad_input_is_refused() -> None:
    bad_arguments("random_crop")


def test_pad_bad_input_is_refused() -> None:
    bad_arguments("pad")


def test_letterbox_bad_input_is_refused() -> None:
    bad_arguments("letterbox")


def test_random_horizontal_flip_bad_input_is_refused() -> None:
    bad_arguments("random_horizontal_flip")


def test_random_vertical_flip_bad_input_is_refused() -> None:
    bad_arguments("random_vertical_flip")


def test_too_many_arguments_or_one_given_twice_are_type_errors() -> None:
    with pytest.raises(TypeError, match="at most 1 arguments: p"):
        RandomHorizontalFlip(0.5, 1)
    with pytest.raises(TypeError, match="size is given twice"):
        Resize(5, size=6)


def test_a_transform_is_frozen() -> None:
    with pytest.raises(ValidationError):
        Resize(5).size = 6


# chains


@pytest.mark.parametrize(
    "chain, size",
    [
        ([RandomResizedCrop(224)], (224, 224)),
        ([Resize(256), CenterCrop(224)], (224, 224)),
        ([Resize((20, 30)), RandomHorizontalFlip(), RandomVerticalFlip()], (20, 30)),
        ([CenterCrop((40, 60)), Resize(20)], (20, 30)),
        ([CenterCrop(300), RandomResizedCrop(100), CenterCrop(90)], (90, 90)),
        ([RandomHorizontalFlip(), CenterCrop(7)], (7, 7)),
        ([Resize(256, max_size=300), CenterCrop(224)], (224, 224)),
        ([RandomCrop((32, 40), padding=4)], (32, 40)),
        ([Pad(4), RandomHorizontalFlip(), RandomCrop(32, pad_if_needed=True)], (32, 32)),
        ([RandomResizedCrop(64), RandomCrop(56), CenterCrop(50)], (50, 50)),
        ([Resize((20, 30)), Pad([1, 2, 3, 4], 9)], (26, 34)),
        ([CenterCrop(40), Resize(20, max_size=30)], (20, 20)),
        ([Letterbox((64, 48), 114), RandomHorizontalFlip(), RandomCrop(32)], (32, 32)),
        ([Letterbox((64, 48), 114), Pad(2, 114)], (68, 52)),
        ([Resize(256), Pad(8, 114), CenterCrop(270)], (270, 270)),
    ],
)
def test_a_chain_that_folds_has_a_size(chain: list[Transform], size: tuple[int, int]) -> None:
    assert output_size(chain) == size
    assert planned(chain, SIZES).size == size


@pytest.mark.parametrize(
    "chain, text",
    [
        ([], "no fixed size"),
        ([Resize(256)], "after resize the pictures have no fixed size"),
        ([RandomHorizontalFlip()], "after random_horizontal_flip the pictures have no fixed size"),
        ([Resize(256), RandomResizedCrop(224)], "resize and random_resized_crop would each resample"),
        ([Resize((9, 9)), Resize((8, 8))], "resize and resize.2 would each resample"),
        (
            [RandomResizedCrop(224), CenterCrop(256)],
            "center_crop would pad to 256 pixels high what random_",
        ),
        ([Pad(4), Resize((9, 9))], "resize would resample what pad has put around the picture.* Pad after resize"),
        ([RandomCrop(32, padding=4), Resize(16)], "resize would resample what random_crop has put"),
        ([RandomCrop(32, pad_if_needed=True), RandomResizedCrop(16)], "resample what random_crop has put"),
        ([Letterbox(64), Resize((9, 9))], "letterbox and resize would each resample"),
        ([CenterCrop(32), Pad(4)], "pad would pad what center_crop has cut; .* Pad before center_crop"),
        ([RandomResizedCrop(32), RandomCrop(32, padding=4)], "random_crop would pad what random_resized_crop has cut"),
        ([CenterCrop(32), Letterbox(64)], "letterbox would pad what center_crop has cut"),
        ([RandomCrop(32), RandomCrop(64, pad_if_needed=True)], "random_crop.2 would pad what random_crop has cut"),
        ([RandomResizedCrop(32), RandomCrop(33)], r"would cut \[33, 33\] pixels .* out of pictures that have 32 x 32"),
        ([Pad(4, 114), CenterCrop(64)], r"pad puts \[114, 114, 114\] around the picture and center_crop \[0, 0, 0\]"),
        ([Pad(4, 1), Pad(4, 2), CenterCrop(4)], r"pad puts \[1, 1, 1\] around the picture and pad.2 \[2, 2, 2\]"),
        ([Pad(4), RandomHorizontalFlip()], "after pad, random_horizontal_flip the pictures have no fixed size"),
        ([Resize((16384, 1)), Pad(1)], "16386x3 pixels are over the limit of 16384 a side"),
        ([CenterCrop(10), CenterCrop(20)], "center_crop.2 would pad to 20 pixels high what center_crop has cut to 10"),
    ],
)
def test_a_chain_that_does_not_fold_is_refused_with_the_reason(chain: list[Transform], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        output_size(chain)
    with pytest.raises(ValueError, match=text):
        planned(chain, SIZES)


def test_what_lies_outside_has_the_colour_of_whoever_pads() -> None:
    assert planned([Pad(4, 114), RandomCrop(32, 2, True, 114)], SIZES).fill == (114, 114, 114)
    assert planned([Letterbox(32, [1, 2, 3])], SIZES).fill == (1, 2, 3)
    assert planned([RandomResizedCrop(32)], SIZES).fill == (0, 0, 0)
    # Here center_crop has nothing to pad, and so has pad.
    assert planned([Resize(40), Pad(4, 114), CenterCrop(48)], SIZES).fill == (114, 114, 114)
    assert planned([Pad(0, 5), CenterCrop(48)], SIZES).fill == (0, 0, 0)


def test_a_picture_too_small_for_a_random_crop_is_refused_with_both_sizes() -> None:
    chain = [RandomHorizontalFlip(), Resize(20), RandomCrop((24, 32), padding=2)]
    assert unfit(chain, 100, 140) is None
    assert unfit(chain, 100, 139) == (
        "random_crop: a picture of 20x27 pixels (height x width), with its padding 24x31 is too small to cut 24x32 out "
        "of it; pad_if_needed: true would pad it"
    )
    assert unfit([RandomCrop(8)], 7, 9) == (
        "random_crop: a picture of 7x9 pixels (height x width) is too small to cut 8x8 out of it; pad_if_needed: true "
        "would pad it"
    )
    assert unfit([RandomCrop(8, pad_if_needed=True)], 1, 1) is None
    assert unfit([CenterCrop(8)], 1, 1) is None


def test_interpolation_is_that_of_the_one_that_resamples() -> None:
    assert planned([Resize((5, 5), "lanczos"), CenterCrop(4)], SIZES).interpolation == "lanczos"
    assert planned([CenterCrop(4)], SIZES).interpolation == "bilinear"


def test_second_ones_of_a_kind_have_names_of_their_own() -> None:
    names = [name for name, _ in named([RandomHorizontalFlip(), CenterCrop(5), RandomHorizontalFlip(), CenterCrop(5)])]
    assert names == ["random_horizontal_flip", "center_crop", "random_horizontal_flip.2", "center_crop.2"]


def test_another_transform_leaves_the_draws_of_the_others_alone() -> None:
    sizes = [(300, 400)] * 100
    alone = planned([RandomResizedCrop(64)], sizes)
    beside = planned([RandomHorizontalFlip(0), RandomVerticalFlip(), RandomResizedCrop(64)], sizes)
    np.testing.assert_array_equal(alone.box[~beside.mirror_y], beside.box[~beside.mirror_y])


def test_take_keeps_rows_together() -> None:
    params = planned([RandomResizedCrop(64), RandomHorizontalFlip()], [(300, 400)] * 10)
    some = params.take(np.array([7, 2]))
    assert len(some) == 2 and some.size == params.size
    np.testing.assert_array_equal(some.box, params.box[[7, 2]])
    np.testing.assert_array_equal(some.mirror_x, params.mirror_x[[7, 2]])


# purity: a row is a function of (transforms, seed, epoch, position, size) alone


def pure(transform: Transform) -> None:
    chain = [transform, CenterCrop(4)]
    rng = np.random.default_rng(1)
    heights, widths = rng.integers(1, 2000, (2, 64))
    whole = plan(chain, 3, 5, 1000, heights, widths)
    again = plan(chain, 3, 5, 1000, heights, widths)
    np.testing.assert_array_equal(whole.box, again.box)
    for first, count in ((0, 1), (63, 1), (10, 20)):
        part = slice(first, first + count)
        rows = plan(chain, 3, 5, 1000 + first, heights[part], widths[part])
        np.testing.assert_array_equal(rows.box, whole.box[part])
        np.testing.assert_array_equal(rows.mirror_x, whole.mirror_x[part])
        np.testing.assert_array_equal(rows.mirror_y, whole.mirror_y[part])
    if transform.draws:
        for seed, epoch, first in ((4, 5, 1000), (3, 6, 1000), (3, 5, 2000)):
            other = plan(chain, seed, epoch, first, heights, widths)
            same = (other.box == whole.box).all() and (other.mirror_x == whole.mirror_x).all()
            assert not (same and (other.mirror_y == whole.mirror_y).all())


def test_resize_purity() -> None:
    pure(Resize(16))


def test_center_crop_purity() -> None:
    pure(CenterCrop(16))


def test_random_resized_crop_purity() -> None:
    pure(RandomResizedCrop(16))


def test_random_crop_purity() -> None:
    pure(RandomCrop(16))


def test_pad_purity() -> None:
    pure(Pad([1, 2, 3, 4]))


def test_letterbox_purity() -> None:
    pure(Letterbox(16))


def test_random_horizontal_flip_purity() -> None:
    pure(RandomHorizontalFlip())


def test_random_vertical_flip_purity() -> None:
    pure(RandomVerticalFlip())


def test_the_parameters_never_change() -> None:
    # Expected values: if this fails, the code is wrong, not the test.
    params = planned([RandomResizedCrop(224), RandomHorizontalFlip()], [(853, 1280), (375, 500), (10, 1000)], seed=1)
    assert params.box.tolist() == BOX
    assert params.mirror_x.tolist() == MIRROR


# parity with torchvision


@pytest.mark.parametrize("size", [1, 7, 224, 256, 500])
def test_resize_parity_of_sizes_with_torchvision(size: int) -> None:
    t = torchvision("transforms")
    for height, width in SIZES:
        if max(height, width) * size > 10**6 * min(height, width):
            continue  # torchvision would really make it
        theirs = t.Resize(size)(Image.new("L", (width, height))).size[::-1]
        axes = Resize(size).apply(_geometry(height, width), np.zeros((1, 0)))
        assert (int(axes.y.pixels[0]), int(axes.x.pixels[0])) == theirs


@pytest.mark.parametrize("size, max_size", [(7, 9), (224, 225), (256, 400), (None, 1), (None, 300), (5, None)])
def test_resize_parity_of_max_size_with_torchvision(size: int | None, max_size: int | None) -> None:
    v2 = torchvision("transforms.v2.functional")
    for height, width in [*SIZES, (100, 101), (101, 100)]:
        theirs = v2._geometry._compute_resized_output_size((height, width), size=size, max_size=max_size)
        axes = Resize(size, max_size=max_size).apply(_geometry(height, width), np.zeros((1, 0)))
        # A side without pixels torchvision would refuse to make.
        assert [int(axes.y.pixels[0]), int(axes.x.pixels[0])] == [max(side, 1) for side in theirs]


def shown(chain: Sequence[Transform], source: NDArray[np.uint8], position: int = 0) -> NDArray[np.uint8]:
    """What a chain that does not resample makes of a picture with one channel, by its window alone."""
    params = plan(chain, 0, 0, position, *(np.array([side]) for side in source.shape))
    x0, y0, x1, y1 = (int(v) for v in params.box[0])
    frame = 100
    framed = np.pad(source, frame, constant_values=params.fill[0])
    return framed[y0 + frame : y1 + frame, x0 + frame : x1 + frame]


@pytest.mark.parametrize("padding", [0, 3, [2, 5], [1, 2, 3, 4], [7]])
@pytest.mark.parametrize("fill", [0, 200])
def test_pad_parity_with_torchvision_to_the_pixel(padding: Any, fill: int) -> None:
    t = torchvision("transforms")
    for height, width in ((5, 5), (4, 7), (1, 1)):
        source = np.arange(1, height * width + 1, dtype=np.uint8).reshape(height, width)
        theirs = np.asarray(t.Pad(padding, fill)(Image.fromarray(source)))
        crop = [*theirs.shape]
        np.testing.assert_array_equal(shown([Pad(padding, fill), RandomCrop(crop)], source), theirs)


@pytest.mark.parametrize("api", ["transforms", "transforms.v2"])
@pytest.mark.parametrize("size", [(8, 8), (3, 9), (20, 4), (5, 7)])
@pytest.mark.parametrize("padding", [None, 4, [3, 9, 5, 7]])
def test_random_crop_parity_with_torchvision_given_the_same_numbers(
    size: tuple[int, int], padding: Any, api: str, torch_reads: Any
) -> None:
    t = torchvision(api)
    for position, (height, width) in enumerate([(20, 30), (8, 8), (5, 7), (3, 20), (12, 2), (1, 1)]):
        source = np.arange(1, height * width + 1, dtype=np.uint8).reshape(height, width)
        ours = shown([RandomCrop(size, padding, True, 250)], source, position)
        top, left = uniforms(0, 0, "random_crop", position, 1, RandomCrop.draws)[0]
        # Where a side leaves no choice the second version draws nothing for it.
        drawn = [
            u
            for u, free in ((top, _free(height, size[0], padding, 1)), (left, _free(width, size[1], padding, 0)))
            if free
        ]
        torch_reads(np.zeros(0), drawn if api.endswith("v2") else [top, left])
        theirs = t.RandomCrop(size, padding, pad_if_needed=True, fill=250)(Image.fromarray(source))
        np.testing.assert_array_equal(ours, np.asarray(theirs))


def _free(side: int, wanted: int, padding: Any, first: int) -> bool:
    around = [0] * 4 if padding is None else [padding] * 4 if isinstance(padding, int) else padding
    return side + around[first] + around[first + 2] != wanted


@pytest.mark.parametrize("padding", [None, 1])
def test_random_crop_parity_with_torchvision_in_what_is_too_small(padding: Any, torch_reads: Any) -> None:
    t = torchvision("transforms.v2")
    for height, width in ((8, 8), (7, 9), (6, 6), (5, 20), (20, 5)):
        torch_reads(np.zeros(0), [0.0, 0.0])
        try:
            t.RandomCrop(8, padding)(Image.new("L", (width, height)))
            assert unfit([RandomCrop(8, padding)], height, width) is None
        except ValueError:
            assert unfit([RandomCrop(8, padding)], height, width)


def test_random_crop_has_every_place_equally_often() -> None:
    box = planned([RandomCrop(8)], [(10, 12)] * 9000).box
    places, counts = np.unique(box[:, :2], axis=0, return_counts=True)
    # 15 of them, with a standard deviation of 24 each.
    assert len(places) == 15 and np.abs(counts - 600).max() < 120


@pytest.mark.parametrize("size", [(640, 640), (384, 640), (5, 5)])
@pytest.mark.parametrize("upscale", [True, False])
def test_letterbox_parity_with_the_rule_of_yolo(size: tuple[int, int], upscale: bool) -> None:
    for height, width in SIZES:
        # As letterbox() of YOLOv5 writes it, `auto` off, but that no side is without pixels.
        r = min(size[0] / height, size[1] / width)
        r = r if upscale else min(r, 1.0)
        new_w, new_h = max(round(width * r), 1), max(round(height * r), 1)
        dw, dh = (size[1] - new_w) / 2, (size[0] - new_h) / 2
        top, left = round(dh - 0.1), round(dw - 0.1)
        geometry = Letterbox(size, 114, upscale).apply(_geometry(height, width), np.zeros((1, 0)))
        for axis, side, inside, before, whole in (
            (geometry.y, size[0], new_h, top, height),
            (geometry.x, size[1], new_w, left, width),
        ):
            assert int(axis.pixels[0]) == side
            step = whole / inside
            np.testing.assert_allclose([axis.low[0], axis.high[0]], [-before * step, (side - before) * step])


def _geometry(height: int, width: int) -> Any:
    from headrace.pipeline.geometry import Geometry

    return Geometry.whole(np.array([height]), np.array([width]))


@pytest.mark.parametrize("size", [1, 4, 5, (3, 8), (8, 3), 9])
def test_center_crop_parity_with_torchvision_to_the_pixel(size: Any) -> None:
    t = torchvision("transforms")
    for height, width in ((5, 5), (4, 7), (7, 4), (10, 10), (1, 1), (3, 12)):
        # Each pixel knows its place, and black is 0.
        source = np.arange(1, height * width + 1, dtype=np.uint8).reshape(height, width)
        theirs = np.asarray(t.CenterCrop(size)(Image.fromarray(source)))
        x0, y0, x1, y1 = (int(v) for v in planned([CenterCrop(size)], [(height, width)]).box[0])
        framed = np.pad(source, 20)
        np.testing.assert_array_equal(framed[y0 + 20 : y1 + 20, x0 + 20 : x1 + 20], theirs)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale": (0.5, 1.0)},
        {"scale": (0.9, 1.0), "ratio": (3.0, 4.0)},
        {"ratio": (0.1, 0.2)},
        {"scale": (0, 0.01)},
    ],
)
def test_random_resized_crop_parity_with_torchvision_given_the_same_numbers(options: Any, torch_reads: Any) -> None:
    t = torchvision("transforms")
    ours, theirs = RandomResizedCrop(8, **options), t.RandomResizedCrop(8, **options)
    sizes = [(853, 1280), (500, 375), (64, 64), (20, 300), (300, 20)] * 40
    boxes = planned([ours], sizes, seed=9).box
    rows = uniforms(9, 0, "random_resized_crop", 0, len(sizes), RandomResizedCrop.draws)
    exact = 0
    for (height, width), box, u in zip(sizes, boxes, rows, strict=True):
        w, h = box[2] - box[0], box[3] - box[1]
        torch_reads(u[:-2], u[-2:])
        picture = Image.new("L", (width, height))
        top, left, their_h, their_w = theirs.get_params(picture, theirs.scale, theirs.ratio)
        # It computes in float32: sizes may round to the other side, and the place with them.
        np.testing.assert_allclose([left, top, their_w, their_h], [box[0], box[1], w, h], atol=1.01)
        exact += (left, top, their_w, their_h) == (box[0], box[1], w, h)
    assert exact > 0.97 * len(sizes)


def test_random_resized_crop_has_the_distribution_of_its_definition() -> None:
    n = 20_000
    params = planned([RandomResizedCrop(8)], [(1000, 1000)] * n, seed=2)
    w, h = params.box[:, 2] - params.box[:, 0], params.box[:, 3] - params.box[:, 1]
    assert (params.box >= 0).all() and (params.box <= 1000).all()
    area, ratio = w * h / 1e6, w / h
    assert 0.078 < area.min() and area.max() <= 1
    assert 0.745 < ratio.min() and ratio.max() < 1.34
    # As many wide as tall (standard deviation 0.35 %), and places uniform among those possible.
    assert abs((ratio > 1).mean() - 0.5) < 0.02
    movable = w < 900
    place = params.box[movable, 0] / (1000 - w[movable])
    assert abs(place.mean() - 0.5) < 0.015


@pytest.mark.parametrize("height, width", SIZES)
def test_random_resized_crop_always_cuts_at_least_a_pixel_inside(height: int, width: int) -> None:
    box = planned([RandomResizedCrop(8)], [(height, width)] * 50).box
    assert (box[:, 2] - box[:, 0] >= 1).all() and (box[:, 3] - box[:, 1] >= 1).all()
    assert (box[:, :2] >= 0).all() and (box[:, 2] <= width).all() and (box[:, 3] <= height).all()


def flips(transform: Transform, torch_transform: Any, torch_reads: Any) -> None:
    """The same numbers flip the same pictures."""
    t = torchvision("transforms")
    params = planned([transform, CenterCrop(2)], [(2, 2)] * 200, seed=6)
    rows = uniforms(6, 0, transform.name, 0, 200, 1)
    source = Image.fromarray(np.array([[1, 2], [3, 4]], np.uint8))
    assert t is not None
    for i, u in enumerate(rows):
        torch_reads(u)
        theirs = np.asarray(torch_transform(source))
        ours = np.asarray(source)[:: -1 if params.mirror_y[i] else 1, :: -1 if params.mirror_x[i] else 1]
        np.testing.assert_array_equal(ours, theirs)


def test_random_horizontal_flip_parity_with_torchvision(torch_reads: Any) -> None:
    flips(RandomHorizontalFlip(0.3), torchvision("transforms").RandomHorizontalFlip(0.3), torch_reads)


def test_random_vertical_flip_parity_with_torchvision(torch_reads: Any) -> None:
    flips(RandomVerticalFlip(0.7), torchvision("transforms").RandomVerticalFlip(0.7), torch_reads)


@pytest.mark.parametrize("p, expected", [(0.0, 0), (1.0, 100)])
def test_a_flip_of_certain_outcome_is_certain(p: float, expected: int) -> None:
    assert planned([RandomHorizontalFlip(p), CenterCrop(4)], [(5, 5)] * 100).mirror_x.sum() == expected


def test_half_of_the_pictures_are_flipped_by_default() -> None:
    params = planned([RandomHorizontalFlip(), RandomVerticalFlip(), CenterCrop(4)], [(5, 5)] * 10_000)
    # Standard deviation 0.5 %.
    assert abs(params.mirror_x.mean() - 0.5) < 0.025 and abs(params.mirror_y.mean() - 0.5) < 0.025
    assert abs((params.mirror_x == params.mirror_y).mean() - 0.5) < 0.025


BOX = [[225.0, 107.0, 682.0, 611.0], [15.0, 7.0, 235.0, 236.0], [493.0, 0.0, 506.0, 10.0]]
MIRROR = [True, True, True]
