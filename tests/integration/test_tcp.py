"""Rows over tcp are those of the ring, whoever asks for which; and where a daemon listens."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import photos as samples
import pytest
import yaml
from remote import RemoteClient
from service import Daemon, Trainer, Truth, merged, stream, until

from headrace import Loader
from headrace.ping import ping

ENTRIES = 203
CHUNK = 8


@pytest.fixture
def folder(many: Callable[[int], Path]) -> Path:
    return many(ENTRIES)


@pytest.fixture(scope="module")
def daemon(photos: Path, session_home: Path) -> Iterator[Daemon]:
    folder = Path(tempfile.mkdtemp(dir=session_home))
    streams = {"train": stream(samples.links(photos, folder / "many", ENTRIES), chunk=CHUNK)}
    with Daemon(folder, streams, workers=2, slots=6, tcp=True) as made:
        yield made


def test_an_epoch_is_byte_equal_over_shm_and_tcp_and_from_one_host_and_another(daemon: Daemon, home: Path) -> None:
    sides = [
        (daemon.address, "auto", "shm"),
        (daemon.address, "tcp", "tcp"),
        (daemon.tcp_address, "tcp", "tcp"),
        (daemon.tcp_address, "auto", "shm"),
    ]
    truth = Truth(daemon.config, home / "cache")
    for number, (address, transport, used) in enumerate(sides):
        with Trainer(address, home / f"{number}.jsonl", transport=transport, epochs=2) as trainer:
            trainer.wait()
        assert trainer.rows() == truth.rows(0) + truth.rows(1), (address, transport)
        assert f"joined stream train over {used}" in daemon.log.read_text().splitlines()[-2]
    assert daemon.ping().sessions == 0


@pytest.mark.parametrize(("ranks", "batch_size"), [(2, 3), (3, 7), (4, 20)])
def test_ranks_over_both_transports_get_one_epoch_whatever_rows_their_batches_need(
    daemon: Daemon, home: Path, ranks: int, batch_size: int
) -> None:
    trainers = [
        Trainer(
            daemon.address, home / f"{r}.jsonl", rank=r, world_size=ranks, batch_size=batch_size,
            transport=("tcp", "shm")[r % 2],
        ).start()
        for r in range(ranks)
    ]  # fmt: skip
    for trainer in trainers:
        trainer.wait()
    assert merged(trainers) == Truth(daemon.config, home / "cache").rows(0)


def test_any_run_of_rows_is_that_part_of_the_chunk_over_any_lane(daemon: Daemon) -> None:
    client = RemoteClient(daemon.tcp_address, lanes=3)
    last = (ENTRIES - 1) // CHUNK
    wholes = {}
    number = 0
    for chunk in (0, 5, last):
        number += 1
        client.get(number, chunk)
        message, wholes[chunk] = client.rows(client.lanes[number % 3])
        assert (message.request, message.first) == (number, 0)
        assert message.count == (ENTRIES - last * CHUNK if chunk == last else CHUNK)
    for chunk, whole in wholes.items():
        rows = len(whole["status"])
        for first in range(rows):
            for count in (0, 1, rows - first):
                number += 1
                client.get(number, chunk, first=first, count=count)
                message, part = client.rows(client.lanes[number % 3])
                stop = first + (count or rows - first)
                assert (message.request, message.first, message.count) == (number, first, stop - first)
                for name in ("images", "labels", "indices", "status"):
                    assert np.array_equal(part[name], whole[name][first:stop]), name
    client.close()


def test_rejects_come_with_their_rows_and_no_others(folder: Path, home: Path) -> None:
    bad = sorted(folder.glob("*/*"))[3]
    bad.unlink()
    bad.write_bytes(b"no picture")
    description = stream(folder, chunk=CHUNK) | {"shuffle": False}
    with Daemon(home, {"train": description}, slots=6, tcp=True) as daemon:
        client = RemoteClient(daemon.tcp_address)
        found = {}
        for number, (first, count) in enumerate([(0, 0), (0, 3), (3, 1), (2, 3), (4, 4)]):
            client.get(number, 0, first=first, count=count)
            message, fields = client.rows()
            found[first, count] = [(reject.row, reject.index) for reject in message.rejects]
            assert [row + first for row in np.flatnonzero(fields["status"] == 3)] == [r for r, _ in found[first, count]]
        client.close()
    assert found == {(0, 0): [(3, 3)], (0, 3): [], (3, 1): [(3, 3)], (2, 3): [(3, 3)], (4, 4): []}


def test_texts_come_with_their_rows_and_ends_that_count_from_the_first(photos: Path, home: Path) -> None:
    files = sorted(photos.glob("*/*"))[:10]
    lines = [f"{file},{'é' * i}{i},{i / 2}\n" for i, file in enumerate(files)]
    (home / "list.csv").write_text("path,label,weight\n" + "".join(lines), encoding="utf-8")
    description = {
        "dataset": {"list": str(home / "list.csv"), "root": str(photos), "labels": "text"},
        "chunk": CHUNK,
        "transforms": [{"center_crop": {"size": 8}}],
    }
    with Daemon(home, {"train": description}, slots=6, tcp=True) as daemon:
        client = RemoteClient(daemon.tcp_address)
        assert (client.welcome.labels, client.welcome.columns) == ("text", ["weight"])
        runs = [(0, 0, 8), (0, 3, 5), (0, 7, 1), (1, 1, 1), (1, 0, 2)]
        for number, (chunk, first, count) in enumerate(runs):
            client.get(number, chunk, first=first, count=count)
            _, fields = client.rows()
            ends, text = [0, *fields["ends"].tolist()], fields["text"].tobytes()
            assert ends[-1] == len(text)
            shown = [msgspec.msgpack.decode(text[a:b]) for a, b in zip(ends, ends[1:], strict=False)]
            wanted = range(chunk * CHUNK + first, chunk * CHUNK + first + count)
            assert [row[0] for row in shown] == ["é" * i + str(i) for i in wanted]
            assert [float(row[1]) for row in shown] == [i / 2 for i in wanted]
        client.close()


def test_pictures_that_are_larger_than_a_frame_come_in_several(many: Callable[[int], Path], home: Path) -> None:
    description = stream(many(10), chunk=5, size=1200)
    with Daemon(home, {"train": description}, slots=6, tcp=True) as daemon:
        client = RemoteClient(daemon.tcp_address)
        client.get(1, 0)
        message, fields = client.rows()
        assert (message.count, message.split) == (5, 1)
        client.close()
        with Trainer(daemon.tcp_address, home / "a.jsonl", transport="tcp") as trainer:
            trainer.wait()
    assert fields["images"].shape == (5, 1200, 1200, 3)
    assert trainer.rows() == Truth(daemon.config, home / "cache").rows(0)


def test_a_private_daemon_sends_rows_over_tcp_and_ends_with_its_last_session(folder: Path, home: Path) -> None:
    config: dict[str, Any] = {"workers": {"processes": 1}, "streams": {"train": stream(folder, chunk=CHUNK)}}
    (home / "private.yaml").write_text(yaml.safe_dump(config))
    with Trainer(str(home / "private.yaml"), home / "a.jsonl", transport="tcp") as trainer:
        trainer.wait()
    assert trainer.rows() == Truth(home / "private.yaml", home / "cache").rows(0)
    until(lambda: not list((home / "run").rglob("*.sock")), "the private daemon to end")


def test_a_daemon_over_tcp_says_where_it_is_on_this_host(folder: Path, home: Path) -> None:
    with Daemon(home, {"train": stream(folder)}, tcp=True) as daemon:
        there, here = ping(daemon.tcp_address), ping(daemon.address)
        assert there.address == here.address == daemon.address
        assert there.instance == here.instance
        before = here.instance
        daemon.stop()
        daemon.start()
        assert ping(daemon.address).instance != before


def test_the_loader_says_how_its_rows_came(daemon: Daemon) -> None:
    for transport in ("shm", "tcp"):
        with Loader(daemon.address, batch_size=10, transport=transport, output="numpy") as loader:
            assert sum(len(labels) for _, labels in loader) == ENTRIES
            assert loader.stats()["transport"] == transport


# -- where it listens -------------------------------------------------------------------------------------------


def serving(home: Path, listen: Any, folder: Path, *options: str) -> subprocess.Popen[str]:
    config = {"workers": {"processes": 1, "backend": "fake"}, "streams": {"train": stream(folder)}}
    (home / "s.yaml").write_text(yaml.safe_dump(config | {"listen": listen}))
    command = [sys.executable, "-m", "headrace.server", "serve", str(home / "s.yaml"), *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def addresses(process: subprocess.Popen[str], count: int) -> list[str]:
    assert process.stdout is not None
    return [process.stdout.readline().removeprefix("listening on ").rstrip("\n") for _ in range(count)]


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    process.terminate()
    _, log = process.communicate(timeout=60)
    return process.returncode, log


def test_a_daemon_prints_its_addresses_in_the_order_of_the_configuration_with_real_ports(
    folder: Path, home: Path
) -> None:
    listen = ["tcp://127.0.0.1:0", f"ipc://{home}/s.sock", "tcp://localhost:*"]
    process = serving(home, listen, folder)
    first, second, third = addresses(process, 3)
    assert second == f"ipc://{home}/s.sock" and first != third
    for address in (first, third):
        assert re.fullmatch(r"tcp://127\.0\.0\.1:[1-9]\d*", address)
        assert ping(address).pid == process.pid
    assert ended(process)[0] == 0


def test_a_daemon_that_is_told_to_listen_on_tcp_only_has_a_unix_socket_too_and_says_where(
    folder: Path, home: Path
) -> None:
    process = serving(home, "tcp://127.0.0.1:0", folder)
    tcp, ipc = addresses(process, 2)
    assert ipc.startswith(f"ipc://{home}/run/headrace/") and ping(tcp).address == ipc
    with Loader(tcp, batch_size=10, output="numpy") as loader:
        assert sum(len(labels) for _, labels in loader) == ENTRIES
        assert loader.stats()["transport"] == "shm"
    assert ended(process)[0] == 0


def test_where_other_hosts_reach_it_a_daemon_listens_only_when_told_and_says_what_is_lost(
    folder: Path, home: Path
) -> None:
    process = serving(home, "tcp://*:0", folder)
    _, log = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "tcp://*:0 can be reached from other hosts" in log and "headrace serve --insecure" in log
    process = serving(home, "tcp://*:0", folder, "--insecure")
    (address, _) = addresses(process, 2)
    port = address.removeprefix("tcp://0.0.0.0:")
    assert ping(f"tcp://127.0.0.1:{port}").pid == process.pid
    status, log = ended(process)
    assert status == 0 and "nothing is encrypted" in log and "read its pictures and labels" in log


def test_a_port_that_is_taken_ends_the_start_with_its_name(daemon: Daemon, folder: Path, home: Path) -> None:
    process = serving(home, [f"ipc://{home}/s.sock", daemon.tcp_address], folder)
    _, log = process.communicate(timeout=60)
    assert process.returncode == 2 and f"listen: {daemon.tcp_address}: another program" in log
    assert "Traceback" not in log and not (home / "s.sock").exists()
