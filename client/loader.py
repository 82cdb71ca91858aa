"""The Loader: an iterable over the batches of this rank, epoch after epoch."""

from __future__ import annotations

import logging
import operator
import os
import time
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Literal, NoReturn, TypeVar, cast, get_args

from headrace.assembly import REPLACEMENTS, Assembly, Counts, OnBadSample, ready
from headrace.batch import Batch
from headrace.connect import scheme
from headrace.device import open_device
from headrace.draws import uniforms
from headrace.engine import ENDED, Engine, Locate
from headrace.errors import ConfigError, StateError
from headrace.form import Form, import_torch, library
from headrace.keys import Keys
from headrace.mix import Mixing, check_labels
from headrace.output import CutMix, MixUp, Output
from headrace.pace import Work, plain, summary
from headrace.private import PrivateDaemon
from headrace.protocol import Welcome
from headrace.rank import resolve
from headrace.several import Servers
from headrace.staging import DevicePixels
from headrace.steps import LastBatch, Steps
from headrace.transport import Transport

log = logging.getLogger(__name__)

#: Bad pictures of an epoch that are logged one by one; the rest is counted.
_LOGGED = 10

#: Epochs are numbered below this, which any language can count to.
_EPOCHS = 1 << 63

T = TypeVar("T")


@dataclass(slots=True)
class _Epoch:
    """What `stats` tells of an epoch: `noted` batches with `rows`; `waited` and `spent` are seconds; `begun` is the
    work that had been done for the Loader when it began, `work` what has been done since.
    """

    counts: Counts = field(default_factory=Counts)
    noted: int = 0
    rows: int = 0
    waited: float = 0.0
    spent: float = 0.0
    begun: Work = Work()
    work: Work = Work()


class Loader:
    """Batches from a daemon, for this rank.

    `for images, labels in loader` is one epoch, the next `for` the next one. `iter()` begins nothing; a batch counts
    once `next()` has returned it; `break` ends the epoch; an error from `next()` leaves the position where it was.
    Each `next()` waits at most `timeout` seconds without any progress.

    Args:
        source: a daemon's address, `ipc://PATH` or `tcp://HOST:PORT`; a list of them, of servers of the same pictures,
            among which the chunks are divided; or a YAML file's path, a mapping or a `headrace.Config`, for which a
            private daemon is started or joined.
        stream: its name; not needed where there is just one.
        batch_size: rows of a batch of one rank.
        rank, world_size: both or none: then from `torch.distributed`, torchrun's or Slurm's environment, looked at
            when they are first needed.
        last_batch: `drop`, `partial` or `pad`; by default `partial` for one rank and `pad` for several.
        on_bad_sample: `skip`, `replace`, `mask` or `raise`; by default the stream's.
        max_bad: share of this rank's positions that may be bad before an epoch ends with an error, from 17 on; by
            default the stream's.
        dtype: `uint8`, `float16`, `bfloat16` or `float32`, by name or torch's; layout: `NCHW`, `NHWC` or
            `channels_last`; mean, std: per channel; by default the stream's `output`.
        mixup, cutmix: `{"alpha": NUMBER}`, and labels are then float32 (n, classes); False: none; by default the
            stream's `output`. Mixed batches depend on batch and world size, see `docs/configuration.md`.
        output: `torch` or `numpy`.
        device: None or `cpu`; or `cuda`, `cuda:1`, a torch device: images and labels are tensors there, safe to use on
            the stream that is current in `next()`, and `prefetch` batches lie there ready. It has never run on a GPU.
        prefetch: batches kept ready. Further ones are begun, so that all ranks together ask for as many chunks as the
            daemon's workers can be at; with 0 no more than the batch that is due.
        transport: `shm`, through memory shared with a daemon on this host; `tcp`; or `auto`, which is `shm` wherever
            the daemon can be reached on this host.
        curve: keys for a `tcp://` address, `{"secret_key": FILE, "server": FILE}`: this client's own, and the daemon's
            public one. `headrace keygen` makes them.
        exact: refuse pictures that another renderer made than the one the daemon named first.
        timeout: seconds.

    Raises:
        ConfigError: an argument, or the configuration, is wrong; or `shm` and the daemon is on another host; or its
            keys and those given do not fit.
        DatasetError: the samples cannot be listed.
        ConnectionLost: no daemon listens at the address.
        DeadlineError: it does not answer.
        ProtocolError: what answers there is another version, or no daemon.
    """

    def __init__(
        self,
        source: Any,
        *,
        stream: str | None = None,
        batch_size: int,
        rank: int | None = None,
        world_size: int | None = None,
        last_batch: str | None = None,
        on_bad_sample: str | None = None,
        max_bad: float | None = None,
        dtype: Any = None,
        layout: str | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        mixup: Mapping[str, float] | MixUp | Literal[False] | None = None,
        cutmix: Mapping[str, float] | CutMix | Literal[False] | None = None,
        output: str = "torch",
        device: Any = None,
        prefetch: int = 2,
        transport: str = "auto",
        curve: Mapping[str, str | os.PathLike[str]] | None = None,
        exact: bool = False,
        timeout: float = 60.0,
    ) -> None:
        _among("transport", transport, get_args(Transport))
        self.batch_size = _whole("batch_size", batch_size, 1)
        self._prefetch = _whole("prefetch", prefetch, 0)
        if last_batch is not None:
            _among("last_batch", last_batch, get_args(LastBatch))
        if on_bad_sample is not None:
            _among("on_bad_sample", on_bad_sample, get_args(OnBadSample))
        if max_bad is not None and not (isinstance(max_bad, (int, float)) and 0 <= max_bad <= 1):
            raise ConfigError(f"max_bad: {max_bad!r} must be a number from 0 to 1")
        if not (isinstance(timeout, (int, float)) and timeout > 0):
            raise ConfigError(f"timeout: {timeout!r} must be a number of seconds above 0")
        kind = library(output)
        if kind == "torch":
            import_torch()
        self._device = open_device(device)
        if self._device is not None and kind != "torch":
            raise ConfigError(f"device: {device} takes tensors; use output='torch', which hand out DLPack")
        self._rank = (
            None if rank is None else _whole("rank", rank, 0),
            None if world_size is None else _whole("world_size", world_size, 1),
        )
        if self._rank != (None, None):
            resolve(*self._rank)
        self._last_batch = cast(LastBatch | None, last_batch)
        self._steps: Steps | None = None

        locate, self._address = _locate(source, timeout, exact=exact)
        self._servers = locate if isinstance(locate, Servers) else None
        bus = "" if self._device is None else self._device.bus
        self._engine = Engine(
            locate,
            stream,
            cast(Transport, transport),
            timeout=timeout,
            exact=exact,
            device=bus,
            keys=Keys.load(curve),
        )
        self._staging: DevicePixels | None = None
        self._finalizer = weakref.finalize(self, self._engine.close)
        try:
            self._engine.open()
            welcome = self._engine.welcome
            self._welcome = welcome
            self._on_bad_sample = cast(OnBadSample, on_bad_sample or welcome.on_bad_sample)
            self._max_bad = welcome.max_bad if max_bad is None else float(max_bad)
            try:
                form = welcome.output.replaced(
                    dtype=None if dtype is None else str(dtype).removeprefix("torch."),
                    layout=layout,
                    mean=_triple("mean", mean),
                    std=_triple("std", std),
                    mixup=mixup,
                    cutmix=cutmix,
                )
            except ValueError as error:
                raise ConfigError(str(error)) from None
            if form.dtype == "uint8" and not mean is std is None:
                raise ConfigError("dtype uint8 hands out the rendered levels; mean and std need a floating dtype")
            self._form = Form(
                kind,
                form,
                height=welcome.layout.height,
                width=welcome.layout.width,
                batch_size=self.batch_size,
                prefetch=self._prefetch,
                text_labels=welcome.labels == "text",
                columns=welcome.columns,
                mixing=_mixing(form, welcome),
                pixels=self._staged(form, welcome, timeout),
            )
        except BaseException:
            self.close()
            raise
        for notice in welcome.notices:
            log.warning("stream %s: %s", welcome.stream, notice)

        #: Where the next iteration begins, while there is no assembly.
        self._state = (0, 0)
        self._assembly: Assembly | None = None
        #: The iterator that holds the assembly from one `next` to the next: if it is dropped, the epoch has ended.
        #: Nobody holds it during a `next` and after one that failed: whoever asks then goes on.
        self._holder: weakref.ref[_Batches] | None = None
        #: The next epoch's beginning, fetched once all of the epoch before has been asked for.
        self._ahead: Assembly | None = None
        self._epochs: dict[int, _Epoch] = {}
        self._said_short = False

    # -- what it is -----------------------------------------------------------------------------------------

    @property
    def stream(self) -> str:
        """The stream's name."""
        return self._welcome.stream

    @property
    def classes(self) -> list[str]:
        """Names by label; empty where labels are no classes."""
        return list(self._welcome.classes)

    @property
    def num_samples(self) -> int:
        """Samples of the stream, over all ranks."""
        return self._welcome.samples

    def __len__(self) -> int:
        """Batches of a whole epoch for this rank, the same for every rank.

        Raises:
            ConfigError: `drop` leaves none.
            StateError: the sources of the rank contradict each other.
        """
        return self._settled().count(0)

    @property
    def remaining(self) -> int:
        """Batches from here to the end of the epoch."""
        return self._settled().count(self._position()[1])

    def __repr__(self) -> str:
        epoch, position = self._position()
        return f"Loader({self._address!r}, stream={self.stream!r}, epoch={epoch}, position={position})"

    @property
    def batch_sampler(self) -> _Sampler:
        """What Lightning looks for in a loader: `batch_sampler.sampler.set_epoch`, which it calls before each epoch.

        So the epoch is the right one also where it does not restore our state: from a checkpoint at an epoch's end.
        """
        return _Sampler(self)

    # -- where it stands ------------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is of this epoch. Not needed: epochs follow one another.

        The epoch that a loaded state is in keeps its position; any other begins at its beginning.
        """
        epoch = _whole("epoch", epoch, 0, _EPOCHS)
        if epoch != self._position()[0] or self._broken():
            self._move((epoch, 0))

    def state_dict(self) -> dict[str, Any]:
        """Where to go on: a few numbers and digests, the same on every rank at the same step."""
        self._settled()
        epoch, position = self._position()
        prints = self._welcome.fingerprints
        return {
            "epoch": epoch,
            "position": position,
            "samples": self._welcome.samples,
            "seed": self._welcome.seed,
            "data": prints.data,
            "order": prints.order,
            "pixels": prints.pixels,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the state was taken, on any number of ranks. Ends an iteration that is under way.

        Warns if the pictures differ (decoding, transforms or chunk size changed), while the order is the same.

        Raises:
            StateError: not a state, or one of another order of samples.
        """
        welcome, prints = self._welcome, self._welcome.fingerprints
        try:
            epoch, position, order = state["epoch"], state["position"], state["order"]
        except (KeyError, TypeError) as error:
            raise StateError(f"not a state of a Loader: {error} is missing") from None
        if order != prints.order:
            raise StateError(f"the state is of another order of samples: {_difference(state, welcome)}")
        try:
            start = _whole("epoch", epoch, 0, _EPOCHS), _whole("position", position, 0, welcome.samples)
        except ConfigError as error:
            raise StateError(f"not a state of a Loader: {error}") from None
        if state.get("pixels", prints.pixels) != prints.pixels:
            warnings.warn(
                "the state was saved with other pictures: decoding, transforms or chunk size of stream "
                f"{welcome.stream!r} have changed since; the order of samples is the same",
                stacklevel=2,
            )
        self._move(start)

    def stats(self) -> dict[str, Any]:
        """Counts and rates.

        Returns:
            `transport`; `render_ids`, what has rendered so far; `epochs`, by number: `delivered` (valid rows),
            `rejected`, `dropped` (positions), `extra` (rows that are not valid), `images_per_s`, `wait_share`, the time
            inside `next()` over all time, and `headroom`, how many times as fast this Loader could have been fed, by
            estimate, or None. The same for all of them together: `images_per_s` (valid rows), `wait_share`; and
            `stages`: count, seconds and bytes of `wait` in `next()`, `copy` and `finish` of what came, in a thread
            beside it.
            With several servers also `servers`, of each: `address`; `state`, which is `up`, `late` or `down`, and the
            `trouble`; `transport`; `weight`, its share of the chunks beside the others'; `chunks` that it brought
            first; how often it was `late`; requests that were `moved` to others.
            With a device also `device`: its `name`; `finisher`, `triton` or `torch`; `memory`, bytes that are taken
            there at most, beside what the trainer holds or has queued; and `page_locked`, bytes of the host.
        """
        staging, pace = self._staging, self._engine.pace
        device = {} if staging is None else {"device": staging.stats(self._kept())}
        servers = {} if self._servers is None else {"servers": self._servers.fleet.status()}
        return (
            device
            | servers
            | {
                "transport": self._engine.transport,
                "render_ids": sorted(self._engine.render_ids),
                "images_per_s": pace.images / pace.spent if pace.spent else 0.0,
                "wait_share": pace.waited / pace.spent if pace.spent else 0.0,
                "stages": plain(pace.stages.status()),
                "epochs": {
                    number: asdict(e.counts)
                    | {
                        "images_per_s": e.rows / e.spent if e.spent else 0.0,
                        "wait_share": e.waited / e.spent if e.spent else 0.0,
                        "headroom": e.work.headroom(e.spent),
                    }
                    for number, e in self._epochs.items()
                },
            }
        )

    # -- iterating ------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Batch]:
        return _Batches(self)

    def close(self) -> None:
        """Leave the daemon; a private one ends with its last Loader. May be called twice, and by a signal's handler."""
        self._engine.close()
        self._finalizer.detach()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Loader cannot be pickled or copied: make the Loader in the process that uses it")

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _settled(self) -> Steps:
        """Rank and world size are looked up now, and stay."""
        if self._steps is None:
            rank, world_size = resolve(*self._rank)
            last_batch = self._last_batch or ("partial" if world_size == 1 else "pad")
            self._steps = Steps(self._welcome.samples, self.batch_size, rank, world_size, last_batch)
        return self._steps

    def _position(self) -> tuple[int, int]:
        assembly = self._assembly
        return self._state if assembly is None else assembly.state

    def _broken(self) -> bool:
        """Whether the iterator was dropped in the middle of the epoch."""
        assembly, holder = self._assembly, self._holder
        return assembly is not None and not assembly.done and holder is not None and holder() is None

    def _move(self, state: tuple[int, int]) -> None:
        """End whatever is under way; the next iteration begins there."""
        assembly, ahead = self._assembly, self._ahead
        self._state = state
        self._assembly = None
        if assembly is not None:
            self._engine.end(assembly)
        if ahead is not None and (ahead.epoch, ahead.start) != state:
            self._engine.end(ahead)
            self._ahead = None

    def _begin(self) -> Assembly:
        """The assembly that a new iterator takes from."""
        assembly = self._assembly
        if assembly is not None and assembly.done:
            self._move(assembly.state)
        elif assembly is not None and self._broken():
            self._move((assembly.epoch + 1, 0))
        elif assembly is not None and self._holder is not None:
            raise StateError("two iterators on one Loader are under way: finish or drop the first, or make two Loaders")
        if self._assembly is None:
            ahead = self._ahead
            fits = ahead is not None and (ahead.epoch, ahead.start) == self._state and not ahead.ended
            assembly = ahead if fits else self._assemble(*self._state)
            assert assembly is not None
            self._epochs[assembly.epoch] = _Epoch(assembly.counts, begun=self._engine.pace.work)
            self._ahead = self._holder = None
            self._assembly = assembly
        assert assembly is not None
        if self._ahead is None and assembly.epoch + 1 < _EPOCHS:
            self._ahead = self._assemble(assembly.epoch + 1, 0)
        # In any case: an interrupt may have come before it was done.
        self._engine.begin(assembly, self._form, self._ahead)
        return assembly

    def _staged(self, output: Output, welcome: Welcome, timeout: float) -> DevicePixels | None:
        """The way to the device, where there is one."""
        if self._device is not None:
            engine = weakref.ref(self._engine)  # which refers to what is made here
            self._staging = DevicePixels(
                self._device,
                output,
                welcome.layout,
                batch_size=self.batch_size,
                mixing=_mixing(output, welcome),
                timeout=timeout,
                stopped=lambda: (it := engine()) is None or it.stopped(),
            )
        return self._staging

    def _kept(self) -> int:
        """Batches that are made up and not handed out, at most."""
        stride = self.batch_size if self._steps is None else self._steps.stride
        welcome = self._welcome
        return ready(self._prefetch, welcome.layout.chunk, stride, self.batch_size, welcome.in_flight)

    def _assemble(self, epoch: int, start: int) -> Assembly:
        return Assembly(
            epoch=epoch,
            start=start,
            steps=self._settled(),
            layout=self._welcome.layout,
            prefetch=self._prefetch,
            on_bad_sample=self._on_bad_sample,
            max_bad=self._max_bad,
            allocate=self._form.allocate,
            uniforms=partial(_replacement_row, self._welcome.seed, epoch),
            counts=Counts(),
            busy=self._welcome.in_flight,
        )

    def _take(self, assembly: Assembly) -> Batch | None:
        """The batch that is due; None if another thread got the last one."""
        batch = self._engine.take(assembly)
        if batch is not None:
            self._form.hand_over(batch)
        if assembly.taken == assembly.count and self._assembly is assembly and self._ahead is not None:
            # The trainer still works on this batch, and may validate before it comes back.
            self._engine.begin(self._ahead, self._form)
        return batch

    def _note(self, batch: Batch, rows: int, waited: float, spent: float, *, last: bool) -> None:
        """Count and log; once, also if the batch is given out in a second attempt only."""
        epoch = self._epochs[batch.epoch]
        if batch.step < epoch.noted:
            return
        epoch.noted = batch.step + 1
        epoch.rows += len(batch.indices)
        epoch.waited += waited
        epoch.spent += spent
        pace = self._engine.pace
        pace.took(int(batch.valid.sum()), waited, spent)
        epoch.work = pace.work.since(epoch.begun)
        before = epoch.counts.rejected - len(batch.rejects)
        for reject in batch.rejects[: max(0, _LOGGED - before)]:
            log.warning("bad picture in epoch %d: %s", batch.epoch, reject)
        if before < _LOGGED < epoch.counts.rejected:
            log.warning("more bad pictures in epoch %d are counted in stats(), and named in batch.rejects", batch.epoch)
        if len(batch.indices) < rows and not self._said_short:
            self._said_short = True
            log.warning(
                "a batch has %d rows instead of %d, because bad pictures are skipped; shapes that vary cost "
                "recompilation and unequal weights: on_bad_sample 'mask' or 'replace' keep them",
                len(batch.indices),
                rows,
            )
        if last:
            self._engine.epoch_over()
            headroom = epoch.work.headroom(epoch.spent)
            log.info("%s", summary(batch.epoch, epoch.counts.delivered, epoch.waited, epoch.spent, headroom))


@dataclass(frozen=True, slots=True)
class _Sampler:
    """Stands in for a batch sampler and its sampler; samples are the daemon's business."""

    loader: Loader

    @property
    def batch_size(self) -> int:
        return self.loader.batch_size

    @property
    def sampler(self) -> _Sampler:
        return self

    def set_epoch(self, epoch: int) -> None:
        self.loader.set_epoch(epoch)


class _Batches(Iterator[Batch]):
    """An iteration over the rest of one epoch; it begins with the first `next`.

    A batch counts as handed out by plain stores that `return` follows: no signal's handler and no other thread runs
    between them, because those run between calls.
    """

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._ref = weakref.ref(self)
        self._assembly: Assembly | None = None
        self._since = 0.0

    def __next__(self) -> Batch:
        loader, assembly = self._loader, self._assembly
        if loader._holder is self._ref:
            loader._holder = None
        entered = time.perf_counter()
        if assembly is None:
            assembly = self._assembly = loader._begin()
            self._since = entered
        while not assembly.done:
            if loader._holder is not None and loader._holder is not self._ref:
                raise StateError(ENDED)
            batch = loader._take(assembly)
            if batch is None:
                break
            left = time.perf_counter()
            rows = len(assembly.steps.block(assembly.start, batch.step))
            last = batch.step == assembly.count - 1
            loader._note(batch, rows, left - entered, left - self._since, last=last)
            self._since = left
            if assembly.handed is batch:  # and no other thread was faster
                loader._holder = self._ref
                assembly.handed = None
                return batch
        raise StopIteration

    def __del__(self) -> None:
        # `break`: what was asked for is not wanted any more. What an error left goes on with the next iterator.
        assembly, loader = self._assembly, self._loader
        if assembly is not None and loader._assembly is assembly and loader._holder is self._ref:
            loader._engine.end(assembly)


def _locate(source: Any, timeout: float, *, exact: bool) -> tuple[Locate | Servers, str]:
    """How the daemon is found, and what to call it."""
    if isinstance(source, (list, tuple)):
        for address in source:
            if not (isinstance(address, str) and "://" in address):
                raise ConfigError(f"source: {address!r} in a list is no address (ipc://… or tcp://…)")
            scheme(address)
        if len(set(source)) < len(source):
            raise ConfigError(f"source: an address stands twice in the list {', '.join(source)}")
        if not source:
            raise ConfigError("source: the list of addresses is empty")
        if len(source) > 1:
            return Servers(source, timeout=timeout, exact=exact), ", ".join(source)
        (source,) = source
    if isinstance(source, str) and "://" in source:
        scheme(source)
        return partial(_fixed, source), source
    return PrivateDaemon(source).address, "private daemon" if not isinstance(source, (str, os.PathLike)) else str(
        source
    )


def _fixed(address: str, *, timeout: float, stop: int) -> str:
    return address


def _replacement_row(seed: int, epoch: int, position: int) -> Any:
    return uniforms(seed, epoch, "replace", position, 1, REPLACEMENTS)[0]


def _mixing(output: Output, welcome: Welcome) -> Mixing | None:
    if not output.mixed:
        return None
    classes = len(welcome.classes)
    check_labels(welcome.layout, classes, text=welcome.labels == "text")
    return Mixing(output.mixup, output.cutmix, welcome.seed, classes, planes=output.layout == "NCHW")


def _among(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name}: {value!r} is not one of {', '.join(allowed)}")


def _whole(name: str, value: Any, least: int, below: int | None = None) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise ConfigError(f"{name}: {value!r} is not a whole number") from None
    if isinstance(value, bool) or number < least or (below is not None and number >= below):
        limit = "" if below is None else f" and below {below}"
        raise ConfigError(f"{name}: {value!r} must be a whole number from {least} on{limit}")
    return number


def _triple(name: str, values: Sequence[float] | None) -> tuple[float, ...] | None:
    try:
        return None if values is None else tuple(float(v) for v in values)
    except (TypeError, ValueError):
        raise ConfigError(f"{name}: {values!r} is not three numbers, one per channel") from None


def _difference(state: Mapping[str, Any], welcome: Any) -> str:
    """What makes the orders differ, as far as the state tells."""
    if state.get("samples", welcome.samples) != welcome.samples:
        return f"it has {state['samples']} samples, the stream {welcome.stream!r} has {welcome.samples}"
    if state.get("data", welcome.fingerprints.data) != welcome.fingerprints.data:
        return f"files or labels of the stream {welcome.stream!r} have changed since"
    if state.get("seed", welcome.seed) != welcome.seed:
        return f"its seed is {state['seed']}, the stream's {welcome.seed}"
    if "data" in state and "seed" in state:
        return "shuffle has changed"
    return f"its digest is {state['order']}, the stream's {welcome.fingerprints.order}"
