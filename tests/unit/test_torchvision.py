"""torchvision's pipelines in Headrace's words, against torchvision itself."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from pictures import encode, noise
from PIL import Image
from torchvision_shim import torchvision

import headrace
from headrace.errors import ConfigError
from headrace.output import Output
from headrace.pipeline.pillow import PillowBackend
from headrace.pipeline.probe import probe
from headrace.pipeline.spec import Decode, Stream
from headrace.pipeline.torchvision import from_torchvision
from headrace.pipeline.transforms import plan

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


@pytest.fixture
def v1() -> Any:
    return torchvision("transforms")


@pytest.fixture
def v2() -> Any:
    return torchvision("transforms.v2")


def translated(transform: object, settled: Mapping[str, Mapping[str, Any]] = MappingProxyType({})) -> dict[str, Any]:
    """The translation, which a stream accepts as it is, but for arguments that it settles."""
    found = from_torchvision(transform)
    stream = Stream(dataset={"folder": "/data"}, **found)
    expected = [{name: {**a, **settled.get(name, {})} for name, a in part.items()} for part in found["transforms"]]
    assert [part.plain() for part in stream.transforms] == expected
    return found


def refused(*transforms: object) -> str:
    with pytest.raises(ConfigError) as caught:
        from_torchvision(list(transforms))
    return str(caught.value)


def shown(found: dict[str, Any], picture: Image.Image) -> Any:
    """A picture through the translation, as a batch would have it."""
    import torch

    chain = Stream(dataset={"folder": "/data"}, **found).transforms
    params = plan(chain, 0, 0, 0, np.array([picture.height]), np.array([picture.width]))
    levels = np.empty((1, *params.size, 3), np.uint8)
    assert PillowBackend().render([probe(encode(picture), Decode())], params, list(levels), lambda i: None) == [None]
    output = Output(**found["output"])
    finished = np.moveaxis(levels[0], 2, 0).astype(np.float64)
    if output.dtype != "uint8":
        mean, std = (np.array(v)[:, None, None] for v in (output.mean, output.std))
        finished = (finished / 255 - mean) / std
    return torch.from_numpy(finished)


def to_floats(t: Any) -> list[Any]:
    """What makes tensors with numbers from 0 to 1, in either version."""
    import torch

    if not hasattr(t, "ToImage"):
        return [t.ToTensor()]
    return [t.ToImage(), t.ToDtype({torch.Tensor: None, "others": torch.float32}, scale=True)]


def test_the_usual_training_pipeline(v1: Any) -> None:
    compose = v1.Compose([v1.RandomResizedCrop(224), v1.RandomHorizontalFlip(), v1.ToTensor(), v1.Normalize(MEAN, STD)])
    assert translated(compose) == {
        "transforms": [headrace.RandomResizedCrop(224).plain(), headrace.RandomHorizontalFlip().plain()],
        "output": {"dtype": "float32", "mean": MEAN, "std": STD},
    }


def test_the_usual_pipeline_of_version_2(v2: Any) -> None:
    import torch

    compose = v2.Compose(
        [
            v2.ToImage(),
            v2.RandomResizedCrop((160, 192), scale=(0.5, 1), ratio=(1, 2), interpolation=3),
            v2.RandomVerticalFlip(0.25),
            v2.ToDtype(torch.bfloat16, scale=True),
            v2.Normalize(MEAN, STD, inplace=True),
            v2.ToPureTensor(),
        ]
    )
    assert translated(compose) == {
        "transforms": [
            headrace.RandomResizedCrop([160, 192], [0.5, 1.0], [1.0, 2.0], "bicubic").plain(),
            headrace.RandomVerticalFlip(0.25).plain(),
        ],
        "output": {"dtype": "bfloat16", "mean": MEAN, "std": STD},
    }


@pytest.mark.parametrize("picture", [(300, 400), (401, 333), (90, 70)])
@pytest.mark.parametrize("api", ["transforms", "transforms.v2"])
def test_what_draws_nothing_gives_the_same_tensor(api: str, picture: tuple[int, int]) -> None:
    t = torchvision(api)
    image = noise(*picture)
    for chain in (
        [t.Resize(64), t.CenterCrop(56)],
        [t.Resize([64], max_size=80), t.CenterCrop((80, 72))],
        [t.Resize((50, 60), interpolation=t.InterpolationMode.BICUBIC), t.Pad([1, 2, 3, 4], fill=(9, 100, 200))],
        [t.CenterCrop(64), t.RandomHorizontalFlip(1), t.RandomVerticalFlip(1)],
        [t.Resize((40, 44)), t.RandomCrop((48, 48), padding=[2, 4], fill=7)],
    ):
        compose = t.Compose([*chain, *to_floats(t), t.Normalize(MEAN, STD)])
        theirs, ours = compose(image), shown(translated(compose), image)
        assert theirs.shape == ours.shape
        # A level is 1/255 before it is divided by std.
        assert (theirs - ours).abs().max() < 1.01 / 255 / min(STD)


def test_levels_that_stay_whole(v1: Any, v2: Any) -> None:
    for compose in (v1.Compose([v1.CenterCrop(48), v1.PILToTensor()]), v2.Compose([v2.CenterCrop(48), v2.ToImage()])):
        found = translated(compose)
        assert found["output"] == {"dtype": "uint8"}
        np.testing.assert_array_equal(shown(found, noise(60, 50)), compose(noise(60, 50)))


def test_a_pipeline_without_tensors_says_nothing_of_the_output(v1: Any) -> None:
    assert translated(v1.RandomResizedCrop(8)) == {"transforms": [headrace.RandomResizedCrop(8).plain()], "output": {}}


def test_a_type_for_each_kind_of_input_is_that_of_the_kind_that_comes(v2: Any) -> None:
    import torch

    types = {torchvision("tv_tensors").Image: torch.float16, "others": torch.bfloat16}
    for chain, expected in (
        ([v2.ToImage()], "float16"),
        ([v2.ToImage(), v2.ToPureTensor()], "bfloat16"),
        ([v2.PILToTensor()], "bfloat16"),
    ):
        compose = v2.Compose([v2.CenterCrop(8), *chain, v2.ToDtype(types, scale=True)])
        assert str(compose(noise(9, 9)).dtype) == f"torch.{expected}"
        assert translated(compose)["output"] == {"dtype": expected}


def test_the_transforms_of_weights(v1: Any) -> None:
    models = torchvision("models")
    for weights in (
        models.ResNet50_Weights.IMAGENET1K_V2,
        models.EfficientNet_B0_Weights.DEFAULT,
        models.ViT_B_16_Weights.IMAGENET1K_SWAG_E2E_V1,
    ):
        preset = weights.transforms()
        found = translated(preset)
        assert found["output"] == {"dtype": "float32", "mean": preset.mean, "std": preset.std}
        image = noise(400, 500)
        assert (preset(image) - shown(found, image)).abs().max() < 1.01 / 255 / min(preset.std)


def test_nested_ones_are_read_in_order(v1: Any, v2: Any) -> None:
    import torch

    inner = v2.Compose([v2.RandomHorizontalFlip(0.1), v2.CenterCrop(8)])
    found = translated(v1.Compose([torch.nn.Sequential(v1.Resize(9), inner), v2.Identity(), v2.RGB()]))
    assert [next(iter(part)) for part in found["transforms"]] == ["resize", "random_horizontal_flip", "center_crop"]


@pytest.mark.parametrize(
    "padding, expected", [(4, [4] * 4), ([1, 2], [1, 2, 1, 2]), ([1, 2, 3, 4], [1, 2, 3, 4]), (None, [0] * 4)]
)
@pytest.mark.parametrize("api", ["transforms", "transforms.v2"])
def test_the_padding_of_a_random_crop(api: str, padding: Any, expected: list[int]) -> None:
    [part] = translated(torchvision(api).RandomCrop(8, padding, True, 5))["transforms"]
    assert part == {"random_crop": {"size": [8, 8], "padding": expected, "pad_if_needed": True, "fill": [5, 5, 5]}}


def test_a_fill_after_the_levels_are_floats_is_a_share_of_white(v1: Any) -> None:
    found = translated([v1.ToTensor(), v1.RandomCrop(8, 2, fill=1.0)])
    assert found["transforms"][0]["random_crop"]["fill"] == [255, 255, 255]
    assert "no whole level" in refused(v1.ToTensor(), v1.RandomCrop(8, 2, fill=0.3))


@pytest.mark.parametrize("api", ["transforms", "transforms.v2"])
def test_the_usual_pipelines_of_colour(api: str) -> None:
    t = torchvision(api)
    jitter = t.ColorJitter(0.4, 0.4, 0.4, 0.1)
    contrastive = t.Compose(  # that of SimCLR, and of MoCo v2
        [
            t.RandomResizedCrop(224, scale=(0.2, 1.0)),
            t.RandomApply([jitter], p=0.8),
            t.RandomGrayscale(p=0.2),
            t.RandomApply([t.Compose([t.GaussianBlur((23, 21), (0.1, 2.0))])], p=0.5),
            t.RandomHorizontalFlip(),
            *to_floats(t),
            t.Normalize(MEAN, STD),
            t.RandomErasing(0.25),
        ]
    )
    assert translated(contrastive, settled={"random_erasing": {"value": [124 / 255, 116 / 255, 104 / 255]}}) == {
        "transforms": [
            headrace.RandomResizedCrop(224, (0.2, 1.0)).plain(),
            headrace.ColorJitter(0.4, 0.4, 0.4, 0.1, p=0.8).plain(),
            headrace.RandomGrayscale(0.2).plain(),
            headrace.GaussianBlur([23, 21], p=0.5).plain(),
            headrace.RandomHorizontalFlip().plain(),
            headrace.RandomErasing(0.25, value="mean").plain(),
        ],
        "output": {"dtype": "float32", "mean": MEAN, "std": STD},
    }
    rest = [
        t.CenterCrop(8),
        t.ColorJitter(0.5, hue=(-0.1, 0.2)),
        t.RandomSolarize(128, 0.2),
        t.RandomPosterize(4),
        t.RandomAutocontrast(0.1),
        t.RandomEqualize(1),
        t.RandomInvert(0.3),
        t.Grayscale(3),
        t.RandomApply([t.RandomHorizontalFlip(0.5)], 0.5),
        t.RandomApply([t.RandomAutocontrast(), t.RandomEqualize()], 1.0),
    ]
    assert translated(t.Compose(rest))["transforms"] == [
        headrace.CenterCrop(8).plain(),
        headrace.ColorJitter([0.5, 1.5], hue=[-0.1, 0.2]).plain(),
        headrace.RandomSolarize(128, 0.2).plain(),
        headrace.RandomPosterize(4).plain(),
        headrace.RandomAutocontrast(0.1).plain(),
        headrace.RandomEqualize(1).plain(),
        headrace.RandomSolarize(0, 0.3).plain(),
        headrace.RandomGrayscale(1).plain(),
        headrace.RandomHorizontalFlip(0.25).plain(),
        headrace.RandomAutocontrast().plain(),
        headrace.RandomEqualize().plain(),
    ]


@pytest.mark.parametrize("api", ["transforms", "transforms.v2"])
def test_what_an_erased_box_is_set_to_depends_on_what_runs_through_the_pipeline(api: str) -> None:
    t = torchvision(api)
    crop, floats, normalize = t.CenterCrop(8), to_floats(t), t.Normalize([0.5], [0.25])

    def value(*chain: Any) -> object:
        return from_torchvision(list(chain))["transforms"][-1]["random_erasing"]["value"]

    assert value(crop, t.PILToTensor(), t.RandomErasing(value=51)) == [0.2] * 3
    assert value(crop, *floats, t.RandomErasing(value=0.3)) == [0.3] * 3
    assert value(crop, *floats, t.RandomErasing(value=(0.1, 0.2, 0.3))) == [0.1, 0.2, 0.3]
    assert value(crop, *floats, normalize, t.RandomErasing()) == "mean"
    assert value(crop, *floats, normalize, t.RandomErasing(value=1.0)) == [0.75] * 3
    assert value(crop, *floats, normalize, t.RandomErasing(value=(0, -2, 2))) == [0.5, 0.0, 1.0]
    assert value(crop, *floats, normalize, t.RandomApply([t.RandomErasing()], 0.5)) == "mean"


def test_a_threshold_after_the_levels_are_floats_is_a_share_of_white(v2: Any) -> None:
    found = translated([v2.CenterCrop(8), *to_floats(v2), v2.RandomSolarize(0.5)])
    assert found["transforms"][1]["random_solarize"]["threshold"] == 127.5


def test_colours_that_cannot_be_translated_are_named_with_the_reason(v1: Any, v2: Any) -> None:
    text = refused(
        v1.CenterCrop(8),
        v2.RandomApply([v2.ColorJitter(0.1), v2.GaussianBlur(3)], 0.5),
        v1.RandomApply([v1.ToTensor()], 0.5),
        v1.Grayscale(),
        v2.RandomPhotometricDistort(),
        v1.RandomErasing(value="random"),
        v2.RandomErasing(value="random"),
        v1.RandomApply([v2.RandomApply([v2.RandomAutocontrast(), v2.RandomEqualize()], 1.0)], 0.5),
    )
    for line, (place, why) in zip(
        text.split("\n"),
        [
            (
                "[1]: RandomApply",
                "does several transforms or none, and Headrace draws for each; use one RandomApply for",
            ),
            ("[2]: RandomApply", "ToTensor cannot be left out at random"),
            ("[3]: Grayscale", "makes one channel, and Headrace's pictures have three; say num_output_channels=3"),
            ("[4]: RandomPhotometricDistort", "Headrace has no such transform"),
            ("[5]: RandomErasing", "value: 'random' would need a draw for each value"),
            ("[6]: RandomErasing", "value: 'random' would need a draw for each value"),
            ("[7]: RandomApply", "RandomApply cannot be left out at random"),
        ],
        strict=True,
    ):
        assert line.startswith(f"from_torchvision: transforms{place}: ") and why in line
    chain = [v1.CenterCrop(8), v1.ToTensor(), v1.Normalize(MEAN, STD)]
    assert "stands after Normalize, and Headrace changes colours before it" in refused(*chain, v1.ColorJitter(0.1))
    assert "[9.0, 9.0, 9.0] after Normalize are [2.546, " in refused(*chain, v1.RandomErasing(value=9))
    brighter = [*chain[:2], v1.Normalize([1.5], [1]), v1.RandomErasing()]
    assert "[0.0, 0.0, 0.0] after Normalize are [1.5, 1.5, 1.5] before it" in refused(*brighter)
    assert "Put random_resized_crop before color_jitter" in refused(v1.ColorJitter(0.1), v1.RandomResizedCrop(8))


@pytest.mark.parametrize("api", ["transforms", "transforms.v2"])
def test_colours_give_the_same_tensor_where_nothing_is_drawn(api: str) -> None:
    import torch

    t = torchvision(api)
    for chain, levels in (
        ([t.ColorJitter((1.3, 1.3))], 1),
        ([t.ColorJitter(contrast=(0.6, 0.6))], 1),
        ([t.ColorJitter(saturation=(1.6, 1.6)), t.RandomGrayscale(1)], 2),
        ([t.GaussianBlur((5, 9), (1.2, 1.2)), t.RandomAutocontrast(1)], 3),
        ([t.RandomSolarize(99, 1), t.RandomPosterize(5, 1), t.RandomEqualize(1), t.RandomInvert(1)], 0),
    ):
        compose = t.Compose([t.CenterCrop((48, 40)), *chain, *to_floats(t), t.Normalize(MEAN, STD)])
        theirs, ours = compose(noise(60, 50)), shown(translated(compose), noise(60, 50))
        assert (theirs - ours).abs().max() < (levels + 0.01) / 255 / min(STD)
    torch.manual_seed(0)
    erase = t.Compose(
        [t.CenterCrop(32), *to_floats(t), t.Normalize(MEAN, STD), t.RandomErasing(1.0, (0.2, 0.2), (1, 1))]
    )
    theirs, ours = erase(noise(32, 32)), shown(from_torchvision(erase), noise(32, 32))
    # Each has its box elsewhere; what is in it is zero, to half a level.
    for tensor in (theirs, ours):
        inside = (tensor.abs() < 0.51 / 255 / min(STD)).all(dim=0).sum()
        assert inside >= 14 * 14


def test_all_that_cannot_be_translated_is_named_with_its_place_and_the_reason(v1: Any, v2: Any) -> None:
    import torch

    class Mine:
        def __call__(self, image: Any) -> Any:
            return image

    class Own(v1.CenterCrop):  # type: ignore[misc]
        pass

    text = refused(
        v1.Resize(9, antialias=False),
        v1.Compose([v1.RandomRotation(9), v1.Resize(9, interpolation=v1.InterpolationMode.NEAREST)]),
        Mine(),
        Own(8),
        v1.Pad(3, padding_mode="reflect"),
        v2.RandomApply([v2.CenterCrop(3)], 0.5),
        v1.Normalize(MEAN, STD),
        v2.ToDtype(torch.float32),
        v2.ToDtype(torch.float64, scale=True),
        v1.ToTensor(),
        v1.ToTensor(),
        v1.Normalize([0.5] * 4, [0.5] * 4),
        v1.Normalize([0.5], [0.5]),
        v1.Normalize(MEAN, STD),
        v1.CenterCrop(8),
        v1.ConvertImageDtype(torch.uint8),
    )
    for line, (place, why) in zip(
        text.split("\n"),
        [
            ("[0]: Resize", "antialias=False: Headrace always antialiases"),
            ("[1][0]: RandomRotation", "Headrace has no such transform; leave it out here, and do it to the batches"),
            ("[1][1]: Resize", "interpolation: Input should be 'bilinear', 'bicubic' or 'lanczos' (got 'nearest')"),
            ("[2]: Mine", "is no transform of torchvision's but one of"),
            ("[3]: Own", "is no transform of torchvision's but one of"),
            ("[4]: Pad", "padding_mode='reflect': Headrace pads with one colour"),
            ("[5]: RandomApply", "CenterCrop cannot be left out at random; Headrace always does it"),
            ("[6]: Normalize", "stands before the levels are floats"),
            ("[7]: ToDtype", "scale=False makes floats from 0 to 255"),
            ("[8]: ToDtype", "not float64"),
            ("[10]: ToTensor", "is a tensor already"),
            ("[11]: Normalize", "three numbers, or one for all"),
            ("[13]: Normalize", "is the second of its kind"),
            ("[14]: CenterCrop", "stands after Normalize, where what it pads with is the mean and not black"),
            ("[15]: ConvertImageDtype", "would turn floats into uint8 again"),
        ],
        strict=True,
    ):
        assert line.startswith(f"from_torchvision: transforms{place}: ") and why in line


def test_a_pipeline_that_does_not_fold_is_refused_with_the_reason(v1: Any) -> None:
    assert "resize and random_resized_crop would each resample" in refused(v1.Resize(256), v1.RandomResizedCrop(224))
    assert "no fixed size" in refused(v1.Resize(256), v1.ToTensor())


@pytest.mark.parametrize("thing", [None, 3, "resize", object()])
def test_what_is_no_transform_is_refused(thing: object) -> None:
    with pytest.raises(ConfigError, match=f"from_torchvision: {type(thing).__name__}: is no transform"):
        from_torchvision(thing)


def test_the_example_of_the_configuration_page_runs(v1: Any) -> None:
    page = (Path(__file__).parents[2] / "docs/configuration.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    names: dict[str, Any] = {}
    exec(compile(example, "configuration.md", "exec"), names)  # as a reader would
    assert names["stream"].output == Output(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))


def test_torchvision_is_not_needed() -> None:
    code = "import headrace, sys; headrace.from_torchvision; print([m for m in sys.modules if m.startswith('torch')])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.stdout.strip() == "[]", run.stderr
