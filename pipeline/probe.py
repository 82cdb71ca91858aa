"""What a file is, by its content alone: format, size and orientation, before any pixel is decoded."""

from __future__ import annotations

from typing import Literal

Stage = Literal["read", "probe", "decode", "worker"]


class BadPicture(Exception):
    """A verdict on content: the bytes are there, and they are no picture that can be shown.

    Attributes:
        stage: "read", "probe" or "decode"; "worker" for one convicted of killing those who render it.
        reason: one sentence with the real format or the limit; the file's name is the caller's to add.
    """

    def __init__(self, stage: Stage, reason: str) -> None:
        super().__init__(f"{stage}: {reason}")
        self.stage: Stage = stage
        self.reason = reason
