"""Which workers there are to be while GPUs or backends fail, and what is said of it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.workers.crew import Crew
from headrace.workers.fill import UNEXPLAINED
from headrace.workers.roster import BACKEND_DELAYS, CPU_DELAYS, CRASHES, DEVICE_DELAYS, STARTS, Roster

GPU = Crew("dali-gpu", 3, (0, 2), fallback="pillow")
CPU = Crew("dali-cpu", 3, fallback="pillow")
PILLOW = Crew("pillow", 3)
BOTH, ALONE = ("dali-cpu", "pillow"), ("pillow",)


def test_cpu_workers_are_wanted_where_there_is_no_device_or_none_that_works() -> None:
    assert Roster(PILLOW).cpu_workers(fallback=False) == 3
    at = Roster(GPU)
    assert not at.on_cpu and at.cpu_workers(fallback=False) == 0
    assert at.cpu_workers(fallback=True) == 1  # what only they may render
    at.device_failed(0, "no driver", 0.0)
    assert at.cpu_workers(fallback=False) == 0
    at.device_failed(2, "no driver", 0.0)
    assert at.on_cpu and at.cpu_workers(fallback=False) == 3
    at.device_ready(2)
    assert not at.on_cpu and at.cpu_workers(fallback=False) == 0


def test_each_is_started_with_what_it_may_need() -> None:
    assert Roster(PILLOW).cpu_backends(0.0) == ("pillow",)
    assert Roster(GPU).cpu_backends(0.0) == ALONE
    assert Roster(CPU).cpu_backends(0.0) == BOTH


def test_a_device_is_tried_again_ever_later_and_its_trouble_said_when_it_changes() -> None:
    at, now = Roster(GPU), 1000.0
    at.device_failed(2, "x", now)
    assert at.device_failed(0, "no driver", now) == (
        "GPU 0: no driver; chunks are rendered by 3 CPU workers (pillow) until it is back; trying again in 1 s"
    )
    for delay in (*DEVICE_DELAYS, DEVICE_DELAYS[-1]):
        assert not at.device_due(0, now + delay - 0.01) and at.device_due(0, now + delay)
        now += delay
        assert at.device_failed(0, "no driver", now) == ""
    assert "out of memory" in at.device_failed(0, "out of memory", now)
    assert at.device_ready(0) == "GPU 0 works again: chunks go to it" and at.device_ready(0) == ""
    # It fails again at once: that is said, and the pauses go on. After a day of work they begin anew.
    assert at.device_failed(0, "out of memory", now, worked=3.0).endswith("in 900 s")
    at.device_ready(0)
    assert at.device_failed(0, "crashed", now, worked=86400.0).endswith("in 1 s")


def test_notices_say_what_is_the_case_now() -> None:
    at = Roster(GPU)
    assert at.notices == []
    at.device_failed(0, "no driver", 0.0)
    assert at.notices == ["GPU 0: no driver; the others render its chunks until it is back"]
    at.device_failed(2, "it hung", 0.0)
    instead = "chunks are rendered by 3 CPU workers (pillow) until it is back"
    assert at.notices == [f"GPU 0: no driver; {instead}", f"GPU 2: it hung; {instead}"]
    at.device_ready(0)
    assert at.notices == ["GPU 2: it hung; the others render its chunks until it is back"]


def test_workers_that_end_before_they_are_ready_are_put_off_and_at_last_given_up() -> None:
    at = Roster(PILLOW)
    said = []
    for failures, delay in enumerate((*CPU_DELAYS, CPU_DELAYS[-1]), 1):
        said.append(at.cpu_failed("exit status 1", 10.0))
        assert not at.cpu_due(10.0 + delay - 0.01) and at.cpu_due(10.0 + delay)
        assert bool(said[-1]) == (failures >= STARTS)
    assert said[-1] == "workers end before they are ready (exit status 1, 4 times); see the log"
    at.cpu_ready()
    assert at.cpu_failed("exit status 1", 10.0) == ""


def test_a_backend_that_kills_its_workers_in_a_row_is_left_alone_for_a_while() -> None:
    assert 2 < CRASHES < UNEXPLAINED
    at, now = Roster(CPU), 100.0
    for _ in range(3 * CRASHES):  # with pictures in between it is the pictures
        assert at.crashed("signal 11", now) == "" and at.works(everywhere=True) == ""
    for delay in (*BACKEND_DELAYS, BACKEND_DELAYS[-1]):
        said = [at.crashed("signal 11", now) for _ in range(CRASHES)]
        assert said[:-1] == [""] * (CRASHES - 1) and said[-1].endswith(f"trying again in {delay:.0f} s")
        assert "(signal 11); chunks are rendered by pillow alone" in at.notices[0]
        assert at.cpu_backends(now + delay - 1) == ALONE and at.cpu_backends(now + delay) == BOTH
        now += delay
    assert at.works(everywhere=True) == "dali-cpu works again: chunks are rendered by it" and at.notices == []


def test_a_backend_that_fails_is_told_once_for_all_workers_until_it_works_in_all() -> None:
    at = Roster(CPU)
    assert at.fell_back("out of memory") == (
        "dali-cpu: out of memory; chunks are rendered by pillow until it works again; it is tried again from time to "
        "time"
    )
    assert at.fell_back("out of memory") == ""
    assert at.works(everywhere=False) == "" and len(at.notices) == 1
    assert at.works(everywhere=True) == "dali-cpu works again: chunks are rendered by it" and at.notices == []
    assert at.works(everywhere=True) == "" and at.fell_back("out of memory") != ""
    said = [at.fell_back(f"{number} bytes are not to be had") for number in range(100)]
    assert len([text for text in said if text]) < 10 and len(at.notices) < 10


@given(st.lists(st.tuples(st.sampled_from([0, 2]), st.booleans(), st.floats(0, 30)), max_size=80))
def test_cpu_workers_are_wanted_only_while_no_device_works_and_none_is_started_in_a_spin(
    events: list[tuple[int, bool, float]],
) -> None:
    at, now = Roster(GPU), 0.0
    ready = {0: False, 2: False}
    starts = {0: 0, 2: 0}
    for device, works, seconds in events:
        if at.device_due(device, now) and not ready[device]:
            starts[device] += 1
            ready[device] = works
            if works:
                at.device_ready(device)
            else:
                at.device_failed(device, "no", now)
        elif ready[device] and not works:
            ready[device] = False
            at.device_failed(device, "crash", now, worked=1.0)
        now += seconds
        assert not at.on_cpu or not any(ready.values())
        assert at.on_cpu == (at.cpu_workers(fallback=False) > 0)
    # The nth start of a device waits for n - 1 pauses.
    for count in starts.values():
        assert count <= 1 or now >= sum((*DEVICE_DELAYS, *[DEVICE_DELAYS[-1]] * count)[: count - 1])
