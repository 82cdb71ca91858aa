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
from collections.abc import Mapping
from typing import IO, Any

from headrace.errors import ConfigError, ConnectionLost, DeadlineError, HeadraceError, from_wire
from headrace.session import Interrupted

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
        elif isinstance(source, Mapping):
            request = {"config": dict(source)}
        elif callable(plain := getattr(source, "plain", None)):
            request = {"config": plain()}
        else:
            raise ConfigError(f"source: {source!r} is no address (ipc://PATH), YAML file, mapping or headrace.Config")
        with contextlib.suppress(OSError):  # it may have been removed
            request["folder"] = os.getcwd()
        try:
            self._request = json.dumps(request, default=_plain).encode()
        except TypeError as error:
            raise ConfigError(f"source: the configuration holds what YAML cannot say: {error}") from None
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
            address, self._log = _understand(line, complaints)
            return address

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
            ready = {fd for fd, _ in poll.poll(max(0, left) * 1000)}
            if stop in ready:
                raise Interrupted
            if not ready:
                raise DeadlineError("the private daemon was started and does not get ready")
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


def _understand(line: bytes, complaints: IO[bytes]) -> tuple[str, str]:
    """The address and where the log is, or the error that the line holds."""
    try:
        answer = json.loads(line)
        if "address" in answer:
            return str(answer["address"]), str(answer["log"])
        error = from_wire(str(answer["kind"]), str(answer["text"]))
    except (ValueError, TypeError, KeyError):
        complaints.seek(0)
        said = complaints.read()[-2000:].decode(errors="replace").strip()
        error = HeadraceError(f"the private daemon could not be started: {said or repr(line)}")
    raise error


def _plain(value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if callable(plain := getattr(value, "plain", None)):
        return plain()
    raise TypeError(f"{value!r} of type {type(value).__name__}")
