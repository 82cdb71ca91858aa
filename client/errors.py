"""Every error that Headrace raises on purpose.

HeadraceError
 ├── ConfigError      the configuration is wrong: key, value, what is allowed, line
 ├── DatasetError     samples cannot be listed or read: folder, file, errno, what to do
 ├── SampleError      a picture is bad and `on_bad_sample` is `raise`; `.reject` names it
 ├── TooManyRejects   more bad pictures in the epoch than `max_bad` allows
 ├── DeadlineError    a wait ran out; says who was waited for
 ├── ConnectionLost   the daemon is gone and could not be reached again
 ├── StateError       a saved state, rank or iterator does not fit this Loader
 ├── RenderMismatch   `exact=True` and a chunk was rendered by something else
 └── ProtocolError    the other side speaks another version, or nonsense
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.batch import Reject


class HeadraceError(Exception):
    """Root of the tree above."""


class ConfigError(HeadraceError):
    """The configuration, or an argument that stands for a part of it, is wrong."""


class DatasetError(HeadraceError):
    """Samples cannot be listed or read. Never used for a picture whose content is bad: that is a reject."""


class SampleError(HeadraceError):
    """A picture is bad and the policy is `raise`.

    Args:
        message: the whole sentence.
        reject: the picture, its position and the reason.
    """

    def __init__(self, message: str, reject: Reject | None = None) -> None:
        super().__init__(message)
        self.reject = reject


class TooManyRejects(HeadraceError):
    """This Loader's rejects in the epoch exceed 16 and `max_bad` of its positions."""


class DeadlineError(HeadraceError, TimeoutError):
    """Nothing moved for as long as was allowed."""


class ConnectionLost(HeadraceError, ConnectionError):
    """The daemon is gone and did not come back in time."""


class StateError(HeadraceError):
    """A state, a rank or an iterator was used where it does not fit."""


class RenderMismatch(HeadraceError):
    """A chunk carries another render id than the stream's, and `exact=True` forbids that."""


class ProtocolError(HeadraceError):
    """A message that this version cannot take."""


_BY_NAME: dict[str, type[HeadraceError]] = {
    c.__name__: c
    for c in (
        ConfigError,
        DatasetError,
        SampleError,
        TooManyRejects,
        DeadlineError,
        ConnectionLost,
        StateError,
        RenderMismatch,
        ProtocolError,
    )
}


def to_wire(error: BaseException) -> tuple[str, str]:
    """`(kind, text)` of any exception: an error crosses a process border as text, never as an object."""
    if isinstance(error, HeadraceError):
        return type(error).__name__, str(error)
    return "HeadraceError", f"{type(error).__name__}: {error}"


def from_wire(kind: str, text: str) -> HeadraceError:
    """The exception that `to_wire` described; an unknown kind becomes a plain `HeadraceError`."""
    return _BY_NAME.get(kind, HeadraceError)(text)
