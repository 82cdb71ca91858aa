"""MixUp and CutMix: torchvision's recipe, with draws that are a function of stream, epoch and first position."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scripted import ScriptedDaemon, index_of, level
from torchvision_shim import torchvision

import headrace.mix
import headrace.pixels
from headrace.assembly import Draft
from headrace.batch import Batch
from headrace.errors import ConfigError, HeadraceError
from headrace.finish import to_bfloat16
from headrace.form import Form, Library
from headrace.loader import Loader
from headrace.mix import Mixing, beta, blend, check_labels, cut, mix, mix_labels, pair, paste
from headrace.output import CutMix, DType, Layout, MixUp, Output
from headrace.pipeline.spec import Config, Stream
from headrace.slots import SlotLayout

torch = pytest.importorskip("torch")

MEAN_STD: Any = {"mean": (0.4, 0.5, 0.6), "std": (0.2, 0.3, 0.4)}
DTYPES: tuple[DType, ...] = ("float32", "float16", "bfloat16")
LAYOUTS: tuple[Layout, ...] = ("NCHW", "NHWC", "channels_last")
EVERY_ROW: NDArray[np.bool_] = np.ones(6, np.bool_)
SOME_ROWS = np.array([False, True, True, False, True, False])
CLASSES = 4
NUMBERS = np.array([2, 0, 3, 3, 1, 0])
#: By what was drawn first, in units of 2**-24.
DRAWN: list[Any] = [(16767738, None), (15747365, (65, 0, 115, 44)), (5636504, None), (2574, None)]
HOT = np.array([[1, 0, 1, 0], [0, 0, 0, 0], [0, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 1], [1, 0, 0, 0]], np.float32)


def pictures(dtype: DType = "float32", *, planes: bool = True) -> NDArray[Any]:
    """Six of 5 by 7 as a Loader's memory has them: bfloat16 as its bits."""
    values = np.random.default_rng(4).normal(0, 2, (6, 3, 5, 7) if planes else (6, 5, 7, 3)).astype(np.float32)
    return to_bfloat16(values).view(np.int16) if dtype == "bfloat16" else values.astype(dtype)


def tensor(images: NDArray[Any]) -> Any:
    """A copy."""
    copied = torch.from_numpy(images.copy())
    return copied.view(torch.bfloat16) if images.dtype == np.int16 else copied


def same_bits(images: Any, others: Any) -> bool:
    def bits(some: Any) -> bytes:
        if not isinstance(some, np.ndarray):
            some = some.contiguous().view(torch.uint8).numpy()
        return bytes(np.ascontiguousarray(some).tobytes())

    return bits(images) == bits(others)


def reference(name: str, params: dict[str, Any], images: Any, labels: Any) -> Any:
    """What torchvision makes of tensors with what is usually drawn."""
    transform = getattr(torchvision("transforms.v2"), name)(num_classes=CLASSES)
    transform.make_params = lambda _: dict(params)
    return transform(images, labels)


# -- as torchvision -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("labels", [NUMBERS, HOT], ids=["numbers", "several"])
@pytest.mark.parametrize("weight", [0.0, 0.3, 0.75, 1.0])
def test_mixup_is_torchvisions_to_the_bit(weight: float, labels: NDArray[Any]) -> None:
    images = pictures()
    wanted, wanted_labels = reference("MixUp", {"lam": weight}, tensor(images), torch.from_numpy(labels))
    blend(images, pair(EVERY_ROW), weight)
    mixed = mix_labels(labels, pair(EVERY_ROW), weight, CLASSES)
    assert np.array_equal(images, wanted)
    assert mixed.dtype == np.float32 and np.array_equal(mixed, wanted_labels)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_mixup_of_16_bits_is_rounded_once_and_torchvisions_three_times(dtype: DType) -> None:
    images = pictures(dtype)
    before = tensor(images)
    exact, _ = reference("MixUp", {"lam": 0.3}, before.float(), torch.from_numpy(NUMBERS))
    near, _ = reference("MixUp", {"lam": 0.3}, before, torch.from_numpy(NUMBERS))
    blend(images, pair(EVERY_ROW), 0.3)
    assert same_bits(images, exact.to(before.dtype))
    step = torch.finfo(before.dtype).eps * before.abs().max()
    assert (tensor(images) - near).abs().max() <= 2 * step


@pytest.mark.parametrize(("dtype", "planes"), [*product(DTYPES, [True, False])])
def test_cutmix_is_torchvisions_to_the_bit(dtype: DType, planes: bool) -> None:
    images = pictures(dtype, planes=planes)
    seen = tensor(images) if planes else tensor(images).permute(0, 3, 1, 2)
    mixture = cut(0.6, 5, 1, 5, 7)
    assert mixture.box is not None
    params = {"box": mixture.box, "lam_adjusted": mixture.weight}
    wanted, wanted_labels = reference("CutMix", params, seen, torch.from_numpy(NUMBERS))
    paste(images, pair(EVERY_ROW), mixture.box, planes=planes)
    assert same_bits(images, wanted if planes else wanted.permute(0, 2, 3, 1))
    assert np.array_equal(mix_labels(NUMBERS, pair(EVERY_ROW), mixture.weight, CLASSES), wanted_labels)


def test_the_box_is_torchvisions_for_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = torchvision("transforms.v2").CutMix(num_classes=2)
    image = torch.zeros(1, 3, 30, 41)
    for share, x, y in product([0.0, 0.013, 0.5, 0.97, 1.0], [0, 20, 40], [0, 11, 29]):
        theirs._dist.sample = lambda _, share=share: torch.tensor([share], dtype=torch.float64)
        drawn = iter([x, y])
        monkeypatch.setattr(torch, "randint", lambda _, size, drawn=drawn: torch.tensor([next(drawn)]))
        wanted = theirs.make_params([image])
        ours = cut(share, x, y, 30, 41)
        assert (ours.box, ours.weight) == (wanted["box"], wanted["lam_adjusted"])


# -- what is drawn --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("alpha", "below"),
    [
        (0.5, lambda x: 2 / np.pi * np.arcsin(np.sqrt(x))),
        (1.0, lambda x: x),
        (2.0, lambda x: 3 * x**2 - 2 * x**3),
        (3.0, lambda x: 10 * x**3 - 15 * x**4 + 6 * x**5),
    ],
)
def test_the_weight_is_of_the_beta_distribution(alpha: float, below: Any) -> None:
    middle = (np.arange(100) + 0.5) / 100  # a grid instead of chance: only the grid's own error is left
    drawn = np.sort([beta(alpha, u, v) for u in middle for v in middle])
    for x in (0.001, 0.01, 0.1, 0.3, 0.5, 0.8, 0.99):
        assert np.searchsorted(drawn, x) / len(drawn) == pytest.approx(below(x), abs=0.008)


@pytest.mark.parametrize("alpha", [0.1, 0.2, 0.4, 7.5])
def test_the_weights_moments_are_those_of_the_beta_distribution(alpha: float) -> None:
    middle = (np.arange(100) + 0.5) / 100
    drawn = np.array([beta(alpha, u, v) for u in middle for v in middle])
    variance = 1 / (4 * (2 * alpha + 1))
    assert drawn.mean() == pytest.approx(0.5, abs=1e-6)
    assert drawn.var() == pytest.approx(variance, rel=0.02)
    assert ((drawn - 0.5) ** 4).mean() == pytest.approx(3 * variance**2 * (2 * alpha + 1) / (2 * alpha + 3), rel=0.02)


@pytest.mark.parametrize("alpha", [5e-324, 1e-3, 0.2, 1.0, 1e3, 1.7e308])
def test_a_weight_and_the_rest_are_numbers_of_float32_from_0_to_1(alpha: float) -> None:
    for u, v in product([0.0, 2**-53, 0.4, 1 - 2**-53], [0.0, 0.25, 0.5, 0.75, 1 - 2**-53]):
        weight = beta(alpha, u, v)
        assert 0 <= weight <= 1
        assert float(np.float32(weight)) == weight and float(np.float32(1 - weight)) == 1 - weight


def test_what_is_drawn_stays_for_ever() -> None:
    both = Mixing(MixUp(0.2), CutMix(1.0), seed=7, classes=2, planes=True)
    drawn = [both.draw(3, first, 224, 160) for first in (0, 64, 128, 192)]
    assert [(round(m.weight * 2**24), m.box) for m in drawn] == DRAWN
    only = Mixing(None, CutMix(1.0), seed=7, classes=2, planes=True)
    for first, mixture in zip((0, 64, 128, 192), drawn, strict=True):
        assert mixture.box is None or mixture == only.draw(3, first, 224, 160)


def test_each_seed_epoch_and_first_position_has_draws_of_its_own() -> None:
    def weight(seed: int, epoch: int, first: int) -> float:
        return Mixing(MixUp(), None, seed, 2, planes=True).draw(epoch, first, 8, 8).weight

    assert len({weight(*key) for key in product((0, 1), (0, 1), (0, 1, 64))}) == 12


def test_of_both_each_has_half_of_the_batches() -> None:
    both = Mixing(MixUp(), CutMix(), seed=0, classes=2, planes=True)
    boxes = [both.draw(0, 64 * step, 32, 48).box for step in range(400)]
    assert 160 < sum(box is None for box in boxes) < 240
    for box in boxes:
        assert box is None or (0 <= box[0] <= box[2] <= 48 and 0 <= box[1] <= box[3] <= 32)


# -- who is mixed ---------------------------------------------------------------------------------------------


def test_partners_are_the_valid_rows_rolled_by_one() -> None:
    assert pair(EVERY_ROW).tolist() == [5, 0, 1, 2, 3, 4]
    assert pair(SOME_ROWS).tolist() == [0, 4, 1, 3, 2, 5]
    assert pair(np.array([False, True])).tolist() == [0, 1]
    assert pair(np.array([], np.bool_)).tolist() == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [MixUp, CutMix])
def test_rows_that_are_not_valid_stay_as_they_are_and_nobody_has_them(kind: Any, dtype: DType) -> None:
    images, rest = pictures(dtype), pictures(dtype)[SOME_ROWS]
    output = Output(dtype).replaced(**{kind.__name__.lower(): kind()})
    mixing = Mixing(output.mixup, output.cutmix, seed=0, classes=CLASSES, planes=True)
    before = images.copy()
    labels = mix(images, NUMBERS, SOME_ROWS, mixing, epoch=0, first=3)
    alone = mix(rest, NUMBERS[SOME_ROWS], np.ones(3, np.bool_), mixing, epoch=0, first=3)
    assert same_bits(images[~SOME_ROWS], before[~SOME_ROWS])
    assert same_bits(images[SOME_ROWS], rest) and not same_bits(rest, before[SOME_ROWS])
    assert np.array_equal(labels[~SOME_ROWS], np.eye(CLASSES)[NUMBERS[~SOME_ROWS]])
    assert np.array_equal(labels[SOME_ROWS], alone)


@pytest.mark.parametrize("valid", [np.zeros(6, np.bool_), np.arange(6) == 2], ids=["none", "one"])
@pytest.mark.parametrize("labels", [NUMBERS, HOT], ids=["numbers", "several"])
def test_fewer_than_two_valid_rows_are_not_mixed_and_labels_have_the_same_form(
    valid: NDArray[np.bool_], labels: NDArray[Any]
) -> None:
    for mixing in (Mixing(MixUp(), None, 0, CLASSES, planes=True), Mixing(None, CutMix(), 0, CLASSES, planes=True)):
        images = pictures()
        out = mix(images, labels, valid, mixing, epoch=0, first=0)
        assert np.array_equal(images, pictures())
        assert out.dtype == np.float32
        assert np.array_equal(out, HOT if labels is HOT else np.eye(CLASSES)[NUMBERS])


@pytest.mark.parametrize("valid", [EVERY_ROW, SOME_ROWS], ids=["every", "some"])
@pytest.mark.parametrize("rows", [1, 2, 4, 5])
def test_large_batches_are_mixed_in_blocks_with_the_same_result(
    rows: int, valid: NDArray[np.bool_], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, blocks = pictures("bfloat16"), pictures("bfloat16")
    blend(whole, pair(valid), 0.3)
    monkeypatch.setattr(headrace.mix, "_BLOCK", rows * 4 * 3 * 5 * 7)
    blend(blocks, pair(valid), 0.3)
    assert same_bits(whole, blocks)


# -- arrays and tensors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "layout"), [*product(DTYPES, LAYOUTS)])
@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
def test_tensors_are_mixed_as_arrays_are(kind: str, dtype: DType, layout: Layout) -> None:
    form = Output(dtype, layout).replaced(**{kind: {"alpha": 1.0}})
    array = pictures(dtype, planes=layout == "NCHW")
    held = tensor(array)
    seen = held.permute(0, 3, 1, 2) if layout == "channels_last" else held
    for labels in (NUMBERS, HOT):
        ours, theirs = (
            mix(images, given, SOME_ROWS, Mixing(form.mixup, form.cutmix, 1, CLASSES, planes=planes), epoch=2, first=6)
            for images, given, planes in (
                (array, labels, layout == "NCHW"),
                (seen, torch.from_numpy(labels), layout != "NHWC"),
            )
        )
        assert theirs.dtype is torch.float32 and same_bits(ours, theirs)
        assert same_bits(array, held)


def made(kind: Library, output: Output, keep: list[bool]) -> Batch:
    mixing = Mixing(output.mixup, output.cutmix, 5, CLASSES, planes=output.layout == "NCHW")
    form = Form(kind, output, height=5, width=7, batch_size=6, prefetch=1, mixing=mixing if output.mixed else None)
    draft = Draft(
        step=1, positions=range(12, 18), images=form.allocate(6), labels=NUMBERS.copy(), indices=np.arange(6),
        valid=SOME_ROWS.copy(), keep=np.array(keep), missing=0,
    )  # fmt: skip
    form.finish(np.random.default_rng(2).integers(0, 256, (6, 5, 7, 3), np.uint8), draft.images)
    return form.make(draft, epoch=3)


@pytest.mark.parametrize(("dtype", "layout"), [*product(DTYPES, LAYOUTS)])
@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
def test_a_batch_is_mixed_whatever_its_form_once_rows_have_closed_up(kind: str, dtype: DType, layout: Layout) -> None:
    keep = [True, True, True, False, True, True]
    output = Output(dtype, layout, **MEAN_STD).replaced(**{kind: {"alpha": 1.0}})
    batch, plain = made("torch", output, keep), made("torch", output.replaced(**{kind: False}), keep)
    mixing = Mixing(output.mixup, output.cutmix, 5, CLASSES, planes=layout != "NHWC")
    labels = mix(plain.images, plain.labels, plain.valid, mixing, epoch=3, first=12)
    assert batch.images.shape == plain.images.shape and batch.images.stride() == plain.images.stride()
    assert same_bits(batch.images, plain.images)
    assert torch.equal(batch.labels, labels) and batch.labels.shape == (5, CLASSES)
    if dtype != "bfloat16":
        array = made("numpy", output, keep)
        assert isinstance(array.labels, np.ndarray) and same_bits(array.labels, labels)
        assert same_bits(array.images, batch.images)


# -- what is refused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mixup": {"alpha": 0}}, "mixup: alpha: 0 must be a positive number"),
        ({"cutmix": {"alpha": -1.0}}, "cutmix: alpha: -1.0 must be a positive number"),
        ({"mixup": {"alpha": float("inf")}}, "mixup: alpha: inf must be a positive number"),
        ({"mixup": {"alpha": float("nan")}}, "mixup: alpha: nan must be a positive number"),
        ({"mixup": {"alpha": "0.2"}}, "mixup: alpha: '0.2' must be a positive number"),
        ({"mixup": {"beta": 1}}, "mixup: {'beta': 1} must be {'alpha': NUMBER}"),
        ({"cutmix": 0.2}, "cutmix: 0.2 must be {'alpha': NUMBER}"),
        ({"cutmix": MixUp()}, "cutmix: MixUp.* must be {'alpha': NUMBER}"),
        ({"mixup": True}, "mixup: True must be"),
        ({"dtype": "uint8", "mixup": {"alpha": 1}}, "uint8 hands out the rendered levels, .* need a floating dtype"),
        ({"dtype": "uint8", "cutmix": {}}, "mixup and cutmix need a floating dtype"),
    ],
)
def test_a_mixing_that_makes_no_sense_is_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Output(**arguments)


def test_only_classes_can_be_mixed() -> None:
    check_labels(SlotLayout(4, 2, 2), 2, text=False)
    check_labels(SlotLayout(4, 2, 2, "float32", 2), 2, text=False)
    for layout, classes, text, kind in (
        (SlotLayout(4, 2, 2), 0, False, "numbers"),
        (SlotLayout(4, 2, 2, "float32"), 0, False, "numbers"),
        (SlotLayout(4, 2, 2, "int64", 3), 0, False, "vectors of numbers"),
        (SlotLayout(4, 2, 2, "float32", 3), 0, False, "vectors of numbers"),
        (SlotLayout(4, 2, 2, text=9), 0, True, "texts"),
    ):
        with pytest.raises(ConfigError, match=f"labels are {kind}, and only classes can be mixed: .*mixup=False"):
            check_labels(layout, classes, text=text)


# -- streams and Loaders --------------------------------------------------------------------------------------

STREAM: dict[str, Any] = {"dataset": {"folder": "/data"}, "transforms": [{"center_crop": {"size": 8}}]}


def test_a_stream_declares_it_and_its_fingerprints_do_not_tell() -> None:
    declared = {"mixup": {"alpha": 0.2}, "cutmix": {"alpha": 1}}
    config = Config.load({"streams": {"a": STREAM | {"output": declared}}})
    assert config.streams["a"].output == Output(mixup=MixUp(0.2), cutmix=CutMix(1.0))
    assert Config.load(config.plain()) == config
    plain = Stream(**STREAM)
    assert config.streams["a"].fingerprints("d") == plain.fingerprints("d")
    with pytest.raises(ConfigError, match=r"streams\.a\.output\.mixup\.?.*alpha: .*must be a positive number"):
        Config.load({"streams": {"a": STREAM | {"output": {"mixup": {"alpha": 0}}}}})
    with pytest.raises(ConfigError, match=r"streams\.a\.output\.cutmix\.gamma: there is no such key"):
        Config.load({"streams": {"a": STREAM | {"output": {"cutmix": {"gamma": 1}}}}})


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[ScriptedDaemon]:
    output = Output(**MEAN_STD, mixup=MixUp(1.0))
    with ScriptedDaemon(tmp_path / "s", samples=20, size=(4, 6), bad=[5], output=output, seed=3) as daemon:
        yield daemon


def open_loader(daemon: ScriptedDaemon, **arguments: Any) -> Loader:
    usual: dict[str, Any] = {"batch_size": 4, "output": "numpy", "timeout": 20, "rank": 0, "world_size": 1}
    return Loader(daemon.address, **(usual | arguments))


def test_a_loader_mixes_the_same_after_a_resume_and_otherwise_with_another_batch_size(daemon: ScriptedDaemon) -> None:
    with open_loader(daemon, on_bad_sample="mask") as loader:
        batches = iter(loader)
        seen = [next(batches) for _ in range(2)]
        state = loader.state_dict()
        seen += batches
    weights = []
    for step, batch in enumerate(seen):
        positions = range(4 * step, 4 * step + 4)
        assert batch.labels.dtype == np.float32 and batch.labels.shape == (4, 2)
        assert batch.valid.tolist() == [p != 5 for p in positions]
        levels = np.array([0 if p == 5 else level(0, p) for p in positions])[:, None] / 255
        images = ((levels - MEAN_STD["mean"]) / MEAN_STD["std"])[:, :, None, None] * np.ones((4, 6))
        labels = np.eye(2)[[index_of(p, 20) // 10 for p in positions]]
        weights.append(Mixing(MixUp(1.0), None, 3, 2, planes=True).draw(0, positions[0], 4, 6).weight)
        partners = pair(batch.valid)
        mixed, rest = np.where(batch.valid, weights[-1], 1), np.where(batch.valid, 1 - weights[-1], 0)
        wanted = images * mixed[:, None, None, None] + images[partners] * rest[:, None, None, None]
        assert np.allclose(batch.images, wanted, atol=1e-5)
        assert np.allclose(batch.labels, labels * mixed[:, None] + labels[partners] * rest[:, None], atol=1e-6)
    assert len(set(weights)) == 5
    with open_loader(daemon, on_bad_sample="mask") as loader:
        loader.load_state_dict(state)
        rest_of_epoch = list(loader)
        counts = loader.stats()["epochs"][0]
    assert (counts["delivered"], counts["rejected"], counts["extra"]) == (12, 0, 0)
    for batch, again in zip(seen[2:], rest_of_epoch, strict=True):
        assert np.array_equal(batch.images, again.images) and np.array_equal(batch.labels, again.labels)
    with open_loader(daemon, on_bad_sample="mask", batch_size=8) as loader:
        assert not np.array_equal(next(iter(loader)).images[:4], seen[0].images)


def test_a_loader_may_mix_otherwise_than_the_stream_or_not_at_all(daemon: ScriptedDaemon) -> None:
    with open_loader(daemon, mixup=False) as loader:
        plain = loader.state_dict()
        images, labels = next(iter(loader))
    assert labels.tolist() == [1, 1, 1, 1] and labels.dtype == np.int64
    with open_loader(daemon, mixup=False, cutmix={"alpha": 1.0}, output="torch", layout="channels_last") as loader:
        assert loader.state_dict() == plain
        cut_images, cut_labels = next(iter(loader))
    assert cut_images.is_contiguous(memory_format=torch.channels_last)
    assert set(cut_images.unique().tolist()) <= set(np.unique(images).tolist())
    assert cut_labels.tolist() == [[0, 1]] * 4
    with pytest.raises(ConfigError, match="mixup and cutmix need a floating dtype"):
        open_loader(daemon, dtype="uint8")
    with open_loader(daemon, dtype="uint8", mixup=False) as loader:
        assert next(iter(loader)).images[0, 0, 0, 0] == level(0, 0)
    with pytest.raises(ConfigError, match="mixup: alpha: 0 must be a positive number"):
        open_loader(daemon, mixup={"alpha": 0})


def test_a_batch_for_whose_mixing_there_was_no_memory_is_assembled_anew(
    daemon: ScriptedDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_loader(daemon, on_bad_sample="mask") as loader:
        wanted = list(loader)
    failed: list[int] = []

    def fail_once(*args: Any, first: int, **more: Any) -> Any:
        labels = mix(*args, first=first, **more)  # pictures are mixed in place, so this cannot be done again
        if first == 8 and not failed:
            failed.append(first)
            raise MemoryError("no room")
        return labels

    monkeypatch.setattr(headrace.pixels, "mix", fail_once)
    with open_loader(daemon, on_bad_sample="mask", timeout=5) as loader:
        seen: list[Batch] = []
        with pytest.raises(HeadraceError, match="no room"):
            seen.extend(loader)  # those that came before the error stay; others that were ready are made again
        seen.extend(loader)
    for batch, again in zip(wanted, seen, strict=True):
        assert np.array_equal(batch.images, again.images) and np.array_equal(batch.labels, again.labels)


def test_a_loader_refuses_to_mix_labels_that_are_no_classes(tmp_path: Path) -> None:
    with ScriptedDaemon(tmp_path / "s", labels="text") as daemon:
        with pytest.raises(ConfigError, match="labels are texts, and only classes can be mixed"):
            open_loader(daemon, mixup={"alpha": 0.2})
