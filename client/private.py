"""The daemon of a Loader that was given a configuration: found if it runs, started if not.

The configuration goes as JSON to `python -m headrace.server.private`, a process of its own, which joins or becomes
the daemon of this user and configuration and prints where it listens. Nothing of the pipeline is imported here.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import IO, Any

from headrace.errors import ConfigError, ConnectionLost, DeadlineError, HeadraceError, from_wire
from headrace.session import LONGEST_POLL, Interrupted

#: How often a daemon that died is started again within `_SPAN` seconds.
_RESTARTS = 3
_SPAN = 60.0

_READ = 1 << 16


class PrivateDaemon:
    """Where the private daemon of a configuration is reached.

    Args:
        source: a YAML file's path, a mapping, or an object with `plain()`, such as `headrace.Config`.

    Raises:
        ConfigError: something else, or a mapping that JSON cannot hold.
    """

    def __init__(self, source: Any) -> None:
        if isinstance(source, (str, os.PathLike)):
            request: dict[str, Any] = {"path": os.path.abspath(os.fspath(source))}
        elif isinstance(source, Mapping) or callable(getattr(source, "plain", None)):
            request = {"config": source}
        else:
            raise ConfigError(f"source: {source!r} is no address (ipc://…), YAML file, mapping or headrace.Config")
        with contextlib.suppress(OSError):  # it may have been removed
            request["folder"] = os.getcwd()
        try:
            self._request = json.dumps(_plain(request)).encode()
        except TypeError as error:
            raise ConfigError(f"source: the configuration holds what YAML cannot say: {error}") from None
        except RecursionError:
            raise ConfigError("source: the configuration contains itself") from None
        self._started: deque[float] = deque(maxlen=_RESTARTS + 1)
        self._log = "unknown"

    def address(self, *, timeout: float, stop: int) -> str:
        """The daemon's address; it is started if it does not run.

        Args:
            timeout: seconds that it may take.
            stop: a descriptor; when it becomes readable, `Interrupted` is raised.

        Raises:
            ConnectionLost: it was started four times within a minute already.
            DeadlineError: it does not get ready.
            HeadraceError: of the kind that it reports, such as ConfigError.
        """
        now = time.monotonic()
        if len(self._started) == self._started.maxlen and now - self._started[0] < _SPAN:
            raise ConnectionLost(
                f"the private daemon ended {len(self._started)} times within {_SPAN:.0f} s and is not started again; "
                f"its log says why: {self._log}"
            )
        self._started.append(now)
        # A file and not a pipe: whoever inherits it may write for ever, and nobody has to read.
        with tempfile.TemporaryFile() as complaints:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "headrace.server.private"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=complaints,
                start_new_session=True,
            )
            try:
                line = self._converse(process, now + timeout, stop)
            finally:
                _end(process)
            answer = _understand(line, complaints)
            self._log = str(answer.get("log", self._log))
            if "config" in answer:  # the file may be edited, the folder removed: the run goes on with what it began
                self._request = json.dumps({"config": answer["config"]}).encode()
            return str(answer["address"])

    def _converse(self, process: subprocess.Popen[bytes], deadline: float, stop: int) -> bytes:
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(self._request)
            process.stdin.close()
        except BrokenPipeError:
            pass  # it is gone already, and has said why
        poll = select.poll()
        poll.register(process.stdout, select.POLLIN)
        poll.register(stop, select.POLLIN)
        line = b""
        while not line.endswith(b"\n"):
            left = deadline - time.monotonic()
            ready = {fd for fd, _ in poll.poll(1000 * min(max(0, left), LONGEST_POLL))}
            if stop in ready:
                raise Interrupted
            if not ready and left <= 0:
                raise DeadlineError("the private daemon was started and does not get ready")
            if not ready:
                continue
            data = os.read(process.stdout.fileno(), _READ)
            if not data:
                break
            line += data
        return line


def _end(process: subprocess.Popen[bytes]) -> None:
    """The started process hands over to the daemon and ends; what has not, by now never will."""
    assert process.stdin is not None and process.stdout is not None
    try:
        process.wait(timeout=5 if sys.exc_info()[0] is None else 0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()
    try:
        process.stdin.close()
    except BrokenPipeError:
        pass


def _understand(line: bytes, complaints: IO[bytes]) -> dict[str, Any]:
    """The answer: address, log and configuration; or the error that the line holds."""
    try:
        answer = json.loads(line)
        if "address" in answer:
            return dict(answer)
        error = from_wire(str(answer["kind"]), str(answer["text"]))
    except (ValueError, TypeError, KeyError):
        complaints.seek(0)
        said = complaints.read()[-2000:].decode(errors="replace").strip()
        error = HeadraceError(f"the private daemon could not be started: {said or repr(line)}")
    raise error


def _plain(value: Any) -> Any:
    """As JSON has it: any mapping is a dict, any sequence a list."""
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        if strange := [key for key in value if not isinstance(key, str)]:
            raise ConfigError(f"source: the key {strange[0]!r} is not text; put it in quotes")
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray, memoryview)):
        return [_plain(item) for item in value]
    if callable(plain := getattr(value, "plain", None)):
        return _plain(plain())
    raise TypeError(f"{value!r} of type {type(value).__name__}")
