"""The indexer process: lists a data set, or opens the cached list, and hands its descriptor over.

`python -m headrace.workers.indexer FD PID`. A process of its own because it walks a file system for minutes, with
threads, while the daemon's loop goes on, and because its memory is gone with it.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from headrace.channel import Channel, Closed
from headrace.errors import to_wire
from headrace.pipeline.dataset import open_index
from headrace.pipeline.spec import Stream
from headrace.workers import messages
from headrace.workers.messages import BuildFailed, Built, Progress
from headrace.workers.process import attach_to_parent

_TIMEOUT = 60.0
#: Seconds between two reports of progress.
_PACE = 0.2


def build(channel: Channel) -> None:
    """Take one `Build`, answer with `Progress` and then `Built` or `BuildFailed`."""
    task = messages.to_indexer.decode(channel.recv(timeout=_TIMEOUT)[0])
    last = 0.0

    def progress(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= _PACE:
            last = time.monotonic()
            channel.send(messages.encode(Progress(done=done, total=total)), timeout=_TIMEOUT)

    try:
        stream = Stream.model_validate(json.loads(task.spec))
        index = open_index(stream.dataset, Path(task.cache_dir), progress=progress)
    except Closed:
        raise
    except Exception as error:
        kind, text = to_wire(error)
        channel.send(messages.encode(BuildFailed(kind=kind, text=text)), timeout=_TIMEOUT)
        return
    file = None if index.file is None else str(index.file)
    channel.send(messages.encode(Built(file=file)), [index.fd], timeout=_TIMEOUT)
    index.close()


def main(argv: list[str]) -> int:
    channel = Channel(attach_to_parent(argv))
    try:
        build(channel)
    except Closed:
        return 1
    channel.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
