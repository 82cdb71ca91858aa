"""The form of a batch: torch and NumPy give the same bits, in every dtype and layout."""

from __future__ import annotations

import sys
from itertools import product
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.assembly import Draft
from headrace.batch import Batch
from headrace.errors import ConfigError, ProtocolError
from headrace.form import Form, Library, import_torch, library
from headrace.output import DType, Layout, Output

torch = pytest.importorskip("torch")

DTYPES: tuple[DType, ...] = ("uint8", "float16", "float32")
LAYOUTS: tuple[Layout, ...] = ("NCHW", "NHWC", "channels_last")
LEVELS: NDArray[np.uint8] = np.random.default_rng(2).integers(0, 256, (5, 4, 6, 3), np.uint8)


def made(kind: Library, dtype: DType, layout: Layout, keep: list[bool] | None = None) -> Batch:
    mean_std: Any = {} if dtype == "uint8" else {"mean": (0.4, 0.5, 0.6), "std": (0.2, 0.3, 0.4)}
    form = Form(kind, Output(dtype, layout, **mean_std), height=4, width=6, batch_size=5, prefetch=1)
    draft = Draft(
        step=3, positions=range(5), images=form.allocate(5), labels=np.arange(5) + 10, indices=np.arange(5) + 20,
        valid=np.ones(5, np.bool_), keep=np.array(keep or [True] * 5), missing=0,
    )  # fmt: skip
    form.finish(LEVELS, draft.images)
    return form.make(draft, epoch=7)


def as_numpy(images: Any) -> NDArray[Any]:
    if isinstance(images, np.ndarray):
        return images
    return np.asarray(images.view(torch.int16) if images.dtype is torch.bfloat16 else images)


@pytest.mark.parametrize(("dtype", "layout"), [*product(DTYPES, LAYOUTS)])
def test_torch_and_numpy_give_the_same_bits(dtype: DType, layout: Layout) -> None:
    array, tensor = made("numpy", dtype, layout).images, made("torch", dtype, layout).images
    assert isinstance(array, np.ndarray)
    assert tensor.dtype is getattr(torch, dtype)
    assert array.dtype == np.dtype(dtype)
    assert array.tobytes() == as_numpy(tensor).tobytes()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bfloat16_is_a_torch_dtype_rounded_from_float32(layout: Layout) -> None:
    tensor = made("torch", "bfloat16", layout).images
    assert tensor.dtype is torch.bfloat16
    assert torch.equal(tensor, made("torch", "float32", layout).images.to(torch.bfloat16))


@pytest.mark.parametrize("dtype", [*DTYPES, "bfloat16"])
def test_layouts_are_shaped_and_laid_out_as_they_are_called(dtype: DType) -> None:
    planes, rows, last = (made("torch", dtype, layout).images for layout in LAYOUTS)
    assert planes.shape == last.shape == (5, 3, 4, 6)
    assert rows.shape == (5, 4, 6, 3)
    assert planes.is_contiguous()
    assert rows.is_contiguous()
    assert last.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(planes, last)
    assert torch.equal(planes, rows.permute(0, 3, 1, 2))


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_labels_are_int64_and_the_rest_stays_numpy(kind: Library) -> None:
    batch = made(kind, "float32", "NCHW")
    assert str(batch.labels.dtype).removeprefix("torch.") == "int64"
    assert isinstance(batch.labels, np.ndarray) == (kind == "numpy")
    assert isinstance(batch.indices, np.ndarray)
    assert isinstance(batch.valid, np.ndarray)
    assert (batch.epoch, batch.step) == (7, 3)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("keep", [*product([True, False], repeat=5)][:-1])
def test_rows_that_are_not_kept_close_up_in_order(layout: Layout, keep: tuple[bool, ...]) -> None:
    whole, batch = made("numpy", "float32", layout), made("numpy", "float32", layout, list(keep))
    rows = np.flatnonzero(keep)
    assert np.array_equal(batch.images, whole.images[rows])
    assert np.array_equal(batch.labels, rows + 10)
    assert np.array_equal(batch.indices, rows + 20)
    assert len(batch.valid) == len(rows)


TEXTS = [(f"label {row}", row / 2, {"n": [row, None]}) for row in range(5)]


def with_texts(kind: Library, keep: list[bool] | None = None, *, text_labels: bool) -> Batch:
    columns = ["score", "more"] if text_labels else ["name", "score", "more"]
    form = Form(
        kind, Output("uint8", "NHWC"), height=4, width=6, batch_size=5, prefetch=1, text_labels=text_labels,
        columns=columns,
    )  # fmt: skip
    draft = Draft(
        step=3, positions=range(5), images=form.allocate(5), labels=np.arange(10, dtype=np.float32).reshape(5, 2),
        indices=np.arange(5), valid=np.ones(5, np.bool_), keep=np.array(keep or [True] * 5), missing=0,
        texts=form.read([msgspec.msgpack.encode(row) for row in TEXTS]),
    )  # fmt: skip
    return form.make(draft, epoch=7)


@pytest.mark.parametrize("kind", ["torch", "numpy"])
@pytest.mark.parametrize("keep", [None, [False, True, True, False, True]])
def test_texts_become_labels_and_columns_with_a_value_for_each_row(kind: Library, keep: list[bool] | None) -> None:
    rows = [row for row, kept in zip(TEXTS, keep or [True] * 5, strict=True) if kept]
    batch = with_texts(kind, keep, text_labels=True)
    assert batch.labels == [row[0] for row in rows]
    assert batch.extra == {"score": [row[1] for row in rows], "more": [row[2] for row in rows]}
    batch = with_texts(kind, keep, text_labels=False)
    assert batch.labels.shape == (len(rows), 2)
    assert str(batch.labels.dtype).removeprefix("torch.") == "float32"
    assert list(batch.extra) == ["name", "score", "more"]
    assert batch.extra["name"] == [row[0] for row in rows]


def test_without_texts_there_is_nothing_extra() -> None:
    assert made("numpy", "uint8", "NHWC").extra == {}


@pytest.mark.parametrize(
    "text",
    [
        b"", b"\xc1", b"\xc0", msgspec.msgpack.encode(["a", 1]), msgspec.msgpack.encode(["a", 1, 2, 3]),
        msgspec.msgpack.encode([1, 2, 3]), msgspec.msgpack.encode(["a", 1, 2])[:-1],
        msgspec.msgpack.encode(["a", 1, 2]) + b"\xc0", b"\x93\xa1\xff\x01\x02",
    ],
)  # fmt: skip
def test_a_text_that_is_none_is_refused(text: bytes) -> None:
    form = Form(
        "numpy", Output("uint8"), height=1, width=1, batch_size=2, prefetch=0, text_labels=True, columns=["a", "b"]
    )
    good = msgspec.msgpack.encode(["a", None, {}])
    assert form.read([good, good]) == [("a", None, {})] * 2
    with pytest.raises(ProtocolError, match="the text of a row is not what"):
        form.read([good, text])


def test_a_batch_can_be_written_to_without_a_warning() -> None:
    made("torch", "float32", "NCHW").images.add_(1)


def test_bfloat16_without_torch_is_refused() -> None:
    with pytest.raises(ConfigError, match="bfloat16 is unknown to NumPy"):
        made("numpy", "bfloat16", "NCHW")


def test_missing_torch_is_an_error_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ConfigError, match=r"pip install 'headrace\[torch\]'.*output='numpy'"):
        import_torch()


def test_an_unknown_library_is_named() -> None:
    with pytest.raises(ConfigError, match="output: 'jax' is not one of torch, numpy"):
        library("jax")
