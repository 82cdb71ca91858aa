"""A verification in this process: its jobs, its memory, its workers."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
from service import stream

from headrace.errors import ConfigError, HeadraceError
from headrace.pipeline.dataset import open_index
from headrace.pipeline.fake import REJECT
from headrace.pipeline.ledger import Ledger
from headrace.pipeline.spec import Config
from headrace.protocol import RowReject
from headrace.server import cli, ring_size, verify
from headrace.server.journal import Journal
from headrace.server.verify import Verification
from headrace.slots import Ring, SlotLayout
from headrace.workers.crew import Crew
from headrace.workers.fill import Fill
from headrace.workers.supervisor import Started, Supervisor


def config(folder: Path, **more: Any) -> Config:
    workers = {"processes": 1, "backend": "fake"}
    return Config.load({"workers": workers, "streams": {"train": stream(folder, **more)}})


@contextlib.contextmanager
def quiet(what: str) -> Iterator[verify.Progress]:
    yield lambda done, total, note="": None


def run(loaded: Config, watch: verify.Watch = quiet) -> list[tuple[int, str]]:
    with Verification(loaded, loaded.streams, watch) as at:
        at.run()
        found = [(row[1], row[3]) for row in at.findings()]
        assert at.found == len(found)
        at.finish()
    return found


@pytest.fixture
def rings(monkeypatch: pytest.MonkeyPatch) -> list[tuple[SlotLayout, int]]:
    """Layout and slots of every ring that is made."""
    made = []
    really = Ring.create

    def create(layout: SlotLayout, slots: int) -> Ring:
        made.append((layout, slots))
        return really(layout, slots)

    monkeypatch.setattr(Ring, "create", create)
    return made


@pytest.mark.parametrize(("chunk", "size", "rows"), [(1, 32, 32), (4096, 32, 32), (4, 512, 16), (4096, 2600, 1)])
def test_jobs_are_of_one_size_whatever_the_chunk_and_smaller_for_large_pictures(
    many: Callable[[int], Path], rings: list[tuple[SlotLayout, int]], chunk: int, size: int, rows: int
) -> None:
    assert run(config(many(6), chunk=chunk, size=size)) == []
    ((layout, slots),) = rings
    assert (layout.chunk, layout.height, slots) == (rows, size, 2)


def test_memory_that_is_not_there_is_an_error_that_says_how_much_is_needed(
    many: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring_size, "available_bytes", lambda: 1000)
    with pytest.raises(ConfigError, match=r"stream train: 1 chunks in flight need \d+ bytes, but .* leaves 1000: set"):
        run(config(many(6)))


def test_what_memory_says_does_not_matter(many: Callable[[int], Path]) -> None:
    loaded = config(many(6))
    assert run(loaded.model_copy(update={"memory": Config.load({**loaded.plain(), "memory": "1 slots"}).memory})) == []


def test_workers_that_render_differently_end_it(many: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    started = Supervisor.start

    def start(self: Supervisor) -> None:
        started(self)
        self._report(Started("fake/0"))

    monkeypatch.setattr(Supervisor, "start", start)
    with pytest.raises(HeadraceError, match="workers render with fake/0 and with fake/1"):
        run(config(many(6)))


def test_what_the_fallback_judges_counts_and_is_judged_again_by_a_run_that_goes_on(
    many: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[int] = []
    monkeypatch.setattr(verify, "who_renders", lambda workers, private: Crew("fake", 1, fallback="pillow"))
    monkeypatch.setattr(Journal, "add", lambda self, chunk, found: kept.append(chunk))
    answered = Fill.rendered

    def rendered(self: Fill, rows: Collection[int], rejects: list[RowReject], render_id: str) -> None:
        answered(self, rows, rejects, "pillow/1" if len(rows) < 32 else render_id)

    monkeypatch.setattr(Fill, "rendered", rendered)
    assert run(config(many(70))) == []
    assert kept == [0, 1]


def test_progress_grows_to_all_samples_and_says_what_was_found(many: Callable[[int], Path]) -> None:
    folder = many(100)
    file = sorted(folder.glob("*/*"))[50]
    data = file.read_bytes()
    file.unlink()
    file.write_bytes(data + REJECT)
    shown: dict[str, list[tuple[int, int, str]]] = {}

    @contextlib.contextmanager
    def watch(what: str) -> Iterator[verify.Progress]:
        yield lambda done, total, note="": shown.setdefault(what, []).append((done, total, note))

    assert run(config(folder), watch) == [(50, "decode")]
    steps = shown["verifying train"]
    assert steps == sorted(steps)
    assert steps[-1] == (100, 100, ", 1 found")
    assert "comparing what was judged of train" not in shown


def test_what_a_daemon_convicts_meanwhile_is_listed(many: Callable[[int], Path]) -> None:
    loaded = config(many(40))

    @contextlib.contextmanager
    def watch(what: str) -> Iterator[verify.Progress]:
        yield lambda done, total, note="": None
        if what == "verifying train":
            index = open_index(loaded.streams["train"].dataset, loaded.cache_folder)
            Ledger(index).convict(35, "it was in a hurry")
            index.close()

    assert run(loaded, watch) == [(35, "worker")]
    assert run(loaded) == [(35, "worker")]


def test_where_there_is_no_terminal_progress_is_a_line_in_the_log_now_and_then(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    clock = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: clock)
    with cli._progress("verifying train") as progress:
        for second in range(100):
            clock = float(second)
            progress(second, 500, ", 3 found")
    assert caplog.messages == [f"verifying train: {second} of 500, 3 found" for second in (30, 60, 90)]
