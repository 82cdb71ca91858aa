"""A batch: a sequence of two that is no tuple."""

from __future__ import annotations

import pickle
from collections.abc import Sequence

import numpy as np
import pytest

from headrace.batch import Batch, Reject
from headrace.errors import StateError


def numpy_batch() -> Batch:
    return Batch(
        images=np.zeros((2, 3, 4, 4), np.float32),
        labels=np.array([1, 2]),
        indices=np.array([7, 8]),
        valid=np.array([True, False]),
        epoch=3,
        step=5,
        rejects=(Reject(9, 11, "/data/a b.jpg", "decode", "cut short"),),
    )


def test_a_batch_unpacks_into_images_and_labels() -> None:
    batch = numpy_batch()
    images, labels = batch
    assert images is batch.images is batch[0]
    assert labels is batch.labels is batch[1] is batch[-1]
    assert len(batch) == 2
    with pytest.raises(IndexError):
        batch[2]


def test_a_batch_is_a_sequence_but_no_tuple_or_list() -> None:
    batch = numpy_batch()
    assert isinstance(batch, Sequence)
    assert not isinstance(batch, (tuple, list))


def test_a_batch_moves_as_a_whole_and_keeps_what_belongs_to_the_host() -> None:
    torch = pytest.importorskip("torch")
    batch = numpy_batch()
    tensors = Batch(torch.zeros(2, 3, 4, 4), torch.tensor([1, 2]), batch.indices, batch.valid, 3, 5, batch.rejects)
    moved = tensors.to("meta")
    assert moved.images.device.type == moved.labels.device.type == "meta"
    assert moved.indices is batch.indices
    assert moved.valid is batch.valid
    assert (moved.epoch, moved.step, moved.rejects) == (3, 5, batch.rejects)


def test_texts_stay_where_they_are_when_a_batch_moves() -> None:
    torch = pytest.importorskip("torch")
    batch = numpy_batch()
    texts = Batch(torch.zeros(2, 3, 4, 4), ["a", "b"], batch.indices, batch.valid, 3, 5, extra={"c": [1, None]})
    moved = texts.to("meta")
    assert moved.images.device.type == "meta"
    assert moved.labels == ["a", "b"]
    assert moved.extra == {"c": [1, None]}


def test_a_numpy_batch_says_why_it_cannot_be_moved() -> None:
    with pytest.raises(StateError, match="output='torch'"):
        numpy_batch().to("cpu")


def test_a_batch_can_be_pickled() -> None:
    again = pickle.loads(pickle.dumps(numpy_batch()))
    assert np.array_equal(again.indices, [7, 8])
    assert again.rejects == numpy_batch().rejects


def test_a_reject_reads_as_a_sentence() -> None:
    (reject,) = numpy_batch().rejects
    assert str(reject) == "/data/a b.jpg (index 9, position 11): decode: cut short"
