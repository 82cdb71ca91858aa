"""The engine's copy out of a slot, and who counts as the same daemon; the rest is tested through the Loader."""

from __future__ import annotations

import gc
import sys
import threading
import time
from types import FrameType
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from scripted import welcome

from headrace.assembly import Draft, Piece, Want
from headrace.engine import Engine, _check_same, _copy
from headrace.errors import ConnectionLost, ProtocolError, StateError
from headrace.form import Form
from headrace.output import Output
from headrace.protocol import Chunk, RowReject
from headrace.shm import SharedDelivery
from headrace.slots import Ring, SlotLayout, Status

GENERATION = 5


class Scene:
    """One slot of four rows, and a draft of four rows that wants them all."""

    def __init__(self) -> None:
        self.ring = Ring.create(SlotLayout(4, 2, 2, text=8), 2)
        view = self.ring.views[1]
        view.text[...] = np.frombuffer(b"\x91\x01\x91\x02\x91\x03\x91\x04", np.uint8)
        view.ends[...] = 2, 4, 6, 8
        view.images[...] = np.arange(1, 5)[:, None, None, None]
        view.labels[...], view.indices[...], view.status[...] = range(10, 14), range(20, 24), Status.OK
        self.ring.generation[1] = GENERATION
        self.form = Form("numpy", Output("uint8", "NHWC"), height=2, width=2, batch_size=4, prefetch=0,
                         columns=["n"])  # fmt: skip
        self.draft = Draft(
            step=0, positions=range(4), images=self.form.allocate(4), labels=np.zeros(4, np.int64),
            indices=np.zeros(4, np.int64), valid=np.ones(4, np.bool_), keep=np.ones(4, np.bool_), missing=4,
            texts=[None] * 4,
        )  # fmt: skip
        self.draft.images[...] = 99
        self.want = Want(7, 0, [Piece(self.draft, 0, 0, 4)])
        self.reject = RowReject(row=2, index=22, path="/x", stage="decode", reason="cut")

    def copy(self, *rejects: RowReject) -> bool:
        message = Chunk(
            request=1, slot=1, generation=GENERATION, render_id="r", window=1, rejects=list(rejects)
        )  # fmt: skip
        return _copy(SharedDelivery(self.ring, message), self.want, {r.row: r for r in rejects}, self.form)


@pytest.fixture
def scene() -> Any:
    made = Scene()
    yield made
    made.ring.close()


def nobody(*, timeout: float, stop: int) -> str:
    time.sleep(0.01)  # long enough for who opens to wait for it
    raise ConnectionLost("nobody is there")


class Interrupt:
    """Raises before the n-th line that a thread executes from now on, as the handler of a signal may anywhere."""

    def __init__(self, n: int) -> None:
        self.left = n

    def __enter__(self) -> None:
        gc.disable()  # what is raised in the finalizers of other tests' garbage is lost, and here it is the only one
        sys.settrace(self._trace)

    def __exit__(self, *exception: object) -> None:
        sys.settrace(None)
        gc.enable()

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_name in ("__exit__", "__del__"):
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self._trace


def test_an_interrupt_anywhere_in_the_start_is_that_interrupt_and_leaves_no_thread() -> None:
    lines = 0
    opened = False
    while not opened:
        lines += 1
        engine = Engine(nobody, None, "auto", timeout=5, exact=False)
        try:
            with Interrupt(lines):
                engine.open()
        except KeyboardInterrupt:
            pass
        except ConnectionLost:
            opened = True
        engine.close()
    assert lines > 5
    deadline = time.monotonic() + 10
    while any(thread.name == "headrace-fetch" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_engine_without_a_thread_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    engine = Engine(nobody, None, "auto", timeout=5, exact=False)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        engine.open()
    engine.close()


def test_rows_labels_indices_and_texts_are_copied(scene: Scene) -> None:
    assert scene.copy()
    assert scene.draft.images[:, 0, 0, 0].tolist() == [1, 2, 3, 4]
    assert scene.draft.labels.tolist() == [10, 11, 12, 13]
    assert scene.draft.indices.tolist() == [20, 21, 22, 23]
    assert scene.draft.texts == [(1,), (2,), (3,), (4,)]


def test_a_slot_that_holds_something_else_by_now_is_not_copied(scene: Scene) -> None:
    scene.ring.generation[1] = GENERATION + 1
    assert not scene.copy()


def test_a_slot_that_is_reused_during_the_copy_is_noticed(scene: Scene) -> None:
    finish = scene.form.finish

    def slow(levels: NDArray[np.uint8], out: NDArray[Any]) -> None:
        finish(levels[:2], out[:2])
        scene.ring.generation[1] += 1
        scene.ring.views[1].images[...] = 77
        scene.ring.views[1].status[...] = Status.PENDING
        finish(levels[2:], out[2:])

    scene.form.finish = slow
    assert not scene.copy()


@pytest.mark.parametrize("ends", [(2, 4, 6, 9), (2, 1, 6, 8), (2, 4, 6, 7)])
def test_texts_that_are_none_are_an_error_and_where_the_slot_was_reused_none(scene: Scene, ends: Any) -> None:
    view = scene.ring.views[1]
    view.ends[...] = ends
    with pytest.raises(ProtocolError, match="text"):
        scene.copy()
    assert scene.draft.texts == [None] * 4
    finish = scene.form.finish

    def reused(levels: NDArray[np.uint8], out: NDArray[Any]) -> None:
        finish(levels, out)
        scene.ring.generation[1] += 1

    scene.form.finish = reused
    assert not scene.copy()
    assert scene.draft.texts == [None] * 4


def test_a_reject_is_black_in_the_slot_and_named_in_the_message_or_neither(scene: Scene) -> None:
    scene.ring.views[1].status[2] = Status.REJECTED
    assert scene.copy(scene.reject)
    with pytest.raises(ProtocolError, match="chunk 7"):
        scene.copy()
    scene.ring.views[1].status[2] = Status.OK
    with pytest.raises(ProtocolError, match="chunk 7"):
        scene.copy(scene.reject)


@pytest.mark.parametrize("status", [Status.PENDING, Status.RENDERING])
def test_a_row_that_was_not_rendered_is_no_picture(scene: Scene, status: Status) -> None:
    scene.ring.views[1].status[3] = status
    with pytest.raises(ProtocolError, match="neither pictures nor rejects"):
        scene.copy()


def test_rows_that_this_rank_does_not_need_may_be_anything(scene: Scene) -> None:
    scene.ring.views[1].status[3] = Status.PENDING
    scene.want.pieces = [Piece(scene.draft, 1, 0, 2)]
    assert scene.copy()
    assert scene.draft.images[:, 0, 0, 0].tolist() == [99, 1, 2, 99]
    assert scene.draft.texts == [None, (1,), (2,), None]


def test_a_replacement_that_is_bad_itself_is_not_copied(scene: Scene) -> None:
    scene.ring.views[1].status[2] = Status.REJECTED
    scene.want.pieces = [Piece(scene.draft, 3, 2, 1, tries=1), Piece(scene.draft, 0, 1, 1, tries=4)]
    assert scene.copy(scene.reject)
    assert scene.draft.images[:, 0, 0, 0].tolist() == [2, 99, 99, 99]


def test_a_daemon_that_serves_the_same_pictures_may_differ_in_everything_else() -> None:
    _check_same(welcome(), welcome(pid=7, token=b"u" * 16, slots=9, window=4, render_id="other"))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"samples": 8}, "number of samples"),
        ({"pixels": "x"}, "pixels"),
        ({"pixels": "x", "order": "x"}, r"order \(seed or shuffle\), pixels"),
        ({"pixels": "x", "order": "x", "data": "x"}, "files or labels, order"),
        ({"labels": "text"}, "kind of label"),
        ({"layout": SlotLayout(4, 2, 2, "float32")}, "kind of label"),
        ({"columns": ["a"]}, "columns"),
    ],
)
def test_a_daemon_that_serves_other_pictures_is_refused_by_what_differs(change: dict[str, Any], named: str) -> None:
    prints = {k: v for k, v in change.items() if k in ("pixels", "order", "data")}
    rest = {k: v for k, v in change.items() if k not in prints}
    other = welcome(fingerprints=msgspec.structs.replace(welcome().fingerprints, **prints), **rest)
    with pytest.raises(StateError, match=named):
        _check_same(welcome(), other)
