"""The Loader with several servers: whichever dies, stops, lies or comes back, each picture once and the right one."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scripted import SAMPLES, Do, ScriptedDaemon, check_epoch, once, wait_until

from headrace import Loader, fleet, several
from headrace.errors import (
    ConfigError,
    ConnectionLost,
    DatasetError,
    HeadraceError,
    RenderMismatch,
    StateError,
)
from headrace.output import Output
from headrace.protocol import Get, Refused

CHUNKS = SAMPLES // 4


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Loader does not wait long for the second server to answer, too."""
    monkeypatch.setattr(several, "_GRACE", 0.1)


def open_loader(*servers: ScriptedDaemon | str, **arguments: Any) -> Loader:
    usual: dict[str, Any] = {"batch_size": 8, "output": "numpy", "dtype": "uint8", "timeout": 20}
    addresses = [server if isinstance(server, str) else server.address for server in servers]
    return Loader(addresses, **(usual | arguments))


def told(loader: Loader, key: str) -> list[Any]:
    """Of each server."""
    return [server[key] for server in loader.stats()["servers"]]


def until_up(loader: Loader) -> None:
    wait_until(lambda: told(loader, "state") == ["up"] * len(told(loader, "state")))


def of(daemon: ScriptedDaemon, epoch: int) -> list[int]:
    """Chunks of an epoch that it was asked for."""
    return [chunk for e, chunk in daemon.asked if e == epoch]


@pytest.fixture
def two(place: Path) -> Iterator[tuple[ScriptedDaemon, ScriptedDaemon]]:
    with ScriptedDaemon(place / "a") as a, ScriptedDaemon(place / "b") as b:
        yield a, b


# -- who is asked ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_each_chunk_is_asked_for_once_and_both_servers_take_part(
    two: tuple[ScriptedDaemon, ScriptedDaemon], transport: str
) -> None:
    a, b = two
    with open_loader(a.address, b.tcp_address, transport=transport) as loader:
        assert loader.stats()["transport"] == transport
        for epoch in range(3):
            check_epoch(loader, epoch)
        assert sum(told(loader, "chunks")) >= 3 * CHUNKS
        assert told(loader, "state") == ["up", "up"]
    for epoch in range(3):
        assert sorted(of(a, epoch) + of(b, epoch)) == list(range(CHUNKS))
    assert min(len(a.gets), len(b.gets)) > CHUNKS / 2
    a.wait_released()
    b.wait_released()


def test_trainers_ask_the_same_server_for_the_same_chunk(two: tuple[ScriptedDaemon, ScriptedDaemon]) -> None:
    a, b = two
    with open_loader(a, b) as one, open_loader(b, a, batch_size=5) as other:
        check_epoch(one, 0)
        asked = set(of(a, 0)), set(of(b, 0))
        check_epoch(other, 0)
    assert (set(of(a, 0)), set(of(b, 0))) == asked


def test_a_slow_server_is_asked_less(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "_SPAN", 32)
    monkeypatch.setattr(fleet, "_LONG", 0.1)

    def slow(get: Get) -> Do:
        time.sleep(0.01)
        return Do.ANSWER

    samples = 400
    with (
        ScriptedDaemon(place / "a", samples=samples) as a,
        ScriptedDaemon(place / "b", samples=samples, behave=slow) as b,
        open_loader(a, b, prefetch=4) as loader,
    ):
        for epoch in range(8):
            check_epoch(loader, epoch, samples=samples)
        assert told(loader, "weight")[1] < told(loader, "weight")[0] == 1
        assert len(of(b, 7)) < len(of(b, 0)) / 1.5
        assert told(loader, "late") == [0, 0]


def test_one_address_in_a_list_is_that_address(two: tuple[ScriptedDaemon, ScriptedDaemon]) -> None:
    with open_loader(two[0]) as loader:
        check_epoch(loader, 0)
        assert "servers" not in loader.stats()


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ([], "empty"),
        (["ipc:///a", "ipc:///a"], "twice"),
        (["ipc:///a", "train.yaml"], "'train.yaml' in a list"),
        (["ipc:///a", {"streams": {}}], "in a list"),
        (["ipc:///a", "udp://a:1"], "no address"),
    ],
)
def test_lists_that_are_none_are_refused(source: list[Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Loader(source, batch_size=8)


# -- servers that go and come -----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [Do.VANISH, Do.GOODBYE, Do.UNKNOWN, Do.GARBAGE, Do.NO_SLOT])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_what_a_server_owes_that_dies_or_talks_nonsense_is_asked_for_at_the_other(
    place: Path, how: Do, transport: str, caplog: pytest.LogCaptureFixture
) -> None:
    if (how, transport) == (Do.NO_SLOT, "tcp"):
        how = Do.FRAME_LESS
    count = 0

    def third(get: Get) -> Do:
        nonlocal count
        count += 1
        return how if count == 3 else Do.ANSWER

    with (
        ScriptedDaemon(place / "a") as a,
        ScriptedDaemon(place / "b", behave=third) as b,
        caplog.at_level(logging.WARNING, "headrace"),
        open_loader(a, b, transport=transport) as loader,
    ):
        check_epoch(loader, 0)
        check_epoch(loader, 1)
        assert b.address in caplog.text
        assert told(loader, "moved")[1] > 0
        if how in (Do.UNKNOWN, Do.GARBAGE, Do.NO_SLOT, Do.FRAME_LESS):  # it is there, and tried again
            until_up(loader)
            before = len(b.gets)
            for epoch in (2, 3, 4):
                check_epoch(loader, epoch)
            assert len(b.gets) > before
            b.wait_released()
        a.wait_released()


def test_a_server_that_returns_is_taken_back(place: Path) -> None:
    with ScriptedDaemon(place / "a") as a:
        b = ScriptedDaemon(place / "b")
        with open_loader(a, b) as loader:
            batches = iter(loader)
            got = [next(batches)]
            b.close()
            check_epoch([*got, *batches], 0)
            wait_until(lambda: told(loader, "state") == ["up", "down"])
            check_epoch(loader, 1)
            assert len(of(a, 1)) == CHUNKS
            with ScriptedDaemon(place / "b") as b:
                until_up(loader)
                for epoch in (2, 3, 4):
                    check_epoch(loader, epoch)
                assert len(b.gets) > CHUNKS / 2


def test_a_server_that_is_silent_is_left_and_taken_back_when_it_answers(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    silent = threading.Event()
    held = threading.Event()

    def stops(get: Get) -> Do:
        if silent.is_set():
            held.wait(20)
        return Do.ANSWER

    with (
        ScriptedDaemon(place / "a") as a,
        ScriptedDaemon(place / "b", behave=stops) as b,
        caplog.at_level(logging.INFO, "headrace"),
        open_loader(a, b, timeout=4) as loader,
    ):
        check_epoch(loader, 0)
        silent.set()
        for epoch in (1, 2, 3):
            check_epoch(loader, epoch)
        assert told(loader, "state") == ["up", "late"]
        assert told(loader, "late") == [0, 1]
        assert "has answered nothing for too long" in caplog.text
        silent.clear()
        held.set()
        until_up(loader)  # what it brings now has been had from the other
        for epoch in (4, 5, 6):
            check_epoch(loader, epoch)
        assert len(of(b, 6) + of(a, 6)) == CHUNKS
        assert "answers again" in caplog.text
        a.wait_released()
        b.wait_released()


def test_a_chunk_that_one_server_cannot_bring_comes_from_the_other(place: Path) -> None:
    with (
        ScriptedDaemon(place / "a") as a,
        ScriptedDaemon(place / "b", behave=lambda get: Do.FAIL) as b,
        open_loader(a, b) as loader,
    ):
        check_epoch(loader, 0)
        assert sorted(of(a, 0)) == list(range(CHUNKS))
        # What was asked of it last, for the next epoch, may not have failed yet.
        wait_until(lambda: told(loader, "moved")[1] == len(of(b, 0) + of(b, 1)) > 0)


def test_a_chunk_that_no_server_can_bring_fails_by_name_and_the_next_next_tries_again(place: Path) -> None:
    with (
        ScriptedDaemon(place / "a", behave=once(Do.FAIL, 4)),
        ScriptedDaemon(place / "b", behave=once(Do.FAIL, 4)),
        open_loader(f"ipc://{place}/a", f"ipc://{place}/b") as loader,
    ):
        batches = iter(loader)
        assert [next(batches).step, next(batches).step] == [0, 1]
        with pytest.raises(DatasetError, match="chunk 4: EIO"):
            next(batches)
        assert [b.step for b in batches] == [2, 3, 4]


def test_without_any_server_the_error_names_each_and_the_run_goes_on_with_the_first_that_returns(place: Path) -> None:
    def half(get: Get) -> Do:  # or the whole epoch might be here before they end
        return Do.ANSWER if get.chunk < CHUNKS // 2 else Do.NOTHING

    a, b = ScriptedDaemon(place / "a", behave=half), ScriptedDaemon(place / "b", behave=half)
    with open_loader(a, b, timeout=1) as loader:
        batches = iter(loader)
        got = [next(batches)]
        a.close()
        b.close()
        with pytest.raises(ConnectionLost, match=rf"(?s){a.address}, down: .*{b.address}, down: "):
            while True:
                got.append(next(batches))
        with ScriptedDaemon(place / "b"):
            check_epoch([*got, *batches], 0)


def test_a_slot_that_was_reused_is_never_handed_out_but_asked_for_again(place: Path) -> None:
    def old(get: Get) -> Do:
        return Do.OLD_GENERATION if get.request % 3 == 0 else Do.ANSWER

    with (
        ScriptedDaemon(place / "a", behave=old) as a,
        ScriptedDaemon(place / "b", behave=old) as b,
        open_loader(a, b) as loader,
    ):
        for epoch in range(3):
            check_epoch(loader, epoch)
        assert len(a.gets) + len(b.gets) > 3 * CHUNKS


def test_what_was_taken_back_is_given_back_to_whoever_brings_it(place: Path) -> None:
    def slow(get: Get) -> Do:
        time.sleep(0.01)
        return Do.ANSWER

    with (
        ScriptedDaemon(place / "a", behave=slow) as a,
        ScriptedDaemon(place / "b", behave=slow) as b,
        open_loader(a, b.tcp_address, transport="auto") as loader,
    ):
        for epoch in range(200, 0, -1):
            loader.set_epoch(epoch)
            batches = iter(loader)
            next(batches)
            if epoch < 197 and a.cancelled and b.cancelled:  # each owed something by then, once at least
                break
        assert a.cancelled and b.cancelled
        loader.set_epoch(0)
        check_epoch(loader, 0)
        a.wait_released()
        b.wait_released()


# -- servers that are not alike -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"pixels": "others"}, r"pixels \(decode, transforms or chunk\) differ"),
        ({"order": "other", "pixels": "others"}, "order"),
        ({"columns": ["n"]}, "columns"),
        ({"samples": 44}, "number of samples"),
        ({"size": (1, 3)}, "chunk or size of the pictures"),
        ({"output": Output("uint8"), "max_bad": 0.5}, "output, max_bad differ"),
    ],
)
def test_servers_of_other_pictures_are_refused_by_name(place: Path, change: dict[str, Any], named: str) -> None:
    with ScriptedDaemon(place / "a") as a, ScriptedDaemon(place / "b", **change) as b:
        with pytest.raises(StateError, match=rf"{place}/[ab] does not serve the same .*{named}"):
            open_loader(a, b)
        wait_until(lambda: not a.sessions and not b.sessions)


def test_a_server_that_comes_back_with_other_pictures_is_named_and_not_asked(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ScriptedDaemon(place / "a") as a:
        b = ScriptedDaemon(place / "b")
        with open_loader(a, b) as loader, caplog.at_level(logging.WARNING, "headrace"):
            check_epoch(loader, 0)
            b.close()
            with ScriptedDaemon(place / "b", pixels="others") as b:
                wait_until(lambda: len(b.hellos) > 1)
                check_epoch(loader, 1)
                assert not b.gets
                assert "pixels (decode, transforms or chunk) differ" in told(loader, "trouble")[1]
                assert caplog.text.count("is not asked for anything") == 1  # not each time that it is tried


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"pixels": "others"}, StateError, "does not serve the same stream"),
        ({"refuse": Refused(kind="DatasetError", text="/data is not there")}, DatasetError, "/data is not there"),
    ],
)
def test_if_no_server_that_comes_back_will_do_that_is_said_and_the_run_goes_on_once_it_is_mended(
    place: Path, change: dict[str, Any], error: type[Exception], said: str
) -> None:
    samples = 400  # more than are fetched ahead
    a, b = ScriptedDaemon(place / "a", samples=samples), ScriptedDaemon(place / "b", samples=samples)
    with open_loader(a, b) as loader:
        batches = iter(loader)
        got = [next(batches)]
        a.close()
        b.close()
        change = change | {"samples": samples}
        with ScriptedDaemon(place / "a", **change), ScriptedDaemon(place / "b", **change):
            for _ in range(2):  # also by the `next` that tries again
                with pytest.raises(error, match=f"(?s)none of 2 servers can be joined: .*{said}.*{said}"):
                    while True:
                        got.append(next(batches))
        with ScriptedDaemon(place / "b", samples=samples):
            while len(got) < len(loader):
                with contextlib.suppress(error):  # that was tried again before it was mended
                    got.append(next(batches))
        check_epoch(got, 0, samples=samples)


def test_a_server_that_comes_back_with_other_defaults_is_asked(place: Path) -> None:
    with ScriptedDaemon(place / "a") as a:
        b = ScriptedDaemon(place / "b")
        with open_loader(a, b) as loader:
            check_epoch(loader, 0)
            b.close()
            wait_until(lambda: told(loader, "state") == ["up", "down"])
            with ScriptedDaemon(place / "b", output=Output("float16"), max_bad=0.5) as b:
                until_up(loader)
                for epoch in (1, 2):
                    check_epoch(loader, epoch)
                assert b.gets


def test_servers_that_render_differently_are_said_to_and_refused_if_they_must_be_exact(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ScriptedDaemon(place / "a", render_id="x/1") as a, ScriptedDaemon(place / "b", render_id="y/2") as b:
        with open_loader(a, b) as loader, caplog.at_level(logging.WARNING, "headrace"):
            check_epoch(loader, 0)
            assert loader.stats()["render_ids"] == ["x/1", "y/2"]
            assert "equal within the tolerance, not byte for byte" in caplog.text
        with pytest.raises(RenderMismatch, match=rf"exact=True, and the server at ipc://{place}/[ab] renders by"):
            open_loader(a, b, exact=True)


# -- the beginning ------------------------------------------------------------------------------------------------


def test_one_server_is_enough_to_begin_and_the_others_are_named_and_join_later(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        ScriptedDaemon(place / "a") as a,
        caplog.at_level(logging.WARNING, "headrace"),
        open_loader(a, f"ipc://{place}/b", f"tcp://127.0.0.1:{free_port()}") as loader,
    ):
        assert f"the server at ipc://{place}/b cannot be joined: no daemon at" in caplog.text
        assert "nobody listens at this port" in caplog.text
        check_epoch(loader, 0)
        with ScriptedDaemon(place / "b") as b:
            wait_until(lambda: told(loader, "state") == ["up", "up", "down"])
            check_epoch(loader, 1)
            check_epoch(loader, 2)
            assert b.gets


def test_without_any_server_there_is_no_loader_and_the_error_names_all(place: Path) -> None:
    port = free_port()
    refuse = Refused(kind="DatasetError", text="/data is not there")
    with ScriptedDaemon(place / "b", refuse=refuse) as b:
        with pytest.raises(ConnectionLost, match="none of 3 servers can be joined") as caught:
            open_loader(f"ipc://{place}/a", b, f"tcp://127.0.0.1:{port}")
        for each in (f"{place}/a: No such file", f"{place}/b: /data is not there", f"{port}: Connection refused"):
            assert each in str(caught.value)
        with pytest.raises(DatasetError, match="none of 2 servers"):
            open_loader(b.address, b.tcp_address)


def test_a_server_that_says_nothing_holds_up_neither_the_beginning_nor_the_run_nor_the_end(
    place: Path, quick: None, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        socket.socket(socket.AF_UNIX) as unix,
        socket.create_server(("127.0.0.1", 0)) as tcp,
        ScriptedDaemon(place / "a") as a,
        caplog.at_level(logging.WARNING, "headrace"),
    ):
        unix.bind(str(place / "b"))
        unix.listen()
        with open_loader(a, f"ipc://{place}/b", f"tcp://127.0.0.1:{tcp.getsockname()[1]}") as loader:
            assert f"going on without the server at ipc://{place}/b" in caplog.text
            check_epoch(loader, 0)
            before = time.monotonic()
        assert time.monotonic() - before < 5


def test_a_server_whose_name_the_resolver_looks_up_for_ever_holds_up_neither_the_run_nor_the_end(
    place: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, found, resolve = threading.Event(), threading.Event(), socket.getaddrinfo

    def getaddrinfo(host: str, *about: Any, **more: Any) -> Any:
        if host != "far.example":
            return resolve(host, *about, **more)
        known.wait(30)
        found.set()
        return resolve("127.0.0.1", *about, **more)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    with ScriptedDaemon(place / "a") as a, ScriptedDaemon(place / "b") as b:
        far = b.tcp_address.replace("127.0.0.1", "far.example")
        with open_loader(a, far) as loader:
            check_epoch(loader, 0)
            assert told(loader, "state") == ["up", "down"]
        assert not known.is_set() and not found.is_set()
        known.set()
        wait_until(lambda: not any(thread.name == "headrace-join" for thread in threading.enumerate()))
        assert found.is_set() and not b.gets and not b.remote  # and whoever comes too late joins nobody


def test_without_any_server_each_is_given_its_time_once(place: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(place / "b"))
        silent.listen()
        silent.setblocking(False)
        with pytest.raises(ConnectionLost, match="(?s)No such file.*does not answer"):
            open_loader(f"ipc://{place}/a", f"ipc://{place}/b", timeout=0.3)
        silent.accept()[0].close()
        with pytest.raises(BlockingIOError):
            silent.accept()


def test_a_server_that_lists_for_long_joins_when_it_is_done(place: Path, quick: None) -> None:
    with ScriptedDaemon(place / "a") as a, ScriptedDaemon(place / "b", indexing=None) as b:
        with open_loader(a, b) as loader:
            check_epoch(loader, 0)
            assert told(loader, "state") == ["up", "down"]


def test_what_keeps_a_loader_from_being_made_leaves_nothing(place: Path) -> None:
    with ScriptedDaemon(place / "a") as a, ScriptedDaemon(place / "b", labels="text") as b:
        for _ in range(5):
            with pytest.raises(HeadraceError):
                open_loader(a, b)
        with pytest.raises(ConfigError):
            open_loader(a, f"ipc://{place}/c", mixup={"alpha": 0.2})
        wait_until(lambda: not a.sessions and not b.sessions)


def test_a_child_that_is_forked_keeps_no_session_open(two: tuple[ScriptedDaemon, ScriptedDaemon]) -> None:
    a, b = two
    loader = open_loader(a, b)
    go, wait = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(wait)
        os.read(go, 1)
        os._exit(0)
    os.close(go)
    try:
        loader.close()
        wait_until(lambda: not a.sessions and not b.sessions)
    finally:
        os.close(wait)
        os.waitpid(pid, 0)


def test_a_loader_that_is_dropped_leaves_every_server(two: tuple[ScriptedDaemon, ScriptedDaemon]) -> None:
    a, b = two
    loader = open_loader(a, b)
    next(iter(loader))
    assert a.sessions and b.sessions
    del loader
    gc.collect()
    wait_until(lambda: not a.sessions and not b.sessions)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
