"""A worker's backend, and who takes over."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.pipeline.backend import BackendFailed
from headrace.pipeline.fake import FakeBackend
from headrace.workers.renderer import Renderer

DELAYS = (5.0, 30.0, 120.0, 600.0)


class Engine(FakeBackend):
    def __init__(self, name: str) -> None:
        self.render_id = name
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


class World:
    """A first backend that can be had or not, and a clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.broken = ""
        self.made: list[Engine] = []
        self.tries = 0

    def first(self) -> Engine:
        self.tries += 1
        if self.broken:
            raise BackendFailed(self.broken)
        self.made.append(Engine("first"))
        return self.made[-1]

    def renderer(self) -> Renderer:
        return Renderer(self.first, lambda: Engine("fallback"), lambda: self.now)


def test_the_first_backend_renders_as_long_as_it_works() -> None:
    world = World()
    at = world.renderer()
    for _ in range(3):
        backend = at.choose()
        assert backend.render_id == "first"
        at.rendered(backend)
    assert world.tries == 1 and at.trouble == ""


def test_without_a_fallback_a_failure_is_the_callers() -> None:
    world = World()
    world.broken = "no driver"
    with pytest.raises(BackendFailed, match="no driver"):
        Renderer(world.first)
    world.broken = ""
    at = Renderer(world.first)
    with pytest.raises(BackendFailed, match="out of memory"):
        at.failed(at.choose(), BackendFailed("out of memory"))
    assert world.made[0].closed == 1
    # Asked for the fallback, it renders itself: there is none.
    assert Renderer(world.first).choose(fallback=True).render_id == "first"


def test_a_fallback_that_fails_is_the_callers_too() -> None:
    world = World()
    at = world.renderer()
    with pytest.raises(BackendFailed, match="it as well"):
        at.failed(at.choose(fallback=True), BackendFailed("it as well"))


def test_what_fails_is_closed_and_tried_again_ever_later_not_for_every_job() -> None:
    world = World()
    at = world.renderer()
    at.failed(at.choose(), BackendFailed("out of memory"))
    assert at.choose().render_id == "fallback" and at.trouble == "out of memory" and world.made[0].closed == 1
    world.broken = "still none"
    tried = []
    for second in range(2000):
        world.now, before = float(second), world.tries
        assert at.choose().render_id == "fallback"
        if world.tries > before:
            tried.append(second)
    assert tried == [5, 35, 155, 755, 1355, 1955] and at.trouble == "still none"


def test_one_that_comes_back_has_to_render_before_the_trouble_is_over() -> None:
    world = World()
    world.broken = "no driver"
    at = world.renderer()
    world.broken, world.now = "", 5.0
    backend = at.choose()
    assert backend.render_id == "first" and at.trouble == "no driver"
    at.rendered(at.choose(fallback=True))
    assert at.trouble == "no driver"
    at.rendered(backend)
    assert at.trouble == ""
    # It fails again soon: the pause goes on growing. After an hour of work it begins anew.
    at.failed(backend, BackendFailed("crashed"))
    world.now += DELAYS[1] - 1
    assert at.choose().render_id == "fallback"
    world.now += 1
    assert at.choose().render_id == "first"
    world.now += 3600
    at.failed(at.choose(), BackendFailed("crashed"))
    world.now += DELAYS[0]
    assert at.choose().render_id == "first"


@given(st.lists(st.tuples(st.floats(0, 100), st.booleans(), st.booleans()), max_size=60))
def test_whatever_fails_when_somebody_renders_and_few_tries_are_made(steps: list[tuple[float, bool, bool]]) -> None:
    world = World()
    at = world.renderer()
    failures = 0
    for seconds, broken, fails in steps:
        world.now += seconds
        world.broken = "broken" if broken else ""
        backend = at.choose()
        if fails and backend.render_id == "first":
            failures += 1
            at.failed(backend, BackendFailed("it broke"))
            backend = at.choose()
            assert backend.render_id == "fallback" and at.trouble == "it broke"
        at.rendered(backend)
        assert (at.trouble == "") == (backend.render_id == "first")
    assert world.tries <= 1 + failures + world.now / DELAYS[0]
    at.close()
    assert all(engine.closed == 1 for engine in world.made)
