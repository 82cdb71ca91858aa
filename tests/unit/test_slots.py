"""The ring of slots in anonymous shared memory."""

from __future__ import annotations

import fcntl
import mmap
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.slots import PAGE, Ring, SlotLayout, Status

LAYOUT = SlotLayout(chunk=5, height=7, width=11, label_dtype="float32", label_width=3, text=50)
layouts = st.builds(
    SlotLayout,
    chunk=st.integers(1, 64),
    height=st.integers(1, 300),
    width=st.integers(1, 300),
    label_dtype=st.sampled_from(["int64", "float32"]),
    label_width=st.integers(0, 100),
    text=st.integers(0, 10_000),
)


@given(layouts)
def test_fields_lie_aligned_in_order_and_apart_within_the_stride(layout: SlotLayout) -> None:
    end = 64  # the header
    for dtype, shape, offset in layout.fields.values():
        assert offset % 64 == 0
        assert end <= offset < end + 64
        end = offset + dtype.itemsize * int(np.prod(shape))
    assert layout.stride % PAGE == 0
    assert end <= layout.stride < end + PAGE
    assert list(layout.fields) == ["images", "labels", "indices", "status", "ends", "text"]


@given(layouts)
def test_a_layout_survives_the_wire(layout: SlotLayout) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(layout), type=SlotLayout) == layout


@pytest.mark.parametrize(
    "layout",
    [{"chunk": 0, "height": 1, "width": 1}, {"chunk": 1, "height": -1, "width": 1}, {"chunk": 1, "height": 1}]
    + [{"chunk": 1, "height": 1, "width": 1 << 40}, {"chunk": 1, "height": 1, "width": 1, "depth": 1}]
    + [
        {"chunk": 1, "height": 1, "width": 1, "label_dtype": "int32"},
        {"chunk": 1, "height": 1, "width": 1, "text": -1},
    ],
)
def test_a_layout_out_of_bounds_is_refused(layout: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(layout, SlotLayout)


def test_what_is_written_into_one_slot_is_in_no_other() -> None:
    ring = Ring.create(LAYOUT, 3)
    reader = Ring.attach(ring.read_only_fd(), LAYOUT, 3)
    for i, view in enumerate(ring.views):
        ring.generation[i] = 100 + i
        for name in LAYOUT.fields:
            getattr(view, name)[...] = 10 * i + 1
    for i, view in enumerate(reader.views):
        assert reader.generation[i] == 100 + i
        for name, (dtype, shape, _) in LAYOUT.fields.items():
            field = getattr(view, name)
            assert field.dtype == dtype and field.shape == shape
            assert (field == 10 * i + 1).all()
    reader.close()
    ring.close()


def test_a_new_ring_is_black_and_pending() -> None:
    ring = Ring.create(LAYOUT, 2)
    assert not any(getattr(view, name).any() for view in ring.views for name in LAYOUT.fields)
    assert (ring.views[0].status == Status.PENDING).all() and not ring.generation.any()
    ring.close()


def test_the_size_is_sealed() -> None:
    ring = Ring.create(LAYOUT, 2)
    size = os.fstat(ring.fd).st_size
    assert size == 2 * LAYOUT.stride
    for other in (0, size - PAGE, size + PAGE):
        with pytest.raises(PermissionError):
            os.ftruncate(ring.fd, other)
    with pytest.raises(PermissionError):
        fcntl.fcntl(ring.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    ring.close()


def test_the_memory_is_reserved_at_once() -> None:
    ring = Ring.create(LAYOUT, 4)
    status = os.fstat(ring.fd)
    assert status.st_blocks * 512 == status.st_size
    ring.close()


def test_a_readers_descriptor_and_views_refuse_writing() -> None:
    ring = Ring.create(LAYOUT, 2)
    fd = ring.read_only_fd()
    assert not os.get_inheritable(fd) and not os.get_inheritable(ring.fd)
    with pytest.raises(PermissionError):
        mmap.mmap(fd, 0, access=mmap.ACCESS_WRITE)
    with pytest.raises(PermissionError):
        Ring.attach(os.dup(fd), LAYOUT, 2, writable=True)
    with pytest.raises(OSError):
        os.pwrite(fd, b"x", 0)
    assert os.fstat(fd).st_mode & 0o777 == 0o400  # nor can it be opened again for writing, but by root
    reader = Ring.attach(fd, LAYOUT, 2)
    with pytest.raises(ValueError, match="read-only"):
        reader.views[0].images[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        reader.generation[0] = 1
    reader.close()
    ring.close()


@pytest.mark.parametrize(("layout", "slots"), [(LAYOUT, 1), (LAYOUT, 3), (SlotLayout(5, 70, 11), 2)])
def test_another_size_than_agreed_is_refused_and_the_descriptor_closed(layout: SlotLayout, slots: int) -> None:
    ring = Ring.create(LAYOUT, 2)
    fd = ring.read_only_fd()
    with pytest.raises(ValueError, match=rf"has {2 * LAYOUT.stride} bytes, {slots} slots need {slots * layout.stride}"):
        Ring.attach(fd, layout, slots)
    with pytest.raises(OSError):
        os.fstat(fd)
    ring.close()


def test_a_view_that_is_still_held_keeps_its_bytes_after_close() -> None:
    ring = Ring.create(LAYOUT, 1)
    ring.views[0].images[...] = 9
    images = ring.views[0].images
    ring.close()
    ring.close()
    assert (images == 9).all()


_WRITER = """
import sys
from headrace.slots import Ring, SlotLayout
ring = Ring.attach(int(sys.argv[1]), SlotLayout(5, 7, 11, "float32", 3, 50), 2, writable=True)
print(int(ring.generation[0]), flush=True)
low, high = 0x1111111111111111, 0xEEEEEEEEEEEEEEEE
ring.views[1].indices[...] = range(5)
while not ring.views[0].status[0]:
    ring.generation[1] = low
    ring.generation[1] = high
ring.close()
"""


def test_generations_are_seen_whole_by_another_process() -> None:
    """A word is seen as it was before or after a write, never half written and never as 0 in between."""
    ring = Ring.create(LAYOUT, 2)
    ring.generation[0] = 1 << 60
    writer = subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(ring.fd)], pass_fds=[ring.fd], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    assert int(writer.stdout.readline()) == 1 << 60
    while not ring.generation[1]:
        assert writer.poll() is None
    seen = {int(ring.generation[1]) for _ in range(200_000)}
    ring.views[0].status[0] = Status.OK
    assert writer.wait(timeout=30) == 0
    writer.stdout.close()
    assert seen <= {0x1111111111111111, 0xEEEEEEEEEEEEEEEE}
    assert list(ring.views[1].indices) == [0, 1, 2, 3, 4]
    ring.close()


def test_the_memory_is_gone_with_the_last_descriptor_and_mapping() -> None:
    ring = Ring.create(LAYOUT, 2)
    inode = os.fstat(ring.fd).st_ino
    ring.close()
    with open("/proc/self/maps") as maps:
        assert not any(f" {inode} " in line and "headrace-ring" in line for line in maps)


def test_a_segment_that_might_shrink_is_not_mapped(tmp_path: Path) -> None:
    """Who reads beyond its new end would be killed by SIGBUS."""
    open_files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ValueError, match="not sealed"):
        fd = os.memfd_create("ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, 3 * LAYOUT.stride)
        Ring.attach(fd, LAYOUT, 3)
    with pytest.raises(OSError):
        file = tmp_path / "ring"
        file.write_bytes(bytes(3 * LAYOUT.stride))
        Ring.attach(os.open(file, os.O_RDONLY), LAYOUT, 3)
    assert len(os.listdir("/proc/self/fd")) == open_files
