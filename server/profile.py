"""`headrace profile`: how fast each stage is alone and the chain as a whole, here, and what follows from it.

Nothing is measured with code of its own. The stages alone are those of `pipeline.render`, whose files come from memory,
and of `finish`; the chain is a real daemon with real workers and a Loader that does nothing with its batches. Reading
alone is the data set's reader, on files as they lie. A daemon that serves already is watched under its real load, by
what it says of itself. What follows is decided in `verdict.py`.
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from headrace.errors import ConfigError, DatasetError, HeadraceError
from headrace.finish import Finisher
from headrace.loader import Loader
from headrace.ping import ping
from headrace.pipeline import gpus, machine
from headrace.pipeline.backend import Backend, BackendFailed
from headrace.pipeline.dataset import open_index, open_source
from headrace.pipeline.index import Index
from headrace.pipeline.ledger import Ledger
from headrace.pipeline.order import order
from headrace.pipeline.probe import BadPicture, probe
from headrace.pipeline.reading import Source
from headrace.pipeline.render import ChunkRenderer
from headrace.pipeline.spec import Config, Stream
from headrace.protocol import Pong
from headrace.server import rates, ring_size, verdict
from headrace.server.own import serving
from headrace.server.usage import cpu_seconds, machine_seconds, own_bytes
from headrace.server.verdict import Advice, Chain, Headroom, Machine, Model, Setting, Verdict, plural
from headrace.server.verify import Progress, Watch
from headrace.slots import Ring, SlotLayout
from headrace.stages import Stages
from headrace.workers import cpus
from headrace.workers.crew import Crew, crew

#: Rows of a batch that the chain is asked for, and how many are kept ready at least, as by default.
_BATCH = 64
_PREFETCH = 2
#: What is read at most to be rendered from memory.
_SAMPLE, _SAMPLE_BYTES = 256, 256 << 20
#: Bytes of files that are rendered in one go, if they are several.
_TOGETHER = 12 << 20
#: Bytes of a ring, if they are not fewer slots than it must have.
_RING = 256 << 20
#: Seconds of a chain before it is measured: the workers begin one after the other, and so do their caches.
_WARM = 1.5
#: Chunks for each worker that make a measurement, or that it takes so many times as long.
_CHUNKS, _LONGER = 4, 3.0
#: Parts of a measurement, between which it is the others' turn.
_TURNS = 4
#: Share of the seconds of a measurement that each smaller one gets.
_SHORT = 0.4
#: Seconds that a daemon may take to answer beside its work.
_PING = 20.0
#: In forecasts of a daemon that is watched CPUs are no limit: whose they are nobody knows.
_MANY = 1 << 30


@dataclass(frozen=True, slots=True)
class Alone:
    """A stage with nothing beside it, on one core.

    Attributes:
        stage: its name.
        seconds: for an image.
        nbytes: for an image, where it moves any.
        first: seconds for an image that was never seen before, where that differs.
    """

    stage: str
    seconds: float
    nbytes: float = 0.0
    first: float | None = None

    @property
    def rate(self) -> float:
        """Images per second."""
        return 1.0 / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class Forecast:
    """
    Attributes:
        workers, cpus: of how many; of CPUs what others leave, where it was measured.
        rate: images per second that they are said to give.
        limit: the stage that limits them.
        basis: workers of the measurement that says it.
        measured: images per second that they gave; None: it was not tried.
    """

    workers: int
    cpus: float
    rate: float
    limit: str
    basis: int
    measured: float | None = None


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes.

    Attributes:
        worker, daemon: of its own, that a worker and the daemon took.
        consumer: of a Loader's batches.
        slot: of a chunk in the ring.
        least, usual: slots that the ring must have, and that it gets by the configuration.
    """

    worker: int
    daemon: int
    consumer: int
    slot: int
    least: int
    usual: int

    def total(self, workers: int, *, usual: bool) -> int:
        """Of a daemon with so many workers, and one consumer."""
        slots = self.usual if usual else self.least
        return workers * self.worker + self.daemon + self.consumer + slots * self.slot


@dataclass(frozen=True, slots=True)
class Profile:
    """
    Attributes:
        stream: its name; "" of a daemon with several.
        what: what was measured, a sentence.
        machine: where; None of a daemon that was watched.
        alone: stages, in the order of a picture's way.
        chains: the whole, for each number of workers.
        handing: images per second that a consumer gets out of a ring that holds them; None: not measured.
        verdict: which stage limits the fastest chain.
        headroom: what would be without that; None where it is no stage.
        potential: images per second that workers and CPUs could give to faster consumers; None: nothing was
            rendered that says it.
        forecasts: for numbers of workers and CPUs.
        distrust: why the last of them may be wrong.
        memory: that it takes; None of a daemon that was watched.
        advice: what to change.
        target: what it takes to feed what was asked for; None: nothing was.
    """

    stream: str
    what: str
    machine: Machine | None
    alone: tuple[Alone, ...]
    chains: tuple[Chain, ...]
    handing: float | None
    verdict: Verdict
    headroom: Headroom | None
    potential: float | None
    forecasts: tuple[Forecast, ...]
    distrust: tuple[str, ...]
    memory: Memory | None
    advice: tuple[Advice, ...]
    target: tuple[Advice, ...] | None = None

    @property
    def best(self) -> Chain:
        """The fastest chain."""
        return verdict.fastest(self.chains)

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        alone = [asdict(stage) | {"images_per_s": stage.rate} for stage in self.alone]
        chains = [
            asdict(replace(chain, stages=dict(chain.stages), cpu=dict(chain.cpu), client=dict(chain.client)))
            | {"images_per_s": chain.rate, "idle": chain.idle}
            for chain in self.chains
        ]
        headroom = None if self.headroom is None else asdict(self.headroom) | {"text": self.headroom.text}
        return asdict(replace(self, alone=(), chains=(), headroom=None)) | {
            "alone": alone,
            "chains": chains,
            "headroom": headroom,
        }


# -- of a configuration -----------------------------------------------------------------------------------------


def profile(
    config: Config,
    name: str,
    watch: Watch,
    *,
    workers: Sequence[int] = (),
    seconds: float = 5.0,
    target: float | None = None,
) -> Profile:
    """Measure a stream of a configuration.

    Args:
        workers: numbers of them to measure the chain with; of GPUs, of the threads of each one's worker. None: one, as
            many as the configuration says, and one number in between.
        seconds: for each of these; what is measured alone gets less.
        target: images per second that are wanted.

    Raises:
        ConfigError: what is named cannot run here.
        DatasetError: samples cannot be listed, or read.
        HeadraceError: the backend fails, or the daemon.
    """
    stream = config.streams[name]
    team = crew(config.workers, private=False, chosen=machine.choose(config.workers))  # before a GPU is in use: by us
    with watch(f"listing {name}") as progress:
        index = open_index(stream.dataset, config.cache_folder, progress=progress)
    with contextlib.closing(index), contextlib.closing(machine.make(config.workers)) as backend:
        with watch(f"stages of {name}, alone") as progress:
            stages = _Stages(stream, index, backend, seconds * _SHORT)
            alone = stages.measure(progress)
        measured = _measured(config, name, index, team, watch, workers, seconds)
        here = Machine(
            cpus.usable_cpus(),
            cpus.cores(),
            virtual=cpus.virtual(),
            cached=stages.cached,
            data=int(index.sizes.sum()),
            memory=ring_size.available_bytes(),
        )
        what = (
            f"{len(index):,} samples of {stages.nbytes / 1000:,.0f} kB and {stages.pixels / 1e6:.2f} megapixels "
            f"(medians); pictures of {stream.size[0]}x{stream.size[1]}, {stream.output.dtype}; {backend.render_id}"
        )
    best = verdict.fastest(measured.chains)
    found = verdict.judge(best, here.cpus)
    model = Model.of(best, here.cpus)
    limits = model.limits(best.workers, here.cpus)
    forecasts = _forecasts(measured.chains, here.cpus)
    basis = next(chain for chain in measured.chains if chain.workers == forecasts[-1].basis)
    setting = _setting(stream, team, stages, here.cpus)
    return Profile(
        stream=name,
        what=what,
        machine=here,
        alone=tuple(alone),
        chains=tuple(measured.chains),
        handing=measured.handing,
        verdict=found,
        headroom=verdict.headroom(model, found.stage, best.workers, here.cpus, quiet=best.crowded),
        potential=_finite(min(limits["workers"], limits["cpus"])),
        forecasts=tuple(forecasts),
        distrust=tuple(verdict.distrust(basis, here, forecasts[-1].workers, forecasts[-1].cpus)),
        memory=measured.memory,
        advice=tuple(verdict.advise(found, best, model, setting)),
        target=_reached(target, model, best.workers, here.cpus, stages.nbytes),
    )


def _finite(rate: float) -> float | None:
    return rate if math.isfinite(rate) else None


def _setting(stream: Stream, team: Crew, stages: _Stages, here: int) -> Setting:
    return Setting(
        backend=team.backend,
        processes=team.threads * len(team.devices) if team.devices else team.processes,
        cpus=here,
        dali=bool(machine.dali()) and machine.lack(machine.dali()) is None,
        gpu=_gpu_is_free(),
        source=stream.dataset.source,
        dtype=stream.output.dtype,
        dct_scaling=stream.decode.dct_scaling,
        jpegs=stages.jpegs,
        pixels=stages.pixels,
        shown=float(stream.size[0] * stream.size[1]),
        nbytes=stages.nbytes,
    )


def _reached(
    target: float | None, model: Model, workers: int, here: int | None, nbytes: float
) -> tuple[Advice, ...] | None:
    return None if target is None else tuple(verdict.reach(target, model, workers, here, nbytes))


def _gpu_is_free() -> bool:
    there = gpus.look()
    return any(not gpu.busy and not gpu.trouble for gpu in there.found)


def _forecasts(chains: Sequence[Chain], here: int) -> list[Forecast]:
    """What the smallest measurement says of the others, and the largest of more CPUs than there are."""
    first, largest = verdict.base(chains), max(chains, key=lambda chain: chain.workers)
    near, far = Model.of(first, here), Model.of(largest, here)
    found = [
        _forecast(near, first, chain.workers, chain.free(here), chain.rate)
        for chain in sorted(chains, key=lambda chain: chain.workers)
        if chain is not first
    ]
    if here > largest.workers:
        found.append(_forecast(far, largest, here, here))
    each = max(here, largest.workers)  # who has more workers than CPUs wants them elsewhere, too
    return found + [_forecast(far, largest, times * each, times * here) for times in (2, 4)]


def _forecast(model: Model, basis: Chain, workers: int, here: float, measured: float | None = None) -> Forecast:
    return Forecast(workers, here, model.rate(workers, here), model.limiting(workers, here), basis.workers, measured)


class _Memory:
    """A source whose samples are in memory."""

    def __init__(self, samples: Mapping[int, bytes | BadPicture]) -> None:
        self._samples = samples

    def read(self, i: int) -> bytes:
        sample = self._samples[i]
        if isinstance(sample, BadPicture):
            raise BadPicture(sample.stage, sample.reason)
        return sample


@dataclass(slots=True)
class _Place:
    """Rows of a chunk that were read."""

    chunk: int
    rows: list[int] = field(default_factory=list)
    nbytes: int = 0


class _Stages:
    """Measures each stage alone, in this process.

    Args:
        seconds: for each part of it.

    Attributes:
        nbytes, pixels: of a sample, medians.
        jpegs: share of the samples.
        cached: see `Machine`.
    """

    def __init__(self, stream: Stream, index: Index, backend: Backend, seconds: float) -> None:
        self._stream = stream
        self._index = index
        self._backend = backend
        self._seconds = seconds
        self._samples: dict[int, bytes | BadPicture] = {}
        self._places: list[_Place] = []
        self.nbytes = self.pixels = self.jpegs = 0.0
        self.cached: float | None = None

    def measure(self, progress: Progress) -> list[Alone]:
        """
        Raises:
            DatasetError: a sample cannot be read.
            HeadraceError: the backend fails.
        """
        progress(0, 3, ": reading")
        read = self._read(open_source(self._stream.dataset, self._index, self._stream.decode))
        self._look()
        progress(1, 3, ": rendering")
        layout = self._stream.layout(self._index)
        ring = Ring.create(layout, 1)
        try:
            rendered = self._render(ring)
            progress(2, 3, ": finishing")
            finished = self._finish(ring, layout)
        finally:
            ring.close()
        progress(3, 3)
        return [read, *rendered, finished]

    def _read(self, source: Source) -> Alone:
        """As the files lie, so the first time from the disk if they are not in memory."""
        chunk, samples = self._stream.chunk, len(self._index)
        chunks = -(-samples // chunk)
        step = max(1, chunks // max(1, _SAMPLE // chunk))
        numbers = range(0, chunks, step)
        total, spent = 0, 0.0
        inside: list[bool] = []
        for number, row, i in self._spread(numbers):
            if (here := self._in_memory(i)) is not None:
                inside.append(here)
            began = time.perf_counter()
            sample = self._sample(source, i)
            spent += time.perf_counter() - began
            self._samples[i] = sample
            self._place(number, row, len(sample) if isinstance(sample, bytes) else 0)
            total += len(sample) if isinstance(sample, bytes) else 0
            if len(self._samples) >= _SAMPLE or total >= _SAMPLE_BYTES or spent > self._seconds:
                break
        self.cached = sum(inside) / len(inside) if inside else None
        self.nbytes = statistics.median(self._index.sizes[list(self._samples)].tolist())
        return Alone("read", spent / len(self._samples), total / len(self._samples))

    def _spread(self, numbers: Iterable[int]) -> Iterator[tuple[int, int, int]]:
        """Chunk, row and line of the listing, of all rows of some chunks."""
        chunk, samples = self._stream.chunk, len(self._index)
        for number in numbers:
            first, count = number * chunk, min(chunk, samples - number * chunk)
            indices = order(self._stream.seed, 0, samples, first, count, shuffle=self._stream.shuffle).tolist()
            for row, i in enumerate(indices):
                yield number, row, i

    def _place(self, number: int, row: int, nbytes: int) -> None:
        """Add a row to those that are rendered together; large ones are few, so that time can be kept to."""
        last = self._places[-1] if self._places else None
        if last is None or last.chunk != number or last.nbytes + nbytes > _TOGETHER:
            self._places.append(last := _Place(number))
        last.rows.append(row)
        last.nbytes += nbytes

    def _sample(self, source: Source, i: int) -> bytes | BadPicture:
        try:
            return source.read(i)
        except BadPicture as bad:
            return bad.with_traceback(None)
        except OSError as error:
            raise DatasetError(f"sample {i}, {self._index.shown_full(i)}: cannot be read: {error.strerror}") from error

    def _in_memory(self, i: int) -> bool | None:
        """Whether the kernel has the middle of the file in memory; None: nobody says, or it is no file of its own."""
        if self._index.container is not None:
            return None
        try:
            fd = os.open(self._index.full_path(i), os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            os.preadv(fd, [bytearray(1)], int(self._index.sizes[i]) // 2, os.RWF_NOWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return None
        finally:
            os.close(fd)
        return True

    def _look(self) -> None:
        """Sizes and formats of the samples."""
        pixels, jpegs = [0], 0
        for data in self._samples.values():
            with contextlib.suppress(BadPicture):
                if isinstance(data, bytes):
                    picture = probe(data, self._stream.decode)
                    pixels.append(picture.height * picture.width)
                    jpegs += picture.format in ("JPEG", "MPO")
        self.pixels = statistics.median(pixels[1:] or pixels)
        self.jpegs = jpegs / len(self._samples)

    def _render(self, ring: Ring) -> list[Alone]:
        renderer = ChunkRenderer(self._stream, self._index, self._backend, _Memory(self._samples))
        convicted = Ledger(self._index).convicted

        def whole(places: Sequence[_Place], until: float = math.inf) -> tuple[Stages, list[_Place]]:
            stages, done = Stages(), []
            for place in places:
                stages.merge(renderer.render(0, place.chunk, ring.views[0], place.rows, convicted).stages)
                done.append(place)
                if time.perf_counter() > until:
                    break
            return stages, done

        try:
            began = time.perf_counter()
            first, places = whole(self._places, began + self._seconds)
            later, passes = Stages(), 0
            began = time.perf_counter()
            while passes == 0 or time.perf_counter() - began < self._seconds:
                later.merge(whole(places)[0])
                passes += 1
        except BackendFailed as failed:
            raise HeadraceError(f"the backend fails: {failed}") from failed
        images = sum(len(place.rows) for place in places)
        once = first.status()
        found = []
        for name, status in sorted(later.status().items(), key=_place):
            if name != "read":  # from memory
                before = once[name].seconds / images if name in once else None
                found.append(Alone(name, status.seconds / images / passes, status.nbytes / images / passes, before))
        total = sum(stage.seconds for stage in found)
        return [*found, Alone("chunk", total, 0.0, sum(stage.first or stage.seconds for stage in found))]

    def _finish(self, ring: Ring, layout: SlotLayout) -> Alone:
        finisher = Finisher(self._stream.output, layout.height, layout.width)
        levels = ring.views[0].images
        out = finisher.rows(np.empty(layout.chunk * finisher.row_bytes, np.uint8), layout.chunk)
        finisher.finish(levels, out)
        done, began = 0, time.perf_counter()
        while done == 0 or time.perf_counter() - began < self._seconds / 4:
            finisher.finish(levels, out)
            done += 1
        return Alone("finish", (time.perf_counter() - began) / done / layout.chunk, finisher.row_bytes)


def _place(named: tuple[str, object]) -> int:
    """Where a stage stands in the order of a picture's way."""
    names = [*verdict.WORKER_STAGES]
    return names.index(named[0]) if named[0] in names else len(names)


# -- the chain --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Measured:
    chains: list[Chain]
    handing: float | None
    memory: Memory | None


def _measured(
    config: Config, name: str, index: Index, team: Crew, watch: Watch, workers: Sequence[int], seconds: float
) -> _Measured:
    most = team.threads if team.devices else team.processes
    numbers = sorted(set(workers)) or _numbers(most)
    daemons = [_Daemon(config, name, index, team, number) for number in numbers]
    measured = _Measured([], None, None)
    # Of one GPU there is one worker at a time.
    for together in [[daemon] for daemon in daemons] if team.devices else [daemons]:
        counts = " and ".join(str(daemon.number) for daemon in together)
        what = "threads of a GPU" if team.devices else plural(together[-1].number, "worker")
        with watch(f"{name} with {counts} {what}") as progress, contextlib.ExitStack() as stack:
            for daemon in together:
                stack.enter_context(daemon)
            measured.chains += _in_turns(together, seconds, progress)
            if together[-1] is daemons[-1]:
                measured.handing = daemons[-1].handing(seconds * _SHORT)
    measured.memory = daemons[-1].memory
    return measured


def _in_turns(daemons: Sequence[_Daemon], seconds: float, progress: Progress) -> list[Chain]:
    """Each daemon's chain, measured a part of the time at a time, so that whatever else the machine does meets all of
    them; as one part where a chunk takes too long for that.
    """
    laps = [daemon.warm(min(_WARM, seconds)) for daemon in daemons]
    turns = 1 if len(daemons) == 1 else max(1, min(_TURNS, int(seconds / (_CHUNKS * max(laps)))))
    parts: list[list[Chain]] = [[] for _ in daemons]
    for turn in range(turns):
        for d in sorted(range(len(daemons)), reverse=turn % 2 == 1):
            done = sum(map(len, parts)) / len(daemons) / turns

            def tell(share: float, note: str, done: float = done) -> None:
                progress(int(1000 * (done + share / len(daemons) / turns)), 1000, note)

            parts[d].append(daemons[d].measure(seconds / turns, _CHUNKS / turns, tell))
    return [verdict.joined(part) for part in parts]


def _numbers(most: int) -> list[int]:
    """Of workers that are tried: one, all, and one between."""
    between = 1 << round(np.log2(most) / 2)
    return sorted({1, int(between), most})


class _Daemon:
    """A daemon of one's own with so many workers, and a Loader that does nothing with what it gets.

    Attributes:
        number: of workers, of GPUs of the threads of each one's worker.
        memory: as in `Profile`, once it was measured.
    """

    def __init__(self, config: Config, name: str, index: Index, team: Crew, number: int) -> None:
        self.number = number
        self._name = name
        self._stream = config.streams[name]
        self._index = index
        self._cache = config.cache_folder
        self._stack = contextlib.ExitStack()
        self._workers = number * max(1, len(team.devices))
        key = "threads" if team.devices else "processes"
        in_flight = team.chunks - team.processes + (team.processes if team.devices else number)
        layout = self._stream.layout(index)
        need = ring_size.Need(layout, in_flight, layout.chunks(len(index)), 1)
        self._slots = max(need.fewest, min(need.most, max(_RING // layout.stride, 2 * in_flight + 2)))
        # So many batches that every worker finds a chunk that is asked for when it has done with one.
        self._prefetch = max(_PREFETCH, -(-2 * in_flight * layout.chunk // self._rows(index)))
        settled: dict[str, Any] = {"backend": team.backend}
        if team.devices:  # named, because they are in use: by us
            settled["devices"] = list(team.devices)
        self._document = config.plain() | {
            "cache_dir": str(self._cache),
            "memory": f"{self._slots} slots",
            "metrics": None,
            "workers": config.workers.plain() | settled | {key: number},
            "streams": {name: self._stream.plain()},
        }
        left = ring_size.available_bytes()
        all_streams = replace(need, in_flight=team.chunks, streams=len(config.streams))
        try:
            usual = ring_size.slots(name, config.memory, all_streams, left, left)
        except ConfigError:
            usual = all_streams.fewest
        self.memory = Memory(0, 0, 0, layout.stride, need.fewest, usual)

    @staticmethod
    def _rows(index: Index) -> int:
        """Of a batch."""
        return min(_BATCH, len(index))

    def __enter__(self) -> _Daemon:
        output = self._stream.output
        with contextlib.ExitStack() as stack:
            place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-profile-")))
            document = self._document | {"listen": [f"ipc://{place}/d.sock"]}
            self._address = stack.enter_context(serving(document, place))
            self._loader = stack.enter_context(
                Loader(
                    self._address,
                    stream=self._name,
                    batch_size=self._rows(self._index),
                    rank=0,
                    world_size=1,
                    last_batch="partial",
                    on_bad_sample="mask",  # whose rows take their time, too
                    max_bad=1.0,
                    dtype="float16" if output.dtype == "bfloat16" else None,  # as many bytes, known to NumPy
                    output="numpy",
                    prefetch=self._prefetch,
                )
            )
            self._batches = _endless(self._loader)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def warm(self, seconds: float) -> float:
        """Let workers and their caches begin; returns seconds that a worker takes for a chunk, about."""
        next(self._batches)
        began = time.perf_counter()
        images = 0
        while (spent := time.perf_counter() - began) < seconds:
            images += len(next(self._batches).indices)
        self._settle()
        return spent * self._workers * self._stream.chunk / max(1, images)

    def measure(self, seconds: float, chunks: float, tell: Callable[[float, str], None]) -> Chain:
        """
        Args:
            chunks: that each worker is to render at least, if that does not take too long.
            tell: is called with how much is done, and a note.
        """
        self._begin()
        address, batches = self._address, self._batches
        before, cpu, (busy, stolen) = ping(address, timeout=_PING), self._cpu(address), machine_seconds()
        images, waited, began = 0, 0.0, time.perf_counter()
        enough = chunks * self._workers * self._stream.chunk
        while (spent := time.perf_counter() - began) < seconds or (images < enough and spent < _LONGER * seconds):
            rate = f", {images / spent:.0f} images/s with {self.number}" if images else ""
            tell(min(1.0, spent / seconds), rate)
            entered = time.perf_counter()
            images += len(next(batches).indices)
            waited += time.perf_counter() - entered
        spent = time.perf_counter() - began
        after, used, (busy_now, stolen_now) = ping(address, timeout=_PING), self._cpu(address), machine_seconds()
        all_cpus = spent * (os.cpu_count() or 1)
        self._weigh(after, self._loader)
        self._settle()
        chain = watched(before, after, spent, self._name)
        return replace(
            chain,
            workers=self._workers,
            images=images,
            cpu=(mine := {who: used[who] - cpu[who] for who in used}),
            waited=waited / spent,
            others=max(0.0, (busy_now - busy - sum(mine.values())) / all_cpus),
            stolen=(stolen_now - stolen) / all_cpus,
        )

    def _begin(self) -> None:
        """Drop what was made while nobody looked, and let each worker end its first chunk: with that it says how long
        it has waited for it.
        """
        images = -self._prefetch * self._loader.batch_size
        while images < 2 * self._workers * self._stream.chunk:
            images += len(next(self._batches).indices)

    def _settle(self) -> None:
        """Wait until all is there that was asked for, so that it disturbs nobody."""
        until = time.monotonic() + _PING
        while time.monotonic() < until:
            if not any(client.outstanding for client in ping(self._address, timeout=_PING).clients):
                return
            time.sleep(0.02)

    def _cpu(self, address: str) -> dict[str, float]:
        pong = ping(address, timeout=_PING)
        return {
            "workers": sum(map(cpu_seconds, pong.workers)),
            "daemon": cpu_seconds(pong.pid),
            "client": time.process_time(),
        }

    def _weigh(self, pong: Pong, loader: Loader) -> None:
        layout, output = self._stream.layout(self._index), self._stream.output
        batch = Finisher(output, layout.height, layout.width).row_bytes * loader.batch_size
        self.memory = replace(
            self.memory,
            worker=max(map(own_bytes, pong.workers), default=0),
            daemon=own_bytes(pong.pid),
            consumer=(_PREFETCH + 2) * batch,
        )

    def handing(self, seconds: float) -> float | None:
        """Images per second out of a ring that holds them already; None where it does not hold them."""
        address, loader = self._address, self._loader
        rows = loader.batch_size
        count = min(len(loader), int(self._slots * 0.6) * self._stream.chunk // rows)
        if count < 2:
            return None
        epoch = loader.state_dict()["epoch"] + 2

        def once() -> int:
            loader.set_epoch(epoch)
            batches = iter(loader)
            taken = sum(len(next(batches).indices) for _ in range(count))
            del batches
            loader.set_epoch(epoch + 1)  # so that the next time begins at the beginning
            return taken

        once()
        before, fastest, began = self._status(address), 0.0, time.perf_counter()
        while not fastest or time.perf_counter() - began < seconds:
            since = time.perf_counter()
            images = once()
            # The fastest pass: beside the others workers still render what was asked for ahead.
            fastest = max(fastest, images / (time.perf_counter() - since))
        after = self._status(address)
        return fastest if after.hits - before.hits > 0.8 * (after.delivered - before.delivered) else None

    def _status(self, address: str) -> Any:
        return ping(address, timeout=_PING).streams[self._name]


def _endless(loader: Loader) -> Iterator[Any]:
    while True:
        yield from loader


# -- a daemon that serves -----------------------------------------------------------------------------------------


def against(
    address: str,
    watch: Watch,
    *,
    stream: str | None = None,
    seconds: float = 5.0,
    target: float | None = None,
    curve: Mapping[str, Any] | None = None,
) -> Profile:
    """Watch a daemon under its real load.

    Args:
        stream: which trainers' share of it to look at; None: of all. Workers are always those of all streams.
        curve: as `ping`'s.

    Raises:
        ConfigError: no such stream.
        HeadraceError: the daemon does not answer, or nobody takes anything from it.
    """
    before = ping(address, timeout=_PING, curve=curve)
    if stream is not None and stream not in before.streams:
        raise ConfigError(f"{address}: there is no stream {stream!r}; there is {', '.join(before.streams)}")
    began = time.perf_counter()
    with watch(f"watching {address}") as progress:
        while (spent := time.perf_counter() - began) < seconds:
            progress(int(spent * 10), int(seconds * 10))
            time.sleep(min(0.1, seconds - spent + 0.001))
    after = ping(address, timeout=_PING, curve=curve)
    chain = watched(before, after, time.perf_counter() - began, stream)
    if not chain.consumers:
        raise HeadraceError(f"{address}: no trainer is there: nothing to watch")
    found = verdict.judge(chain, trainers=True)
    model = Model.of(chain, _MANY)
    at = [status for name, status in after.streams.items() if status is not None and stream in (None, name)]
    was = [status for name, status in before.streams.items() if status is not None and stream in (None, name)]
    delivered = sum(one.delivered for one in at) - sum(one.delivered for one in was)
    again = sum(one.recomputed for one in at) - sum(one.recomputed for one in was)
    setting = Setting("", chain.workers, chain.workers, again=again / delivered if delivered else 0.0)
    return Profile(
        stream=stream or "",
        what=f"the daemon at {address}, {chain.workers} {plural(chain.workers, 'worker')}, {chain.consumers} "
        f"{plural(chain.consumers, 'trainer')}; "
        f"watched for {chain.seconds:.1f} s",
        machine=None,
        alone=(),
        chains=(chain,),
        handing=None,
        verdict=found,
        headroom=verdict.headroom(model, found.stage, chain.workers, _MANY),
        potential=_finite(model.limits(chain.workers, _MANY)["workers"]),
        forecasts=(),
        distrust=(),
        memory=None,
        advice=tuple(verdict.advise(found, chain, model, setting)),
        target=_reached(target, model, chain.workers, None, chain.nbytes / max(1, chain.rendered)),
    )


def watched(before: Pong, after: Pong, seconds: float, stream: str | None = None) -> Chain:
    """What a daemon did between two answers.

    Args:
        stream: whose clients and pictures count; None: all.
    """
    stages, nbytes, wait = {}, 0, 0.0
    for name, status in sorted(after.stages.items(), key=_place):
        was = before.stages.get(name)
        spent = status.seconds - (was.seconds if was is not None else 0.0)
        if name == "wait":
            wait = spent
        elif name != "send":  # the daemon's own
            stages[name] = spent
        if name == "read":
            nbytes = status.nbytes - (was.nbytes if was is not None else 0)
    rendered = _images(after) - _images(before)
    pairs = [(was, now) for was, now in rates.pairs(before, after) if stream in (None, now.stream)]
    waited, spent_in_all = (
        sum(getattr(now, what) - (getattr(was, what) if was is not None else 0.0) for was, now in pairs)
        for what in ("waited", "spent")
    )
    images = sum(now.images - (was.images if was is not None else 0) for was, now in pairs)
    taken = sum(now.images for _, now in pairs)
    client = {
        what: sum(now.stages[what].seconds for _, now in pairs if what in now.stages) / taken
        for what in ("copy", "finish")
        if taken and any(what in now.stages for _, now in pairs)
    }
    return Chain(
        workers=len(after.workers),
        seconds=seconds,
        images=max(0, images),
        rendered=max(0, rendered),
        stages=stages,
        wait=wait,
        nbytes=nbytes,
        client=client,
        # Who has taken nothing meanwhile trains, or waits for what it has asked for.
        waited=min(1.0, max(0.0, waited / spent_in_all))
        if spent_in_all > 0
        else float(any(now.outstanding for _, now in pairs)),
        consumers=len(pairs),
    )


def _images(pong: Pong) -> int:
    """Rendered so far, of all streams."""
    return sum(status.images for status in pong.streams.values() if status is not None)
