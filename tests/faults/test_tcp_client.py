"""The Loader over tcp when the network, the daemon or the client itself misbehaves: nothing wrong, nothing twice."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import http.server
import logging
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
from proxy import Proxy
from scripted import SAMPLES, Do, ScriptedDaemon, check_epoch, index_of, label_of, once, text_of, wait_until

from headrace import Loader, connect, tcp
from headrace.errors import ConfigError, ConnectionLost, DeadlineError, ProtocolError, StateError
from headrace.protocol import Get, Refused
from headrace.tcp import RemoteSession

TESTS = str(Path(__file__).parents[1])


@pytest.fixture
def socket_file(tmp_path: Path) -> Path:
    return tmp_path / "d.sock"


def open_loader(address: str, **arguments: Any) -> Loader:
    usual: dict[str, Any] = {
        "batch_size": 8, "output": "numpy", "dtype": "uint8", "timeout": 20, "transport": "tcp",
    }  # fmt: skip
    return Loader(address, **(usual | arguments))


@pytest.fixture
def lanes(monkeypatch: pytest.MonkeyPatch) -> int:
    """Data connections of a session, the same on every machine."""
    monkeypatch.setattr(tcp, "lanes_wanted", lambda: 2)
    return 2


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats that find a silent peer in a second."""
    monkeypatch.setattr(tcp, "HEARTBEAT", 100)
    monkeypatch.setattr(tcp, "CONTROL_SILENCE", 700)
    monkeypatch.setattr(tcp, "DATA_SILENCE", 700)


# -- what arrives ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["skip", "mask", "replace"])
@pytest.mark.parametrize("labels", ["numbers", "text"])
def test_batches_are_the_same_over_every_transport(socket_file: Path, labels: str, policy: str) -> None:
    got = []
    for transport in ("shm", "tcp"):
        with ScriptedDaemon(
            socket_file, samples=43, chunk=8, bad=[0, 3, 17, 18, 42], labels=labels, columns=["a", "b"],
            label_dtype="float32", label_width=2,
        ) as daemon:  # fmt: skip
            rows = []
            for rank in range(2):
                with open_loader(
                    daemon.tcp_address, transport=transport, batch_size=6, rank=rank, world_size=2,
                    on_bad_sample=policy, dtype="float32",
                ) as loader:  # fmt: skip
                    assert loader.stats()["transport"] == transport
                    for batch in loader:
                        indices = batch.indices.tolist()
                        assert dict(batch.extra) == {
                            name: [text_of(i, labels, ["a", "b"])[place] for i in indices]
                            for place, name in enumerate("ab", labels == "text")
                        }
                        if labels == "text":
                            assert batch.labels == [f"label {i} é" for i in indices]
                        else:
                            assert batch.labels.tolist() == [label_of(i, daemon.layout) for i in indices]
                        rows += [(indices, batch.valid.tolist(), batch.images.tobytes(), batch.rejects)]
            got.append(rows)
    assert got[0] == got[1]


def test_only_the_rows_that_this_rank_needs_are_asked_for(socket_file: Path) -> None:
    with ScriptedDaemon(socket_file, samples=64, chunk=16) as daemon:
        with open_loader(daemon.tcp_address, batch_size=6, rank=1, world_size=3, last_batch="partial") as loader:
            assert len([*loader]) == 4
        # Its steps are 6-11, 24-29, 42-47 and 60-63; chunks begin at 0, 16, 32 and 48.
        gets = [(get.chunk, get.first, get.count) for get in daemon.gets if get.epoch == 0]
        assert gets == [(0, 6, 6), (1, 8, 6), (2, 10, 6), (3, 12, 4)]


def test_frames_are_dropped_as_soon_as_they_were_copied(socket_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[weakref.ref[Any]] = []
    take = RemoteSession._take

    def remembered(self: RemoteSession, *arguments: Any) -> Any:
        rows = take(self, *arguments)
        taken.append(weakref.ref(rows))
        return rows

    monkeypatch.setattr(RemoteSession, "_take", remembered)
    with ScriptedDaemon(socket_file) as daemon, open_loader(daemon.tcp_address) as loader:
        kept = list(loader)
        wait_until(lambda: len(taken) >= 10)
        wait_until(lambda: all(ref() is None for ref in taken))
        check_epoch(kept, 0)


@pytest.mark.parametrize(
    ("do", "named"),
    [
        (Do.GARBAGE, "not a message"),
        (Do.SHORT_FRAME, "rows came in frames of"),
        (Do.FRAME_LESS, "rows came in frames of"),
        (Do.OTHER_ROWS, "rows 1 to 4 came"),
        (Do.OTHER_REQUEST, "is not open"),
        (Do.STRANGE_REJECT, "rejects in other rows"),
        (Do.FALLING_ENDS, "texts that end before they begin"),
        (Do.WRONG_TEXT, "the text of a row is not what"),
        (Do.WRONG_STATUS, "neither pictures nor rejects"),
    ],
)
def test_rows_that_are_wrong_are_an_error_no_picture_and_asked_for_again(socket_file: Path, do: Do, named: str) -> None:
    with (
        ScriptedDaemon(socket_file, columns=["a"], behave=once(do, 2)) as daemon,
        open_loader(daemon.tcp_address, prefetch=1) as loader,
    ):
        seen: list[Any] = []
        batches = iter(loader)
        with pytest.raises(ProtocolError, match=named):
            while True:
                seen.append(next(batches))
        assert len(seen) <= 1
        check_epoch([*seen, *batches], 0)


def test_rows_that_come_though_the_trainer_has_turned_elsewhere_are_dropped(socket_file: Path) -> None:
    def slow(get: Get) -> Do:
        time.sleep(0.02)
        return Do.ANSWER

    with ScriptedDaemon(socket_file, behave=slow) as daemon, open_loader(daemon.tcp_address) as loader:
        for epoch in (5, 3, 9, 4):
            loader.set_epoch(epoch)
            batches = iter(loader)
            next(batches)
        loader.set_epoch(2)
        check_epoch(loader, 2)
        assert daemon.cancelled
        assert len(daemon.hellos) == 1


# -- connections that end -------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", [0, 1, 2])  # the control connection, or one over which rows come
def test_whichever_connection_ends_the_session_is_begun_anew_and_nothing_is_lost_or_repeated(
    socket_file: Path, lanes: int, which: int
) -> None:
    with ScriptedDaemon(socket_file) as daemon, Proxy(daemon.tcp_address) as proxy:
        with open_loader(proxy.address) as loader:
            assert len(proxy.alive) == 1 + lanes
            batches = iter(loader)
            got = [next(batches)]
            proxy.cut(proxy.alive[which])
            check_epoch([*got, *batches], 0)
            wait_until(lambda: len(daemon.hellos) == 2)
            check_epoch(loader, 1)
        assert len(daemon.hellos) == 2


def test_connections_that_end_in_the_middle_of_a_frame_lose_and_repeat_nothing(socket_file: Path, lanes: int) -> None:
    with (
        ScriptedDaemon(socket_file, samples=160, size=(64, 64), window=8) as daemon,  # 2 MB of pictures
        Proxy(daemon.tcp_address, cut_after=200_000) as proxy,
        open_loader(proxy.address) as loader,
    ):
        check_epoch(loader, 0, samples=160)
        assert len(daemon.hellos) > 2


def test_a_network_that_falls_silent_is_noticed_by_heartbeats(
    socket_file: Path, lanes: int, quick: None, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        ScriptedDaemon(socket_file) as daemon,
        Proxy(daemon.tcp_address) as proxy,
        open_loader(proxy.address) as loader,
        caplog.at_level(logging.WARNING, "headrace"),
    ):
        batches = iter(loader)
        got = [next(batches)]
        for stretch in proxy.alive:
            stretch.hold()
        check_epoch([*got, *batches], 0)
        assert len(daemon.hellos) == 2
        assert "the connection to the daemon ended" in caplog.text


def test_a_slow_network_is_no_silent_one(socket_file: Path, lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame that takes longer than the control connection may be silent."""
    monkeypatch.setattr(tcp, "HEARTBEAT", 100)
    monkeypatch.setattr(tcp, "CONTROL_SILENCE", 1000)
    with (
        ScriptedDaemon(socket_file, samples=8, chunk=8, size=(256, 256), window=1, split=8) as daemon,
        Proxy(daemon.tcp_address, pace=1.2e6) as proxy,
        open_loader(proxy.address) as loader,
    ):
        check_epoch(loader, 0, samples=8)
        assert len(daemon.hellos) == 1


@pytest.mark.parametrize("end", [Do.VANISH, Do.GOODBYE])
def test_a_daemon_that_is_started_again_is_asked_for_what_is_still_missing(socket_file: Path, end: Do) -> None:
    with ScriptedDaemon(socket_file, behave=once(end, 6)) as daemon, open_loader(daemon.tcp_address) as loader:
        batches = iter(loader)
        got = [next(batches)]
        thread = threading.Thread(target=lambda: got.extend(batches))
        thread.start()
        time.sleep(0.2)
        daemon.close()
        with ScriptedDaemon(socket_file, endpoint=daemon.tcp_address) as second:
            thread.join(20)
            assert not thread.is_alive()
            check_epoch(got, 0)
            assert sum(epoch == 0 for epoch, _ in second.asked) < 10


def test_a_daemon_that_forgot_the_session_is_greeted_again(socket_file: Path) -> None:
    with ScriptedDaemon(socket_file, behave=once(Do.UNKNOWN, 5)) as daemon, open_loader(daemon.tcp_address) as loader:
        check_epoch(loader, 0)
        assert len(daemon.hellos) == 2


def test_a_daemon_that_stays_away_is_lost_after_the_timeout_with_the_reason(socket_file: Path) -> None:
    with (
        ScriptedDaemon(socket_file, behave=once(Do.VANISH, 2)) as daemon,
        open_loader(daemon.tcp_address, timeout=0.5) as loader,
    ):
        batches = iter(loader)
        with pytest.raises(ConnectionLost, match=rf"{daemon.tcp_address} is gone .* 0\.5 s .*nobody listens"):
            for _ in range(5):
                next(batches)
        position = loader.state_dict()["position"]
        daemon.close()
        with ScriptedDaemon(socket_file, endpoint=daemon.tcp_address):
            check_epoch(batches, 0, first=position)


def test_a_silent_daemon_runs_into_the_deadline_which_names_it_and_the_chunks(socket_file: Path) -> None:
    def silent(get: Get) -> Do:
        return Do.NOTHING if get.chunk >= 2 else Do.ANSWER

    with (
        ScriptedDaemon(socket_file, behave=silent) as daemon,
        open_loader(daemon.tcp_address, timeout=0.4) as loader,
    ):
        batches = iter(loader)
        next(batches)
        with pytest.raises(DeadlineError, match=rf"{daemon.tcp_address} .* for 0\.4 s.*chunks 2, 3"):
            next(batches)
        assert loader.state_dict()["position"] == 8


# -- the other side of the address ----------------------------------------------------------------------------


def test_nobody_at_the_port_is_said_at_once() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        before = time.monotonic()
        with pytest.raises(ConnectionLost, match="no daemon at tcp://127.*nobody listens at this port"):
            open_loader(f"tcp://127.0.0.1:{sock.getsockname()[1]}", timeout=60)
        assert time.monotonic() - before < 30


def test_a_web_server_at_the_port_is_told_from_a_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connect, "_GREETING", 0.3)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    with pytest.raises(DeadlineError, match="says nothing for .* it is another service's port"):
        open_loader(f"tcp://127.0.0.1:{server.server_address[1]}")
    server.shutdown()
    server.server_close()
    thread.join()


def has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as sock:
        sock.bind(("::1", 0))
        return True
    return False


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")
def test_a_daemon_may_have_an_ipv6_address(socket_file: Path) -> None:
    with ScriptedDaemon(socket_file, endpoint="tcp://[::1]:*") as daemon, open_loader(daemon.tcp_address) as loader:
        assert daemon.tcp_address.startswith("tcp://[::1]:")
        check_epoch(loader, 0)


def test_a_refusal_becomes_the_error_that_it_names(socket_file: Path) -> None:
    refused = Refused(kind="ConfigError", text="no stream is called 'val'; there is: train")
    with (
        ScriptedDaemon(socket_file, refuse=refused) as daemon,
        pytest.raises(ConfigError, match="there is: train"),
    ):
        open_loader(daemon.tcp_address, stream="val")


def test_indexing_is_waited_for_while_it_goes_on_and_no_longer(socket_file: Path) -> None:
    with ScriptedDaemon(socket_file, indexing=50) as daemon, open_loader(daemon.tcp_address) as loader:
        check_epoch(loader, 0)
    with (
        ScriptedDaemon(socket_file, indexing=None) as daemon,
        pytest.raises(DeadlineError, match=r"does not answer.* 0\.3 s"),
    ):
        open_loader(daemon.tcp_address, timeout=0.3)


# -- this process ---------------------------------------------------------------------------------------------


def test_a_python_that_is_held_up_keeps_its_session(socket_file: Path, quick: None) -> None:
    with (
        ScriptedDaemon(socket_file, heartbeat=(100, 700)) as daemon,
        open_loader(daemon.tcp_address) as loader,
    ):
        batches = iter(loader)
        got = [next(batches)]
        ctypes.PyDLL(None).usleep(2_000_000)  # keeps the interpreter lock
        check_epoch([*got, *batches], 0)
        assert len(daemon.hellos) == 1


def test_a_trainer_that_was_stopped_for_long_comes_back_by_itself(socket_file: Path) -> None:
    script = """
import logging, sys, time
from headrace import Loader
logging.basicConfig(level=logging.INFO)
with Loader(sys.argv[1], batch_size=8, output="numpy", dtype="uint8", timeout=20, transport="tcp",
            prefetch=1) as loader:
    for batch in loader:
        sys.stdout.write(" ".join(map(str, batch.indices.tolist())) + "\\n")
        sys.stdout.flush()
        time.sleep(0.2)
"""
    with ScriptedDaemon(socket_file, heartbeat=(100, 700)) as daemon:
        trainer = subprocess.Popen(
            [sys.executable, "-c", script, daemon.tcp_address],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert trainer.stdout is not None
        lines = [trainer.stdout.readline()]
        trainer.send_signal(signal.SIGSTOP)
        time.sleep(2.5)
        trainer.send_signal(signal.SIGCONT)
        out, log = trainer.communicate(timeout=60)
        assert trainer.returncode == 0, log
        rows = [int(i) for line in [*lines, *out.splitlines()] for i in line.split()]
        assert rows == [index_of(p, SAMPLES) for p in range(SAMPLES)]
        assert len(daemon.hellos) == 2, log


def test_a_forked_child_does_not_keep_the_parents_session(socket_file: Path) -> None:
    script = f"""
import os, sys
sys.path.insert(0, {TESTS!r})
from pathlib import Path
from scripted import ScriptedDaemon, wait_until
from headrace import Loader
from headrace.errors import StateError
with ScriptedDaemon(Path({str(socket_file)!r})) as daemon:
    for address in (daemon.tcp_address, daemon.address):
        loader = Loader(address, batch_size=8, output="numpy", transport="tcp")
        batches = iter(loader)
        next(batches)
        ready, go = os.pipe(), os.pipe()
        child = os.fork()
        if child == 0:
            try:
                next(batches)
            except StateError as error:
                os.write(ready[1], str(error).encode())
            loader.close()
            os.read(go[0], 1)
            os._exit(0)
        said = os.read(ready[0], 1000).decode()
        assert "made before a fork" in said, said
        assert sum(len(b.indices) for b in batches) == 32  # the parent goes on
        assert len(daemon.remote) == 1
        loader.close()
        wait_until(lambda: not daemon.remote)  # the session ends although the child lives
        os.write(go[1], b"x")
        assert os.waitpid(child, 0)[1] == 0
sys.stdout.write("fine")
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", script], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "fine"), done.stderr


@pytest.mark.parametrize("ending", ["pass", "raise SystemExit(3)", "os.kill(os.getpid(), signal.SIGINT)"])
def test_a_live_loader_does_not_hold_up_the_interpreters_exit(socket_file: Path, ending: str) -> None:
    script = f"""
import os, signal, sys
from headrace import Loader
loader = Loader(sys.argv[1], batch_size=8, output="numpy", transport="tcp")
batches = iter(loader)
next(batches)
{ending}
"""
    with ScriptedDaemon(socket_file) as daemon:
        done = subprocess.run(
            [sys.executable, "-c", script, daemon.tcp_address], capture_output=True, text=True, timeout=30
        )
        wait_until(lambda: not daemon.remote)
    assert "Fatal" not in done.stderr
    assert done.returncode == {"pass": 0, "raise SystemExit(3)": 3}.get(ending, -signal.SIGINT)


def test_a_loader_that_is_dropped_ends_its_thread_and_session(socket_file: Path) -> None:
    with ScriptedDaemon(socket_file) as daemon:
        loader = open_loader(daemon.tcp_address)
        batches = iter(loader)
        batch = next(batches)
        del loader, batches
        gc.collect()
        wait_until(lambda: not daemon.remote)
        assert not any(thread.name == "headrace-fetch" for thread in threading.enumerate())
        assert (batch.images == batch.images[:, :1, :1, :1]).all()


@pytest.mark.parametrize("moment", ["a wait for rows", "a wait for a daemon that is gone", "a handshake"])
def test_a_signals_handler_may_close_the_loader_at_any_time(socket_file: Path, moment: str) -> None:
    behave = {"a wait for rows": Do.NOTHING}.get(moment, Do.VANISH)
    with ScriptedDaemon(socket_file, behave=lambda get: behave) as daemon, socket.socket() as silent:

        def replace() -> None:
            """By something that takes connections and says nothing."""
            daemon.close()
            host, _, port = daemon.tcp_address.removeprefix("tcp://").rpartition(":")
            silent.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            silent.bind((host, int(port)))
            silent.listen()

        loader = open_loader(daemon.tcp_address, timeout=60)
        timer = threading.Timer(0.2, replace if moment == "a handshake" else lambda: None)
        before = signal.signal(signal.SIGALRM, lambda number, frame: loader.close())
        try:
            began = time.monotonic()
            timer.start()
            signal.setitimer(signal.ITIMER_REAL, 1.0)
            with pytest.raises(StateError, match="closed"):
                next(iter(loader))
            assert time.monotonic() - began < 30
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            timer.join()
        assert not any(thread.name == "headrace-fetch" for thread in threading.enumerate())
