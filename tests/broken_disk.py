"""A disk that fails on demand, in processes whose interpreter starts with this module.

    PYTHONPATH=… python …      with a `sitecustomize.py` on it that imports this module and calls `install(folder)`

Every file in the folder is an order: opening, or reading from, a path fails with an error number, once or for as long
as the order stands.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


def site(folder: Path) -> Path:
    """A folder for PYTHONPATH, with orders in `folder/orders`."""
    (folder / "orders").mkdir(parents=True)
    (folder / "sitecustomize.py").write_text(
        f"import sys\nsys.path.append({str(Path(__file__).parent)!r})\n"
        f"import broken_disk\nbroken_disk.install({str(folder / 'orders')!r})\n"
    )
    return folder


class Orders:
    """
    Args:
        folder: what `site` was given.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "orders"

    def fail(self, path: Path, call: str, number: int, times: int | None = None) -> None:
        """`call` ("open" or "read") on the path fails so many times; None: always."""
        for i in range(1 if times is None else times):
            text = json.dumps({"path": str(path), "call": call, "errno": number, "always": times is None})
            partial = self._folder.parent / "partial"
            partial.write_text(text)
            partial.rename(self._folder / f"{call}-{number}-{path.name}-{i}")

    def left(self) -> int:
        return len(os.listdir(self._folder))

    def clear(self) -> None:
        for order in self._folder.iterdir():
            order.unlink()


def install(orders: str) -> None:
    """In the process that is to suffer."""
    really_open, really_unlink, really_list = os.open, os.unlink, os.listdir

    def obey(call: str, path: Callable[[], str]) -> None:
        for name in really_list(orders):
            if not name.startswith(call):
                continue
            with contextlib.suppress(FileNotFoundError):
                order = json.loads(Path(orders, name).read_text())
                if order["path"] == path():
                    if not order["always"]:
                        really_unlink(os.path.join(orders, name))
                    raise OSError(order["errno"], os.strerror(order["errno"]), path())

    def opened(path: Any, *args: Any, **options: Any) -> int:
        if isinstance(path, (str, bytes)):
            obey("open", lambda: os.fsdecode(path))
        return really_open(path, *args, **options)

    def reads(really: Callable[..., Any]) -> Callable[..., Any]:
        def read(fd: int, *args: Any) -> Any:
            obey("read", lambda: os.readlink(f"/proc/self/fd/{fd}"))
            return really(fd, *args)

        return read

    os.open = opened  # type: ignore[assignment]
    for name in ("read", "pread", "readv", "preadv"):
        setattr(os, name, reads(getattr(os, name)))
