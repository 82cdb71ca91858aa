"""Several real daemons behind one Loader: killed, stopped and started again, an epoch is that of one daemon."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import photos as samples
import pytest
from service import Daemon, Row, Trainer, Truth, signal_, stream, until
from trainer import described

from headrace import Loader

ENTRIES = 120
CHUNK = 4


def make(folder: Path, home: Path, name: str, slots: int) -> Daemon:
    """One with files of its own."""
    (home / name).mkdir(parents=True)
    return Daemon(home / name, {"train": stream(folder, chunk=CHUNK)}, slots=slots, tcp=True)


@pytest.fixture(scope="module")
def pair(photos: Path, session_home: Path) -> Iterator[list[Daemon]]:
    """Two of one stream, with room for all chunks of these tests."""
    home = Path(tempfile.mkdtemp(dir=session_home))
    folder = samples.links(photos, home / "many", ENTRIES)
    with make(folder, home, "a", 100) as a, make(folder, home, "b", 100) as b:
        yield [a, b]


def rows(batches: Any) -> list[Row]:
    """Of batches of levels in NHWC, as `Truth` has them."""
    found: list[Row] = []
    for batch in batches:
        told = described(batch, {})
        whole = zip(told["indices"], told["labels"], told["pictures"], strict=True)
        found += [row for row, valid in zip(whole, told["valid"], strict=True) if valid]
    return found


def open_loader(addresses: list[str], **arguments: Any) -> Loader:
    usual: dict[str, Any] = {"batch_size": 16, "output": "numpy", "dtype": "uint8", "layout": "NHWC", "timeout": 20}
    return Loader(addresses, **(usual | arguments))


@pytest.mark.kills
def test_a_server_that_is_killed_stopped_or_started_again_changes_no_epoch(
    many: Callable[[int], Path], home: Path
) -> None:
    folder = many(ENTRIES)
    with make(folder, home, "a", 8) as a, make(folder, home, "b", 8) as b, make(folder, home, "c", 8) as c:
        truth = Truth(a.config, home / "cache").rows
        with open_loader([a.address, b.address, c.tcp_address], timeout=8) as loader:

            def states() -> list[str]:
                return [server["state"] for server in loader.stats()["servers"]]

            batches = iter(loader)
            got = [next(batches), next(batches)]
            b.kill()
            assert rows([*got, *batches]) == truth(0)
            until(lambda: states() == ["up", "down", "up"], "the killed server to be missed")
            batches = iter(loader)
            got = [next(batches)]
            b.start()
            assert rows([*got, *batches]) == truth(1)
            until(lambda: states() == ["up"] * 3, "the server to be taken back")
            batches = iter(loader)
            got = [next(batches)]
            signal_(c.pid, signal.SIGSTOP)
            assert rows([*got, *batches]) == truth(2)
            signal_(c.pid, signal.SIGCONT)
            before = loader.stats()["servers"][2]["chunks"]
            for epoch in (3, 4):
                assert rows(loader) == truth(epoch)
            until(lambda: states() == ["up"] * 3, "the stopped server to answer again")
            assert rows(loader) == truth(5)
            told = loader.stats()["servers"]
            assert told[2]["chunks"] > before
            assert sum(server["chunks"] for server in told) >= 6 * ENTRIES // CHUNK
            assert told[1]["moved"] + told[2]["moved"] > 0


def test_trainers_that_share_a_stream_have_each_chunk_rendered_once_by_all_servers_together(
    pair: list[Daemon], home: Path
) -> None:
    addresses = [server.tcp_address for server in pair]
    trainers = [
        Trainer(",".join(order), home / f"{n}.jsonl", transport=transport, batch_size=size, epochs=2).start()
        for n, (order, transport, size) in enumerate([(addresses, "shm", 16), (addresses[::-1], "tcp", 7)])
    ]
    for trainer in trainers:
        trainer.wait()
    truth = Truth(pair[0].config, home / "cache")
    for trainer in trainers:
        assert trainer.rows() == truth.rows(0) + truth.rows(1)
    computed = [server.status().computed for server in pair]
    assert min(computed) > ENTRIES // CHUNK // 2
    # Both epochs once; the third is fetched ahead, and stays a beginning.
    assert 2 * ENTRIES // CHUNK <= sum(computed) < 3 * ENTRIES // CHUNK
    assert sum(server.status().delivered for server in pair) >= 4 * ENTRIES // CHUNK


def test_a_run_of_one_daemon_goes_on_at_several_and_has_the_same_pictures_labels_and_indices(
    pair: list[Daemon], home: Path
) -> None:
    truth = Truth(pair[0].config, home / "cache").rows
    with open_loader([pair[0].address]) as loader:
        batches = iter(loader)
        got = rows([next(batches), next(batches), next(batches)])
        state = loader.state_dict()
    with open_loader([pair[1].address, pair[0].tcp_address], transport="tcp", batch_size=10) as loader:
        loader.load_state_dict(state)
        assert got + rows(loader) == truth(0)
        assert min(server["chunks"] for server in loader.stats()["servers"]) > 0
