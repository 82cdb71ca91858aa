"""Ranks and resume: whatever the numbers, each position once; whatever the interruptions, as if there had been none."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scripted import ScriptedDaemon, index_of, level
from service import Daemon, Truth, stream

from headrace import Batch, Loader
from headrace.errors import ConfigError, StateError

numbers = st.integers(1, 30)
worlds = st.integers(1, 5)
batch_sizes = st.integers(1, 9)
modes = st.sampled_from(["drop", "partial", "pad"])


@contextmanager
def scripted(samples: int, chunk: int) -> Iterator[ScriptedDaemon]:
    """A daemon for one example; a path of its own, as there are many to a test."""
    with (
        tempfile.TemporaryDirectory() as folder,
        ScriptedDaemon(Path(folder) / "s", samples=samples, chunk=chunk) as it,
    ):
        yield it


@contextmanager
def ranks_of(daemon: ScriptedDaemon, count: int, **more: Any) -> Iterator[list[Loader]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                Loader(daemon.address, rank=rank, world_size=count, output="numpy", dtype="uint8", timeout=20, **more)
            )
            for rank in range(count)
        ]


def positions(batch: Batch, samples: int) -> list[int]:
    """Of its valid rows, which must show what belongs there."""
    found = [index_of(int(index), samples) for index in batch.indices[batch.valid]]  # its own inverse
    assert batch.images[batch.valid][:, 0, 0, 0].tolist() == [level(batch.epoch, p) for p in found]
    return found


@settings(max_examples=25)
@given(numbers, batch_sizes, worlds, st.integers(1, 7), modes)
def test_in_every_epoch_the_ranks_get_each_position_once_in_as_many_steps_each_as_len_says(
    samples: int, batch_size: int, world: int, chunk: int, mode: str
) -> None:
    assume(mode != "drop" or samples >= batch_size * world)
    with (
        scripted(samples, chunk) as daemon,
        ranks_of(daemon, world, batch_size=batch_size, last_batch=mode) as loaders,
    ):
        steps = {len(loader) for loader in loaders}
        assert len(steps) == 1
        (count,) = steps
        for epoch in range(3):
            batches = [list(loader) for loader in loaders]
            assert [len(each) for each in batches] == [count] * world
            assert {batch.epoch for each in batches for batch in each} == {epoch}
            got = [p for step in zip(*batches, strict=True) for batch in step for p in positions(batch, samples)]
            dropped = sum(loader.stats()["epochs"][epoch]["dropped"] for loader in loaders)
            assert got == list(range(samples - dropped))
            assert dropped == (samples % (batch_size * world) if mode == "drop" else 0)


@pytest.mark.parametrize("mode", ["drop", "partial", "pad"])
@pytest.mark.parametrize("samples", [1, 3, 4, 10, 11, 13, 26])
def test_four_ranks_share_what_they_do_not_divide(samples: int, mode: str) -> None:
    """Beside the drawn ones, the numbers that people meet: each rank B positions in turn, copies only at the end."""
    with scripted(samples, 4) as daemon:
        with ranks_of(daemon, 4, batch_size=3, last_batch=mode) as loaders:
            if mode == "drop" and samples < 12:
                with pytest.raises(ConfigError, match=rf"{samples} samples \(N\)"):
                    next(iter(loaders[0]))
                return
            for _ in range(3):
                batches = [list(loader) for loader in loaders]
                assert len({len(each) for each in batches}) == 1
                sizes = {len(batch.indices) for each in batches for batch in each}
                assert sizes <= ({1, 2, 3} if mode == "partial" else {3})
                for rank, each in enumerate(batches):
                    whole = range(samples // 12 * 12) if mode == "drop" else range(samples)
                    assert [positions(batch, samples) for batch in each] == [
                        [p for p in range(12 * step + 3 * rank, 12 * step + 3 * rank + 3) if p in whole]
                        for step in range(len(each))
                    ]


lives = st.lists(st.tuples(worlds, batch_sizes, st.integers(0, 6), st.booleans()), min_size=1, max_size=6)


@settings(max_examples=40)
@given(numbers, st.integers(1, 7), lives, modes.filter(lambda mode: mode != "drop"))
def test_any_number_of_lives_on_any_number_of_ranks_get_what_one_would_have_got(
    samples: int, chunk: int, lives: list[tuple[int, int, int, bool]], mode: str
) -> None:
    """A life takes so many steps, also none and also across the border; its state goes to the next, on this server or
    on another one, which knows nothing.
    """
    state: dict[str, Any] | None = None
    got: Counter[tuple[int, int]] = Counter()
    order: list[tuple[int, int]] = []
    with scripted(samples, chunk) as one, scripted(samples, chunk) as other:
        for world, batch_size, steps, elsewhere in [*lives, (1, samples, 1, False)]:
            daemon = other if elsewhere else one
            with ranks_of(daemon, world, batch_size=batch_size, last_batch=mode) as loaders:
                for loader in loaders:
                    if state is not None:
                        loader.load_state_dict(json.loads(json.dumps(state)))
                iterators = [iter(loader) for loader in loaders]
                for _ in range(steps):
                    if loaders[0].state_dict()["position"] == 0:
                        iterators = [iter(loader) for loader in loaders]
                    batches = [next(iterator) for iterator in iterators]
                    order += [(b.epoch, p) for b in batches for p in positions(b, samples)]
                    states = [loader.state_dict() for loader in loaders]
                    assert all(each == states[0] for each in states)
                state = loaders[0].state_dict()
    got.update(order)
    assert set(got.values()) <= {1}
    epochs = state["epoch"]
    expected = [(epoch, p) for epoch in range(epochs) for p in range(samples)]
    assert order == expected + [(epochs, p) for p in range(state["position"])]


@pytest.mark.parametrize("after", [2, 3, 8])
@pytest.mark.parametrize("steps", [0, 1, 3, 5])
def test_four_ranks_go_on_as_any_number_from_before_the_first_step_to_the_last(steps: int, after: int) -> None:
    samples = 40
    with scripted(samples, 4) as one, scripted(samples, 4) as other:
        with ranks_of(one, 4, batch_size=2) as loaders:
            batches = [list(islice(loader, steps)) for loader in loaders]
            before = [p for step in zip(*batches, strict=True) for batch in step for p in positions(batch, samples)]
            state = loaders[3].state_dict()
        assert (state["epoch"], state["position"]) == ((1, 0) if steps == 5 else (0, 8 * steps))
        with ranks_of(other, after, batch_size=2) as loaders:
            for loader in loaders:
                loader.load_state_dict(state)
                assert loader.remaining == -(-(samples - state["position"]) // (2 * after))
            rest = [list(loader) for loader in loaders]
    again = [p for step in zip(*rest, strict=True) for batch in step for p in positions(batch, samples)]
    assert before == list(range(8 * steps))
    assert again == list(range(state["position"], samples))


# -- with real pictures ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(photos: Path, session_home: Path) -> Path:
    folder = Path(tempfile.mkdtemp(dir=session_home))
    for name in ("same", "fewer", "moved", "touched"):
        shutil.copytree(photos, folder / name)
    (folder / "fewer" / "sea" / "003.jpg").unlink()
    (folder / "moved" / "sea" / "003.jpg").rename(folder / "moved" / "meadow" / "016.jpg")
    with (folder / "touched" / "sea" / "003.jpg").open("ab") as file:
        file.write(b"\0")
    return folder


@pytest.fixture(scope="module")
def daemon(photos: Path, data: Path) -> Iterator[Daemon]:
    """A stream, and what may become of it between a state and its loading."""
    sharper = [{"random_resized_crop": {"size": 32, "interpolation": "bicubic"}}]
    streams = {
        "train": stream(photos),
        "copy": stream(data / "same"),
        "fewer": stream(data / "fewer"),
        "moved": stream(data / "moved"),
        "touched": stream(data / "touched"),
        "seed": stream(photos, seed=7),
        "ordered": stream(photos, shuffle=False),
        "sharper": stream(photos, transforms=sharper),
        "chunks": stream(photos, chunk=5),
    }
    with Daemon(data, streams, workers=1, slots=4) as made:
        yield made


@pytest.fixture(scope="module")
def other(data: Path) -> Iterator[Daemon]:
    """One whose folder lies elsewhere, and whose index, workers and ring are its own."""
    with Daemon(data, {"again": stream(data / "same")}, workers=2, name="other") as made:
        yield made


def open_loader(at: Daemon, name: str, **more: Any) -> Loader:
    usual = {"batch_size": 4, "output": "numpy", "dtype": "uint8", "layout": "NHWC", "rank": 0, "world_size": 1}
    return Loader(at.address, stream=name, **(usual | more))


@pytest.fixture(scope="module")
def state(daemon: Daemon) -> dict[str, Any]:
    with open_loader(daemon, "train") as loader:
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        saved: dict[str, Any] = json.loads(json.dumps(loader.state_dict()))
    return saved


def digests(batches: list[Batch]) -> list[tuple[int, bytes]]:
    return [
        row for b in batches for row in zip(b.indices[b.valid].tolist(), map(bytes, b.images[b.valid]), strict=True)
    ]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_the_pictures_go_on_on_another_server_with_any_number_of_ranks(
    daemon: Daemon, other: Daemon, state: dict[str, Any], ranks: int
) -> None:
    with open_loader(daemon, "train") as loader:
        loader.load_state_dict(state)
        rest = digests(list(loader))
    with ExitStack() as stack:
        loaders = [
            stack.enter_context(open_loader(other, "again", batch_size=3, rank=r, world_size=ranks))
            for r in range(ranks)
        ]
        for loader in loaders:
            loader.load_state_dict(state)
        steps = zip(*(list(loader) for loader in loaders), strict=True)
        assert [row for step in steps for row in digests(list(step))] == rest
    assert len(rest) == 48 - 12


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("fewer", "it has 48 samples, the stream 'fewer' has 47"),
        ("moved", "files or labels of the stream 'moved' have changed since"),
        ("touched", "files or labels of the stream 'touched' have changed since"),
        ("seed", "its seed is 0, the stream's 7"),
        ("ordered", "shuffle has changed"),
    ],
)
def test_a_state_of_another_order_is_refused_with_the_difference(
    daemon: Daemon, state: dict[str, Any], name: str, named: str
) -> None:
    with open_loader(daemon, name) as loader:
        with pytest.raises(StateError, match=named):
            loader.load_state_dict(state)
        assert (loader.state_dict()["epoch"], loader.state_dict()["position"]) == (0, 0)


@pytest.mark.parametrize("name", ["sharper", "chunks"])
def test_a_state_of_other_pixels_is_taken_with_a_warning_and_the_samples_go_on(
    daemon: Daemon, state: dict[str, Any], name: str
) -> None:
    with open_loader(daemon, "train") as loader:
        loader.load_state_dict(state)
        rest = [index for index, _ in digests(list(loader))]
    with open_loader(daemon, name) as loader:
        with pytest.warns(UserWarning, match=f"decoding, transforms or chunk size of stream '{name}' have changed"):
            loader.load_state_dict(state)
        assert [index for index, _ in digests(list(loader))] == rest


def test_a_state_is_of_the_samples_and_not_of_where_they_lie(daemon: Daemon, state: dict[str, Any], home: Path) -> None:
    with open_loader(daemon, "copy") as loader:
        loader.load_state_dict(state)
        rest = [index for index, _ in digests(list(loader))]
    assert rest == [index for index, _, _ in Truth(daemon.config, home / "cache", "train").rows(0)][12:]
