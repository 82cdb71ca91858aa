"""What figures say: the limit, what would be without it, what other machines give, what to do."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from headrace.server import verdict
from headrace.server.verdict import Advice, Chain, Machine, Model, Setting

#: Two seconds of one worker on pictures of 2 ms; a consumer that takes 0.1 ms.
ONE = Chain(
    workers=1,
    seconds=2.0,
    images=1000,
    rendered=1000,
    stages={"read": 0.1, "plan": 0.05, "decode": 1.25, "resize": 0.5, "write": 0.1},
    nbytes=100_000_000,
    cpu={"workers": 1.95, "daemon": 0.05, "client": 0.1},
    client={"copy": 0.00002, "finish": 0.00008},
)
#: A worker that waits for its disk nine tenths of the time.
SLOW_DISK = replace(
    ONE, images=100, rendered=100, stages={"read": 1.8, "decode": 0.15, "resize": 0.05}, cpu={"workers": 0.25}
)
SETTING = Setting("pillow", processes=2, cpus=2, pixels=200_000, shown=50_176, nbytes=100_000)
HERE = Machine(cpus=2, cores=2)


def texts(advice: list[Advice]) -> str:
    return "\n".join([*(one.text for one in advice), *(line for one in advice for line in one.lines)])


# -- which stage limits ------------------------------------------------------------------------------------------


def test_of_workers_that_work_the_longest_stage_limits() -> None:
    found = verdict.judge(ONE)
    assert found.stage == "decode"
    assert found.share == pytest.approx(0.625)
    assert "decoding" in found.text
    assert verdict.judge(SLOW_DISK).stage == "read"


def test_when_all_cpus_are_in_use_it_is_what_uses_them() -> None:
    """Many workers hide their disk behind each other."""
    hidden = replace(ONE, workers=8, seconds=1.0, stages={**ONE.stages, "read": 6.0})
    assert verdict.judge(hidden, 2).stage == "decode"
    assert "all CPUs are in use" in verdict.judge(hidden, 2).text
    assert verdict.judge(hidden, 8).stage == "read"
    assert verdict.judge(hidden).stage == "read"


def test_workers_without_work_and_a_consumer_that_works_make_it_the_consumer() -> None:
    slow = replace(ONE, stages={"decode": 0.5}, wait=1.5, client={"copy": 0.0003, "finish": 0.0015})
    assert verdict.judge(slow).stage == "finish"
    assert verdict.judge(replace(slow, client={"copy": 0.0015, "finish": 0.0003})).stage == "copy"


def test_several_consumers_share_what_there_is() -> None:
    """Each of four takes a quarter, and so is hardly at work."""
    several = replace(ONE, stages={"decode": 0.5}, wait=1.5, client={"finish": 0.0015}, consumers=4)
    assert verdict.judge(several).stage == "requests"


def test_everybody_waiting_is_a_want_of_requests() -> None:
    assert verdict.judge(replace(ONE, stages={"decode": 0.5}, wait=1.5)).stage == "requests"


def test_nothing_taken_is_said() -> None:
    assert "nobody took" in verdict.judge(Chain(1, 5.0, 0, 0, {}), trainers=True).text


def test_a_trainer_that_does_not_wait_is_the_limit() -> None:
    trainer = replace(ONE, waited=0.01, stages={"decode": 0.3}, wait=1.7)
    assert verdict.judge(trainer, trainers=True).stage == "trainer"
    assert verdict.judge(trainer).stage == "requests"  # what takes batches only to measure is none


def test_a_trainer_that_waits_is_not() -> None:
    assert verdict.judge(replace(ONE, waited=0.4), trainers=True).stage == "decode"


# -- the model --------------------------------------------------------------------------------------------------


def test_twice_the_workers_give_twice_as_much_while_there_are_cpus() -> None:
    model = Model.of(ONE, cpus=4)
    assert model.rate(1, 4) == pytest.approx(500)
    assert model.rate(2, 4) == pytest.approx(1000)


def test_cpus_are_shared_with_daemon_and_consumer() -> None:
    """2.1 CPU ms a picture: two CPUs give 952 a second, and not the thousand of two workers."""
    assert Model.of(ONE, cpus=2).rate(2, 2) == pytest.approx(2 / 0.0021)
    assert Model.of(ONE, cpus=2).rate(16, 2) == pytest.approx(2 / 0.0021)


def test_a_consumer_is_a_limit_of_its_own() -> None:
    model = Model.of(ONE, cpus=1000)
    assert model.rate(1000, 1000) == pytest.approx(10_000)
    assert model.limiting(1000, 1000) == "finish"


def test_waiting_for_a_disk_takes_no_cpu() -> None:
    model = Model.of(SLOW_DISK, cpus=2)
    assert model.cpu["read"] == pytest.approx(0.0005)  # of 18 ms
    assert model.rate(8, 2) == pytest.approx(400)
    assert model.rate(32, 2) == pytest.approx(800)  # 2.5 ms of CPU a picture


def test_what_crowded_workers_wait_for_a_cpu_is_none_of_their_cpu_time() -> None:
    """Four workers on one CPU: their stages take four times as long, and the pictures no more."""
    crowded = replace(ONE, workers=4, stages={name: 4 * seconds for name, seconds in ONE.stages.items()})
    model = Model.of(crowded, cpus=1)
    assert sum(model.cpu.values()) == pytest.approx(0.00195, rel=0.01)


def test_a_busy_machine_is_seen_through() -> None:
    """Others took half of the CPUs, so every stage took twice as long: the model is of a quiet machine, and says what
    that one gave with what was left."""
    busy = replace(
        ONE, workers=2, images=950, rendered=950, others=0.5,
        stages={name: 4.0 / 2.0 * seconds for name, seconds in ONE.stages.items()},
        cpu={who: 0.95 * seconds for who, seconds in ONE.cpu.items()},
    )  # fmt: skip
    assert busy.free(2) == pytest.approx(1.0, abs=0.01)
    model = Model.of(busy, cpus=2)
    assert model.rate(2, busy.free(2)) == pytest.approx(475, rel=0.02)
    assert model.rate(1, 2) == pytest.approx(1 / 0.00216, rel=0.02)  # reading takes what it takes


def test_what_the_model_leaves_out_is_in_its_scale() -> None:
    hindered = replace(ONE, images=900, rendered=1000)
    assert Model.of(hindered, cpus=4).rate(1, 4) == pytest.approx(450)


def test_workers_that_were_without_work_could_have_done_more() -> None:
    idle = replace(ONE, images=500, rendered=500, wait=3.0, stages={n: s / 2 for n, s in ONE.stages.items()})
    assert Model.of(idle, cpus=4).limits(1, 4)["workers"] == pytest.approx(500)


def test_without_a_stage_the_next_one_limits() -> None:
    model = Model.of(ONE, cpus=4)
    room = verdict.headroom(model, "decode", 1, 4)
    assert room is not None
    assert room.rate == pytest.approx(1000 / 0.75)
    assert room.then == "resize"
    assert room.text == "if decoding cost nothing, the limit would be 1,333 images/s: resizing"
    assert "1,333 images/s on a quiet machine: " in replace(room, quiet=True).text
    assert not ONE.crowded and replace(ONE, others=0.04, stolen=0.04).crowded


def test_without_the_last_stage_the_consumer_limits() -> None:
    only = replace(ONE, stages={"render": 2.0})
    room = verdict.headroom(Model.of(only, cpus=4), "render", 1, 4)
    assert room is not None
    assert (room.rate, room.then) == (pytest.approx(10_000), "finish")


def test_who_is_no_stage_has_no_headroom() -> None:
    assert verdict.headroom(Model.of(ONE, 2), "trainer", 1, 2) is None
    assert verdict.headroom(Model.of(ONE, 2), "requests", 1, 2) is None


def test_what_is_needed_gives_what_is_wanted() -> None:
    model = Model.of(ONE, cpus=4)
    workers, cpus = model.needed(2100)
    assert (workers, cpus) == (5, 5)
    assert model.rate(workers, cpus) >= 2100 > model.rate(workers - 1, cpus)
    assert model.needed(0.001) == (1, 1)


def test_nothing_measured_is_no_division_by_zero() -> None:
    nothing = Chain(2, 5.0, 0, 0, {})
    model = Model.of(nothing, 2)
    assert model.rate(2, 2) == math.inf
    assert (nothing.rate, nothing.idle, Chain(1, 0.0, 0, 0, {}).rate) == (0.0, 0.0, 0.0)


# -- when it is not to be trusted -----------------------------------------------------------------------------------


def test_a_quiet_machine_is_trusted() -> None:
    assert verdict.distrust(ONE, HERE, 2, 2) == []


@pytest.mark.parametrize(
    ("chain", "machine", "word"),
    [
        (ONE, Machine(cpus=2, cores=1), "2 CPUs are threads of 1 core:"),
        (ONE, replace(HERE, virtual=True), "virtual machine"),
        (replace(ONE, stolen=0.2), HERE, "hypervisor gave 20%"),
        (replace(ONE, others=0.3), HERE, "other processes took 30%"),
        (SLOW_DISK, HERE, "one disk"),
        (ONE, replace(HERE, cached=1.0, data=9, memory=1), "larger than the memory"),
        (replace(ONE, images=20), HERE, "only 20 images"),
    ],
)
def test_what_may_make_it_wrong_is_said(chain: Chain, machine: Machine, word: str) -> None:
    (reason, *others) = [r for r in verdict.distrust(chain, machine, 2, 2) if word in r]
    assert reason and not others


def test_far_away_is_a_guess() -> None:
    assert verdict.distrust(ONE, HERE, 4, 4) == []
    assert "more than 4 times" in verdict.distrust(ONE, HERE, 5, 5)[0]


# -- what to do -------------------------------------------------------------------------------------------------------


def advised(chain: Chain, setting: Setting = SETTING, *, trainers: bool = False) -> str:
    found = verdict.advise(verdict.judge(chain, trainers=trainers), chain, Model.of(chain, setting.cpus), setting)
    assert found
    return texts(found)


def test_a_slow_disk_gets_more_workers_and_larger_files() -> None:
    text = advised(SLOW_DISK)
    assert "workers: {processes: 16}" in text  # 20 ms, of which 2.5 of a CPU
    assert "shards:" in text
    assert "shards:" not in advised(SLOW_DISK, replace(SETTING, source="shards"))
    assert "shards:" not in advised(SLOW_DISK, replace(SETTING, nbytes=1e6))


def test_large_jpegs_get_smaller_decoding() -> None:
    large = replace(SETTING, pixels=24e6)
    text = advised(ONE, large)
    assert "decode: {dct_scaling: true}" in text and "24.0 megapixels" in text and "store the pictures smaller" in text
    assert "dct_scaling" not in advised(ONE)
    assert "dct_scaling" not in advised(ONE, replace(large, dct_scaling=True))
    assert "dct_scaling" not in advised(ONE, replace(large, jpegs=0.1))


def test_dali_is_named_where_it_helps() -> None:
    assert "pip install" in advised(ONE)
    assert "pip install" not in advised(ONE, replace(SETTING, dali=True))
    assert "dali-cpu" not in advised(ONE, replace(SETTING, backend="dali-cpu"))
    assert "dali-gpu" in advised(ONE, replace(SETTING, gpu=True))


def test_cpus_that_do_nothing_are_named() -> None:
    assert "workers: {processes: auto}" in advised(ONE, replace(SETTING, processes=1))
    assert "workers: {processes: auto}" not in advised(ONE)


def test_a_consumer_gets_fewer_bytes() -> None:
    slow = replace(ONE, stages={"decode": 0.5}, wait=1.5, client={"finish": 0.0018})
    assert 'dtype="uint8"' in advised(slow)
    assert "several of them" in advised(slow, replace(SETTING, dtype="uint8"))
    assert advised(replace(slow, consumers=1), replace(SETTING, dtype="uint8"))


def test_a_slow_trainer_is_told_that_nothing_helps() -> None:
    slow = replace(ONE, workers=4, waited=0.0, stages={"decode": 0.3}, wait=7.7)
    text = advised(slow, trainers=True)
    assert "nothing in the input" in text and "workers: {processes: 1}" in text


def test_a_ring_that_is_too_small_is_named() -> None:
    assert "memory:" in advised(ONE, replace(SETTING, again=0.3))
    assert "memory:" not in advised(ONE)


def test_the_target_says_what_it_takes() -> None:
    model = Model.of(ONE, cpus=2)
    text = texts(verdict.reach(5000, model, 2, 2, 100_000))
    assert "5,000 images/s take 10 workers and 11 CPUs" in text and "500 MB/s" in text
    assert "workers: {processes: 10}" in text and "consumer" not in text
    assert "are fed already" in texts(verdict.reach(900, model, 2, 2, 100_000))
    assert "3 trainers" in texts(verdict.reach(25_000, model, 2, 2, 100_000))
    unknown = texts(verdict.reach(5000, model, 2, None, 100_000))
    assert "take 10 workers and 11 CPUs without the trainer's own; they read" in unknown


def test_small_rates_keep_a_digit() -> None:
    assert [verdict.shown(rate) for rate in (0.0, 3.26, 19.9, 20.4, 12345.6)] == ["0.0", "3.3", "19.9", "20", "12,346"]
