"""Batches by DLPack: NumPy, torch and JAX take each other's arrays, and batches of both kinds, without a copy."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from importlib import import_module
from typing import Any, get_args

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.assembly import Draft
from headrace.batch import Batch
from headrace.form import Form, Library
from headrace.output import Layout, Output

torch = pytest.importorskip("torch")

#: Float32 pictures of 64x64, of which eight are large enough to be memory that comes back.
ROWS, SIZE = 8, 64
LEVELS: NDArray[np.uint8] = np.random.default_rng(5).integers(0, 256, (ROWS, SIZE, SIZE, 3), np.uint8)


def form(kind: Library, layout: Layout = "NHWC") -> Form:
    return Form(kind, Output("float32", layout), height=SIZE, width=SIZE, batch_size=ROWS, prefetch=1)


def batch(of: Form) -> Batch:
    draft = Draft(
        step=0, positions=range(ROWS), images=of.allocate(ROWS), labels=np.arange(ROWS), indices=np.arange(ROWS),
        valid=np.ones(ROWS, np.bool_), keep=np.ones(ROWS, np.bool_), missing=0,
    )  # fmt: skip
    of.finish(LEVELS, draft.images)
    return of.make(draft, epoch=0)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC", "channels_last"])
def test_torch_and_numpy_take_each_others_batches_where_they_lie(layout: Layout) -> None:
    arrays, tensors = batch(form("numpy", layout)), batch(form("torch", layout))
    for own, other, place in (
        (arrays.images, torch.from_dlpack(arrays.images), arrays.images.ctypes.data),
        (arrays.labels, torch.from_dlpack(arrays.labels), arrays.labels.ctypes.data),
    ):
        assert other.data_ptr() == place and tuple(other.stride()) == tuple(n // own.itemsize for n in own.strides)
    for tensor, taken in ((part, np.from_dlpack(part)) for part in tensors):
        assert taken.ctypes.data == tensor.data_ptr() and taken.shape == tuple(tensor.shape)
    np.testing.assert_array_equal(np.from_dlpack(tensors.images), arrays.images)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_memory_comes_back_only_when_what_took_it_is_gone(kind: Library) -> None:
    of = form(kind)
    first = batch(of)
    taken: Any = torch.from_dlpack(first.images) if kind == "numpy" else np.from_dlpack(first.images)
    place = np.from_dlpack(taken).ctypes.data
    before = np.from_dlpack(taken).copy()
    del first
    gc.collect()
    second = batch(of)
    np.asarray(second.images)[...] = -1
    np.testing.assert_array_equal(np.from_dlpack(taken), before)
    del taken
    gc.collect()
    assert np.asarray(batch(of).images).ctypes.data == place


def test_jax_takes_images_where_they_lie_and_they_stay_as_long_as_it_has_them() -> None:
    """In a process of its own, which JAX's threads end with: a process that has them must not fork."""
    pytest.importorskip("jax")
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, __file__], env=environment, stderr=subprocess.PIPE, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def jax_takes(kind: Library) -> None:
    jnp: Any = import_module("jax.numpy")
    of = form(kind)
    first = batch(of)
    place = np.asarray(first.images).ctypes.data
    want = np.from_dlpack(first.images).copy()
    images, labels = map(jnp.from_dlpack, first)
    assert images.unsafe_buffer_pointer() == place
    assert labels.tolist() == list(range(ROWS))
    ones = jnp.ones((1000, 1000))
    for _ in range(8):
        ones = ones @ ones / 1000  # takes a while, and all that comes after it waits
    late = images * ones[0, 0]
    del first
    gc.collect()
    second = batch(of)
    np.asarray(second.images)[...] = -1
    del images
    gc.collect()
    third = batch(of)
    np.asarray(third.images)[...] = -1
    np.testing.assert_array_equal(np.asarray(late), want)
    del second, third
    gc.collect()
    again = [batch(of) for _ in range(3)]
    assert place in [np.asarray(one.images).ctypes.data for one in again]  # and no longer


if __name__ == "__main__":
    for name in get_args(Library):
        jax_takes(name)
