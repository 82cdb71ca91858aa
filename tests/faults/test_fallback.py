"""CPU workers whose backend fails, is absent, or kills them: the fallback renders, says so, and nothing is lost."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import brittle
import pytest
from plant import Plant, plants, poison, run_epoch
from service import Daemon, Row, Truth, stream

from headrace import Loader
from headrace.errors import RenderMismatch
from headrace.workers import roster
from headrace.workers.crew import Crew
from headrace.workers.supervisor import Convicted, Finished

FIRST, FALLBACK = brittle.RENDER_ID, "fake/1"


class Order:
    """What the backend is to do."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self("work")

    def __call__(self, what: str) -> None:
        assert what in brittle.ORDERS
        partial = self._file.with_suffix(".partial")
        partial.write_text(what)
        partial.rename(self._file)


@pytest.fixture
def order(home: Path, monkeypatch: pytest.MonkeyPatch) -> Order:
    monkeypatch.setenv(brittle.VARIABLE, str(home / "order"))
    monkeypatch.setenv("PYTHONPATH", str(Path(brittle.__file__).parent), prepend=os.pathsep)
    return Order(home / "order")


@pytest.fixture
def plant(home: Path, order: Order, many: Callable[[int], Path]) -> Iterator[Callable[..., Plant]]:
    with plants(home / "cache") as build:

        def make(samples: int | Path, workers: int = 1) -> Plant:
            folder = many(samples) if isinstance(samples, int) else samples
            return build(folder, Crew("brittle", workers, fallback="fake", cpu_module="brittle"))

        yield make


def ids(reports: list[Finished]) -> list[str]:
    return [report.render_id for report in reports]


def render(at: Plant, chunk: int) -> None:
    before = len(at.of(Finished))
    at.supervisor.submit(at.job(chunk, chunk % at.ring.slots))
    at.until(lambda: len(at.of(Finished)) > before)


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]


def test_a_backend_that_fails_in_an_epoch_is_replaced_in_all_workers_and_said_once_and_comes_back(
    plant: Callable[..., Plant], order: Order, caplog: pytest.LogCaptureFixture
) -> None:
    at = plant(80, workers=2)
    at.ready(2)
    assert at.supervisor.render_id == FIRST

    def disturb() -> None:
        if len(at.of(Finished)) >= 5:
            order("fail")

    done = run_epoch(at, 20, disturb)
    assert ids(done)[:5] == [FIRST] * 5 and ids(done)[10:] == [FALLBACK] * 10
    text = "brittle: out of memory; chunks are rendered by fake until it works again"
    assert errors(caplog) == [f"{text}; it is tried again from time to time"]
    assert at.supervisor.notices == [text] and at.supervisor.render_id == FALLBACK
    assert at.supervisor.deaths == 0
    order("work")
    chunk = 0
    while at.supervisor.notices:
        render(at, chunk % 20)
        chunk += 1
    assert "brittle works again: chunks are rendered by it" in caplog.messages
    assert at.supervisor.render_id == FIRST


def test_where_the_backend_is_absent_the_fallback_renders_from_the_start(
    plant: Callable[..., Plant], order: Order
) -> None:
    order("absent")
    at = plant(8)
    assert set(ids(run_epoch(at, 2))) == {FALLBACK} and at.supervisor.deaths == 0
    assert at.supervisor.notices == ["brittle: it is not installed; chunks are rendered by fake until it works again"]


def test_a_picture_that_kills_one_backend_is_rendered_by_the_other_and_its_chunk_names_both(
    plant: Callable[..., Plant], many: Callable[[int], Path]
) -> None:
    folder = many(8)
    poison(folder, 5, brittle.POISON)
    at = plant(folder)
    done = run_epoch(at, 2)
    assert sorted(ids(done)) == [FIRST, f"{FIRST} + {FALLBACK}"]
    assert at.supervisor.deaths == 2 and not at.of(Convicted) and not any(report.rejects for report in done)
    # Once may be chance. After the second chunk it is known, and nobody dies any more.
    for epoch, deaths in ((1, 4), (2, 4), (3, 4)):
        for slot, chunk in enumerate(range(2)):
            at.supervisor.submit(at.job(chunk, slot, epoch))
        at.until(lambda wanted=2 * (epoch + 1): len(at.of(Finished)) >= wanted)
        more = [report for report in at.of(Finished)[2 * epoch :] if isinstance(report, Finished)]
        for report in more:
            at.check(report.job)
        assert sorted(ids(more)) == [FIRST, f"{FIRST} + {FALLBACK}"] and at.supervisor.deaths == deaths


def test_a_backend_that_kills_worker_after_worker_is_left_alone_for_a_while(
    plant: Callable[..., Plant], order: Order, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(roster, "CRASHES", 3)
    monkeypatch.setattr(roster, "BACKEND_DELAYS", (10.0, 1000.0))  # longer than a worker takes to start
    order("crash")
    at = plant(40)
    done: list[str] = []

    def disturb() -> None:
        if at.supervisor.notices:
            order("work")

    done = ids(run_epoch(at, 10, disturb))
    assert FALLBACK in done and not at.of(Convicted) and at.supervisor.deaths == 3
    assert len(errors(caplog)) == 1 and "3 workers ended in a row (signal 11)" in errors(caplog)[0]
    at.until(lambda: at.supervisor.render_id == FIRST)
    render(at, 0)
    assert at.supervisor.notices == [] and at.supervisor.deaths == 3


def test_dali_failing_for_good_in_the_middle_of_an_epoch_loses_and_repeats_nothing(
    many: Callable[[int], Path],
    home: Path,
    order: Order,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    pytest.importorskip("nvidia.dali")
    code = home / "code"
    code.mkdir()
    (code / "sitecustomize.py").write_text("import brittle\nbrittle.break_dali()\n")
    monkeypatch.setenv("PYTHONPATH", str(code), prepend=os.pathsep)
    folder = many(96)
    options = {"output": "numpy", "dtype": "uint8", "layout": "NHWC", "batch_size": 8, "prefetch": 1}

    truth = Truth(Daemon(home, {"train": stream(folder)}, name="truth").config, home / "truth").rows(0)
    rows: list[Row] = []
    with Daemon(home, {"train": stream(folder)}, backend="dali-cpu", workers=2, slots=4) as daemon:
        with Loader(daemon.address, exact=True, **options) as exact:  # type: ignore[arg-type]
            batches = iter(exact)
            next(batches)
            with Loader(daemon.address, **options) as loader:  # type: ignore[arg-type]
                first = loader.stats()["render_ids"]
                for step, batch in enumerate(loader):
                    if step == 4:
                        order("fail")
                    assert batch.valid.all() and not batch.rejects
                    digests = [hashlib.sha256(picture).hexdigest()[:16] for picture in batch[0]]
                    rows += zip(batch.indices.tolist(), batch[1].tolist(), digests, strict=True)
                ids = loader.stats()["render_ids"]
            with pytest.raises(RenderMismatch, match="rendered by pillow/.* instead of dali-cpu/"):
                for _ in batches:
                    pass
        [notice] = daemon.ping().notices
        assert notice.endswith("out of memory; chunks are rendered by pillow until it works again")
        log = daemon.log.read_text()
        assert log.count("dali-cpu: out of memory; chunks are rendered by pillow") == 1
        with Loader(daemon.address, **options) as late:  # type: ignore[arg-type]
            assert [*first, *late.stats()["render_ids"]] == ids
    assert [row[:2] for row in rows] == [row[:2] for row in truth]
    assert rows[-32:] == truth[-32:]  # of either backend the pictures before are equal but for a few levels
    assert [one.partition("/")[0] for one in ids] == ["dali-cpu", "pillow"]
    said = [message for message in caplog.messages if message.startswith("pictures come from pillow/")]
    assert len(said) == 1 and any("chunks are rendered by pillow" in message for message in caplog.messages)
