"""A daemon's status as metrics for Prometheus: which there are, what they mean, and their values by a `Pong`.

Everything is as the daemon says it, so a counter begins at 0 with the daemon, a client's with its Loader or session.
Rates, shares and means are Prometheus' business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from headrace.protocol import ClientStatus, Pong, StageStatus, StreamStatus

#: Labels and values of the series of a metric.
Rows = Iterable[tuple[tuple[str, ...], float]]


@dataclass(frozen=True, slots=True)
class Family:
    """A metric.

    Attributes:
        name: a counter's ends in `_total`.
        labels: their names.
        rows: its series, by the daemon's word. Those with equal labels are added up: several sessions of one trainer.
    """

    name: str
    meaning: str
    labels: tuple[str, ...]
    rows: Callable[[Pong], Rows]

    @property
    def kind(self) -> str:
        return "counter" if self.name.endswith("_total") else "gauge"


def _daemon(name: str, meaning: str, value: Callable[[Pong], float]) -> Family:
    return Family(f"headrace_{name}", meaning, (), lambda pong: [((), value(pong))])


def _stream(name: str, meaning: str, value: Callable[[StreamStatus], float]) -> Family:
    def rows(pong: Pong) -> Rows:
        return [((stream,), value(at)) for stream, at in pong.streams.items() if at is not None]

    return Family(f"headrace_stream_{name}", meaning, ("stream",), rows)


def _client(name: str, meaning: str, value: Callable[[ClientStatus], float]) -> Family:
    def rows(pong: Pong) -> Rows:
        return [(_who(client), value(client)) for client in pong.clients]

    return Family(f"headrace_client_{name}", meaning, ("client", "stream", "transport"), rows)


def _who(client: ClientStatus) -> tuple[str, ...]:
    return client.client, client.stream, client.transport


def _slots(pong: Pong) -> Iterator[tuple[tuple[str, ...], float]]:
    for stream, at in pong.streams.items():
        if at is not None:
            idle, free = at.ready - at.leased, at.slots - at.ready - at.filling
            states = {"leased": at.leased, "ready": idle, "filling": at.filling, "free": free}
            yield from (((stream, state), count) for state, count in states.items())


def _client_stages(value: Callable[[StageStatus], float]) -> Callable[[Pong], Rows]:
    return lambda pong: [
        ((*_who(client), stage), value(status)) for client in pong.clients for stage, status in client.stages.items()
    ]


#: Every metric but the histogram, in the order of the page.
FAMILIES: tuple[Family, ...] = (
    Family("headrace_info", "1, and the release that runs", ("version",), lambda pong: [((pong.version,), 1)]),
    _daemon("uptime_seconds", "since the daemon began", lambda pong: pong.uptime),
    _daemon("workers", "processes that render", lambda pong: len(pong.workers)),
    _daemon("worker_deaths_total", "workers that have died", lambda pong: pong.deaths),
    _daemon("worker_seconds_total", "lives of all workers, added up: what the stages are a share of",
            lambda pong: pong.worker_seconds),
    _daemon("sessions", "of clients, now", lambda pong: pong.sessions),
    _daemon("notices", "things that do not work as they are meant to; `headrace ping` says which",
            lambda pong: len(pong.notices)),
    Family("headrace_stage_bytes_total", "bytes that a stage has worked on", ("stage",),
           lambda pong: [((stage,), status.nbytes) for stage, status in pong.stages.items()]),
    _stream("samples", "of an epoch", lambda at: at.samples),
    Family("headrace_stream_slots", "chunks of the ring, by what becomes of them", ("stream", "state"), _slots),
    _stream("requests_waiting", "of all clients, for chunks that are not ready", lambda at: at.waiting),
    _stream("images_total", "pictures rendered", lambda at: at.images),
    _stream("chunks_computed_total", "chunks rendered", lambda at: at.computed),
    _stream("chunks_recomputed_total", "those that had been rendered before", lambda at: at.recomputed),
    _stream("chunks_delivered_total", "chunks handed to clients", lambda at: at.delivered),
    _stream("chunks_hit_total", "those that were there already", lambda at: at.hits),
    _stream("chunks_failed_total", "chunks that could not be had: an I/O error", lambda at: at.failed),
    _stream("rejects_total", "bad pictures", lambda at: at.rejected),
    _client("images_total", "pictures that its training loop has taken", lambda client: client.images),
    _client("batches_total", "batches that its training loop has taken", lambda client: client.batches),
    _client("waited_seconds_total", "that its training loop has waited for them", lambda client: client.waited),
    _client("spent_seconds_total", "in all, that included: the quotient is the share of its time that it waits",
            lambda client: client.spent),
    _client("requests", "that wait for an answer", lambda client: client.outstanding),
    _client("leases", "chunks that it is copying", lambda client: client.leases),
    _client("lag_chunks", "by which it is behind the furthest client of its stream", lambda client: client.lag),
    _client("chunks_delivered_total", "chunks handed to it", lambda client: client.delivered),
    _client("chunks_hit_total", "those that were there already", lambda client: client.hits),
    _client("chunks_recomputed_total", "those that had to be rendered again for it",
            lambda client: client.recomputed),
    Family("headrace_client_stage_seconds_total", "that its fetching thread has spent",
           ("client", "stream", "transport", "stage"), _client_stages(lambda status: status.seconds)),
    Family("headrace_client_stage_bytes_total", "bytes that its fetching thread has worked on",
           ("client", "stream", "transport", "stage"), _client_stages(lambda status: status.nbytes)),
)  # fmt: skip

#: The histogram: of one piece of work, such as reading a picture's file.
STAGE = "headrace_stage_seconds"
_STAGE_MEANING = "seconds of one piece of work of the workers and of the daemon, by stage"


class _Status(Collector):
    def __init__(self, pong: Pong) -> None:
        self._pong = pong

    def collect(self) -> Iterator[Metric]:
        yield _histogram(self._pong)
        for family in FAMILIES:
            made = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
            metric = made(family.name, family.meaning, labels=family.labels)
            added: dict[tuple[str, ...], float] = {}
            for labels, value in family.rows(self._pong):
                added[labels] = added.get(labels, 0.0) + value
            for labels, value in added.items():
                metric.add_metric(labels, value)
            yield metric


def _histogram(pong: Pong) -> Metric:
    metric = HistogramMetricFamily(STAGE, _STAGE_MEANING, labels=("stage",))
    for stage, status in pong.stages.items():
        metric.add_metric((stage,), _buckets(status.histogram), sum_value=status.seconds)
    return metric


def _buckets(histogram: Sequence[int]) -> list[tuple[str, float]]:
    """Upper bounds in seconds, and how many are at most that: bucket i goes up to 2**i µs, the last one has no end."""
    found: list[tuple[str, float]] = []
    total = 0
    for i, count in enumerate(histogram):
        total += count
        found.append((repr(2**i / 1e6) if i < len(histogram) - 1 else "+Inf", float(total)))
    return found


def text(pong: Pong) -> bytes:
    """All of it, in Prometheus' text format (version 0.0.4 and later)."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Status(pong))
    return generate_latest(registry)
