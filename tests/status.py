"""What a daemon might say of itself, for tests of those who show it."""

from __future__ import annotations

from typing import Any

from headrace.protocol import BUCKETS, ClientStatus, Pong, StageStatus, StreamStatus


def stage(count: int = 0, seconds: float = 0.0, nbytes: int = 0, bucket: int = 10) -> StageStatus:
    """All pieces of work in one bucket."""
    histogram = [0] * BUCKETS
    histogram[bucket] = count
    return StageStatus(count, seconds, nbytes, histogram)


def stream(**change: int) -> StreamStatus:
    about = dict.fromkeys(StreamStatus.__struct_fields__, 0) | {"samples": 1000, "slots": 20}
    return StreamStatus(**(about | change))


def client(**change: Any) -> ClientStatus:
    about: dict[str, Any] = dict.fromkeys(ClientStatus.__struct_fields__, 0)
    about |= {"client": "pid 7", "stream": "train", "transport": "shm", "device": "", "stages": {}}
    return ClientStatus(**(about | change))


def pong(**change: Any) -> Pong:
    about: dict[str, Any] = {
        "pid": 4711, "version": "1.2.3", "workers": [1, 2], "deaths": 0, "uptime": 0.0, "stages": {},
        "worker_seconds": 0.0, "streams": {}, "sessions": 0, "clients": [], "address": "ipc:///d.sock",
        "instance": bytes(16), "notices": [],
    }  # fmt: skip
    return Pong(**(about | change))
