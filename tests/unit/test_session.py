"""The handshake's progress, whatever carries it."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import pytest
from scripted import welcome

from headrace import session
from headrace.errors import ConfigError, ConnectionLost, DeadlineError, HeadraceError, ProtocolError
from headrace.protocol import Goodbye, Indexing, Message, Refused, Unknown
from headrace.session import Opening, Refusal


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(session, "time", made)
    return made


def indexing(done: int, total: int = 0, unit: str = "files") -> Indexing:
    return Indexing(stream="train", unit=unit, done=done, total=total)


def test_welcome_ends_the_handshake(clock: Clock) -> None:
    assert Opening("tcp://h:1", 5).heard(welcome()) == welcome()


def test_progress_moves_the_deadline_and_repetition_does_not(clock: Clock) -> None:
    opening = Opening("tcp://h:1", 5)
    for _ in range(3):
        clock.now += 4
        opening.heard(indexing(int(clock.now)))
        assert opening.left() == 5
    clock.now += 4
    opening.heard(indexing(112))
    assert opening.left() == 1
    opening.heard(indexing(112, unit="MiB"))
    assert opening.left() == 5


def test_lateness_says_whether_there_ever_was_an_answer(clock: Clock) -> None:
    opening = Opening("tcp://h:1", 5)
    clock.now += 5
    with pytest.raises(DeadlineError, match=r"tcp://h:1 does not answer: no progress for 5 s"):
        opening.left()
    opening.heard(indexing(1))
    clock.now += 5
    with pytest.raises(DeadlineError, match="goes on no more with opening the stream"):
        opening.left()


def test_progress_is_logged_every_few_seconds(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    opening = Opening("tcp://h:1", 50)
    with caplog.at_level(logging.WARNING, "headrace"):
        for _ in range(12):
            clock.now += 1
            opening.heard(indexing(int(clock.now) * 10, 2000))
    assert [record.message for record in caplog.records] == [
        "stream train is being opened: 1,050 of 2,000 files (52 %)",
        "stream train is being opened: 1,100 of 2,000 files (55 %)",
    ]


@pytest.mark.parametrize(
    ("message", "error", "named"),
    [
        (Goodbye(reason="maintenance"), ConnectionLost, "tcp://h:1 is stopping: maintenance"),
        (Unknown(token=b"t" * 16), ProtocolError, "Unknown is no answer to Hello"),
        (welcome(columns=["a"]), ProtocolError, "do not agree"),
        (welcome(labels="text"), ProtocolError, "do not agree"),
        (welcome(layout=msgspec.structs.replace(welcome().layout, text=9)), ProtocolError, "do not agree"),
    ],
)
def test_other_answers_are_errors(message: Message, error: type[HeadraceError], named: str) -> None:
    with pytest.raises(error, match=named):
        Opening("tcp://h:1", 5).heard(message)


def test_a_refusal_carries_the_error_that_it_names() -> None:
    with pytest.raises(Refusal) as caught:
        Opening("tcp://h:1", 5).heard(Refused(kind="ConfigError", text="no stream 'b'"))
    error: Any = caught.value.error
    assert isinstance(error, ConfigError)
    assert str(error) == "no stream 'b'"
