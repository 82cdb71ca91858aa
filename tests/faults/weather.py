"""What is done to servers, workers, trainers and the network between them in a storm."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from collections.abc import Callable, Sequence

import psutil
from cast import Client, Server, size_of, tail, tell
from proxy import Proxy, Stretch

from headrace.server.second_host import Host


class Weather:
    """
    Args:
        choose: where chance comes from.
        later: calls something after so many seconds.
        seconds: that the storm is to last.
        hosts: as `Storm`'s.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        clients: Sequence[Client],
        choose: random.Random,
        later: Callable[[float, Callable[[], None]], None],
        *,
        seconds: float,
        hosts: tuple[Host, Host] | None,
    ) -> None:
        self._servers = servers
        self._clients = clients
        self._random = choose
        self._later = later
        self._seconds = seconds
        self._hosts = hosts
        self._proxies = [proxy for client in clients for proxy in client.proxies]

    def kinds(self) -> dict[str, tuple[int, Callable[[], str | None]]]:
        """By name: how often, and what does it. That says to whom, or None if there is nobody to do it to."""
        kinds: dict[str, tuple[int, Callable[[], str | None]]] = {
            "worker killed": (10, self._kill_worker),
            "worker stopped": (6, self._stop_worker),
            "workers slowed": (6, self._slow_workers),
            "server killed": (4, self._kill_server),
            "server ended and started": (3, self._restart_server),
            "server stopped": (6, self._stop_server),
            "trainer killed": (5, self._kill_trainer),
            "trainer ended and started": (3, self._restart_trainer),
            "trainer stopped": (6, self._stop_trainer),
        }
        if self._hosts:
            kinds |= {"link down": (12, self._link_down), "link slow": (8, self._link_slow)}
        elif self._proxies:
            kinds |= {
                "connection cut": (7, self._cut),
                "connection reset": (7, lambda: self._cut(reset=True)),
                "connection half open": (5, self._halve),
                "cable pulled": (6, self._pull),
                "network late": (5, self._delay),
                "network slow": (5, self._pace),
                "network refuses": (3, self._refuse),
                "network hangs": (3, self._mute),
            }
        return kinds

    def _kill_worker(self) -> str | None:
        return self._worker(lambda worker: worker.send_signal(signal.SIGKILL))

    def _stop_worker(self) -> str | None:
        # Where there is time for it, also for longer than a server bears it.
        longest = self._random.choice([0.3, 2.0, 2.0, 40.0 if self._seconds >= 300 else 2.0])

        def stop(worker: psutil.Process) -> None:
            worker.send_signal(signal.SIGSTOP)
            self._later(longest * self._random.random(), lambda: tell(worker, signal.SIGCONT))

        return self._worker(stop)

    def _worker(self, act: Callable[[psutil.Process], None]) -> str | None:
        server = self._random.choice(self._servers)
        workers = server.workers() if server.up else []
        if not workers:
            return None
        worker = self._random.choice(workers)
        try:
            act(worker)
        except psutil.NoSuchProcess:
            return None
        return f"{worker.pid} of server {server.number}"

    def _slow_workers(self) -> str | None:
        """Nine tenths of their time they stand still."""
        server = self._random.choice(self._servers)
        if not server.up:
            return None
        end = time.monotonic() + self._random.uniform(1.0, 3.0)

        def stop() -> None:
            workers = server.workers() if server.up else []
            for worker in workers:
                tell(worker, signal.SIGSTOP)
            self._later(0.09, lambda: resume(workers))

        def resume(workers: list[psutil.Process]) -> None:
            for worker in workers:
                tell(worker, signal.SIGCONT)
            if time.monotonic() < end:
                self._later(0.01, stop)

        stop()
        return f"server {server.number}"

    def _server(self, *, end: bool = False) -> Server | None:
        """One that is up, and not to be spared an end."""
        fit = [server for server in self._servers if server.up and not (end and server.spared)]
        return self._random.choice(fit) if fit else None

    def _kill_server(self) -> str | None:
        if (server := self._server(end=True)) is None:
            return None
        if not server.held:
            server.count()
        server.daemon.kill()
        return self._start(server)

    def _restart_server(self) -> str | None:
        server = self._server(end=True)
        if server is None or server.held:
            return None
        server.count()
        process = server.daemon.process
        assert process is not None
        process.terminate()
        deadline = time.monotonic() + 20
        while (status := process.poll()) is None and time.monotonic() < deadline:
            time.sleep(0.02)
        if status not in (0, -signal.SIGTERM):  # the latter before its handler stands
            raise AssertionError(f"server {server.number}, asked to end: status {status}, {tail(server.daemon.log)}")
        server.daemon.kill()
        return self._start(server)

    def _start(self, server: Server) -> str:
        pause = self._random.choice([0.0, self._random.uniform(0.0, 2.0)])

        def start() -> None:
            server.daemon.launch(prefix=server.prefix)
            server.held = False
            server.lives += 1

        self._later(pause, start)
        return f"server {server.number}, for {pause:.1f} s"

    def _stop_server(self) -> str | None:
        if (server := self._server()) is None or server.held:
            return None
        pid, seconds = psutil.Process(server.daemon.pid), self._random.choice([0.2, 1.0, 6.0]) * self._random.random()
        pid.send_signal(signal.SIGSTOP)
        server.held = True

        def go_on() -> None:
            tell(pid, signal.SIGCONT)
            server.held = False

        self._later(seconds, go_on)
        return f"server {server.number}, for {seconds:.1f} s"

    def _client_there(self, *, end: bool = False) -> Client | None:
        fit = [client for client in self._clients if not client.away and not (end and client.spared)]
        return self._random.choice(fit) if fit else None

    def _kill_trainer(self) -> str | None:
        if (client := self._client_there(end=True)) is None:
            return None
        client.away = True
        client.trainer.kill()
        return self.start_again(client)

    def _restart_trainer(self) -> str | None:
        client = self._client_there(end=True)
        if client is None or client.held:
            return None
        process = client.trainer.process
        assert process is not None
        process.terminate()
        client.away = True  # it may have to wait for its last batch while other things are done

        def look() -> None:
            if process.poll() is None:
                self._later(0.1, look)
                return
            if process.returncode not in (0, -signal.SIGTERM):  # the latter before its handler stands
                raise AssertionError(f"trainer {client.number}, asked to end: status {process.returncode}, "
                                     f"{tail(client.trainer.log)}")  # fmt: skip
            self.start_again(client)

        look()
        return f"trainer {client.number}"

    def start_again(self, client: Client) -> str:
        pause = self._random.uniform(0.0, 1.0)

        def start() -> None:
            client.begun = size_of(client.trainer.record)
            client.trainer.start(prefix=client.prefix)
            client.lives += 1
            client.away = client.held = False

        self._later(pause, start)
        return f"trainer {client.number}, for {pause:.1f} s"

    def _stop_trainer(self) -> str | None:
        if (client := self._client_there()) is None or client.held:
            return None
        process, seconds = (
            psutil.Process(client.trainer.pid),
            self._random.choice([0.2, 1.0, 8.0]) * self._random.random(),
        )
        process.send_signal(signal.SIGSTOP)
        client.held = True

        def go_on() -> None:
            tell(process, signal.SIGCONT)
            client.held = False

        self._later(seconds, go_on)
        return f"trainer {client.number}, for {seconds:.1f} s"

    # -- what is done to the network ----------------------------------------------------------------------------

    def _proxy(self) -> Proxy:
        return self._random.choice(self._proxies)

    def _stretch(self, act: Callable[[Proxy, Stretch], None]) -> str | None:
        proxy = self._proxy()
        if not (alive := proxy.alive):
            return None
        which = self._random.randrange(len(alive))
        act(proxy, alive[which])
        return f"connection {which} of {len(alive)} over {proxy.address}"

    def _cut(self, *, reset: bool = False) -> str | None:
        return self._stretch(lambda proxy, stretch: proxy.cut(stretch, reset=reset))

    def _halve(self) -> str | None:
        client = self._random.random() < 0.5
        return self._stretch(lambda proxy, stretch: proxy.halve(stretch, client=client))

    def _pull(self) -> str | None:
        """Of all connections over a proxy; it is put in again before anybody can have noticed, or after."""
        proxy = self._proxy()
        if not (alive := proxy.alive):
            return None
        seconds = self._random.choice([0.5, 2.0, 10.0]) * self._random.random()
        for stretch in alive:
            stretch.hold()

        def put_in() -> None:
            for stretch in alive:
                stretch.held = False

        self._later(seconds, put_in)
        return f"{len(alive)} connections over {proxy.address}, for {seconds:.1f} s"

    def _delay(self) -> str:
        proxy, seconds = self._proxy(), self._random.uniform(0.02, 0.3)
        proxy.delay = seconds
        return self._while(proxy, f"{1000 * seconds:.0f} ms", lambda: setattr(proxy, "delay", 0.0))

    def _pace(self) -> str:
        proxy, pace = self._proxy(), self._random.uniform(2e4, 4e5)
        proxy.pace = pace
        return self._while(proxy, f"{pace / 1000:.0f} kB/s", lambda: setattr(proxy, "pace", None))

    def _refuse(self) -> str:
        proxy = self._proxy()
        proxy.refusing = True
        for stretch in proxy.alive:
            proxy.cut(stretch, reset=True)
        return self._while(proxy, "and all connections reset", lambda: setattr(proxy, "refusing", False))

    def _mute(self) -> str:
        proxy = self._proxy()
        proxy.mute = True
        for stretch in proxy.alive:
            proxy.cut(stretch)
        return self._while(proxy, "and all connections cut", lambda: setattr(proxy, "mute", False))

    def _while(self, proxy: Proxy, what: str, over: Callable[[], None]) -> str:
        seconds = self._random.uniform(0.3, 3.0)
        self._later(seconds, over)
        return f"{proxy.address}, {what}, for {seconds:.1f} s"

    def _link_down(self) -> str:
        seconds = self._random.choice([0.5, 2.0, 8.0]) * self._random.random()
        self._cable("ip", "link", "set", "cable0", "down")
        self._later(seconds, lambda: self._cable("ip", "link", "set", "cable0", "up"))
        return f"for {seconds:.1f} s"

    def _link_slow(self) -> str:
        seconds, rate = self._random.uniform(0.5, 3.0), self._random.choice([500, 2000, 8000])
        limit = ("rate", f"{rate}kbit", "burst", "16kb", "latency", "200ms")
        self._cable("tc", "qdisc", "replace", "dev", "cable0", "root", "tbf", *limit)
        self._later(seconds, lambda: self._cable("tc", "qdisc", "replace", "dev", "cable0", "root", "pfifo"))
        return f"{rate} kbit/s, for {seconds:.1f} s"

    def _cable(self, *command: str) -> None:
        assert self._hosts is not None
        subprocess.run(self._hosts[0].command(*command), check=True, timeout=20)
