"""What the daemon has measured, put together for whoever asks: its own part, the workers', what clients say of
themselves. It decides nothing; `Pong` carries it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable

from headrace.protocol import MAX_CLIENTS, ClientStatus, Report, StageStatus
from headrace.server.connection import Connection
from headrace.server.desk import Desk, Session
from headrace.stages import Clock, Stages
from headrace.workers.supervisor import Supervisor


class Measures:
    """
    Args:
        supervisor: has what workers say.
    """

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._own = Stages()
        self._started = time.monotonic()

    @property
    def uptime(self) -> float:
        """Seconds."""
        return time.monotonic() - self._started

    def sending(self) -> Clock:
        """To be lapped with `send` at each delivery."""
        return Clock(self._own)

    def stages(self) -> dict[str, StageStatus]:
        """Of the workers and of this process."""
        all_of_them = Stages()
        all_of_them.merge(self._supervisor.stages)
        all_of_them.merge(self._own)
        all_of_them.add("wait", self._supervisor.waited(time.monotonic()), 0)
        return all_of_them.status()

    @property
    def worker_seconds(self) -> float:
        """That workers have lived in all, from the moment each was ready."""
        return self._supervisor.worker_seconds(time.monotonic())

    def clients(self, sessions: Iterable[tuple[Connection, Session, Desk]]) -> list[ClientStatus]:
        """One by one, as many of them as a `Pong` takes."""
        lags: dict[Desk, dict[Session, int]] = {}
        found = []
        for connection, session, desk in itertools.islice(sessions, MAX_CLIENTS):
            if desk not in lags:
                lags[desk] = desk.lags()
            found.append(_client(connection, session, lags[desk].get(session, 0)))
        return found


def _client(connection: Connection, session: Session, lag: int) -> ClientStatus:
    report = connection.report or Report(token=connection.token, batches=0, images=0, waited=0.0, spent=0.0, stages={})
    return ClientStatus(
        client=connection.name,
        stream=connection.stream or "",
        transport=connection.transport.name if connection.transport is not None else "",
        device=connection.device,
        age=time.monotonic() - connection.since,
        outstanding=len(session.pending),
        leases=len(session.leases),
        delivered=session.delivered,
        hits=session.hits,
        recomputed=session.recomputed,
        lag=lag,
        batches=report.batches,
        images=report.images,
        waited=report.waited,
        spent=report.spent,
        stages=report.stages,
    )
