"""Who renders, on machines that are made up."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.errors import ConfigError
from headrace.pipeline.machine import Choice
from headrace.pipeline.spec import Workers
from headrace.workers import crew as module
from headrace.workers.crew import Crew, crew
from headrace.workers.device import least_memory

GIB = 1 << 30
TWO_GPUS = Choice("dali-gpu", (0, 3), buses=("0000:3b:00.0", "0000:5e:00.0"))


def made(chosen: Choice, *, cpus: int, monkeypatch: pytest.MonkeyPatch, **workers: Any) -> Crew:
    monkeypatch.setattr(module, "worker_count", lambda processes, private: cpus if processes == "auto" else processes)
    return crew(Workers(**workers), private=False, chosen=chosen)


def test_cpu_workers_alone_have_no_devices_and_fall_back_on_pillow_where_that_is_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for backend, fallback in (("pillow", None), ("fake", None), ("dali-cpu", "pillow")):
        team = made(Choice(backend), cpus=4, monkeypatch=monkeypatch)
        assert (team.backend, team.cpu_backend, team.fallback) == (backend, backend, fallback)
        assert (team.processes, team.devices, team.workers, team.chunks) == (4, (), 4, 4)


def test_gpus_share_the_cpus_and_have_their_chunks_beside_those_of_cpu_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    team = made(TWO_GPUS, cpus=9, monkeypatch=monkeypatch, processes=3, in_flight=5)
    assert (team.devices, team.threads, team.cpu_backend) == ((0, 3), 4, "pillow")
    assert (team.workers, team.chunks) == (5, 13)


def test_a_client_is_at_home_at_the_gpu_at_the_same_place(monkeypatch: pytest.MonkeyPatch) -> None:
    team = made(TWO_GPUS, cpus=4, monkeypatch=monkeypatch)
    places = ("0000:3b:00.0", "0000:5e:00.0", "0000:af:00.0", "")
    assert [team.home(place) for place in places] == [0, 3, None, None]
    assert made(Choice("pillow"), cpus=4, monkeypatch=monkeypatch).home("0000:3b:00.0") is None
    divided = Choice("dali-gpu", (0, 1, 2), buses=("0000:3b:00.0", "0000:3b:00.0", ""))
    assert made(divided, cpus=4, monkeypatch=monkeypatch).home("0000:3b:00.0") is None
    assert made(divided, cpus=4, monkeypatch=monkeypatch).home("") is None


def test_threads_leave_half_of_the_memory_for_pictures_unless_they_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    team = made(TWO_GPUS, cpus=512, monkeypatch=monkeypatch)
    assert 16 < team.threads < 256 and least_memory(team.threads) <= 2 * GIB < least_memory(team.threads + 2)
    assert made(TWO_GPUS, cpus=512, monkeypatch=monkeypatch, threads=80).threads == 80


def test_memory_that_is_too_little_before_the_first_picture_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match=r"gpu_memory: 1024 MiB are too little: a worker with 64 threads takes about 2"
    ):
        made(TWO_GPUS, cpus=8, monkeypatch=monkeypatch, threads=64, gpu_memory="1GiB")
    with pytest.raises(ConfigError, match="with 1 threads"):
        made(TWO_GPUS, cpus=8, monkeypatch=monkeypatch, gpu_memory="64MiB")
    assert made(Choice("pillow"), cpus=8, monkeypatch=monkeypatch, gpu_memory="64MiB").devices == ()
