"""The private daemon of a Loader that brings a configuration: `python -m headrace.server.private`.

It reads `{"path": FILE}` or `{"config": {...}}`, and `"folder"`, which relative paths are relative to, from standard
input. It answers with one JSON line on standard output: `{"address", "log", "config"}`, or `{"kind", "text"}` of an
error. There is one private daemon per user and configuration: whoever gets the lock becomes it, the others find it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.server.quiet import quiet

if TYPE_CHECKING:
    from headrace.pipeline.spec import Config

# Nothing here may import NumPy: it starts threads, and `detach` forks.

#: Seconds for the one who has the lock to answer. It may have to find out what runs here, see `pipeline.trial`.
_FIND_TIMEOUT = 50.0
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
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # what the trainer blocked is not ours to ignore


def main() -> None:
    detach()
    request = json.loads(sys.stdin.buffer.read())
    from headrace.errors import to_wire

    try:
        _serve_privately(request)
    except Exception as error:
        logging.getLogger(__name__).exception("the daemon failed")  # where nobody waits for the reply any more
        kind, text = to_wire(error)
        _reply({"kind": kind, "text": text})


def _serve_privately(request: dict[str, Any]) -> None:
    from headrace import protocol
    from headrace.pipeline.spec import Config
    from headrace.server.exporter import Exporter
    from headrace.server.listener import Listener, Taken, private_folder
    from headrace.server.service import Service

    # The paths of a mapping are relative to the folder that the trainer was in then.
    with contextlib.suppress(OSError):
        os.chdir(request.get("folder", "/"))
    config = Config.load(request["path"] if "path" in request else request["config"])
    os.chdir("/")
    key = f"{config.key()[:20]}-{protocol.VERSION}"  # a daemon of another release is another daemon
    path = private_folder() / f"{key}.sock"
    log = config.cache_folder / "log" / f"{key}.log"
    deadline = time.monotonic() + _FIND_TIMEOUT
    while True:
        try:
            listener = Listener(path, group=config.socket.group)
            break
        except Taken:
            if _answers(path):
                _reply({"address": f"ipc://{path}", "log": str(log), "config": config.plain()})
                return
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
    _log_to(log if not _in_a_dataset(log, config) else Path(os.devnull))
    try:
        exporter = Exporter.at(config.metrics, insecure=False)
    except BaseException:
        listener.close()
        raise
    service = Service(config, [listener], private=True, exporter=exporter)
    service.run(lambda addresses: _reply({"address": addresses[0], "log": str(log), "config": config.plain()}))


def _in_a_dataset(file: Path, config: Config) -> bool:
    """Nothing is ever written there, whatever `cache_dir` says."""
    place = file.parent.resolve()
    folders = [stream.dataset.folder for stream in config.streams.values()]
    return any(place.is_relative_to(folder.resolve()) for folder in folders if folder is not None)


def _answers(path: Path) -> bool:
    from headrace.errors import HeadraceError
    from headrace.ping import ping

    try:
        ping(f"ipc://{path}", timeout=2.0)
    except HeadraceError:
        return False
    return True


def _reply(answer: dict[str, Any]) -> None:
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
        if file.is_file():
            file.replace(file.with_suffix(".old.log"))  # it may say why the daemon before has ended
        fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    except OSError:
        fd = os.open(os.devnull, os.O_WRONLY)
    os.dup2(fd, 2)
    os.close(fd)
    logging.basicConfig(format=_FORMAT, level=logging.INFO, stream=sys.stderr)
    quiet()


if __name__ == "__main__":
    main()
