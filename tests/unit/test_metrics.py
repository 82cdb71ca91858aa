"""A daemon's status as Prometheus reads it."""

from __future__ import annotations

import math
import re
from pathlib import Path

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from status import client, pong, stage, stream

from headrace.protocol import Pong
from headrace.server.metrics import FAMILIES, STAGE, text


def read(status: Pong) -> dict[str, Metric]:
    """By the names on the page."""
    families = list(text_string_to_metric_families(text(status).decode()))
    return {f"{family.name}_total" if family.type == "counter" else family.name: family for family in families}


def value(status: Pong, name: str, **labels: str) -> float:
    (found,) = [sample.value for sample in read(status)[name].samples if sample.labels == labels]
    return float(found)


def test_every_metric_is_there_whatever_the_daemon_has() -> None:
    bare = read(pong())
    assert list(bare) == [STAGE, *(family.name for family in FAMILIES)]
    assert all(bare[family.name].type == family.kind and bare[family.name].documentation for family in FAMILIES)
    full = read(
        pong(streams={"train": stream()}, stages={"read": stage(1)}, clients=[client(stages={"copy": stage(1)})])
    )
    for family in FAMILIES:
        samples = full[family.name].samples
        assert samples and all(set(sample.labels) == set(family.labels) for sample in samples), family.name


def test_the_page_has_every_metric_with_its_kind_labels_and_meaning() -> None:
    page = (Path(__file__).parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `headrace_.*", page, re.M)
    named = [(STAGE, "histogram", ("stage",), read(pong())[STAGE].documentation)]
    named += [(family.name, family.kind, family.labels, family.meaning) for family in FAMILIES]
    assert [[cell.strip() for cell in row.strip("|").split("|")] for row in rows] == [
        [f"`{name}`", kind, ", ".join(f"`{label}`" for label in labels), meaning]
        for name, kind, labels, meaning in named
    ]


def test_values_are_the_daemons() -> None:
    at = stream(ready=12, leased=2, filling=3, waiting=5, images=900, hits=7, delivered=30, rejected=1)
    who = {"client": "pid 7", "stream": "train", "transport": "shm"}
    status = pong(
        uptime=60.5, worker_seconds=121.0, deaths=1, sessions=1, notices=["a"], streams={"train": at, "val": None},
        stages={"read": stage(3, 0.5, 1000)},
        clients=[client(images=64, waited=1.5, spent=6.0, lag=4, stages={"copy": stage(2, 0.25, 10)})],
    )  # fmt: skip
    assert value(status, "headrace_info", version="1.2.3") == 1
    assert value(status, "headrace_uptime_seconds") == 60.5
    assert value(status, "headrace_workers") == 2
    assert value(status, "headrace_worker_deaths_total") == 1
    assert value(status, "headrace_worker_seconds_total") == 121.0
    assert value(status, "headrace_stage_bytes_total", stage="read") == 1000
    assert value(status, "headrace_stream_images_total", stream="train") == 900
    slots = {sample.labels["state"]: sample.value for sample in read(status)["headrace_stream_slots"].samples}
    assert slots == {"leased": 2, "ready": 10, "filling": 3, "free": 5}  # twenty of them
    assert value(status, "headrace_client_images_total", **who) == 64
    assert value(status, "headrace_client_waited_seconds_total", **who) == 1.5
    assert value(status, "headrace_client_lag_chunks", **who) == 4
    assert value(status, "headrace_client_stage_seconds_total", **who, stage="copy") == 0.25


def test_the_latency_of_a_stage_is_a_histogram_that_adds_up() -> None:
    read_, decode = stage(3, 0.5, bucket=0), stage(4, 9.0, bucket=31)
    decode.histogram[10] = 6  # up to 1.024 ms
    (histogram,) = (
        family for name, family in read(pong(stages={"read": read_, "decode": decode})).items() if name == STAGE
    )
    assert histogram.type == "histogram"
    for name, count, seconds in (("read", 3, 0.5), ("decode", 10, 9.0)):
        samples = [sample for sample in histogram.samples if sample.labels["stage"] == name]
        buckets = [(float(s.labels["le"]), s.value) for s in samples if s.name.endswith("_bucket")]
        assert buckets == sorted(buckets) and len(buckets) == 32
        assert buckets[-1] == (math.inf, count)
        others = {sample.name: sample.value for sample in samples if not sample.name.endswith("_bucket")}
        assert others == {f"{STAGE}_count": count, f"{STAGE}_sum": seconds}
        if name == "decode":
            assert dict(buckets)[0.000512] == 0 and dict(buckets)[0.001024] == dict(buckets)[1073.741824] == 6


def test_sessions_that_nobody_can_tell_apart_are_added_up() -> None:
    """Two series with equal labels are an error to Prometheus, and all the others would be lost with them."""
    status = pong(clients=[client(images=10), client(images=20), client(images=5, stream="val")])
    found = {s.labels["stream"]: s.value for s in read(status)["headrace_client_images_total"].samples}
    assert found == {"train": 30, "val": 5}


def test_a_name_from_outside_stays_within_its_label() -> None:
    name = 'x"} 1\nheadrace_workers 99\n# \\ \x1b[2J'
    status = pong(clients=[client(client=name, images=3)])
    assert value(status, "headrace_client_images_total", client=name, stream="train", transport="shm") == 3
    assert value(status, "headrace_workers") == 2
