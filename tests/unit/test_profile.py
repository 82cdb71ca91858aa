"""A profile: what is measured of a small stream, what a daemon's words come to, and how it is shown."""

from __future__ import annotations

import contextlib
import html.parser
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import status
from service import stream

from headrace.errors import ConfigError
from headrace.pipeline.fake import REJECT
from headrace.pipeline.reading import FileSource
from headrace.pipeline.spec import Config
from headrace.server import cli, page, profile, report, usage
from headrace.server.profile import Alone, Forecast, Memory, Profile
from headrace.server.verdict import Advice, Chain, Headroom, Machine, Verdict
from headrace.server.verify import Progress
from headrace.slots import Ring


@contextlib.contextmanager
def quiet(what: str) -> Iterator[Progress]:
    yield lambda done, total, note="": None


def config(folder: Path, **more: Any) -> Config:
    return Config.load({"workers": {"processes": 1, "backend": "fake"}, "streams": {"train": stream(folder, **more)}})


# -- measured -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured(photos: Path, session_home: Path) -> Profile:
    loaded = config(photos, size=16)
    return profile.profile(loaded, "train", quiet, workers=[1], seconds=0.2, target=1.0)


def test_every_stage_is_measured_alone(measured: Profile) -> None:
    names = [one.stage for one in measured.alone]
    assert names[0] == "read" and names[-2:] == ["chunk", "finish"]
    assert {"plan", "render"} <= set(names)
    stages = {one.stage: one for one in measured.alone}
    assert all(one.seconds > 0 and one.rate > 0 for one in measured.alone)
    assert stages["chunk"].seconds == pytest.approx(
        sum(stages[name].seconds for name in names if name not in ("read", "chunk", "finish"))
    )
    assert stages["finish"].nbytes == 16 * 16 * 3 * 4
    assert 500 < stages["read"].nbytes < 100_000  # bytes of a photo


def test_the_chain_is_measured(measured: Profile) -> None:
    assert [chain.workers for chain in measured.chains] == [1]
    for chain in measured.chains:
        assert chain.images > 0 and chain.rendered > 0 and chain.seconds >= 0.2
        assert 0 < chain.busy + chain.wait < 1.5 * chain.workers * chain.seconds
        assert set(chain.cpu) == {"workers", "daemon", "client"}
        assert 0.0 <= chain.waited <= 1.0 and 0.0 <= chain.others <= 1.0
    assert measured.handing is None or measured.handing > 0
    assert measured.best in measured.chains


class Paced:
    """A daemon whose worker takes so many seconds for a chunk, and that notes when it is measured."""

    def __init__(self, number: int, lap: float, log: list[tuple[int, float, float]]) -> None:
        self.number, self._lap, self._log = number, lap, log

    def warm(self, seconds: float) -> float:
        return self._lap

    def measure(self, seconds: float, chunks: float, tell: Any) -> Chain:
        tell(0.5, "")
        self._log.append((self.number, seconds, chunks))
        return Chain(self.number, seconds, 10 * self.number, 9, {"read": 0.5}, wait=0.25, others=0.1 * len(self._log))


def test_numbers_of_workers_are_measured_in_turns() -> None:
    log: list[tuple[int, float, float]] = []
    told: list[int] = []
    daemons: Any = [Paced(number, 0.1, log) for number in (1, 2)]
    chains = profile._in_turns(daemons, 4.0, lambda done, total, note="": told.append(done))
    assert [number for number, _, _ in log] == [1, 2, 2, 1, 1, 2, 2, 1]
    assert {(seconds, chunks) for _, seconds, chunks in log} == {(1.0, 1.0)}
    assert told == sorted(told) and 0 < told[0] < told[-1] < 1000
    assert [(chain.workers, chain.seconds, chain.images, chain.rendered) for chain in chains] == [
        (1, 4.0, 40, 36),
        (2, 4.0, 80, 36),
    ]
    assert chains[0].stages == {"read": 2.0} and chains[0].wait == 1.0
    assert [chain.others for chain in chains] == pytest.approx([0.45, 0.45])  # what the machine did met both alike


@pytest.mark.parametrize(("laps", "turns"), [((0.5,), 1), ((0.1, 2.0), 1), ((0.1, 0.5), 2), ((0.001, 0.001), 4)])
def test_a_chain_is_not_cut_into_less_than_some_chunks(laps: tuple[float, ...], turns: int) -> None:
    log: list[tuple[int, float, float]] = []
    daemons: Any = [Paced(number, lap, log) for number, lap in enumerate(laps, 1)]
    profile._in_turns(daemons, 4.0, lambda *_: None)
    assert len(log) == turns * len(laps)


def test_what_follows_is_there(measured: Profile) -> None:
    assert measured.stream == "train" and "48 samples" in measured.what and "fake/1" in measured.what
    assert measured.forecasts and all(one.measured is None and one.basis == 1 for one in measured.forecasts)
    assert measured.memory is not None
    assert measured.memory.worker > 1 << 20 and measured.memory.daemon > 1 << 20
    assert measured.memory.least == 2  # of one worker
    assert measured.advice
    assert measured.target is not None and "fed already" in measured.target[0].text
    assert measured.machine is not None and measured.machine.data > 48 * 500


def test_the_smallest_measurement_says_what_the_others_give_and_the_largest_what_more_would() -> None:
    one, two, four = (replace(CHAIN, workers=n, images=900 * n, rendered=900 * n) for n in (1, 2, 4))
    found = profile._forecasts([two, four, one], 4)
    assert [(at.workers, at.basis, at.measured) for at in found] == [
        (2, 1, 360.0), (4, 1, 720.0), (8, 4, None), (16, 4, None),
    ]  # fmt: skip
    assert [(at.workers, at.cpus) for at in profile._forecasts([one], 2)] == [(2, 2), (4, 4), (8, 8)]
    # Who has more workers than CPUs, because they wait for a disk, wants more of them on more CPUs.
    assert [(at.workers, at.cpus) for at in profile._forecasts([four], 2)] == [(8, 4), (16, 8)]


def test_bad_pictures_are_profiled_like_others(photos: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "bad" / "a").mkdir(parents=True)
    for i, photo in enumerate(sorted(photos.glob("*/*.jpg"))[:4]):
        (home / "bad" / "a" / f"{i}.jpg").write_bytes(photo.read_bytes() + (REJECT if i % 2 else b""))
    (home / "bad" / "a" / "5.jpg").write_bytes(b"")
    loaded = config(home / "bad", size=16)
    index = profile.open_index(loaded.streams["train"].dataset, loaded.cache_folder)
    backend = profile.machine.make(loaded.workers)
    found = profile._Stages(loaded.streams["train"], index, backend, 0.01).measure(lambda *_: None)
    assert [one.stage for one in found][-2:] == ["chunk", "finish"]
    index.close()


def test_one_all_and_one_between_are_tried() -> None:
    assert [profile._numbers(n) for n in (1, 2, 4, 8, 64)] == [[1], [1, 2], [1, 2, 4], [1, 4, 8], [1, 8, 64]]


def test_the_sample_is_bounded(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In pictures, in bytes, and in what is rendered before anybody looks at the clock."""
    loaded = config(photos, size=16, chunk=8)
    index = profile.open_index(loaded.streams["train"].dataset, loaded.cache_folder)
    backend = profile.machine.make(loaded.workers)

    def sample() -> profile._Stages:
        stages = profile._Stages(loaded.streams["train"], index, backend, 60.0)
        stages._read(FileSource(index, loaded.streams["train"].decode))
        return stages

    assert len(sample()._samples) == 48
    monkeypatch.setattr(profile, "_SAMPLE", 16)
    assert sorted({place.chunk for place in sample()._places}) == [0, 3]  # spread over the epoch
    monkeypatch.setattr(profile, "_SAMPLE_BYTES", 1)
    assert len(sample()._samples) == 1
    monkeypatch.undo()
    monkeypatch.setattr(profile, "_TOGETHER", 1)
    assert all(len(place.rows) == 1 for place in sample()._places)
    monkeypatch.setattr(profile._Stages, "_sample", lambda *_: time.sleep(0.02) or b"")
    slow = profile._Stages(loaded.streams["train"], index, backend, 0.05)
    slow._read(FileSource(index, loaded.streams["train"].decode))
    assert 1 <= len(slow._samples) < 8
    index.close()


def test_memory_of_the_sample_is_given_back(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rings: list[Ring] = []
    create = Ring.create
    monkeypatch.setattr(Ring, "create", lambda *args: rings.append(ring := create(*args)) or ring)
    loaded = config(photos, size=16)
    index = profile.open_index(loaded.streams["train"].dataset, loaded.cache_folder)
    profile._Stages(loaded.streams["train"], index, profile.machine.make(loaded.workers), 0.01).measure(lambda *_: None)
    assert [ring.fd for ring in rings] == [-1]
    index.close()


def test_what_proc_says_of_a_process_that_is_gone_is_nothing() -> None:
    assert (usage.cpu_seconds(1 << 22), usage.own_bytes(1 << 22)) == (0.0, 0)


# -- a daemon's words ----------------------------------------------------------------------------------------------


def test_what_a_daemon_did_is_the_difference_of_two_answers() -> None:
    before = status.pong(
        uptime=100.0,
        stages={"read": status.stage(5, 1.0, 500), "wait": status.stage(1, 7.0)},
        streams={"train": status.stream(images=100), "val": None},
        clients=[status.client(age=50.0, images=90, waited=4.0, spent=40.0)],
    )
    after = status.pong(
        uptime=110.0,
        stages={
            "wait": status.stage(9, 9.0),
            "decode": status.stage(50, 6.0),
            "read": status.stage(55, 3.0, 5500),
            "send": status.stage(3, 5.0),
        },
        streams={"train": status.stream(images=150), "val": status.stream(images=10)},
        clients=[
            status.client(
                age=60.0,
                images=140,
                waited=5.0,
                spent=50.0,
                stages={"copy": status.stage(1, 0.14), "wait": status.stage()},
            ),
            status.client(client="pid 8", age=5.0, images=60, waited=1.0, spent=5.0),
        ],
    )
    chain = profile.watched(before, after, 10.0)
    assert chain == Chain(
        workers=2,
        seconds=10.0,
        images=110,
        rendered=60,
        stages={"read": 2.0, "decode": 6.0},
        wait=2.0,
        nbytes=5000,
        client={"copy": pytest.approx(0.14 / 200)},
        waited=pytest.approx(2 / 15),
        consumers=2,
    )
    assert [*chain.stages] == ["read", "decode"]  # in the order of a picture's way
    assert profile.watched(before, after, 10.0, "val").consumers == 0


def test_a_trainer_that_took_nothing_has_not_waited() -> None:
    """One long step: its last report is of before."""
    at = status.pong(uptime=9.0, clients=[status.client(age=5.0, images=90, waited=4.0, spent=40.0)])
    assert profile.watched(at, at, 1.0).waited == 0.0


def test_a_trainer_that_got_nothing_has_waited_all_the_time() -> None:
    """Its last report is of before as well, but it has asked for something."""
    at = status.pong(uptime=9.0, clients=[status.client(age=5.0, images=90, waited=4.0, spent=40.0, outstanding=3)])
    assert profile.watched(at, at, 1.0).waited == 1.0


# -- shown ----------------------------------------------------------------------------------------------------------


CHAIN = Chain(2, 5.0, 2500, 2600, {"read": 1.0, "decode": 8.0}, 1.0, 10**8, {"workers": 8.5}, {"copy": 1e-5}, 0.9)
FULL = Profile(
    stream="<train>",
    what="10 samples & more",
    machine=Machine(2, 1),
    alone=(Alone("read", 0.001, 100_000.0), Alone("decode", 0.004, 0.0, 0.005)),
    chains=(replace(CHAIN, workers=1, images=1300), CHAIN),
    handing=7000.0,
    verdict=Verdict("decode", 0.89, "decoding is the limit"),
    headroom=Headroom("decode", 4500.0, "read"),
    potential=900.0,
    forecasts=(Forecast(2, 1.5, 520.0, "decode", 1, 500.0), Forecast(4, 4, 1000.0, "finish", 2)),
    distrust=("one disk",),
    memory=Memory(100 << 20, 50 << 20, 60 << 20, 5 << 20, 3, 200),
    advice=(Advice("do this", ("workers: {processes: auto}",)),),
    target=(Advice("that many"),),
)


def test_the_report_has_it_all() -> None:
    text = "\n".join(report.lines(FULL))
    for piece in (
        "stream <train>: 10 samples & more",
        "2 CPUs, threads of 1 core",
        "bottleneck: decoding is the limit",
        "headroom: if decoding cost nothing, the limit would be 4,500 images/s: reading",
        "2 workers on 1.5 CPUs 520 images/s (measured with 1); they gave 500, so it is +4% off",
        "4 workers on 4 CPUs 1,000 images/s (measured with 2); then casting and normalising is the limit",
        "not to be trusted: one disk",
        "a worker 100 MiB",
        "2 workers and one consumer: 0.32 GiB at least, 1.28 by the configuration",
        "- do this\n      workers: {processes: auto}",
        "for the target:\n- that many",
    ):
        assert piece in text
    assert "7,000 images/s" in text
    (row,) = [line for line in text.splitlines() if line.startswith("2  ")]
    assert row.split() == ["2", "500", "10", "80", "10", "1.70", "0.00"]


def test_the_report_says_what_faster_takers_would_get() -> None:
    slow = replace(FULL, verdict=Verdict("trainer", 1.0, "the trainer is the limit"), headroom=None)
    assert "could feed 900 images/s, 1.8 times as many" in "\n".join(report.lines(slow))
    nothing = "\n".join(report.lines(replace(slow, chains=(replace(CHAIN, images=0),))))
    assert "could feed 900 images/s\n" in nothing
    assert "could feed" not in "\n".join(report.lines(replace(slow, potential=None)))


def test_json_says_the_same() -> None:
    data = json.loads(json.dumps(FULL.as_dict()))
    assert data["stream"] == "<train>" and data["verdict"]["stage"] == "decode"
    assert [chain["images_per_s"] for chain in data["chains"]] == [260.0, 500.0]
    assert data["chains"][1]["stages"] == {"read": 1.0, "decode": 8.0}
    assert data["alone"][0]["images_per_s"] == 1000.0
    assert data["headroom"]["text"].startswith("if decoding cost nothing")
    assert data["memory"]["worker"] == 100 << 20
    assert data["advice"][0]["lines"] == ["workers: {processes: auto}"]


class Balance(html.parser.HTMLParser):
    """Every element that opens closes, inside out; and nothing is loaded."""

    VOID = {"meta", "br", "rect", "line", "circle"}

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        assert tag not in ("script", "link", "img", "iframe")
        assert not {name for name, _ in attrs} & {"src", "href", "onload"}
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


@pytest.mark.parametrize(
    "shown",
    [
        FULL,
        replace(FULL, machine=None, alone=(), forecasts=(), distrust=(), memory=None, chains=(CHAIN,), headroom=None),
    ],
)
def test_the_page_is_whole_and_loads_nothing(shown: Profile) -> None:
    text = page.page(shown)
    parser = Balance()
    parser.feed(text)
    parser.close()
    assert not parser.open and "svg" in parser.seen
    assert "&lt;train&gt;" in text and "<train>" not in text and "samples &amp; more" in text
    assert "url(" not in text and "http" not in text
    assert "workers: {processes: auto}" in text


def test_the_plots_stay_in_their_frame() -> None:
    """Whatever was measured: also nothing at all, and what is endless."""
    nothing = replace(
        FULL, chains=(replace(CHAIN, images=0, stages={}, wait=0.0),), forecasts=(Forecast(2, 2, 0.0, "decode", 1),)
    )
    assert "nan" not in page.page(nothing) and "inf" not in page.page(nothing)
    assert page._ticks(650.0) == [0, 200, 400, 600]
    assert page._ticks(5.0) == [0, 1, 2, 3, 4, 5]


def test_the_page_replaces_a_file_and_never_lies_in_the_data(home: Path) -> None:
    file = home / "r.html"
    file.write_text("old")
    page.write(FULL, file)
    assert file.read_text() == page.page(FULL)
    assert [entry.name for entry in home.iterdir() if "partial" in entry.name] == []
    with pytest.raises(ConfigError, match="never written to"):
        page.write(FULL, home / "data" / "r.html", [home.resolve() / "data"])
    with pytest.raises(ConfigError, match="cannot be written"):
        page.write(FULL, home / "nowhere" / "r.html")


# -- asked for --------------------------------------------------------------------------------------------------------


def test_numbers_of_workers_are_read() -> None:
    assert cli._numbers("1, 2,4") == [1, 2, 4]
    for text in ("", "0", "1,", "two", "-1", "99999", "1;2"):
        with pytest.raises(ConfigError, match="--workers"):
            cli._numbers(text)
