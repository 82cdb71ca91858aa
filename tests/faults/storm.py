"""Several trainers and servers while everything around them is killed, stopped, slowed and cut off, at random.

    python tests/faults/storm.py --seconds 60 --seed 1

At its end it tells, as a table, what was done and what the trainers got: every position of every epoch once and in
order, each picture compared with one that was rendered here without any server; and whether servers and trainers have
more memory, descriptors and threads than before the storm. Its status is 1 if anything is not as it must be, and 3 if
this machine does not let it play two hosts.

A trainer that is killed goes on from the state that it wrote down after its last batch. What is random comes from the
seed; when it meets whom at what, does not.
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import itertools
import json
import os
import random
import shutil
import socket
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import leaks
import photos
import psutil
from accounts import Accounts
from cast import Client, Server, Usage, size_of, tail
from proxy import Proxy
from service import Daemon, Trainer, Truth, stream, until, with_timings
from weather import Weather

from headrace.keys import generate
from headrace.server.second_host import Host, NotPossible, two_hosts

#: Of a data set, with the bad ones.
SAMPLES, BAD = 300, 3
CHUNK, WORKERS, SLOTS = 4, 2, 4
#: Rows of a batch, trainer by trainer: most are no multiple of a chunk. Rows a second of each, at most.
BATCHES, PACES = (16, 9, 25), (160, 80, 120)
#: Seconds after which servers give up a peer over tcp, and milliseconds after which trainers do: sooner than usual.
TIMINGS = {"heartbeat": 0.5, "silence": 4.0, "stuck": 4.0, "probe": 1.0, "attach": 4.0}
SILENCE = 3000
#: Seconds that a trainer may be without a new batch while nothing holds it up.
STUCK = 45.0
#: Faults a second, if nothing else is said.
RATE = 2.5
#: Seconds until connections that were left half open, whose end nobody told, are gone everywhere.
SETTLING = 15.0
#: No port that the kernel gives away: a server that is started again must find its own free.
PORTS = range(20_000, 32_000)


class Storm:
    """
    Args:
        folder: for all files.
        keys: all that goes over tcp is encrypted.
        hosts: the trainers over tcp are on the second one, servers on the first; else proxies are between.
    """

    def __init__(
        self,
        folder: Path,
        *,
        seconds: float,
        seed: int,
        trainers: int,
        servers: int,
        rate: float = RATE,
        keys: bool = False,
        hosts: tuple[Host, Host] | None = None,
    ) -> None:
        self.folder = folder
        self.seconds = seconds
        self.random = random.Random(seed)
        self.rate = rate
        self.hosts = hosts
        self.faults: Counter[str] = Counter()
        self.log = (folder / "storm.log").open("w")
        self.began = time.monotonic()
        self.problems: list[str] = []
        self.before: dict[str, Usage] = {}
        self.after: dict[str, Usage] = {}
        #: Of those that are spared, ten times in the storm.
        self.course: dict[str, list[Usage]] = {}
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        pictures = _pictures(folder)
        streams = {"train": stream(pictures)}
        self.truth = Truth(folder / "s0.yaml", folder / "cache")
        self.keys = [generate(folder / "keys", name) for name in ("server", "trainer")] if keys else []
        ports = self.random.sample(PORTS, 4 * servers)
        ip = hosts[0].ip if hosts else "127.0.0.1"
        self.servers = []
        for i in range(servers):
            port = next(p for p in ports[4 * i :] if _free(p))
            address = f"tcp://{ip}:{port}"
            keys = (self.keys[0][1], self.keys[1][0]) if self.keys else None
            daemon = Daemon(folder, streams, workers=WORKERS, slots=SLOTS, name=f"s{i}", tcp=address, keys=keys)
            self.servers.append(Server(i, daemon, tuple(hosts[0].command()) if hosts else ()))
        self.clients: list[Client] = []
        for i in range(trainers):
            self.clients.append(self._client(i))
        self.weather = Weather(self.servers, self.clients, self.random, self._later, seconds=seconds, hosts=hosts)

    def _client(self, number: int) -> Client:
        """Every third one by shared memory alone, every third over tcp alone, every third by way of both."""
        proxies: list[Proxy] = []
        addresses = []
        far = number % 3
        for server in self.servers:
            there = server.daemon.tcp_address
            if far == 0 or (far == 2 and server.number % 2 == 0 and not self.hosts):
                addresses.append(server.daemon.address)
            elif self.hosts:
                addresses.append(there)
            else:
                proxies.append(Proxy(there))
                addresses.append(proxies[-1].address)
        batch, pace = BATCHES[number % len(BATCHES)], PACES[number % len(PACES)]
        keys = {"secret_key": self.keys[1][1], "server_key": self.keys[0][0]} if self.keys and far else {}
        trainer = Trainer(
            ",".join(addresses), self.folder / f"t{number}.jsonl", batch_size=batch, epochs=10**6, pause=batch / pace,
            transport="tcp" if far else "auto", on_bad_sample="mask", silence=SILENCE, **keys,
        )  # fmt: skip
        return Client(number, trainer, proxies, tuple(self.hosts[1].command()) if self.hosts and far else ())

    # -- the course ---------------------------------------------------------------------------------------------

    def run(self) -> None:
        try:
            for server in self.servers:
                server.daemon.start(prefix=server.prefix)
            for client in self.clients:
                client.trainer.start(prefix=client.prefix)
            self.quiet("before the storm")
            self.before = self._usages()
            self._blow()
            self.quiet("after the storm")
            self.after = self._settled()
            self._end()
        finally:
            self._abandon()

    def quiet(self, when: str) -> None:
        """Until all are there, everybody goes on, and nobody is busy with what was before."""
        for server in self.servers:
            until(lambda server=server: server.ask(2.0) is not None, f"server {server.number} {when}")
        for _ in range(2):
            self._all_go_on()
            time.sleep(1.5)
        for server in self.servers:
            until(
                lambda server=server: (
                    (pong := server.ask(5.0)) is not None
                    and pong.sessions <= len(self.clients)
                    and len(server.workers()) == WORKERS
                ),
                f"server {server.number} to have no sessions but the trainers' and all of its workers {when}",
            )

    def _blow(self) -> None:
        kinds = self.weather.kinds()
        names, weights = list(kinds), [weight for weight, _ in kinds.values()]
        start = look = time.monotonic()
        at = start + 0.2
        while at < start + self.seconds:
            self._until(at)
            if at > start + self.seconds / 2 and not self.servers[-1].spared:
                # The last of each is killed no more: whatever leaks adds up there.
                self.servers[-1].spared = self.clients[-1].spared = True
            if at > look:
                look += self.seconds / 20
                self._take_course()
            kind = self.random.choices(names, weights)[0]
            if (what := kinds[kind][1]()) is not None:
                self.faults[kind] += 1
                self._say(f"{kind}: {what}")
            at += self.random.expovariate(self.rate)
        while self._due:  # what is over later than the storm
            self._until(self._due[0][0])

    def _until(self, when: float) -> None:
        """What is due meanwhile; and a look at whether all are alive and go on."""
        while True:
            now = time.monotonic()
            while self._due and self._due[0][0] <= now:
                heapq.heappop(self._due)[2]()
            self._look(now)
            if now >= when:
                return
            until_next = min(when, self._due[0][0] if self._due else when) - time.monotonic()
            time.sleep(max(0.0, min(until_next, 0.1)))

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._due, (time.monotonic() + seconds, next(self._numbers), action))

    def _look(self, now: float) -> None:
        for server in self.servers:
            if server.up and server.daemon.process is not None and (code := server.daemon.process.poll()) is not None:
                raise AssertionError(f"server {server.number} has ended by itself with status {code}: "
                                     f"{tail(server.daemon.log)}")  # fmt: skip
        for client in self.clients:
            if client.away or client.held:
                client.moved = now
                continue
            assert client.trainer.process is not None
            size = size_of(client.trainer.record)
            if client.trainer.process.poll() is not None:
                why = tail(client.trainer.log)
                # A Loader is not made where no server is there; whoever starts trainers starts them again.
                if size > client.begun or "\nheadrace.errors.ConnectionLost" not in why[why.rstrip().rfind("\n") :]:
                    raise AssertionError(f"trainer {client.number} has ended by itself: {why}")
                client.away = True
                self._say(f"trainer {client.number} found nobody: {self.weather.start_again(client)}")
                continue
            client.longest = max(client.longest, now - client.moved)
            if size != client.size:
                client.size, client.moved = size, now
            elif now - client.moved > STUCK:
                raise AssertionError(f"trainer {client.number} got nothing for {STUCK:g} s: {tail(client.trainer.log)}")

    def _all_go_on(self) -> None:
        """Wait until each trainer has got a batch more."""
        start = time.monotonic()
        for client in self.clients:
            client.moved = start
        before = [size_of(client.trainer.record) for client in self.clients]
        while any(size_of(c.trainer.record) <= size for c, size in zip(self.clients, before, strict=True)):
            self._until(time.monotonic() + 0.05)

    def _end(self) -> None:
        """Everybody ends as one asks them to."""
        for client in self.clients:
            process = client.trainer.process
            assert process is not None
            process.terminate()
        for client in self.clients:
            client.trainer.wait(30)
        for server in self.servers:
            until(lambda server=server: server.idle(), f"server {server.number} to get back what was lent")
            server.count()
            if (status := server.daemon.stop()) != 0:
                self.problems.append(f"server {server.number} ends with status {status}")
        for proxy in self._proxies():
            proxy.__exit__()
        # A trainer that finds no server ends with a traceback, and is right.
        for name, signs in (
            ("s*.log", ("Traceback", "is not rendered any more", "Assertion failed")),
            ("t*.log", ("the fetching thread", "Exception ignored", "Assertion failed", "Error in sys.")),
        ):
            for log in sorted(self.folder.glob(name)):
                text = log.read_text(errors="replace")
                for sign in signs:
                    if sign in text:
                        at = text.index(sign)
                        self.problems.append(f"{log.name} says {sign!r}: {text[max(0, at - 500) : at + 1500]}")

    def _abandon(self) -> None:
        for client in self.clients:
            if client.trainer.running:
                client.trainer.kill()
        for server in self.servers:
            if server.up:
                server.daemon.kill()
        for proxy in self._proxies():
            if not proxy.closed:
                proxy.__exit__()
        self.log.close()

    def _proxies(self) -> Iterator[Proxy]:
        for client in self.clients:
            yield from client.proxies

    def judge(self) -> list[Accounts]:
        """What each trainer got."""
        made = []
        cached: dict[int, list[tuple[int, object, str]]] = {}

        def truth(epoch: int) -> list[tuple[int, object, str]]:
            if epoch not in cached:
                cached[epoch] = self.truth.positions(epoch)
            return cached[epoch]

        for client in self.clients:
            accounts = Accounts(SAMPLES, truth)
            with client.trainer.record.open() as record:
                for line in record:
                    accounts.batch(json.loads(line))
            made.append(accounts)
        return made

    def _usages(self) -> dict[str, Usage]:
        found = {f"server {server.number}": Usage.of(server.daemon.pid) for server in self.servers}
        for server in self.servers:
            for i, worker in enumerate(server.workers()):
                with contextlib.suppress(OSError, psutil.Error):
                    found[f"worker {i} of server {server.number}"] = Usage.of(worker.pid)
        return found | {f"trainer {client.number}": Usage.of(client.trainer.pid) for client in self.clients}

    def _take_course(self) -> None:
        server, client = self.servers[-1], self.clients[-1]
        for name, one, pid in (
            (f"server {server.number}", server, server.daemon.process and server.daemon.pid),
            (f"trainer {client.number}", client, client.trainer.process and client.trainer.pid),
        ):
            if one.spared and pid:
                with contextlib.suppress(OSError, psutil.Error):
                    self.course.setdefault(name, []).append(Usage.of(pid))

    def _settled(self) -> dict[str, Usage]:
        """As soon as nobody uses more than before; what has been cut off in the end is given time to be noticed."""
        deadline = time.monotonic() + SETTLING
        while True:
            found = self._usages()
            if (
                all(u.flat(self.before[name]) for name, u in found.items() if name in self.before)
                or time.monotonic() > deadline
            ):
                return found
            time.sleep(0.5)

    def _say(self, text: str) -> None:
        self.log.write(f"{time.monotonic() - self.began:8.3f} {text}\n")
        self.log.flush()


# -- around it ------------------------------------------------------------------------------------------------


def _pictures(folder: Path) -> Path:
    """Of `SAMPLES`, `BAD` are cut in the middle of their header."""
    made = photos.links(photos.make(folder / "photos"), folder / "pictures", SAMPLES)
    for file in sorted(made.glob("*/*"))[:: SAMPLES // BAD][:BAD]:
        data = file.read_bytes()
        file.unlink()  # it is a link
        file.write_bytes(data[:100])
    return made


def _free(port: int) -> bool:
    with contextlib.suppress(OSError), socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("", port))
        return True
    return False


def table(storm: Storm, accounts: list[Accounts]) -> str:
    """What happened, in columns."""
    lines = [f"{storm.seconds:g} s of storm: {sum(storm.faults.values())} faults"]
    lines += [f"  {count:5}  {kind}" for kind, count in sorted(storm.faults.items())]
    lines.append("trainer  lives  epochs  batches  pictures right  bad ones named  lost  repeated  wrong  longest wait")
    for client, found in zip(storm.clients, accounts, strict=True):
        lines.append(
            f"{client.number:7}  {client.lives:5}  {found.epochs:6}  {found.batches:7}  {found.pictures:14}  "
            f"{found.rejected:14}  {found.lost:4}  {found.repeated:8}  {found.wrong:5}  "
            f"{client.longest:10.1f} s"
        )
    lines.append(
        "server  lives  chunks computed  recomputed  delivered   hits  worker deaths  (of lives that could be asked)"
    )
    for server in storm.servers:
        seen = server.seen
        lines.append(
            f"{server.number:6}  {server.lives:5}  {seen['computed']:15}  {seen['recomputed']:10}  "
            f"{seen['delivered']:9}  {seen['hits']:5}  {seen['deaths']:13}"
        )
    for name, before in storm.before.items():
        lines.append(f"{name}: {before} before, {storm.after.get(name, 'gone')} after")
    for name, course in storm.course.items():
        memory = " ".join(f"{usage.memory / 1e6:.1f}" for usage in course)
        most = max(usage.descriptors for usage in course), max(usage.threads for usage in course)
        lines.append(f"{name} in the second half: {memory} MB, at most {most[0]} descriptors and {most[1]} threads")
    return "\n".join(lines)


def faults(storm: Storm, accounts: list[Accounts]) -> list[str]:
    """What is not as it must be."""
    found = list(storm.problems)
    for client, each in zip(storm.clients, accounts, strict=True):
        if not each.sound or not each.pictures:
            found.append(f"trainer {client.number}: {each.first or 'it got nothing'}")
    for name, before in storm.before.items():
        after = storm.after.get(name)
        if after is None or not after.flat(before):
            found.append(f"{name} has grown, or is gone: {before} before, {after} after")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trainers", type=int, default=3)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--rate", type=float, default=RATE, help="faults a second")
    parser.add_argument("--cable", action="store_true", help="between network namespaces, in place of proxies")
    parser.add_argument("--keys", action="store_true", help="encrypt all that goes over tcp")
    parser.add_argument("--keep", action="store_true", help="leave the folder with all logs, and say where it is")
    args = parser.parse_args()
    os.environ.setdefault(leaks.TOKEN, uuid.uuid4().hex)
    before = leaks.take()
    folder = Path(tempfile.mkdtemp(prefix="hr-storm-", dir="/tmp"))  # short: paths of Unix sockets are
    for variable in ("HOME", "TMPDIR", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR"):
        os.environ[variable] = str(folder)
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    os.environ["PYTHONPATH"] = str(with_timings(folder / "code", TIMINGS))
    try:
        with contextlib.ExitStack() as stack:
            hosts = stack.enter_context(two_hosts()) if args.cable else None
            storm = Storm(folder, seconds=args.seconds, seed=args.seed, trainers=args.trainers, servers=args.servers,
                          rate=args.rate, keys=args.keys, hosts=hosts)  # fmt: skip
            try:
                storm.run()
            except BaseException:
                print(tail(folder / "storm.log", 6000), file=sys.stderr)  # noqa: T201
                raise
        accounts = storm.judge()
        found = faults(storm, accounts)
        found += [f"left behind: {line}" for line in leaks.settled(before)]
        found += [f"left behind: socket {path}" for path in folder.rglob("*") if path.is_socket()]
        print(table(storm, accounts))  # noqa: T201
        for problem in found:
            print(f"NOT AS IT MUST BE: {problem}")  # noqa: T201
        return 1 if found else 0
    except NotPossible as error:
        print(f"two hosts cannot be played on this machine: {error}", file=sys.stderr)  # noqa: T201
        return 3
    finally:
        leaks.kill(before)
        if args.keep:
            print(f"kept: {folder}", file=sys.stderr)  # noqa: T201
        else:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
