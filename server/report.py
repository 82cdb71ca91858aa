"""A profile in words and tables, for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headrace.server.profile import Memory, Profile
from headrace.server.verdict import OTHER_STAGES, Advice, Chain, called, off, plural, shown

_MIB, _GIB = 1 << 20, 1 << 30


def lines(profile: Profile) -> list[str]:
    """What `headrace profile` prints."""
    return [*_lines(profile)]


def _lines(profile: Profile) -> Iterator[str]:
    yield (f"stream {profile.stream}: " if profile.stream else "") + profile.what
    if profile.machine is not None:
        at = profile.machine
        yield f"{at.cpus} {plural(at.cpus, 'CPU')}" + (
            f", threads of {at.cores} {plural(at.cores, 'core')}" if at.cores != at.cpus else ""
        )
    if profile.alone:
        yield ""
        yield from _table(
            ["alone, on one core", "images/s", "ms an image", "the first time", "MB/s"],
            [
                [
                    stage.stage,
                    f"{shown(stage.rate)}",
                    f"{stage.seconds * 1e3:.3f}",
                    f"{stage.first * 1e3:.3f}" if stage.first is not None else "",
                    f"{stage.nbytes * stage.rate / 1e6:,.0f}" if stage.nbytes else "",
                ]
                for stage in profile.alone
            ],
        )
        if profile.handing is not None:
            yield f"handed out of a full ring to one consumer: {shown(profile.handing)} images/s"
    yield ""
    yield from _chains(profile)
    yield ""
    yield f"bottleneck: {profile.verdict.text}"
    if profile.headroom is not None:
        yield f"headroom: {profile.headroom.text}"
    if profile.potential is not None and profile.verdict.stage in OTHER_STAGES:
        times = f", {profile.potential / profile.best.rate:.1f} times as many" if profile.best.rate else ""
        yield f"headroom: the workers could feed {shown(profile.potential)} images/s{times}"
    yield from _forecasts(profile)
    if profile.memory is not None:
        yield from _memory(profile.memory, profile.best.workers)
    yield ""
    yield "what to do:"
    yield from _advice(profile.advice)
    if profile.target is not None:
        yield ""
        yield "for the target:"
        yield from _advice(profile.target)


def _chains(profile: Profile) -> Iterator[str]:
    stages = list(dict.fromkeys(name for chain in profile.chains for name in chain.stages))
    cpus = profile.machine.cpus if profile.machine is not None else 0
    head = ["workers", "images/s", *(f"{name} %" for name in stages), "idle %"]
    yield from _table(
        head + (["CPUs used", "by others"] if cpus else ["trainers wait %"]),
        [
            [
                str(chain.workers),
                f"{shown(chain.rate)}",
                *(f"{share:.0%}".rstrip("%") for share in _shares(chain, stages)),
                f"{chain.idle:.0%}".rstrip("%"),
                *([f"{chain.used:.2f}", f"{(chain.others + chain.stolen) * cpus:.2f}"] if cpus else []),
                *([] if cpus else [f"{chain.waited:.0%}".rstrip("%")]),
            ]
            for chain in profile.chains
        ],
    )


def _shares(chain: Chain, stages: Sequence[str]) -> list[float]:
    """Of the workers' time."""
    total = chain.busy + chain.wait
    return [chain.stages.get(name, 0.0) / total if total else 0.0 for name in stages]


def _forecasts(profile: Profile) -> Iterator[str]:
    for one in profile.forecasts:
        cpus = f"{one.cpus:.1f}".removesuffix(".0")
        who = f"{one.workers} {plural(one.workers, 'worker')} on {cpus} CPUs"
        said = f"prediction: {who} {shown(one.rate)} images/s (measured with {one.basis})"
        if one.measured is not None:
            said += f"; they gave {shown(one.measured)}, so it is {off(one.rate, one.measured):+.0%} off"
        yield said + (f"; then {called(one.limit)} is the limit" if one.limit != profile.verdict.stage else "")
    for reason in profile.distrust:
        yield f"  not to be trusted: {reason}"


def _memory(memory: Memory, workers: int) -> Iterator[str]:
    yield (
        f"memory: a worker {memory.worker / _MIB:,.0f} MiB, the daemon {memory.daemon / _MIB:,.0f}, a consumer's "
        f"batches {memory.consumer / _MIB:,.0f}; a chunk in the ring {memory.slot / _MIB:.1f}, at least "
        f"{memory.least} of them, by the configuration {memory.usual}"
    )
    yield (
        f"  {workers} {plural(workers, 'worker')} and one consumer: "
        f"{memory.total(workers, usual=False) / _GIB:.2f} GiB at least, "
        f"{memory.total(workers, usual=True) / _GIB:.2f} by the configuration"
    )


def _advice(advice: Sequence[Advice]) -> Iterator[str]:
    for one in advice:
        yield f"- {one.text}"
        for line in one.lines:
            yield f"      {line}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The first column to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        first, *others = zip(row, widths, strict=True)
        yield "  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]).rstrip()
