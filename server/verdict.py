"""What the figures of a profile say: which stage limits, what would be gained without it, what other machines would
give, and what to change. Plain state: numbers in, numbers and sentences out; nothing is measured here.

The model is a small one. A worker takes `t` seconds for a picture, and all processes together `c` seconds of a CPU; so
n workers on m CPUs give the least of n / t, m / c, and what one consumer can copy and finish. All three come from one
measurement; `distrust` says when they are not to be carried over to another number of workers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

#: What the stages of a worker are called in a sentence, in the order of a picture's way.
WORKER_STAGES: dict[str, str] = {
    "read": "reading",
    "plan": "planning",
    "probe": "looking at headers",
    "decode": "decoding",
    "resize": "resizing",
    "colour": "changing colours",
    "render": "rendering",
    "write": "writing",
}
#: Those behind the workers, and who else may be the limit.
OTHER_STAGES: dict[str, str] = {
    "copy": "copying out of the slots",
    "finish": "casting and normalising",
    "requests": "too few requests",
    "trainer": "the trainer",
}

#: Share of the time that a trainer may wait and still be the slower side.
_LITTLE = 0.05
#: Share of the workers' time without work from which on it is not they who limit.
_IDLE = 0.25
#: Share of a consumer's time in copying and finishing from which on these limit.
_FULL = 0.6
#: Share of the CPUs that a chain keeps busy by itself from which on they are all in use.
_ALL = 0.8
#: Below so many pictures a measurement says little.
_FEW = 300
#: Up to so many times the workers that were measured a prediction is more than a guess.
_FAR = 4.0
#: Share of a worker's time in reading from which on the disk matters.
_READS = 0.1
#: Share of the CPUs' time that others may take unnoticed.
_STOLEN = 0.05
#: Share of a ring's deliveries that were computed a second time from which on the ring is too small.
_AGAIN = 0.05
#: Pixels of a decoded picture for one that is handed out from which on smaller files are worth their while.
_LARGE = 12.0
#: Bytes below which many files are better packed.
_SMALL_FILE = 128 << 10


@dataclass(frozen=True, slots=True)
class Chain:
    """The whole chain at work, watched for some seconds.

    Attributes:
        workers: that rendered; of GPUs the threads of each one's worker.
        seconds: it was watched.
        images: that trainers took.
        rendered: by workers meanwhile.
        stages: seconds of all workers by stage.
        wait: seconds that all workers were without work.
        nbytes: that workers read.
        cpu: CPU seconds of `workers`, `daemon` and `client`, as far as they are known.
        client: seconds that a consumer takes for an image: `copy`, `finish`.
        waited: share of the consumers' time inside `next()`.
        consumers: that took images.
        others: share of the CPUs' time that other processes took meanwhile.
        stolen: share of it that a hypervisor gave to others.
    """

    workers: int
    seconds: float
    images: int
    rendered: int
    stages: Mapping[str, float]
    wait: float = 0.0
    nbytes: int = 0
    cpu: Mapping[str, float] = field(default_factory=dict)
    client: Mapping[str, float] = field(default_factory=dict)
    waited: float = 1.0
    consumers: int = 1
    others: float = 0.0
    stolen: float = 0.0

    @property
    def rate(self) -> float:
        """Images per second."""
        return self.images / self.seconds if self.seconds else 0.0

    @property
    def busy(self) -> float:
        """Seconds that all workers were at work."""
        return sum(self.stages.values())

    @property
    def idle(self) -> float:
        """Share of the workers' time without work."""
        return self.wait / (self.wait + self.busy) if self.wait + self.busy else 0.0

    @property
    def per_image(self) -> dict[str, float]:
        """Seconds of a worker for a picture, by stage."""
        return {stage: seconds / max(1, self.rendered) for stage, seconds in self.stages.items()}

    @property
    def cpu_per_image(self) -> float:
        """CPU seconds of all processes for a picture: what the workers render is counted by what they rendered, the
        rest by what was handed out."""
        workers = self.cpu.get("workers", 0.0) / max(1, self.rendered)
        return workers + (self.cpu.get("daemon", 0.0) + self.cpu.get("client", 0.0)) / max(1, self.images)

    @property
    def crowded(self) -> bool:
        """Whether others took more of the CPUs than goes unnoticed."""
        return self.others + self.stolen > _STOLEN

    @property
    def used(self) -> float:
        """CPUs that all processes kept busy."""
        return sum(self.cpu.values()) / self.seconds if self.seconds else 0.0

    def free(self, cpus: int) -> float:
        """How many of so many CPUs others left. Who waits for a disk might have got more than that."""
        return max(self.used, cpus * (1.0 - self.others - self.stolen))


def joined(parts: Sequence[Chain]) -> Chain:
    """What was watched in several parts, as one."""
    seconds, images = sum(part.seconds for part in parts), sum(part.images for part in parts)

    def total(what: str) -> dict[str, float]:
        names = [name for part in parts for name in getattr(part, what)]
        return {name: sum(getattr(part, what).get(name, 0.0) for part in parts) for name in dict.fromkeys(names)}

    def share(what: str) -> float:
        return sum(getattr(part, what) * part.seconds for part in parts) / seconds if seconds else 0.0

    return Chain(
        workers=parts[0].workers,
        seconds=seconds,
        images=images,
        rendered=sum(part.rendered for part in parts),
        stages=total("stages"),
        wait=sum(part.wait for part in parts),
        nbytes=sum(part.nbytes for part in parts),
        cpu=total("cpu"),
        client=parts[-1].client,  # of all that they have taken so far
        waited=share("waited"),
        consumers=parts[-1].consumers,
        others=share("others"),
        stolen=share("stolen"),
    )


@dataclass(frozen=True, slots=True)
class Machine:
    """
    Attributes:
        cpus: that may be used.
        cores: that these are threads of; as many, where each has one.
        virtual: whether it runs under a hypervisor.
        cached: share of the files that lay in memory before they were read; None: not known.
        data: bytes of the data set.
        memory: bytes that the machine leaves.
    """

    cpus: int
    cores: int
    virtual: bool = False
    cached: float | None = None
    data: int = 0
    memory: int = 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """
    Attributes:
        stage: a key of `WORKER_STAGES` or `OTHER_STAGES`.
        share: of the time of those who are at it.
        text: a sentence.
    """

    stage: str
    share: float
    text: str


@dataclass(frozen=True, slots=True)
class Headroom:
    """What would be, if a stage cost nothing.

    Attributes:
        stage: that one.
        rate: images per second.
        then: the stage that would limit.
        quiet: whether others used the CPUs when it was measured, and this is what it were without them.
    """

    stage: str
    rate: float
    then: str
    quiet: bool = False

    @property
    def text(self) -> str:
        alone = " on a quiet machine" if self.quiet else ""
        return (
            f"if {called(self.stage)} cost nothing, the limit would be {shown(self.rate)} images/s{alone}: "
            f"{called(self.then)}"
        )


@dataclass(frozen=True, slots=True)
class Advice:
    """
    Attributes:
        text: what to do, and why.
        lines: of the configuration, or of the program, as they should be.
    """

    text: str
    lines: tuple[str, ...] = ()


def called(stage: str) -> str:
    """A stage in a sentence."""
    return WORKER_STAGES.get(stage) or OTHER_STAGES.get(stage) or stage


def shown(rate: float) -> str:
    """Images per second."""
    return f"{rate:,.0f}" if rate >= 20 else f"{rate:.1f}"


# -- which stage limits ---------------------------------------------------------------------------------------


def judge(chain: Chain, cpus: int | None = None, *, trainers: bool = False) -> Verdict:
    """Which stage limits the chain.

    Args:
        cpus: that there are; None: nobody knows.
        trainers: whether real trainers take the images, and not somebody who does nothing with them.
    """
    if not chain.images and not chain.rendered:
        return Verdict("requests", 1.0, f"nobody took an image in {chain.seconds:.0f} s")
    if trainers and chain.waited < _LITTLE:
        text = f"the trainer is the limit: it waits {chain.waited:.0%} of its time; nothing here makes it faster"
        return Verdict("trainer", 1.0 - chain.waited, text)
    client = chain.rate / chain.consumers * sum(chain.client.values())
    if chain.idle > _IDLE and client > _FULL:
        stage = max(chain.client, key=lambda name: chain.client[name])
        text = (
            f"{called(stage)} is the limit: copying and finishing keep a consumer busy {client:.0%} of the time, and "
            f"workers are without work {chain.idle:.0%} of theirs"
        )
        return Verdict(stage, client, text)
    if chain.idle > _IDLE or not chain.busy:
        text = (
            f"too few requests are the limit: workers are without work {chain.idle:.0%} of the time, and who takes "
            f"the images waits {chain.waited:.0%} of its own"
        )
        return Verdict("requests", chain.idle, text)
    if cpus is not None and chain.used > _ALL * cpus and (own := Model.of(chain, cpus).cpu):
        # Workers that wait for a disk wait beside others that compute, so it is not the disk that is too slow.
        stage = _longest(own)
        share = own[stage] / sum(own.values())
        text = f"{called(stage)} is the limit: all CPUs are in use, and it takes {share:.0%} of the workers' CPU time"
        return Verdict(stage, share, text)
    stage = _longest(chain.stages)
    share = chain.stages[stage] / chain.busy
    return Verdict(stage, share, f"{called(stage)} is the limit: it takes {share:.0%} of the time that workers work")


def _longest(stages: Mapping[str, float]) -> str:
    return max(stages, key=lambda name: stages[name])


# -- what other machines would give ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Model:
    """What a picture costs, and so what n workers on m CPUs give. Everything in seconds for a picture.

    Attributes:
        stages: of a worker, by stage, without what it waited for a CPU.
        cpu: of a CPU, of the same, by stage: what it waits for a disk is none of it.
        others: CPU time of daemon and consumer.
        client: of a consumer, by stage, likewise.
        consumers: that share the work.
        scale: what was measured, for one of what the model says.
    """

    stages: Mapping[str, float]
    cpu: Mapping[str, float]
    others: float
    client: Mapping[str, float]
    consumers: int = 1
    scale: float = 1.0

    @classmethod
    def of(cls, chain: Chain, cpus: int) -> Model:
        """From one measurement, on so many CPUs."""
        stages = chain.per_image
        own = chain.cpu.get("workers", chain.busy) / max(1, chain.rendered)
        computing = sum(seconds for stage, seconds in stages.items() if stage != "read")
        # Who has to wait for a CPU, for other workers or for other people's processes, takes longer in every stage.
        shrink = min(1.0, own / computing) if computing else 1.0
        cpu = {stage: seconds * shrink for stage, seconds in stages.items() if stage != "read"}
        stages = {stage: cpu.get(stage, seconds) for stage, seconds in stages.items()}
        if "read" in stages:
            cpu["read"] = min(stages["read"], max(0.0, own - computing))
        others = (chain.cpu.get("daemon", 0.0) + chain.cpu.get("client", 0.0)) / max(1, chain.images)
        client = dict(chain.client)
        if taking := sum(client.values()):
            less = min(1.0, chain.cpu.get("client", math.inf) / max(1, chain.images) / taking)
            client = {stage: seconds * less for stage, seconds in client.items()}
        plain = cls(stages, cpu, others, client, chain.consumers)
        says = plain.rate(chain.workers, chain.free(cpus))
        # Who was without work for want of requests could have done more than it did.
        seen = chain.rate / max(1e-9, 1.0 - chain.idle) if chain.idle < _IDLE else 0.0
        scale = min(1.0, seen / says) if seen and math.isfinite(says) else 1.0
        return cls(stages, cpu, others, client, chain.consumers, scale)

    def limits(self, workers: int, cpus: float) -> dict[str, float]:
        """Images per second that `workers`, `cpus` and `client` allow."""
        return {
            "workers": self.scale * _rate(workers, sum(self.stages.values())),
            "cpus": self.scale * _rate(cpus, sum(self.cpu.values()) + self.others),
            "client": _rate(self.consumers, sum(self.client.values())),
        }

    def rate(self, workers: int, cpus: float) -> float:
        """Images per second of so many workers on so many CPUs."""
        return min(self.limits(workers, cpus).values())

    def limiting(self, workers: int, cpus: float) -> str:
        """The stage that limits them."""
        limits = self.limits(workers, cpus)
        match min(limits, key=lambda name: limits[name]):
            case "client":
                return _longest(self.client)
            case "cpus":
                return _longest({**self.cpu, "copy": self.others / self.consumers})
            case _:
                return _longest(self.stages)

    def without(self, stage: str) -> Model:
        """With this stage for nothing."""
        less = 0.0
        if stage in self.client:  # its consumer is in the CPU time of the others
            less = min(self.others, self.client[stage])
        return Model(
            {name: seconds for name, seconds in self.stages.items() if name != stage} or {"plan": 0.0},
            {name: seconds for name, seconds in self.cpu.items() if name != stage},
            self.others - less,
            {name: seconds for name, seconds in self.client.items() if name != stage},
            self.consumers,
            self.scale,
        )

    def needed(self, target: float) -> tuple[int, int]:
        """Workers and CPUs for so many images per second."""
        seconds, cpu = sum(self.stages.values()), sum(self.cpu.values()) + self.others
        return max(1, math.ceil(target * seconds / self.scale - 1e-9)), max(
            1, math.ceil(target * cpu / self.scale - 1e-9)
        )


def _rate(count: float, seconds: float) -> float:
    return count / seconds if seconds > 0 else math.inf


def headroom(model: Model, stage: str, workers: int, cpus: float, *, quiet: bool = False) -> Headroom | None:
    """What the chain would give with this stage for nothing; None where it is none of the chain, or the only one.

    Args:
        quiet: as in `Headroom`.
    """
    free = model.without(stage)
    rate = free.rate(workers, cpus)
    if not math.isfinite(rate) or (stage not in model.stages and stage not in model.client):
        return None
    return Headroom(stage, rate, free.limiting(workers, cpus), quiet)


def distrust(chain: Chain, machine: Machine, workers: int, cpus: float) -> list[str]:
    """Why what is carried over from this measurement to so many workers and CPUs may be wrong."""
    reasons = []
    if machine.cores < machine.cpus and (cpus > machine.cores or chain.workers > machine.cores):
        reasons.append(
            f"{machine.cpus} CPUs are threads of {machine.cores} {plural(machine.cores, 'core')}: "
            "a second thread gives a core a fifth to a half more, not twice as much"
        )
    elif machine.virtual:
        reasons.append(
            "in a virtual machine CPUs may be threads that share a core, or be shared with others: nothing shows it"
        )
    if chain.stolen > _STOLEN:
        reasons.append(f"the hypervisor gave {chain.stolen:.0%} of the CPUs' time to others meanwhile")
    if chain.others > _STOLEN:
        reasons.append(f"other processes took {chain.others:.0%} of the CPUs' time meanwhile")
    reads = chain.stages.get("read", 0.0) / chain.busy if chain.busy else 0.0
    if reads > _READS:
        rate = chain.nbytes / chain.seconds / 1e6
        reasons.append(
            f"workers read {reads:.0%} of their time, {rate:,.0f} MB/s in all; whether one disk gives more to more "
            "workers is not known from this"
        )
    elif machine.cached is not None and machine.cached > 0.5:
        fits = "" if machine.data < machine.memory else ", and the data set is larger than the memory that is left"
        reasons.append(
            f"{machine.cached:.0%} of the files lay in memory already; from a disk reading takes longer{fits}"
        )
    if chain.images < _FEW:
        reasons.append(f"only {chain.images} images were taken: measure for longer, with --seconds")
    if workers > _FAR * chain.workers:
        reasons.append(f"{workers} workers are more than {_FAR:.0f} times the {chain.workers} that were measured")
    return reasons


# -- what to do -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Setting:
    """What is configured and what is there: what advice depends on beside the figures.

    Attributes:
        backend: that renders, a name of `headrace.pipeline.backend`.
        processes: CPU workers of the configuration.
        cpus: that may be used.
        dali, gpu: whether there is one that could be used.
        source: of the data set, `folder`, `list` or `shards`.
        dtype: that batches are handed out in.
        dct_scaling: whether JPEGs may be decoded smaller.
        jpegs: share of the pictures that are JPEGs.
        pixels: of a decoded picture, the median.
        shown: pixels of a picture that is handed out.
        nbytes: of a file, the median.
        again: share of the deliveries that were computed a second time.
    """

    backend: str
    processes: int
    cpus: int
    dali: bool = False
    gpu: bool = False
    source: str = "folder"
    dtype: str = "float32"
    dct_scaling: bool = False
    jpegs: float = 1.0
    pixels: float = 0.0
    shown: float = 1.0
    nbytes: float = 0.0
    again: float = 0.0


def advise(verdict: Verdict, chain: Chain, model: Model, setting: Setting) -> list[Advice]:
    """What to change, most helpful first; never nothing."""
    found: list[Advice] = []
    stage = verdict.stage
    if stage == "read":
        found += _on_reading(chain, model, setting)
    elif stage in WORKER_STAGES:
        found += _on_rendering(stage, model, setting)
    elif stage in ("copy", "finish"):
        found += _on_finishing(setting, chain)
    elif stage == "requests":
        found.append(
            Advice(
                "more batches asked for ahead keep more workers busy; so does a larger ring, where several trainers "
                "share it",
                ("Loader(..., prefetch=4)", "memory: 2GiB"),
            )
        )
    elif stage == "trainer":
        found.append(
            Advice(
                "nothing in the input would make this trainer faster; fewer workers would leave it more CPU time",
                (f"workers: {{processes: {max(1, round(chain.workers * (1.0 - chain.idle) + 0.5))}}}",)
                if chain.idle > 0.5 and chain.workers > 1
                else (),
            )
        )
    if setting.again > _AGAIN:
        found.append(
            Advice(
                f"{setting.again:.0%} of the chunks were rendered a second time: the ring is too small for trainers so "
                "far apart",
                ("memory: 2GiB",),
            )
        )
    return found


def _on_reading(chain: Chain, model: Model, setting: Setting) -> list[Advice]:
    found = []
    # A worker that waits for a disk leaves its CPU to another.
    seconds, cpu = sum(model.stages.values()), sum(model.cpu.values()) + model.others
    useful = min(64, max(1, round(setting.cpus * seconds / cpu))) if cpu else setting.processes
    if useful > setting.processes:
        found.append(
            Advice(
                f"a worker waits for its files most of the time: {useful} workers would keep {setting.cpus} "
                f"{plural(setting.cpus, 'CPU')} busy, if the disk or network gives more to more readers",
                (f"workers: {{processes: {useful}}}",),
            )
        )
    if setting.source != "shards" and setting.nbytes < _SMALL_FILE:
        found.append(
            Advice(
                f"files of {setting.nbytes / 1000:.0f} kB cost a disk or a network a round trip each: tar files are "
                "read in long runs",
                ("dataset: {shards: /data/train-{000000..000099}.tar}",),
            )
        )
    rate = chain.nbytes / chain.seconds / 1e6
    found.append(
        Advice(
            f"{rate:,.1f} MB/s are read now: put the data on a faster disk, or nearer, or make the files smaller"
            + (
                f" (they show {setting.pixels / setting.shown:.0f} times the pixels that are handed out)"
                if setting.pixels > _LARGE * setting.shown
                else ""
            )
        )
    )
    return found


def _on_rendering(stage: str, model: Model, setting: Setting) -> list[Advice]:
    found = []
    if setting.processes < setting.cpus and setting.backend != "dali-gpu":
        found.append(
            Advice(
                f"{setting.processes} of {setting.cpus} CPUs render: one worker for each is what `auto` means",
                ("workers: {processes: auto}",),
            )
        )
    if setting.gpu and setting.backend != "dali-gpu":
        found.append(Advice("a GPU is here and does not render", ("workers: {backend: dali-gpu}",)))
    large = setting.pixels > _LARGE * setting.shown
    if stage in ("decode", "render") and setting.backend == "pillow" and setting.jpegs > 0.5:
        if large and not setting.dct_scaling:
            found.append(
                Advice(
                    f"pictures of {setting.pixels / 1e6:.1f} megapixels are decoded whole, for "
                    f"{setting.shown / 1e6:.2f} that are handed out: JPEGs may be decoded at a half, a quarter or an "
                    "eighth; pixels change a little, and the fingerprint",
                    ("decode: {dct_scaling: true}",),
                )
            )
        install = "" if setting.dali else " (pip install 'headrace[dali]' first)"
        found.append(
            Advice(
                f"DALI decodes no more of a JPEG than is seen, from the second epoch on{install}",
                ("workers: {backend: dali-cpu}",),
            )
        )
    if stage in ("decode", "render", "resize") and large:
        side = round(math.sqrt(setting.shown) * 2)
        found.append(
            Advice(
                f"store the pictures smaller once: with a shorter side of {side} pixels they still show four times "
                "what is handed out"
            )
        )
    if stage == "colour":
        found.append(
            Advice(
                "changes of colour cost more than decoding: leave out what does not help, `auto_augment` and its kin "
                "and `gaussian_blur` cost most; or have a GPU do them",
            )
        )
    workers, cpus = model.needed(2 * model.rate(setting.processes, setting.cpus))
    found.append(
        Advice(
            f"twice as many images take {cpus} {plural(cpus, 'CPU')} with {workers} {plural(workers, 'worker')}, "
            "here or on another host, from which trainers fetch over tcp",
            ("listen: [tcp://HOST:5555]",),
        )
    )
    return found


def _on_finishing(setting: Setting, chain: Chain) -> list[Advice]:
    found = []
    if setting.dtype == "float32":
        found.append(
            Advice(
                "a consumer takes its time to copy and normalise: half the bytes are written in bfloat16 or float16, "
                "and a quarter as uint8, which a GPU normalises in no time",
                ('Loader(..., dtype="uint8")',),
            )
        )
    if chain.consumers == 1:
        found.append(Advice("each trainer finishes its own batches: several of them take more together"))
    return found or [Advice("a consumer copies as fast as its memory allows: several trainers take more together")]


def reach(target: float, model: Model, workers: int, cpus: int | None, nbytes: float) -> list[Advice]:
    """What it takes to feed so many images per second.

    Args:
        workers, cpus: that there are; None: of how many CPUs nobody knows.
        nbytes: of a file.
    """
    limits = model.limits(workers, math.inf if cpus is None else cpus)
    now = min(limits.values())
    if now >= target:
        return [
            Advice(f"{shown(target)} images/s are fed already: {workers} {plural(workers, 'worker')} give {shown(now)}")
        ]
    more, cores = model.needed(target)
    found = []
    if min(limits["workers"], limits["cpus"]) < target:
        here = ""
        if cpus is not None:
            here = ", and this machine has them" if cores <= cpus else f", and this machine has {cpus}"
        found.append(
            Advice(
                f"{shown(target)} images/s take {more} {plural(more, 'worker')} and {cores} {plural(cores, 'CPU')} "
                f"without the trainer's own{here}; they read {target * nbytes / 1e6:,.0f} MB/s",
                (f"workers: {{processes: {more}}}",),
            )
        )
    if limits["client"] < target:
        several = math.ceil(target / (limits["client"] / model.consumers))
        found.append(
            Advice(
                f"one consumer copies and finishes {limits['client'] / model.consumers:,.0f} images/s: {several} "
                "trainers, or a dtype of fewer bytes",
                ('Loader(..., dtype="uint8")',),
            )
        )
    return found


def off(predicted: float, measured: float) -> float:
    """By which share a prediction missed, with its sign."""
    return predicted / measured - 1.0 if measured else math.inf


def base(chains: Sequence[Chain]) -> Chain:
    """Of several measurements the one that predictions start from: the fewest workers, who are in nobody's way."""
    return min(chains, key=lambda chain: chain.workers)


def fastest(chains: Iterable[Chain]) -> Chain:
    return max(chains, key=lambda chain: chain.rate)


def plural(count: int, word: str) -> str:
    """The word for so many."""
    return word if count == 1 else f"{word}s"
