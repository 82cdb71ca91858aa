"""Transforms of colour: what they draw, into which steps it turns, and where they may stand."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from pictures import noise
from PIL import Image
from torchvision_shim import torchvision

from headrace.draws import uniforms
from headrace.errors import ConfigError
from headrace.output import Output
from headrace.pipeline.colour import GREY, Blur, Erase, Matrix, Posterize, Solarize, Step
from headrace.pipeline.geometry import BLACK
from headrace.pipeline.kinds import Photometric
from headrace.pipeline.paint import paint
from headrace.pipeline.photometric import (
    ColorJitter,
    GaussianBlur,
    RandomAutocontrast,
    RandomEqualize,
    RandomErasing,
    RandomGrayscale,
    RandomPosterize,
    RandomSolarize,
)
from headrace.pipeline.transforms import (
    TRANSFORMS,
    CenterCrop,
    Pad,
    Params,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomVerticalFlip,
    Resize,
    Transform,
    output_size,
    parse,
    plan,
    unfit,
)

HEIGHT, WIDTH = 24, 32
EVERY = [
    ColorJitter(0.4, 0.4, 0.4, 0.1, p=0.8),
    RandomGrayscale(0.5),
    GaussianBlur(5, p=0.5),
    RandomErasing(value=[0.2, 0.4, 0.6]),
    RandomSolarize(128),
    RandomPosterize(3),
    RandomAutocontrast(),
    RandomEqualize(),
]


def planned(*transforms: Transform, rows: int = 1, seed: int = 0, epoch: int = 0, first: int = 0) -> Params:
    """Of pictures that come in their final size."""
    sizes = np.full(rows, HEIGHT), np.full(rows, WIDTH)
    return plan([CenterCrop((HEIGHT, WIDTH)), *transforms], seed, epoch, first, *sizes)


def painted(image: Image.Image, *transforms: Transform, row: int = 0) -> NDArray[np.uint8]:
    rows = plan([CenterCrop(image.size[::-1]), *transforms], 0, 0, row, *(np.array([s]) for s in image.size[::-1]))
    return np.asarray(paint(image, rows.colour, 0))


def far(ours: object, theirs: object) -> int:
    """The largest difference, in levels."""
    return int(np.abs(np.asarray(ours).astype(int) - np.asarray(theirs).astype(int)).max())


def numbers(steps: Sequence[Step]) -> list[list[Any]]:
    """All that is in some steps."""
    return [[getattr(step, field) for field in step.__dataclass_fields__] for step in steps]


def equal(steps: Sequence[Step], others: Sequence[Step]) -> bool:
    mine, theirs = numbers(steps), numbers(others)
    same_kinds = [type(s) for s in steps] == [type(s) for s in others]
    return same_kinds and all(
        np.array_equal(a, b) for x, y in zip(mine, theirs, strict=True) for a, b in zip(x, y, strict=True)
    )


# descriptions


def test_defaults_are_those_of_torchvision() -> None:
    t = torchvision("transforms.v2")
    assert ColorJitter().model_dump(exclude={"p"}) == {
        key: getattr(t.ColorJitter(), key)
        for key in t.ColorJitter().__dict__
        if key in ("brightness", "contrast", "saturation", "hue")
    }
    assert RandomGrayscale().p == t.RandomGrayscale().p
    blur = t.GaussianBlur(5)
    assert (GaussianBlur(5).kernel_size, GaussianBlur(5).sigma) == (tuple(blur.kernel_size), tuple(blur.sigma))
    erasing = t.RandomErasing()
    assert (RandomErasing().p, RandomErasing().scale, RandomErasing().ratio) == (
        erasing.p,
        erasing.scale,
        erasing.ratio,
    )
    assert RandomErasing().value == tuple(erasing.value * 3)
    assert RandomSolarize(1).p == t.RandomSolarize(1).p
    assert RandomPosterize(1).p == t.RandomPosterize(1).p
    assert RandomAutocontrast().p == t.RandomAutocontrast().p
    assert RandomEqualize().p == t.RandomEqualize().p
    # What torchvision has not happens always.
    assert ColorJitter().p == GaussianBlur(3).p == 1.0


@pytest.mark.parametrize("value", [0, 0.4, 1.5, (0.2, 0.9), [1, 1], (0, 3)])
def test_one_number_is_a_span_around_what_changes_nothing_as_in_torchvision(value: Any) -> None:
    t = torchvision("transforms.v2")
    theirs = t.ColorJitter(value, value, value)
    ours = ColorJitter(value, value, value)
    assert (ours.brightness, ours.contrast, ours.saturation) == (theirs.brightness, theirs.contrast, theirs.saturation)


@pytest.mark.parametrize("value", [0, 0.5, 0.1, (-0.5, 0.2), [0, 0], (0.1, 0.1)])
def test_a_hue_is_a_span_of_turns_as_in_torchvision(value: Any) -> None:
    assert ColorJitter(hue=value).hue == torchvision("transforms.v2").ColorJitter(hue=value).hue


@pytest.mark.parametrize("transform", [*EVERY, ColorJitter(), RandomErasing(value="mean"), GaussianBlur([3, 5], 2)])
def test_dump_and_parse_are_inverse_and_defaults_are_filled_in(transform: Transform) -> None:
    plain = transform.plain()
    assert parse(plain) == transform
    assert set(plain[transform.name]) == set(type(transform).model_fields)


def test_equal_transforms_dump_equally_however_they_are_written() -> None:
    assert ColorJitter(0.5).plain() == ColorJitter([0.5, 1.5]).plain()
    assert ColorJitter(0, None, [1, 1], (0.0, 0.0)).plain() == ColorJitter().plain()
    assert GaussianBlur(5, 1).plain() == GaussianBlur([5, 5], [1, 1.0]).plain()
    assert RandomErasing(value=0).plain() == RandomErasing(value=[0, 0, 0]).plain() == RandomErasing().plain()
    assert RandomSolarize(128).plain() == RandomSolarize(128.0).plain()


BAD_ARGUMENTS: list[tuple[str, dict[str, Any], str]] = [
    ("color_jitter", {"brightness": -0.1}, r"brightness: -0.1 is neither one number from 0 to 999 nor \[min, max\]"),
    ("color_jitter", {"contrast": [1.2, 0.8]}, r"contrast: \[1.2, 0.8\] is neither .* 0 <= min <= max <= 1000"),
    ("color_jitter", {"saturation": [-1, 1]}, "saturation: .* 0 <= min <= max"),
    ("color_jitter", {"saturation": "strong"}, "saturation: 'strong' is neither"),
    ("color_jitter", {"saturation": True}, "saturation: True is neither"),
    ("color_jitter", {"brightness": float("inf")}, "brightness: inf is neither"),
    ("color_jitter", {"brightness": 10**400}, "brightness: 1000.* is neither"),
    ("color_jitter", {"contrast": [1, 1000.5]}, r"contrast: \[1, 1000.5\] is neither"),
    ("color_jitter", {"hue": 0.6}, "hue: 0.6 is neither one number from 0 to 0.5 nor .* -0.5 <= min <= max <= 0.5"),
    ("color_jitter", {"hue": -0.1}, "hue: -0.1 is neither"),
    ("color_jitter", {"hue": [0, 36]}, r"hue: \[0, 36\] is neither"),
    ("color_jitter", {"p": 2}, "p: Input should be less than or equal to 1"),
    (
        "color_jitter",
        {"gamma": 2},
        "gamma: there is no such argument; there are brightness, contrast, saturation, hue, p",
    ),
    ("random_grayscale", {"p": -1}, "p: Input should be greater than or equal to 0"),
    ("random_grayscale", {"p": True}, "p: Input should be a valid number"),
    ("random_grayscale", {"p": "0.5"}, "p: Input should be a valid number"),
    ("random_grayscale", {"num_output_channels": 3}, "num_output_channels: there is no such argument; there are p"),
    ("gaussian_blur", {}, "kernel_size: is required"),
    ("gaussian_blur", {"kernel_size": 4}, "kernel_size: 4 is not an odd whole number of pixels, from 1 on"),
    ("gaussian_blur", {"kernel_size": -3}, "kernel_size: -3 is not an odd"),
    (
        "gaussian_blur",
        {"kernel_size": [3, 5, 7]},
        r"kernel_size: \[3, 5, 7\] is neither one number nor \[width, height\]",
    ),
    ("gaussian_blur", {"kernel_size": 3, "sigma": 0}, "sigma: 0 is neither one number nor two"),
    ("gaussian_blur", {"kernel_size": 3, "sigma": [2, 1]}, r"sigma: \[2, 1\] is neither .* 0 < min <= max <= 16384"),
    ("random_erasing", {"value": "random"}, "value: 'random' would need a draw for each value .* erase in the trainer"),
    ("random_erasing", {"value": 114}, 'value: 114 is not a number from 0 to 1, .* or "mean".*; divide levels by 255'),
    ("random_erasing", {"value": [0.1, 0.2]}, r"value: \[0.1, 0.2\] is not a number from 0 to 1"),
    ("random_erasing", {"value": np.zeros(3)}, r"value: array\(.* is not a number from 0 to 1"),
    ("random_erasing", {"value": -1}, "value: -1 is not a number from 0 to 1"),
    ("random_erasing", {"scale": [0.1, 1.1]}, r"scale: \[0.1, 1.1\] is not \[min, max\], .* 0 <= min <= max <= 1"),
    ("random_erasing", {"ratio": [0, 1]}, "ratio: .* 0 < min <= max"),
    ("random_erasing", {"inplace": True}, "inplace: there is no such argument; .* It would change nothing"),
    ("random_solarize", {}, "threshold: is required"),
    ("random_solarize", {"threshold": 256}, "threshold: 256 is not a level, a number from 0 to 255"),
    ("random_solarize", {"threshold": [1]}, r"threshold: \[1\] is not a level"),
    ("random_posterize", {}, "bits: is required"),
    ("random_posterize", {"bits": 9}, "bits: 9 is not a number of bits from 0 to 8"),
    ("random_posterize", {"bits": 2.5}, "bits: 2.5 is not a number of bits"),
    ("random_autocontrast", {"p": 1.1}, "less than or equal to 1"),
    ("random_autocontrast", {"cutoff": 1}, "cutoff: there is no such argument; there are p"),
    ("random_equalize", {"p": "often"}, "p: Input should be a valid number"),
]


def bad_arguments(name: str) -> None:
    cases = [(arguments, text) for n, arguments, text in BAD_ARGUMENTS if n == name]
    assert cases
    for arguments, text in cases:
        with pytest.raises(ValueError, match=text):
            parse({name: arguments})
        with pytest.raises(ConfigError):
            TRANSFORMS[name](**arguments)


def test_color_jitter_bad_input_is_refused() -> None:
    bad_arguments("color_jitter")


def test_random_grayscale_bad_input_is_refused() -> None:
    bad_arguments("random_grayscale")


def test_gaussian_blur_bad_input_is_refused() -> None:
    bad_arguments("gaussian_blur")


def test_random_erasing_bad_input_is_refused() -> None:
    bad_arguments("random_erasing")


def test_random_solarize_bad_input_is_refused() -> None:
    bad_arguments("random_solarize")


def test_random_posterize_bad_input_is_refused() -> None:
    bad_arguments("random_posterize")


def test_random_autocontrast_bad_input_is_refused() -> None:
    bad_arguments("random_autocontrast")


def test_random_equalize_bad_input_is_refused() -> None:
    bad_arguments("random_equalize")


@pytest.mark.parametrize(
    "name, text",
    [
        ("ColourJitter", "did you mean color_jitter"),
        ("RandomApply", "give the transform a p of its own; color_jitter and gaussian_blur have one, too"),
        ("Grayscale", "write random_grayscale: {p: 1}"),
        ("RandomInvert", "write random_solarize: {threshold: 0}"),
    ],
)
def test_names_of_torchvision_that_are_none_here_are_told_what_to_write(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}' is not a transform.*{text}"):
        parse(name)


# where they may stand


@pytest.mark.parametrize(
    "chain, text",
    [
        ([ColorJitter(0.1), RandomResizedCrop(8)], "Put random_resized_crop before color_jitter"),
        (
            [Resize((9, 9)), RandomGrayscale(), CenterCrop(8)],
            "center_crop changes what is seen of a picture, or its size",
        ),
        (
            [Resize((9, 9)), RandomErasing(), RandomEqualize(), Pad(1)],
            "pad changes .* after random_erasing .* before random_",
        ),
        ([CenterCrop(8), GaussianBlur(3), Resize((4, 4))], "colour comes after all of that, and only flips after it"),
        (
            [CenterCrop(8), GaussianBlur(17)],
            r"gaussian_blur: kernel_size \[17, 17\] \(width, height\) .* at most \[15, 15\]",
        ),
        ([ColorJitter()], "after color_jitter the pictures have no fixed size"),
    ],
)
def test_a_chain_that_changes_what_is_seen_after_its_colours_is_refused(chain: list[Transform], text: str) -> None:
    with pytest.raises(ValueError, match=f"^transforms: .*{text}"):
        output_size(chain)


def test_colours_come_after_the_size_and_flips_anywhere() -> None:
    chain = [
        RandomHorizontalFlip(),
        Resize((9, 8)),
        Pad(1),
        ColorJitter(0.1),
        RandomVerticalFlip(),
        GaussianBlur([19, 21]),
    ]
    assert output_size(chain) == (11, 10)
    assert output_size([*chain, RandomErasing(), RandomHorizontalFlip(), Pad(0)]) == (11, 10)


def test_whether_a_picture_is_fit_does_not_depend_on_its_colours() -> None:
    crop = parse({"random_crop": {"size": 8}})
    assert unfit([RandomHorizontalFlip(), crop, ColorJitter(0.1)], 7, 9) == unfit([crop], 7, 9) is not None
    assert unfit([crop, RandomErasing(value="mean")], 8, 8) is None


@given(st.booleans(), st.booleans(), st.integers(0, 1000))
def test_a_flip_after_an_erased_box_mirrors_it(across: bool, down: bool, row: int) -> None:
    erasing = RandomErasing(1.0, value=0.5)
    flips = [RandomHorizontalFlip(float(across)), RandomVerticalFlip(float(down))]
    plain = planned(erasing, first=row)
    before, after = planned(*flips, erasing, first=row), planned(erasing, *flips, first=row)
    assert (before.mirror_x, before.mirror_y) == (after.mirror_x, after.mirror_y) == ([across], [down])
    assert equal(before.colour, plain.colour)
    image = noise(HEIGHT, WIDTH)
    erased = np.asarray(paint(image, plain.colour, 0))
    turned = np.asarray(image)[:: -1 if down else 1, :: -1 if across else 1]
    expected = erased[:: -1 if down else 1, :: -1 if across else 1]
    np.testing.assert_array_equal(paint(Image.fromarray(turned), after.colour, 0), expected)


def test_a_flip_concerns_only_the_boxes_before_it() -> None:
    flip, erasing = RandomHorizontalFlip(1.0), RandomErasing(1.0)
    first, second = planned(erasing, flip, erasing).colour
    lone = planned(erasing, erasing).colour
    assert isinstance(first, Erase) and isinstance(second, Erase)
    assert not equal([first], [lone[0]]) and equal([second], [lone[1]])
    assert equal(planned(*EVERY[:3], flip).colour, planned(*EVERY[:3]).colour)


# purity: a row is a function of (transforms, seed, epoch, position) alone


def pure(transform: Photometric) -> None:
    whole = planned(transform, rows=64, seed=3, epoch=5, first=1000)
    for start, count in ((0, 1), (63, 1), (10, 20)):
        part = planned(transform, rows=count, seed=3, epoch=5, first=1000 + start)
        taken = whole.take(np.arange(start, start + count))
        assert equal(part.colour, taken.colour)
    parts = [planned(transform, rows=n, seed=3, epoch=5, first=at) for at, n in ((1000, 10), (1010, 1), (1011, 53))]
    assert equal(Params.joined(parts).colour, whole.colour)
    # Beside others of other kinds, which draw from tables of their own.
    beside = [each for each in EVERY if each.name != transform.name]
    among = planned(*beside[:3], transform, *beside[3:], rows=64, seed=3, epoch=5, first=1000).colour
    assert any(equal(whole.colour, among[i : i + len(whole.colour)]) for i in range(len(among)))
    for other in ({"seed": 4}, {"epoch": 6}, {"first": 2000}):
        assert not equal(
            planned(transform, rows=64, **({"seed": 3, "epoch": 5, "first": 1000} | other)).colour, whole.colour
        )
    # What is painted depends on the row, and on nothing that was painted before.
    image = noise(HEIGHT, WIDTH)
    forth = [np.asarray(paint(image, whole.colour, i)) for i in range(8)]
    back = [np.asarray(paint(image, whole.colour, i)) for i in reversed(range(8))]
    np.testing.assert_array_equal(forth, back[::-1])
    np.testing.assert_array_equal(image, noise(HEIGHT, WIDTH))


def test_color_jitter_purity() -> None:
    pure(EVERY[0])


def test_random_grayscale_purity() -> None:
    pure(EVERY[1])


def test_gaussian_blur_purity() -> None:
    pure(EVERY[2])


def test_random_erasing_purity() -> None:
    pure(EVERY[3])


def test_random_solarize_purity() -> None:
    pure(EVERY[4])


def test_random_posterize_purity() -> None:
    pure(EVERY[5])


def test_random_autocontrast_purity() -> None:
    pure(EVERY[6])


def test_random_equalize_purity() -> None:
    pure(EVERY[7])


@pytest.mark.parametrize("transform", EVERY, ids=lambda each: each.name)
def test_which_steps_there_are_depends_on_no_draw_and_without_luck_they_change_nothing(transform: Photometric) -> None:
    never, always = (type(transform)(**(transform.model_dump() | {"p": p})) for p in (0.0, 1.0))
    kinds = [type(step) for step in planned(never, rows=3).colour]
    assert kinds == [type(step) for step in planned(always, rows=3, seed=1).colour] != []
    image = noise(HEIGHT, WIDTH)
    for i in range(3):
        assert paint(image, planned(never, rows=3).colour, i) is image
    assert any(far(paint(image, planned(always, rows=3).colour, i), image) for i in range(3))


# parity with torchvision, the same numbers forced


@pytest.fixture(scope="module")
def functional() -> Any:
    return torchvision("transforms.v2.functional")


PICTURES = [noise(40, 56, seed) for seed in range(3)]


@pytest.mark.parametrize("factor", [0.0, 0.3, 0.77, 1.0, 1.2, 1.9])
@pytest.mark.parametrize("what", ["brightness", "contrast", "saturation"])
def test_color_jitter_parity_with_torchvision_to_a_level(what: str, factor: float, functional: Any) -> None:
    jitter = ColorJitter(**{what: [factor, factor]})
    for picture in PICTURES:
        theirs = getattr(functional, f"adjust_{what}")(picture, factor)
        assert far(painted(picture, jitter), theirs) <= 1


def test_color_jitter_parity_of_a_whole_jitter(functional: Any) -> None:
    # torchvision loses half a level in the mean at each step, and the factors that follow multiply it.
    jitter = ColorJitter(0.4, 0.4, 0.4)
    names = ("brightness", "contrast", "saturation")
    for row in range(24):
        u = uniforms(0, 0, "color_jitter", row, 1, ColorJitter.draws)[0]
        order = [i for i in ORDERS[int(u[1] * 24)] if i < 3]
        theirs = PICTURES[0]
        for i in order:
            theirs = getattr(functional, f"adjust_{names[i]}")(theirs, 0.6 + 0.8 * u[2 + i])
        ours = painted(PICTURES[0], jitter, row=row)
        assert far(ours, theirs) <= 4 and np.abs(ours.astype(int) - np.asarray(theirs)).mean() < 2


ORDERS = [*permutations(range(4))]


@pytest.mark.parametrize("turn", [-0.5, -0.1, 0.05, 0.25])
def test_color_jitter_parity_of_hue_with_its_definition_in_yiq(turn: float) -> None:
    # DALI's numbers of both directions, and a rotation in the plane of I and Q.
    forth = np.array([[0.299, 0.587, 0.114], [0.596, -0.274, -0.321], [0.211, -0.523, 0.311]])
    back = np.array([[1, 0.956, 0.621], [1, -0.272, -0.647], [1, -1.107, 1.705]])
    c, s = np.cos(2 * np.pi * turn), np.sin(2 * np.pi * turn)
    rotation = np.array([[1, 0, 0], [0, c, s], [0, -s, c]])
    picture = np.asarray(PICTURES[0])
    expected = np.clip(np.rint(picture @ (back @ rotation @ forth).T), 0, 255)
    assert far(painted(PICTURES[0], ColorJitter(hue=[turn, turn])), expected) <= 1


def test_a_hue_turns_as_torchvisions_does_and_keeps_the_grey(functional: Any) -> None:
    red = Image.new("RGB", (4, 4), (160, 110, 110))
    turned, theirs = painted(red, ColorJitter(hue=[0.1, 0.1])), np.asarray(functional.adjust_hue(red, 0.1))
    assert turned[0, 0, 1] > turned[0, 0, 2] and theirs[0, 0, 1] > theirs[0, 0, 2]  # towards yellow
    assert abs(float(turned[0, 0] @ np.array(GREY)) - float(np.array([160, 110, 110]) @ np.array(GREY))) < 1
    grey = Image.new("RGB", (4, 4), (255, 255, 255))
    np.testing.assert_array_equal(painted(grey, ColorJitter(hue=[0.3, 0.3])), grey)


def test_random_grayscale_parity_with_torchvision(functional: Any) -> None:
    for picture in PICTURES:
        assert far(painted(picture, RandomGrayscale(1.0)), functional.rgb_to_grayscale(picture, 3)) <= 1


@pytest.mark.parametrize("kernel", [1, 3, [5, 9], [9, 5], 23, [79, 79]])
@pytest.mark.parametrize("sigma", [0.1, 0.8, 2.0, 30.0])
def test_gaussian_blur_parity_with_torchvision(kernel: Any, sigma: float, functional: Any) -> None:
    # Which of the two sides comes first, where the border is, and how it is mirrored.
    sides = kernel if isinstance(kernel, list) else [kernel] * 2
    ours = painted(PICTURES[0], GaussianBlur(kernel, sigma))
    assert far(ours, functional.gaussian_blur(PICTURES[0], sides, [sigma, sigma])) <= 1


@pytest.mark.parametrize("threshold", [0, 100, 128.5, 255])
def test_random_solarize_parity_with_torchvision_to_the_pixel(threshold: float, functional: Any) -> None:
    for picture in PICTURES:
        assert far(painted(picture, RandomSolarize(threshold, 1.0)), functional.solarize(picture, threshold)) == 0


@pytest.mark.parametrize("bits", range(9))
def test_random_posterize_parity_with_torchvision_to_the_pixel(bits: int, functional: Any) -> None:
    theirs = functional.to_pil_image(functional.posterize(functional.pil_to_tensor(PICTURES[0]), bits))
    assert far(painted(PICTURES[0], RandomPosterize(bits, 1.0)), theirs) == 0


FLAT = [Image.new("RGB", (9, 8), (7, 200, 0)), Image.fromarray(np.asarray(noise(40, 56)) // 4 + 70)]


@pytest.mark.parametrize("picture", [*PICTURES, *FLAT])
def test_random_autocontrast_parity_with_torchvision(picture: Image.Image, functional: Any) -> None:
    assert far(painted(picture, RandomAutocontrast(1.0)), functional.autocontrast(picture)) <= 1


@pytest.mark.parametrize("picture", [*PICTURES, *FLAT])
def test_random_equalize_parity_with_torchvision_to_the_pixel(picture: Image.Image, functional: Any) -> None:
    assert far(painted(picture, RandomEqualize(1.0)), functional.equalize(picture)) == 0


@pytest.mark.parametrize(
    "options", [{}, {"scale": (0.3, 1.0)}, {"ratio": (0.01, 100.0), "scale": (0.5, 0.9)}, {"scale": (0, 1e-5)}]
)
def test_random_erasing_parity_with_torchvision_given_the_same_numbers(options: Any, torch_reads: Any) -> None:
    import torch

    erasing = torchvision("transforms").RandomErasing(1.0, **options)
    image = torch.zeros(3, HEIGHT, WIDTH)
    rows, exact = 150, 0
    [step] = planned(RandomErasing(1.0, **options), rows=rows, seed=9).colour
    assert isinstance(step, Erase)
    for box, u in zip(step.box, uniforms(9, 0, "random_erasing", 0, rows, RandomErasing.draws), strict=True):
        torch_reads(u[1:-2], u[-2:])
        top, left, high, wide, value = erasing.get_params(image, erasing.scale, erasing.ratio, [0.0])
        if value is image:  # no try fitted
            high = wide = 0
        # It computes in float32: sizes may round to the other side, and the place with them.
        ours = box[2] - box[0], box[3] - box[1]
        assert abs(ours[0] - wide) <= 1 and abs(ours[1] - high) <= 1
        exact += not high or not wide or (*box,) == (left, top, left + wide, top + high)
    assert exact > 0.97 * rows


# distributions


def test_every_order_of_a_jitter_comes_as_often_and_its_factors_fill_their_spans() -> None:
    rows = 6000
    steps = planned(ColorJitter(0.4, (0.5, 0.9), 0.2, (-0.1, 0.3)), rows=rows, seed=5).colour
    assert len(steps) == 4
    kinds = np.empty((rows, 4), np.int64)
    for k, step in enumerate(steps):
        assert isinstance(step, Matrix) and step.centred
        off = np.abs(step.matrix - step.matrix * np.eye(3)).max(axis=(1, 2)) > 0
        # A saturation leaves what is grey, to the last bits; a turn nearly so.
        greys = np.abs(step.matrix.sum(axis=2) - 1).max(axis=1) < 1e-9
        kinds[:, k] = np.where(step.gain != 0, 1, np.where(~off, 0, np.where(greys, 2, 3)))
    np.testing.assert_array_equal(np.sort(kinds, axis=1), np.tile(np.arange(4), (rows, 1)))
    _, counts = np.unique(kinds, axis=0, return_counts=True)
    assert len(counts) == 24 and counts.min() > 180 and counts.max() < 330  # 250, standard deviation 15
    brightness = np.concatenate([step.matrix[kinds[:, k] == 0, 0, 0] for k, step in enumerate(steps)])  # type: ignore[union-attr]
    contrast = np.concatenate([1 - step.gain[kinds[:, k] == 1] for k, step in enumerate(steps)])  # type: ignore[union-attr]
    for found, low, high in ((brightness, 0.6, 1.4), (contrast, 0.5, 0.9)):
        assert low <= found.min() < low + 0.01 and high - 0.01 < found.max() <= high
        assert abs(found.mean() - (low + high) / 2) < 0.02 * (high - low)


def test_what_a_jitter_does_not_do_takes_no_step() -> None:
    assert planned(ColorJitter()).colour == ()
    [one] = planned(ColorJitter(saturation=0.3)).colour
    assert isinstance(one, Matrix) and not one.centred


@pytest.mark.parametrize("p", [0.0, 0.25, 1.0])
def test_a_probability_is_how_often(p: float) -> None:
    rows = 4000
    colour = planned(
        ColorJitter(0.4, p=p),
        RandomGrayscale(p),
        GaussianBlur(3, p=p),
        RandomErasing(p, (0.1, 0.2), (1, 1)),
        RandomSolarize(9, p),
        RandomPosterize(2, p),
        RandomAutocontrast(p),
        RandomEqualize(p),
        rows=rows,
        seed=1,
    ).colour
    jitter, grey, blur, erase, solarize, posterize, *rest = colour
    assert isinstance(jitter, Matrix) and isinstance(grey, Matrix) and isinstance(blur, Blur)
    assert isinstance(erase, Erase) and isinstance(solarize, Solarize) and isinstance(posterize, Posterize)
    done = [
        (jitter.matrix != np.eye(3)).any(axis=(1, 2)),
        (grey.matrix != np.eye(3)).any(axis=(1, 2)),
        blur.sigma > 0,
        (erase.box != 0).any(axis=1),
        solarize.threshold < 256,
        posterize.mask < 255,
        *(step.apply for step in rest),  # type: ignore[union-attr]
    ]
    for each in done:
        assert abs(each.mean() - p) < 0.03  # standard deviation 0.007
    # Each draws for itself.
    assert p in (0.0, 1.0) or (np.corrcoef(done) - np.eye(8)).max() < 0.1


def test_erased_boxes_lie_inside_with_the_shares_and_ratios_asked_for() -> None:
    params = plan([CenterCrop(200), RandomErasing(1.0)], 2, 0, 0, np.full(5000, 200), np.full(5000, 200))
    [step] = params.colour
    assert isinstance(step, Erase)
    x0, y0, x1, y1 = step.box.T
    assert (step.box >= 0).all() and (step.box <= 200).all()
    area, ratio = (x1 - x0) * (y1 - y0) / 4e4, (y1 - y0) / (x1 - x0)
    assert 0.018 < area.min() < 0.03 and 0.31 < area.max() <= 0.335
    assert 0.28 < ratio.min() < 0.32 and 3.1 < ratio.max() < 3.5
    assert abs((ratio > 1).mean() - 0.5) < 0.03
    assert abs((y0 / (200 - (y1 - y0))).mean() - 0.5) < 0.02


def test_a_box_that_never_fits_leaves_the_picture() -> None:
    [step] = planned(RandomErasing(1.0, (1.0, 1.0)), rows=10).colour
    assert isinstance(step, Erase) and not step.box.any()


def test_sigmas_fill_their_span() -> None:
    [step] = planned(GaussianBlur([3, 5]), rows=4000).colour
    assert isinstance(step, Blur) and step.size == (5, 3)
    assert 0.1 <= step.sigma.min() < 0.11 and 1.99 < step.sigma.max() <= 2.0
    assert abs(step.sigma.mean() - 1.05) < 0.03


def test_the_parameters_never_change() -> None:
    # Expected values: if this fails, the code is wrong, not the test.
    *jitter, erase = planned(ColorJitter(0.4, 0.4, 0.4, 0.1), RandomErasing(1.0), rows=2, seed=1).colour
    found = [(step.matrix[:, 0, 0].tolist(), step.gain.tolist()) for step in jitter if isinstance(step, Matrix)]
    assert found == JITTER
    assert isinstance(erase, Erase) and erase.box.tolist() == [[13, 6, 21, 24], [7, 3, 29, 12]]


#: The corner of each matrix, and the gain, of two rows: hue, brightness, contrast, saturation, and hue, saturation,
#: brightness, contrast.
JITTER = [
    ([0.8284592407226562, 1.017468588256836], [0.0, 0.0]),
    ([1.316930981013328, 0.7459142631097373], [0.0, 0.0]),
    ([0.980432112257585, 1.1825810988747962], [0.019567887742415024, 0.0]),
    ([1.13345193677364, 1.1300378536248976], [0.0, -0.13003785362489761]),
]


# the colour of an erased box


def test_a_value_is_rounded_to_the_nearest_level() -> None:
    assert RandomErasing(value=0.5).fill == (128, 128, 128)
    assert RandomErasing(value=[0, 0.485, 1]).fill == (0, 124, 255)
    assert RandomErasing().fill == BLACK


def test_the_mean_of_the_output_is_settled_to_levels() -> None:
    settled = RandomErasing(value="mean").settled(Output(mean=(0.485, 0.456, 0.406)))
    assert settled == RandomErasing(value=[124 / 255, 116 / 255, 104 / 255])
    assert settled.fill == (124, 116, 104)
    assert settled.settled(Output()) is settled and parse(settled.plain()) == settled


def test_a_mean_that_is_no_colour_or_of_no_stream_is_an_error() -> None:
    with pytest.raises(ValueError, match="value: mean stands for the mean of the stream's output, and .* is no colour"):
        RandomErasing(value="mean").settled(Output(mean=(0.5, 0.5, 1.5)))
    with pytest.raises(ValueError, match="value: mean is that of a stream's output, and here is no stream"):
        planned(RandomErasing(value="mean"))
