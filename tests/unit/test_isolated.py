"""However a process of its own ends, who has asked learns it in time, and nothing of it is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.pipeline import isolated
from headrace.pipeline.isolated import Failed, Isolated


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Isolated[list[int]]]:
    """Have the process run some other program."""
    start = subprocess.Popen

    def asked(program: str, timeout: float = 25) -> Isolated[list[int]]:
        def other(command: list[str], **options: Any) -> Any:
            return start([command[0], "-I", "-S", "-c", program], **options)

        monkeypatch.setattr(subprocess, "Popen", other)
        return Isolated("some.module", ["x"], list[int], timeout=timeout)

    return asked


Child = Callable[..., Isolated[list[int]]]


@pytest.mark.parametrize(
    ("program", "trouble"),
    [
        (
            "import os; os.write(2, b'a\\nfree(): invalid pointer\\n\\n'); os.kill(os.getpid(), 11)",
            "was killed by SIGSEGV; its last words: free(): invalid pointer",
        ),
        ("raise SystemExit(3)", "ended with status 3; its last words: nothing"),
        ("pass", "ended with status 0; its last words: nothing"),
        ("print('[INFO] noise')", "ended with status 0; its last words: nothing"),
        ("print('[1, \"2\"]')", "ended with status 0; its last words: nothing"),
        ("print('null')", "ended with status 0; its last words: nothing"),
        ("import os; os.write(1, bytes(range(256)))", "ended with status 0; its last words: nothing"),
        ("import os; os.kill(os.getpid(), 40)", "was killed by signal 40; its last words: nothing"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGALRM)", "did not end within 25 seconds"),
    ],
)
def test_what_is_no_answer_says_how_it_has_ended(program: str, trouble: str, child: Child) -> None:
    with pytest.raises(Failed) as failed:
        child(program).result()
    assert str(failed.value) == trouble


def test_the_last_line_is_the_answer_however_much_comes_before(child: Child) -> None:
    program = "import os; [os.write(fd, b'noise ' * 20000) for fd in (1, 2)]; os.write(1, b'\\n[1, 2]\\n')"
    assert child(program).result() == [1, 2]


def test_a_process_that_hangs_is_killed_at_the_deadline(child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated, "_GRACE", 0.2)
    asked = child("import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)", 0.1)
    with pytest.raises(Failed, match=r"did not end within 0\.1 seconds"):
        asked.result()
    assert asked._process is not None and asked._process.returncode == -signal.SIGKILL


def test_who_does_not_wait_any_more_leaves_no_process(child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object) -> Any:
        raise KeyboardInterrupt

    for give_up in (Isolated.close, Isolated.result):
        asked = child("import time; time.sleep(60)")
        assert asked._process is not None
        if give_up is Isolated.result:
            wait = asked._process.wait
            calls = iter([interrupted, wait])
            monkeypatch.setattr(asked._process, "wait", lambda *timeout, calls=calls: next(calls)(*timeout))
            with pytest.raises(KeyboardInterrupt):
                asked.result()
        else:
            asked.close()
            asked.close()
        assert asked._process.returncode == -signal.SIGKILL


def test_a_process_that_cannot_be_started_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> Any:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(Failed, match="could not be started: Resource temporarily unavailable"):
        Isolated("some.module", (), list[int], timeout=1).result()


MODULE = """
import os, sys, time
from headrace.pipeline import isolated
arguments = isolated.attach(sys.argv)
if arguments == ["hang"]:
    os.write(1, b"hangs\\n")
    time.sleep(60)
os.write(1, b"noise without an end")
import atexit
atexit.register(os.write, 1, b"more noise")
isolated.answer(arguments)
"""


def test_in_the_process_arguments_arrive_and_the_answer_is_the_last_that_is_said(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(MODULE)
    command = [sys.executable, str(tmp_path / "module.py"), str(os.getpid())]
    done = subprocess.run([*command, "20", "a", ""], stdout=subprocess.PIPE, timeout=60, check=True)
    assert done.stdout == b'noise without an end\n["a",""]\n'
    assert subprocess.run([*command, "0.2", "hang"], timeout=60, check=False).returncode == -signal.SIGALRM


def test_the_process_ends_with_whoever_has_asked(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(MODULE)
    asks = (
        "import subprocess, sys, os; "
        f"child = subprocess.Popen([sys.executable, {str(tmp_path / 'module.py')!r}, str(os.getpid()), '50', 'hang']); "
        "print(child.pid, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", asks], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as asking:
        assert asking.stdout is not None
        pid = int(asking.stdout.readline())
        assert asking.stdout.readline() == b"hangs\n"
        asking.kill()
    deadline = time.monotonic() + 30
    while _runs(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
