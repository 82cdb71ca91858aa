"""The private daemon of a Loader that brings a configuration: `python -m headrace.server.private`.

It reads `{"path": FILE}` or `{"config": {...}}` from
standard input and answers with one JSON line on standard output, `{"address": ...}` or `{"kind": ..., "text": ...}`.
There is one private daemon per user and configuration: whoever gets the lock becomes it, everybody else finds it.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

# Nothing here may import NumPy: it starts threads, and `detach` forks.

#: Seconds for the one who has the lock to answer.
_FIND_TIMEOUT = 30.0
_FORMAT = "%(asctime)s %(name)s[%(process)d] %(levelname)s %(message)s"


def detach() -> None:
    """Become a process of nobody's: own session, no terminal, adopted by init.

    Forks, so it must run before anything starts a thread; importing NumPy does.
    """
    if os.fork():
        os._exit(0)
    os.setsid()
    if os.fork():
        os._exit(0)


def main() -> None:
    detach()
    request = json.loads(sys.stdin.buffer.read())
    from headrace.errors import to_wire

    try:
        _serve_privately(request)
    except Exception as error:
        kind, text = to_wire(error)
        _reply({"kind": kind, "text": text})


def _serve_privately(request: dict[str, Any]) -> None:
    from headrace.pipeline.spec import Config
    from headrace.server.listener import Listener, Taken, private_folder
    from headrace.server.service import Service

    config = Config.load(request["path"] if "path" in request else request["config"])
    os.chdir("/")  # not before: the paths of a mapping are relative to the trainer's folder
    key = config.key()[:20]
    path = private_folder() / f"{key}.sock"
    deadline = time.monotonic() + _FIND_TIMEOUT
    while True:
        try:
            listener = Listener(path, group=config.socket.group)
            break
        except Taken:
            if _answers(path):
                _reply({"address": f"ipc://{path}"})
                return
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
    log = config.cache_folder / "log" / f"{key}.log"
    _log_to(log)
    Service(config, [listener], private=True).run(lambda addresses: _reply({"address": addresses[0]}))


def _answers(path: Path) -> bool:
    from headrace.errors import HeadraceError
    from headrace.ping import ping

    try:
        ping(f"ipc://{path}", timeout=2.0)
    except HeadraceError:
        return False
    return True


def _reply(answer: dict[str, str]) -> None:
    """The one line; after it nobody reads our output any more."""
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.close(null)


def _log_to(file: Path) -> None:
    """Log there; where that cannot be, nowhere: standard error is the trainer's."""
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    except OSError:
        fd = os.open(os.devnull, os.O_WRONLY)
    os.dup2(fd, 2)
    os.close(fd)
    logging.basicConfig(format=_FORMAT, level=logging.INFO, stream=sys.stderr)


if __name__ == "__main__":
    main()
