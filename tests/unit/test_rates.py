"""What is said of the time between two answers of a daemon."""

from __future__ import annotations

from status import client, pong, stage, stream

from headrace.protocol import BUCKETS, StageStatus
from headrace.server import rates


def test_a_stage_is_what_it_did_in_between() -> None:
    before = pong(uptime=100.0, worker_seconds=200.0, stages={"decode": stage(1000, 50.0, 10**9, bucket=20)})
    histogram = list(before.stages["decode"].histogram)
    histogram[12] += 490  # up to 4.096 ms
    histogram[14] += 10
    grown = StageStatus(1500, 55.0, 3 * 10**9, histogram)
    after = pong(uptime=110.0, worker_seconds=220.0, stages={"decode": grown})
    (rate,) = rates.stages(before, after, ()).values()
    assert rate == rates.StageRate(per_s=50.0, busy=0.25, mean=0.01, p50=4.096e-3, p99=16.384e-3, bytes_per_s=2e8)


def test_a_stage_of_the_daemon_is_busy_in_its_time_and_one_of_workers_in_theirs() -> None:
    before = pong(uptime=10.0, worker_seconds=0.0)
    after = pong(uptime=20.0, worker_seconds=40.0, stages={"read": stage(4, 10.0), "send": stage(4, 1.0)})
    found = rates.stages(before, after, ("send",))
    assert {name: rate.busy for name, rate in found.items()} == {"read": 0.25, "send": 0.1}
    assert {name: rate.per_s for name, rate in found.items()} == {"read": 0.4, "send": 0.4}


def test_a_quantile_is_the_bound_of_its_bucket() -> None:
    histogram = [0] * BUCKETS
    assert rates.quantile(histogram, 0.5) == 0.0
    histogram[0], histogram[3] = 3, 1
    assert [rates.quantile(histogram, share) for share in (0.5, 0.75, 0.76, 1.0)] == [1e-6, 1e-6, 8e-6, 8e-6]
    histogram[-1] = 4  # of those nobody knows
    assert [rates.quantile(histogram, share) for share in (0.5, 0.51)] == [8e-6, float("inf")]


def test_a_stream_is_what_it_did_in_between_or_since_it_was_opened() -> None:
    before, after = stream(images=100, delivered=10, hits=5), stream(images=300, delivered=30, hits=20, recomputed=4)
    assert rates.stream(before, after, 2.0) == rates.StreamRate(100.0, 10.0, 0.75, 2.0)
    assert rates.stream(None, after, 2.0) == rates.StreamRate(150.0, 15.0, 20 / 30, 2.0)
    assert rates.stream(after, after, 2.0) == rates.StreamRate(0.0, 0.0, None, 0.0)


def test_a_client_is_known_by_its_own_clock() -> None:
    before = client(age=10.0, images=1000, waited=2.0, spent=9.0, delivered=40)
    after = client(age=12.0, images=1500, waited=2.25, spent=10.0, delivered=60, hits=10, recomputed=1)
    assert rates.client(before, after, 2.0) == rates.ClientRate(500.0, 0.25, 10.0, 0.5, 0.5)
    silent = rates.client(after, after, 2.0)
    assert (silent.images_per_s, silent.waited, silent.delivered_per_s) == (None, None, 0.0)


def test_a_client_that_is_new_has_had_its_own_time_only() -> None:
    rate = rates.client(None, client(age=0.5, delivered=10), 2.0)
    assert rate.delivered_per_s == 20.0


def test_stages_of_a_client_are_shares_of_the_time_between_its_reports() -> None:
    before = client(spent=10.0, stages={"copy": stage(10, 1.0)})
    after = client(spent=20.0, stages={"copy": stage(30, 6.0)})
    assert rates.client_stages(before, after)["copy"].busy == 0.5
    assert rates.client_stages(None, after)["copy"].busy == 0.3
    assert rates.client_stages(after, after)["copy"].busy == 0.3  # it has said nothing meanwhile


def test_a_session_is_found_again_by_who_it_is_and_when_it_began() -> None:
    first, second = client(age=5.0, delivered=1), client(age=3.0, delivered=2)
    before = pong(uptime=10.0, clients=[first, second])
    again = client(age=1.0, delivered=3)  # the first one has ended, and its trainer came again
    after = pong(uptime=12.0, clients=[again, client(age=5.0, delivered=4), client(age=7.0, stream="val")])
    found = [(None if then is None else then.delivered, now.delivered) for then, now in rates.pairs(before, after)]
    assert found == [(None, 3), (2, 4), (None, 0)]


def test_another_daemon_has_no_rates_with_the_one_before() -> None:
    before = pong(uptime=10.0)
    assert rates.same_run(before, pong(uptime=11.0))
    assert not rates.same_run(before, pong(uptime=11.0, instance=b"another instance"))
    assert not rates.same_run(before, before)
