"""The Loader when the other side, the machine or the user misbehaves: nothing wrong, nothing twice, no hang."""

from __future__ import annotations

import _thread
import gc
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scripted import SAMPLES, Do, ScriptedDaemon, check_epoch, index_of, once, wait_until

from headrace import Loader
from headrace.assembly import Assembly
from headrace.engine import Engine
from headrace.errors import (
    ConfigError,
    ConnectionLost,
    DatasetError,
    DeadlineError,
    HeadraceError,
    ProtocolError,
    RenderMismatch,
    StateError,
)
from headrace.protocol import Get, Refused


@pytest.fixture
def socket_file(tmp_path: Path) -> Path:
    return tmp_path / "d.sock"


def open_loader(daemon: ScriptedDaemon, **arguments: Any) -> Loader:
    usual: dict[str, Any] = {"batch_size": 8, "output": "numpy", "dtype": "uint8", "timeout": 20}
    return Loader(daemon.address, **(usual | arguments))


def test_a_slot_that_was_reused_is_never_handed_out_but_asked_for_again(socket_file: Path) -> None:
    with ScriptedDaemon(socket_file, behave=once(Do.OLD_GENERATION, 4)) as daemon, open_loader(daemon) as loader:
        check_epoch(loader, 0)
        assert daemon.asked.count((0, 4)) == 2
        daemon.wait_released()


def test_rows_that_were_never_rendered_are_an_error_and_no_picture(socket_file: Path) -> None:
    with ScriptedDaemon(socket_file, behave=once(Do.WRONG_STATUS, 2)) as daemon, open_loader(daemon) as loader:
        batches = iter(loader)
        next(batches)
        with pytest.raises(ProtocolError, match="chunk 2 .* neither pictures nor rejects"):
            next(batches)
        assert next(batches).step == 1


def test_a_chunk_that_cannot_be_had_fails_by_name_and_the_next_next_tries_again(socket_file: Path) -> None:
    with ScriptedDaemon(socket_file, behave=once(Do.FAIL, 4)) as daemon, open_loader(daemon) as loader:
        batches = iter(loader)
        assert [next(batches).step, next(batches).step] == [0, 1]
        with pytest.raises(DatasetError, match="chunk 4: EIO"):
            next(batches)
        assert loader.state_dict()["position"] == 16
        assert [b.step for b in batches] == [2, 3, 4]


def test_a_failed_chunk_is_asked_for_again_though_nothing_else_arrives(socket_file: Path) -> None:
    with ScriptedDaemon(socket_file, behave=once(Do.FAIL, 4)) as daemon, open_loader(daemon) as loader:
        batches = iter(loader)
        next(batches)
        next(batches)
        wait_until(lambda: (0, 9) in daemon.asked)  # as far ahead as it goes
        daemon.wait_released()
        with pytest.raises(DatasetError, match="chunk 4: EIO"):
            next(batches)
        assert [b.step for b in batches] == [2, 3, 4]


def test_what_failed_in_the_look_ahead_is_no_error_of_another_epoch(socket_file: Path) -> None:
    def behave(get: Get) -> Do:
        return Do.GARBAGE if get.epoch == 1 else Do.ANSWER

    with ScriptedDaemon(socket_file, behave=behave) as daemon, open_loader(daemon) as loader:
        check_epoch(loader, 0)
        wait_until(lambda: not daemon.sessions)  # the look-ahead met nonsense and left
        loader.set_epoch(0)
        check_epoch(loader, 0)
        with pytest.raises(ProtocolError):
            next(iter(loader))


def test_what_failed_between_two_epochs_and_is_mended_by_then_is_no_error(socket_file: Path) -> None:
    mended = False

    def behave(get: Get) -> Do:
        return Do.GARBAGE if get.epoch == 1 and not mended else Do.ANSWER

    with ScriptedDaemon(socket_file, behave=behave) as daemon, open_loader(daemon) as loader:
        check_epoch(loader, 0)
        wait_until(lambda: len(daemon.hellos) == 2 and not daemon.sessions)  # tried once more, for epoch 1 alone
        mended = True  # while the trainer validates
        check_epoch(loader, 1)


def test_memory_that_the_next_epoch_lacks_is_no_error_of_this_one(
    socket_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = Assembly.want

    def lacking(self: Assembly, before: int = 0) -> Any:
        if self.epoch == 1 and before:
            raise MemoryError
        return want(self, before)

    monkeypatch.setattr(Assembly, "want", lacking)
    with ScriptedDaemon(socket_file) as daemon, open_loader(daemon) as loader:
        check_epoch(loader, 0)
        check_epoch(loader, 1)


def test_a_daemon_that_forgot_the_session_is_greeted_again(socket_file: Path) -> None:
    with ScriptedDaemon(socket_file, behave=once(Do.UNKNOWN, 5)) as daemon, open_loader(daemon) as loader:
        check_epoch(loader, 0)
        assert len(daemon.hellos) == 2
        check_epoch(loader, 1)


def test_a_daemon_that_talks_nonsense_is_an_error_and_then_greeted_again(socket_file: Path) -> None:
    with ScriptedDaemon(socket_file, behave=once(Do.GARBAGE, 0)) as daemon, open_loader(daemon) as loader:
        batches = iter(loader)
        with pytest.raises(ProtocolError):
            next(batches)
        assert [b.step for b in batches] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("end", [Do.VANISH, Do.GOODBYE])
def test_a_daemon_that_is_started_again_is_asked_for_what_is_still_missing(socket_file: Path, end: Do) -> None:
    with ScriptedDaemon(socket_file, behave=once(end, 6)) as daemon, open_loader(daemon) as loader:
        batches = iter(loader)
        first = next(batches)
        assert first.indices.tolist() == [index_of(p, SAMPLES) for p in range(8)]
        state = loader.state_dict()
        rest: list[int] = []
        thread = threading.Thread(target=lambda: rest.extend(i for b in batches for i in b.indices.tolist()))
        thread.start()
        time.sleep(0.2)
        daemon.close()
        with ScriptedDaemon(socket_file) as second:
            thread.join(20)
            assert not thread.is_alive()
            assert rest == [index_of(p, SAMPLES) for p in range(8, SAMPLES)]
            # Of this epoch; the next one's beginning is asked for as soon as the last batch was taken.
            assert sum(epoch == 0 for epoch, _ in second.asked) < 10
            loader.load_state_dict(state)
            check_epoch(loader, 0, first=8)
            second.wait_released()


def test_a_daemon_that_stays_away_is_lost_after_the_timeout_and_may_come_back(socket_file: Path) -> None:
    with ScriptedDaemon(socket_file, behave=once(Do.VANISH, 2)) as daemon, open_loader(daemon, timeout=0.5) as loader:
        batches = iter(loader)
        with pytest.raises(ConnectionLost, match=rf"{socket_file}.* is gone .* 0\.5 s") as caught:
            for _ in range(5):
                next(batches)
        assert "batch" in str(caught.value)
        daemon.close()
        position = loader.state_dict()["position"]
        with ScriptedDaemon(socket_file):
            check_epoch_of(batches, 0, position)


def check_epoch_of(batches: Iterator[Any], epoch: int, first: int) -> None:
    seen = [SAMPLES - 1 - int(i) for b in batches for i in b.indices]
    assert seen == list(range(first, SAMPLES))


def test_a_daemon_that_crashes_and_returns_for_ever_runs_into_the_deadline(socket_file: Path) -> None:
    daemons = [ScriptedDaemon(socket_file, behave=lambda get: Do.VANISH)]
    stop = threading.Event()

    def restart() -> None:
        while not stop.is_set():
            daemons[-1].close()
            daemons.append(ScriptedDaemon(socket_file, behave=lambda get: Do.VANISH))
            wait_until(lambda: daemons[-1].gets != [] or stop.is_set())

    with open_loader(daemons[0], timeout=1) as loader:
        thread = threading.Thread(target=restart)
        thread.start()
        try:
            with pytest.raises((ConnectionLost, DeadlineError), match="for 1 s"):
                next(iter(loader))
        finally:
            stop.set()
            thread.join(20)
            daemons[-1].close()


def test_a_silent_daemon_runs_into_the_deadline_which_names_it_and_the_chunks(socket_file: Path) -> None:
    def silent(get: Get) -> Do:
        return Do.NOTHING if get.chunk >= 2 else Do.ANSWER

    with ScriptedDaemon(socket_file, behave=silent) as daemon, open_loader(daemon, timeout=0.4) as loader:
        batches = iter(loader)
        next(batches)
        for _ in range(2):
            with pytest.raises(DeadlineError, match=rf"{socket_file} \(pid {os.getpid()}\) for 0\.4 s.*chunks 2, 3"):
                next(batches)
        assert loader.state_dict()["position"] == 8


def test_a_daemon_that_comes_back_with_other_pictures_is_refused(socket_file: Path) -> None:
    with ScriptedDaemon(socket_file, behave=once(Do.VANISH, 3)) as daemon, open_loader(daemon) as loader:
        batches = iter(loader)
        next(batches)
        time.sleep(0.1)
        daemon.close()
        with ScriptedDaemon(socket_file, pixels="other"), pytest.raises(StateError, match="pixels"):
            for _ in range(5):
                next(batches)


def test_another_renderer_is_logged_and_refused_where_exact_is_asked_for(
    socket_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ScriptedDaemon(socket_file) as daemon:
        with open_loader(daemon) as loader, caplog.at_level(logging.WARNING, "headrace"):
            batches = iter(loader)
            next(batches)
            daemon.render_id = "script/1 + script/2"
            list(batches)
            daemon.render_id = "script/2"
            check_epoch(loader, 1)
            assert caplog.text.count("script/2") == 1
            assert loader.stats()["render_ids"] == ["script/1", "script/2"]
        daemon.render_id = "script/1"
        with open_loader(daemon, exact=True, prefetch=0) as loader:
            batches = iter(loader)
            next(batches)
            daemon.render_id = "script/2"
            with pytest.raises(RenderMismatch, match="script/2 instead of script/1"):
                list(batches)
        daemon.wait_released()


def test_a_renderer_whose_equal_ids_mean_less_is_refused_where_exact_is_asked_for(socket_file: Path) -> None:
    with ScriptedDaemon(socket_file) as daemon:
        daemon.render_id = "dali-gpu/2.4.0/hw_decoder_load-0.5/pillow/13.0.0"
        with open_loader(daemon) as loader:
            check_epoch(loader, 0)
        with open_loader(daemon, exact=True) as loader:
            with pytest.raises(RenderMismatch, match="hw_decoder_load to 0 or 1"):
                next(iter(loader))
        daemon.wait_released()


# -- handshake ----------------------------------------------------------------------------------------------


def test_nobody_at_the_address_is_an_error_that_names_it(socket_file: Path) -> None:
    with pytest.raises(ConnectionLost, match=f"no daemon at ipc://{socket_file}"):
        Loader(f"ipc://{socket_file}", batch_size=8)


@pytest.mark.parametrize(
    "address", ["tcp://host", "tcp://host:0", "tcp://*:5555", "http://host", "ipc://", "ipc:///" + "x" * 200]
)
def test_an_address_that_cannot_be_is_an_error(address: str) -> None:
    with pytest.raises(ConfigError):
        Loader(address, batch_size=8)


def test_a_private_daemon_that_ends_while_it_is_found_is_looked_for_again(socket_file: Path) -> None:
    with ScriptedDaemon(socket_file) as daemon:
        addresses = iter([f"{daemon.address}.gone", daemon.address])
        engine = Engine(lambda *, timeout, stop: next(addresses), None, "auto", timeout=20, exact=False)
        engine.open()
        assert engine.welcome.samples == SAMPLES
        engine.close()


def test_a_refusal_becomes_the_error_that_it_names(socket_file: Path) -> None:
    refused = Refused(kind="ConfigError", text="no stream is called 'val'; there is: train")
    with (
        ScriptedDaemon(socket_file, refuse=refused) as daemon,
        pytest.raises(ConfigError, match="there is: train"),
    ):
        open_loader(daemon, stream="val")
    assert daemon.hellos[0].stream == "val"


def test_indexing_that_makes_no_progress_runs_into_the_deadline(socket_file: Path) -> None:
    with (
        ScriptedDaemon(socket_file, indexing=None) as daemon,
        pytest.raises(DeadlineError, match=r"does not answer.* 0\.3 s"),
    ):
        open_loader(daemon, timeout=0.3)


def test_progress_of_indexing_is_waited_for(socket_file: Path) -> None:
    with ScriptedDaemon(socket_file, indexing=50) as daemon, open_loader(daemon) as loader:
        check_epoch(loader, 0)


# -- this process -------------------------------------------------------------------------------------------


def test_ctrl_c_in_next_leaves_the_position_and_the_loader_usable(socket_file: Path) -> None:
    def first_never(get: Get) -> Do:
        return Do.NOTHING if get.epoch == 0 else Do.ANSWER

    with ScriptedDaemon(socket_file, behave=first_never) as daemon, open_loader(daemon) as loader:
        timer = threading.Timer(0.3, _thread.interrupt_main)
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            for _ in loader:
                pass
        timer.join()
        assert loader.state_dict()["position"] == 0
        loader.set_epoch(1)
        check_epoch(loader, 1)


def test_ctrl_c_as_the_look_ahead_begins_loses_neither_the_last_batch_nor_the_next_epoch(
    socket_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = Engine.begin

    def interrupted(self: Engine, *arguments: Any) -> None:
        monkeypatch.setattr(Engine, "begin", begin)
        raise KeyboardInterrupt

    with ScriptedDaemon(socket_file) as daemon, open_loader(daemon) as loader:
        batches = iter(loader)
        for _ in range(4):
            next(batches)
        monkeypatch.setattr(Engine, "begin", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(batches)
        assert (loader.state_dict()["epoch"], loader.state_dict()["position"], loader.remaining) == (0, 32, 1)
        check_epoch(loader, 0, first=32)
        check_epoch(loader, 1)


def test_ctrl_c_after_a_batch_was_taken_hands_it_out_next_time(
    socket_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    with ScriptedDaemon(socket_file) as daemon, open_loader(daemon) as loader:
        batches = iter(loader)
        next(batches)
        monkeypatch.setattr(Loader, "_note", interrupt)
        with pytest.raises(KeyboardInterrupt):
            next(batches)
        assert loader.state_dict()["position"] == 8
        assert next(batches).step == 1
        assert loader.state_dict()["position"] == 16


def test_a_signals_handler_may_close_the_loader_while_next_has_the_lock(
    socket_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ScriptedDaemon(socket_file) as daemon:
        loader = open_loader(daemon)
        batches = iter(loader)
        next(batches)
        take = Assembly.take

        def interrupted(self: Assembly) -> Any:
            monkeypatch.setattr(Assembly, "take", take)
            loader._engine._wake.ring()  # the thread runs into the lock
            time.sleep(0.05)
            signal.raise_signal(signal.SIGTERM)
            return take(self)

        before = signal.signal(signal.SIGTERM, lambda number, frame: loader.close())
        try:
            monkeypatch.setattr(Assembly, "take", interrupted)
            with pytest.raises(StateError, match="closed"):
                for _ in batches:
                    pass
        finally:
            signal.signal(signal.SIGTERM, before)
        assert not any(thread.name == "headrace-fetch" for thread in threading.enumerate())
        monkeypatch.undo()  # it remembers the function that refers to the loader


def test_set_epoch_wakes_a_next_that_waits_in_another_thread(socket_file: Path) -> None:
    with ScriptedDaemon(socket_file, behave=lambda get: Do.NOTHING) as daemon, open_loader(daemon) as loader:
        errors: list[HeadraceError] = []
        batches = iter(loader)

        def consume() -> None:
            try:
                next(batches)
            except HeadraceError as error:
                errors.append(error)

        thread = threading.Thread(target=consume)
        thread.start()
        wait_until(lambda: daemon.gets != [])
        loader.set_epoch(5)
        thread.join(10)
        assert not thread.is_alive()
        assert isinstance(errors[0], StateError)
        assert "ended by set_epoch" in str(errors[0])


def test_threads_that_share_an_iterator_get_each_batch_once_and_all_come_to_the_end(socket_file: Path) -> None:
    with ScriptedDaemon(socket_file, samples=400) as daemon, open_loader(daemon) as loader:
        steps: list[int] = []
        batches = iter(loader)

        def consume() -> None:
            while (batch := next(batches, None)) is not None:
                steps.append(batch.step)
            steps.append(-1)

        threads = [threading.Thread(target=consume) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert sorted(steps) == [-1] * 4 + list(range(50))


def test_an_error_in_the_loops_body_ends_the_epoch_like_break(socket_file: Path) -> None:
    with ScriptedDaemon(socket_file) as daemon, open_loader(daemon) as loader:
        with pytest.raises(ZeroDivisionError):
            for batch in loader:
                _ = batch.step // 0
        check_epoch(loader, 1)


def test_a_time_that_this_process_was_stopped_is_no_waiting(socket_file: Path) -> None:
    """SIGSTOP for longer than the timeout, in the middle of a wait that is answered right after."""
    script = f"""
import sys, threading, time
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from pathlib import Path
from scripted import Do, ScriptedDaemon
from headrace import Loader
with ScriptedDaemon(Path({str(socket_file)!r}), slots=1) as daemon:
    daemon.behave = lambda get: time.sleep(0.2) or Do.ANSWER
    with Loader(daemon.address, batch_size=8, output="numpy", timeout=1.5) as loader:
        sys.stdout.write("ready\\n"); sys.stdout.flush()
        sys.stdout.write(str(sum(len(b.indices) for b in loader)))
"""
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    time.sleep(0.3)
    child.send_signal(signal.SIGSTOP)
    time.sleep(2.0)
    child.send_signal(signal.SIGCONT)
    out, _ = child.communicate(timeout=60)
    assert (child.returncode, out) == (0, str(SAMPLES))


def test_a_forked_child_is_refused_and_does_not_keep_the_parents_session(socket_file: Path) -> None:
    script = f"""
import os, sys, time
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from pathlib import Path
from scripted import ScriptedDaemon, wait_until
from headrace import Loader
from headrace.errors import StateError
with ScriptedDaemon(Path({str(socket_file)!r})) as daemon:
    loader = Loader(daemon.address, batch_size=8, output="numpy")
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
    loader.close()
    wait_until(lambda: not daemon.sessions)  # the session ends although the child lives
    os.write(go[1], b"x")
    assert os.waitpid(child, 0)[1] == 0
sys.stdout.write("fine")
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", script], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "fine"), done.stderr


@pytest.mark.parametrize(
    "ending", ["pass", "raise SystemExit(3)", "import os, signal; os.kill(os.getpid(), signal.SIGINT)"]
)
def test_a_live_loader_does_not_hold_up_the_interpreters_exit(socket_file: Path, ending: str) -> None:
    script = f"""
import sys
from headrace import Loader
loader = Loader("ipc://{socket_file}", batch_size=8, output="numpy")
batches = iter(loader)
next(batches)
{ending}
"""
    with ScriptedDaemon(socket_file, slots=2) as daemon:
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30)
        wait_until(lambda: not daemon.sessions)
    assert "Fatal" not in done.stderr
    assert done.returncode == {"pass": 0, "raise SystemExit(3)": 3}.get(ending, -signal.SIGINT)


def test_a_loader_that_is_dropped_ends_its_thread_and_session(socket_file: Path) -> None:
    with ScriptedDaemon(socket_file) as daemon:
        loader = open_loader(daemon)
        batches = iter(loader)
        batch = next(batches)
        gone = weakref.ref(loader)
        del loader, batches
        gc.collect()
        assert gone() is None
        assert not any(thread.name == "headrace-fetch" for thread in threading.enumerate())
        assert (batch.images == batch.images[:, :1, :1, :1]).all()


def test_closing_twice_is_harmless_and_next_says_that_it_is_closed(socket_file: Path) -> None:
    with ScriptedDaemon(socket_file) as daemon:
        loader = open_loader(daemon)
        batches = iter(loader)
        next(batches)
        loader.close()
        loader.close()
        with pytest.raises(StateError, match="closed"):
            next(batches)
        assert loader.state_dict()["position"] == 8


def test_closing_wakes_a_next_that_waits_in_another_thread(socket_file: Path) -> None:
    with ScriptedDaemon(socket_file, behave=lambda get: Do.NOTHING) as daemon:
        loader = open_loader(daemon)
        errors: list[HeadraceError] = []

        def consume() -> None:
            try:
                next(iter(loader))
            except HeadraceError as error:
                errors.append(error)

        thread = threading.Thread(target=consume)
        thread.start()
        time.sleep(0.2)
        loader.close()
        thread.join(10)
        assert not thread.is_alive()
        assert isinstance(errors[0], StateError)


def test_two_clients_that_each_want_more_than_the_ring_both_finish(socket_file: Path) -> None:
    with ScriptedDaemon(socket_file, slots=2, window=9) as daemon:
        totals: list[int] = []

        def consume() -> None:
            with open_loader(daemon, batch_size=30) as loader:
                totals.append(sum(len(b.indices) for b in loader))

        threads = [threading.Thread(target=consume) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert totals == [SAMPLES, SAMPLES]
        daemon.wait_released()


def test_a_thousand_kept_batches_need_no_descriptors(socket_file: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, soft), hard))
    try:
        with ScriptedDaemon(socket_file, samples=1000, chunk=32, size=(32, 32)) as daemon:
            with open_loader(daemon, batch_size=1, dtype="float32") as loader:
                kept = list(loader)
                open_now = len(os.listdir("/proc/self/fd"))
            assert len(kept) == 1000
            assert open_now < 100
            assert all((b.images == b.images[:, :1, :1, :1]).all() for b in kept)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_memory_that_cannot_be_had_is_an_error_that_says_so(socket_file: Path) -> None:
    with ScriptedDaemon(socket_file, samples=64, size=(64, 64)) as daemon, open_loader(daemon, batch_size=64) as loader:
        batches = iter(loader)
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        with open("/proc/self/statm") as statm:
            used = int(statm.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used, hard))
        try:
            with pytest.raises(HeadraceError, match="no memory for a batch"):
                next(batches)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        assert len(next(batches).indices) == 64
