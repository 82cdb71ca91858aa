"""A daemon of one's own, for as long as something is tried with it."""

from __future__ import annotations

import contextlib
import json
import select
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from headrace.errors import DeadlineError

#: Seconds that it may take to listen, and to end.
_READY = 60.0


@contextlib.contextmanager
def serving(
    document: Mapping[str, Any],
    folder: Path,
    *options: str,
    command: Callable[..., list[str]] = lambda *args: [*args],
) -> Iterator[str]:
    """A daemon, and the first address where it listens.

    Args:
        document: its configuration.
        folder: for that, and for its log.
        options: further ones of `headrace serve`.
        command: makes of a command line one that runs it elsewhere, such as in a namespace.

    Raises:
        DeadlineError: it does not start; with the end of its log.
    """
    file, log = folder / "headrace.yaml", folder / "daemon.log"
    file.write_text(json.dumps(document))  # JSON is YAML
    line = command(sys.executable, "-m", "headrace.server", "serve", *options, str(file))
    with log.open("wb") as stderr:
        daemon = subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr)
    assert daemon.stdout is not None
    try:
        ready, _, _ = select.select([daemon.stdout], [], [], _READY)
        said = daemon.stdout.readline().decode() if ready else ""
        if not said.startswith("listening on "):
            raise DeadlineError(f"a daemon does not get ready: {log.read_text(errors='replace')[-2000:]}")
        yield said.removeprefix("listening on ").strip()
    finally:
        daemon.terminate()
        try:
            daemon.wait(_READY)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait(_READY)
        daemon.stdout.close()
