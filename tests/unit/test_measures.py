"""What is said of clients, however many there are and whatever they say of themselves."""

from __future__ import annotations

from status import pong

from headrace import protocol
from headrace.protocol import (
    BUCKETS,
    DAEMON_LIMIT,
    MAX_CLIENTS,
    MAX_COUNT,
    MAX_STAGES,
    Hello,
    Message,
    Report,
    StageStatus,
)
from headrace.server.connection import Connection
from headrace.server.desk import Desk, Session
from headrace.server.measures import Measures
from headrace.workers.crew import Crew
from headrace.workers.loop import Loop
from headrace.workers.supervisor import Supervisor


class Stranger(Connection):
    """Says of itself as much as a message takes."""

    def __init__(self) -> None:
        super().__init__("client at 127.0.0.1", {})
        self.introduce(Hello(stream="train", client="\x9b" * 1024, device="\U0010ffff" * 1024), "train")
        most = StageStatus(MAX_COUNT, 1e12, MAX_COUNT, [MAX_COUNT] * BUCKETS)
        self.report = Report(
            token=bytes(16), batches=MAX_COUNT, images=MAX_COUNT, waited=1e12, spent=1e12,
            stages={f"{i:02}" + "\U0010ffff" * 30: most for i in range(MAX_STAGES)},
        )  # fmt: skip

    def say(self, message: Message, *fds: int) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


def test_a_pong_can_be_said_and_read_however_many_clients_there_are() -> None:
    measures = Measures(Supervisor(Loop(), Crew("pillow", 1), lambda report: None))
    connection, desk = Stranger(), Desk(4, 1, 1)
    report = protocol.encode(connection.report or protocol.Ping())
    assert protocol.decode_client(report) == connection.report
    clients = measures.clients((connection, Session("a stranger"), desk) for _ in range(MAX_CLIENTS + 1))
    said = protocol.encode(pong(clients=clients))
    assert clients[0].client == "client at 127.0.0.1 " + r"\xc2\x9b" * 1024  # a terminal would obey U+009B
    assert len(clients) == MAX_CLIENTS and len(said) < DAEMON_LIMIT // 2
    assert protocol.decode_session_reply(said) == pong(clients=clients)


def test_of_what_a_client_says_of_itself_only_stages_that_there_are_are_taken_down() -> None:
    """Each would be series of its own, in `metrics`, and no two Reports need have the same."""
    stranger = Stranger()
    most = StageStatus(1, 1.0, 1, [0] * BUCKETS)
    report = Report(
        token=bytes(16), batches=1, images=1, waited=0.0, spent=1.0,
        stages=dict.fromkeys(("wait", "copy", "finish", "device", "read", "x", ""), most),
    )  # fmt: skip
    stranger.reported(report)
    assert stranger.report is not None
    assert stranger.report.batches == 1 and [*stranger.report.stages] == ["wait", "copy", "finish", "device"]
