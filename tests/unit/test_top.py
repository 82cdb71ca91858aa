"""What `headrace top` shows of two answers of a daemon."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
from rich.console import Console
from status import client, pong, stage, stream

from headrace.errors import ConnectionLost
from headrace.protocol import MAX_COUNT, Pong
from headrace.server import top as module
from headrace.server.top import frame, plain, top


def cells(text: str, first: str) -> list[str]:
    """Of the row that begins so; columns lie at least two blanks apart."""
    (line,) = (line for line in text.splitlines() if line.startswith(first))
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def busy() -> tuple[Pong, Pong]:
    before = pong(uptime=100.0, worker_seconds=200.0, streams={"train": stream()}, clients=[client(age=50.0)])
    at = stream(images=3200, delivered=100, hits=75, ready=12, leased=2, filling=4, waiting=3, rejected=1)
    after = pong(
        uptime=3703.0, worker_seconds=200.0 + 2 * 3603.0, streams={"train": at, "val": None}, sessions=1, deaths=1,
        stages={"decode": stage(3603 * 400, 3603.0, 3603 * 4_000_000), "send": stage(3603, 36.03)},
        clients=[client(age=3653.0, images=36030, spent=3603.0, waited=72.06, delivered=3603, hits=1201, lag=2,
                        device="0000:3b:00.0", stages={"wait": stage(3, 72.06), "copy": stage(3, 360.3)})],
        notices=["GPU 0 fails"],
    )  # fmt: skip
    return before, after


def test_a_frame_says_what_the_daemon_does() -> None:
    text = plain(frame("ipc:///d.sock", *busy()))
    head = "headrace 1.2.3 at ipc:///d.sock, process 4711, up 1 h 1 min; 2 workers, 1 death of workers; 1 session"
    assert text.splitlines()[:2] == [head, "GPU 0 fails"]
    assert cells(text, "train") == ["train", "0.9", "0.0", "75%", "0", "3", "1", "█▓▓▓▓▓▒▒░░ 12+4 of 20"]
    assert cells(text, "val") == ["val", "not open yet"]
    assert cells(text, "decode") == ["decode", "50%", "█████░░░░░", "400", "2.5 ms", "1.02 ms", "1.02 ms", "4.0"]
    assert cells(text, "send (daemon)")[:2] == ["send (daemon)", "1%"]
    who = ["pid 7, GPU 0000:3b:00.0", "train", "shm"]
    assert cells(text, "pid 7") == [*who, "10", "2%", "10%", "33%", "0", "2", "1 h 0 min"]


def test_a_frame_of_a_single_answer_has_no_rates() -> None:
    _, after = busy()
    text = plain(frame("ipc:///d.sock", after, after))
    assert cells(text, "train")[1:4] == ["0", "0", "0"]
    assert cells(text, "pid 7")[3:5] == ["10%", "0"] and "nan" not in text and "inf" not in text


def test_a_daemon_that_has_done_nothing_can_be_shown() -> None:
    text = plain(frame("tcp://host:1", pong(), pong(uptime=3.0)))
    assert "up 3 s; 2 workers, 0 deaths" in text


def test_names_from_outside_cannot_steer_the_terminal() -> None:
    status = pong(clients=[client(client="\x1b[2J[red]x[/red]\n")], notices=["\x07\udcff"], uptime=1.0)
    text = plain(frame("ipc:///d.sock", status, status, trouble="\x1b[1m"))
    assert not set(text) & set("\x1b\x07\udcff")
    assert r"\x1b[2J[red]x[/red]\n" in text


def test_what_is_off_the_scale_stays_within_its_cell() -> None:
    at = pong(
        uptime=1.0, worker_seconds=0.1, stages={"decode": stage(1, 5.0, bucket=31)}, streams={"t": stream(slots=0)}
    )
    row = cells(plain(frame("ipc:///d.sock", pong(), at)), "decode")
    assert row == ["decode", "5000%", "█" * 10, "1", "5 s", "long", "long"]


def test_a_client_that_says_nonsense_of_itself_does_not_end_the_view() -> None:
    before = pong(uptime=1.0, clients=[client(age=1.0, images=MAX_COUNT)])
    after = pong(uptime=2.0, clients=[client(age=2.0, images=0, waited=1e12, spent=5e-324)])
    row = cells(plain(frame("ipc:///d.sock", before, after)), client().client.split()[0])
    assert "inf" not in row  # less than nothing in next to no time


def test_on_a_narrow_terminal_no_number_is_cut() -> None:
    text = io.StringIO()
    Console(file=text, width=80).print(frame("ipc:///d.sock", *busy()))
    assert max(map(len, text.getvalue().splitlines())) <= 80
    for piece in ("12+4 of 20", "1.02 ms", "1 h 0 min", "images/s", "again/s"):
        assert piece in text.getvalue(), text.getvalue()
    assert "…" not in text.getvalue()


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Pong | ConnectionLost]]:
    """Of the daemon, in turn."""
    given: list[Pong | ConnectionLost] = []

    def ping(address: str, *, timeout: float, curve: object = None) -> Pong:
        answer = given.pop(0)
        if isinstance(answer, ConnectionLost):
            raise answer
        return answer

    monkeypatch.setattr(module, "ping", ping)
    yield given


def test_elsewhere_than_on_a_terminal_frames_follow_one_another(answers: list[Pong | ConnectionLost]) -> None:
    before, after = busy()
    answers += [before, after, after, ConnectionLost("gone")]
    shown: list[str] = []
    with pytest.raises(ConnectionLost, match="gone"):
        top("ipc:///d.sock", shown.append, interval=0.0, once=False)
    assert len(shown) == 2 and all("pid 7" in text for text in shown)


def test_one_frame_is_over_the_time_between_two_answers(answers: list[Pong | ConnectionLost]) -> None:
    answers += busy()
    shown: list[str] = []
    top("ipc:///d.sock", shown.append, interval=0.0, once=True)
    assert [cells(text, "decode")[1] for text in shown] == ["50%"]


def test_rates_are_those_of_the_last_seconds_and_of_one_daemon() -> None:
    history = module.History(pong(uptime=0.0))
    for uptime in (2.0, 4.0, 6.0, 8.0):
        history.push(pong(uptime=uptime))
    assert (history.before.uptime, history.after.uptime) == (2.0, 8.0)
    history.push(pong(uptime=1.0, instance=b"another instance"))
    assert history.before is history.after
