"""What a daemon does now: the difference between two of its `Pong`s. Plain state.

Counters only grow while daemon and session last, so a rate is a difference over the time in between; a session that
came in between began at nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace.protocol import ClientStatus, Pong, StageStatus, StreamStatus

#: Seconds by which two `Pong`s may differ in when a session has begun: their parts are not of one moment.
_SAME = 0.5


@dataclass(frozen=True, slots=True)
class StageRate:
    """A stage of workers, daemon or client.

    Attributes:
        per_s: pieces of work.
        busy: seconds spent in each second, or each second of a worker's life: 0.25 is a quarter of it.
        mean, p50, p99: seconds of one piece; 0 without any. The last two are upper bounds, by powers of two.
        bytes_per_s: that it worked on.
    """

    per_s: float
    busy: float
    mean: float
    p50: float
    p99: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class StreamRate:
    """
    Attributes:
        images_per_s: rendered.
        delivered_per_s: chunks.
        shared: share of the delivered chunks that were there already; None without any.
        recomputed_per_s: chunks that had been rendered before.
    """

    images_per_s: float
    delivered_per_s: float
    shared: float | None
    recomputed_per_s: float


@dataclass(frozen=True, slots=True)
class ClientRate:
    """
    Attributes:
        images_per_s, waited: what its training loop takes, and the share of its time that it waits, by its own
            word; None where it has said nothing meanwhile.
        delivered_per_s: chunks.
        shared: share of them that were there already; None without any.
        recomputed_per_s: of them, those that had been rendered before.
    """

    images_per_s: float | None
    waited: float | None
    delivered_per_s: float
    shared: float | None
    recomputed_per_s: float


def same_run(before: Pong, after: Pong) -> bool:
    """Whether there is a difference to speak of: it is still the same daemon, and time has passed."""
    return before.instance == after.instance and after.uptime > before.uptime


def stages(before: Pong, after: Pong, daemons: Sequence[str]) -> dict[str, StageRate]:
    """Of the workers and the daemon.

    Args:
        daemons: the stages that are the daemon's own, busy in its time; those of workers are in theirs.
    """
    passed, lived = after.uptime - before.uptime, after.worker_seconds - before.worker_seconds
    own = {name: status for name, status in after.stages.items() if name in daemons}
    workers = {name: status for name, status in after.stages.items() if name not in daemons}
    return _stages(before.stages, workers, passed, lived) | _stages(before.stages, own, passed, passed)


def client_stages(before: ClientStatus | None, after: ClientStatus) -> dict[str, StageRate]:
    """Of a client, in the time between its reports; since its session began where it has said nothing meanwhile."""
    earlier = before.stages if before is not None and after.spent > before.spent else {}
    begun = before.spent if before is not None and earlier else 0.0
    passed = after.spent - begun
    return _stages(earlier, after.stages, passed, passed)


def _stages(
    before: Mapping[str, StageStatus], after: Mapping[str, StageStatus], passed: float, lived: float
) -> dict[str, StageRate]:
    return {name: _stage(before.get(name), status, passed, lived) for name, status in after.items()}


def _stage(before: StageStatus | None, after: StageStatus, passed: float, lived: float) -> StageRate:
    histogram = list(after.histogram)
    count, seconds, nbytes = after.count, after.seconds, after.nbytes
    if before is not None:
        count, seconds, nbytes = count - before.count, seconds - before.seconds, nbytes - before.nbytes
        histogram = [now - then for now, then in zip(histogram, before.histogram, strict=True)]
    return StageRate(
        per_s=_over(count, passed),
        busy=_over(seconds, lived),
        mean=_over(seconds, count),
        p50=quantile(histogram, 0.5),
        p99=quantile(histogram, 0.99),
        bytes_per_s=_over(nbytes, passed),
    )


def quantile(histogram: Sequence[int], share: float) -> float:
    """Seconds that this share of the pieces took at most: the upper bound of the bucket, bucket i being 2**i µs.

    Returns:
        0 without any piece; infinity where it lies in the last bucket, which has no bound.
    """
    total, below = sum(histogram), 0
    if not total:
        return 0.0
    for i, count in enumerate(histogram[:-1]):
        below += count
        if below >= share * total:
            return float(2**i) / 1e6
    return float("inf")


def stream(before: StreamStatus | None, after: StreamStatus, passed: float) -> StreamRate:
    """
    Args:
        before: None where it was not open.
        passed: seconds in between.
    """

    def grown(name: str) -> int:
        return int(getattr(after, name)) - (int(getattr(before, name)) if before is not None else 0)

    delivered = grown("delivered")
    return StreamRate(
        images_per_s=_over(grown("images"), passed),
        delivered_per_s=_over(delivered, passed),
        shared=grown("hits") / delivered if delivered > 0 else None,
        recomputed_per_s=_over(grown("recomputed"), passed),
    )


def client(before: ClientStatus | None, after: ClientStatus, passed: float) -> ClientRate:
    """
    Args:
        before: None where it had no session yet.
        passed: seconds in between.
    """

    def grown(name: str) -> int:
        return int(getattr(after, name)) - (int(getattr(before, name)) if before is not None else 0)

    passed = min(passed, after.age) if before is None else passed
    spent = after.spent - (before.spent if before is not None else 0.0)
    waited = after.waited - (before.waited if before is not None else 0.0)
    delivered = grown("delivered")
    return ClientRate(
        images_per_s=grown("images") / spent if spent > 0 else None,
        waited=waited / spent if spent > 0 else None,
        delivered_per_s=_over(delivered, passed),
        shared=grown("hits") / delivered if delivered > 0 else None,
        recomputed_per_s=_over(grown("recomputed"), passed),
    )


def pairs(before: Pong, after: Pong) -> list[tuple[ClientStatus | None, ClientStatus]]:
    """The sessions of `after`, each with itself in `before`, None where it is new.

    A session is known by who it is and by when it has begun: a trainer that came again is another one.
    """
    left = list(before.clients)
    found: list[tuple[ClientStatus | None, ClientStatus]] = []
    for now in after.clients:
        then = next((one for one in left if _same(before.uptime - one.age, one, after.uptime - now.age, now)), None)
        if then is not None:
            left.remove(then)
        found.append((then, now))
    return found


def _same(begun: float, one: ClientStatus, other_begun: float, other: ClientStatus) -> bool:
    who = (one.client, one.stream, one.transport) == (other.client, other.stream, other.transport)
    return who and abs(begun - other_begun) < _SAME


def _over(amount: float, by: float) -> float:
    return amount / by if by > 0 else 0.0
