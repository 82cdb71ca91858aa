"""What a comparison found, for people: `RESULTS.md` and a plot, put together from a file of JSON for each section."""

from __future__ import annotations

import html
import json
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import common
import peers

from headrace.server.verdict import plural
from headrace.workers import cpus

#: Pixels: of the plot, left and right of the bars, and of a bar's line.
_WIDTH, _LEFT, _RIGHT, _BAR = 860, 300, 200, 24
_OURS, _THEIRS = "#c8553d", "#4878a8"
_MIB = 1 << 20


@dataclass(frozen=True)
class Section:
    """
    Attributes:
        name, title, text: as it is asked for, and as it is read.
        photos: what they are.
        command, day, versions: of the run.
        machine: that it ran on.
        rounds: what each side gave, by its label; the first side is what the others are held against.
        claims: text, measured, bound, holds.
    """

    name: str
    title: str
    text: str
    photos: str
    command: str
    day: str
    machine: str
    versions: str
    rounds: common.Rounds
    claims: Sequence[Mapping[str, Any]]

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self.name}.json").write_text(json.dumps(asdict(self)))

    @staticmethod
    def load(folder: Path, name: str) -> Section | None:
        file = folder / f"{name}.json"
        return Section(**json.loads(file.read_text())) if file.exists() else None


def machine() -> str:
    """What the figures are of, without a name of it."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        os.uname().machine,
    )
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / (1 << 30)
    virtual = ", a virtual machine" if cpus.virtual() else ""
    return f"{cpus.usable_cpus()} CPUs of {model}{virtual}, {memory:.0f} GiB of memory, Linux {os.uname().release}"


# -- the page -----------------------------------------------------------------------------------------------------


def write(sections: Sequence[Section], folder: Path) -> Path:
    """`RESULTS.md` and `results.svg`; returns the page."""
    page = folder / "RESULTS.md"
    page.write_text("\n".join(_page(sections)) + "\n")
    (folder / "results.svg").write_text("\n".join(_plot(sections)) + "\n")
    return page


def _page(sections: Sequence[Section]) -> Iterator[str]:
    yield "# Results"
    yield ""
    yield (
        "Written by `make bench`, [compare.py](compare.py). In each round every side runs once, in processes started "
        "for it, and each round begins with another side. A trainer takes one row of pixels of each batch and does "
        "nothing else. After as many pictures to warm up as the set has the time begins without a pause. Everybody "
        "reads the same photos and makes the same pictures: random resized crop to 224, flip, float32, normalised, "
        "batches of 64 unless it says otherwise. The ratio is of images/s in the same round, to the first line."
    )
    yield ""
    yield (
        "Figures are medians, in brackets the quartiles. CPU is user and system time of all processes of a side. "
        "Memory is of the same processes while they work, without pages of files: what is each one's own (USS), and "
        "that with what they share, rings and queues among it, counted once. *Others* is the share of the machine's "
        "CPU time that went to anything else."
    )
    yield ""
    yield "![images/s of each side](results.svg)"
    for section in sections:
        yield from _section(section)
    used = {side.partition(", ")[0] for section in sections for side in section.rounds} | {
        side for section in sections for side in section.rounds
    }
    yield ""
    yield "## Who they are"
    yield ""
    yield (
        "- headrace: a daemon with as many workers as others have workers or threads, and Loaders. *shm*: through "
        "memory that is shared; *tcp*: over loopback. Its filter sees the pixels beyond the window, and each file is "
        "checked as a whole once."
    )
    for name, peer in peers.PEERS.items():
        if any(side == name or side.startswith(f"{name}, ") for side in used):
            yield f"- {name}: {peer.said}."


def _section(section: Section) -> Iterator[str]:
    yield ""
    yield f"## {section.title}"
    yield ""
    yield section.text
    yield ""
    yield from _table(section.rounds)
    yield ""
    for claim in section.claims:
        sign = "<=" if claim["most"] else ">="
        met = "holds" if claim["holds"] else "**does not hold**"
        yield f"- {met}: {claim['claim']}: {claim['measured']:.3g} {sign} {claim['bound']:g}"
    if section.claims:
        yield ""
    rounds = len(next(iter(section.rounds.values())))
    photos = f"{section.photos}. " if section.photos else ""
    run = f"{rounds} {plural(rounds, 'round')}, {section.day}, {section.machine}"
    yield f"{photos}{run}. {section.versions}. `{section.command}`"


def _table(rounds: common.Rounds) -> Iterator[str]:
    yield "| | images/s | ratio | CPU ms per image | memory, MiB: own, in all | others |"
    yield "|---|---|---|---|---|---|"
    base: list[float] = [one["images_per_s"] for one in next(iter(rounds.values()))]
    for side, results in rounds.items():
        speed: list[float] = [one["images_per_s"] for one in results]
        low, middle, high = common.quartiles(speed)
        least, ratio, most = common.quartiles([ours / theirs for ours, theirs in zip(speed, base, strict=True)])
        groups = [key for key in results[0] if key.startswith("cpu_")]
        each = {key[4:]: statistics.median(1000 * one[key] / one["images"] for one in results) for key in groups}
        parts = ", ".join(f"{name} {value:.2f}" for name, value in each.items())
        memory = "" if "own" not in results[0] else ", ".join(
            f"{common.median(results, key) / _MIB:,.0f}" for key in ("own", "held")
        )  # fmt: skip
        failed = sum(one.get("failed", 0) for one in results)
        note = f"; failed {failed} times, and was tried again" if failed else ""
        strong = "**" if side.startswith("headrace") else ""
        cells = (
            f"{strong}{side}{strong}{note}",
            f"{middle:,.0f} ({low:,.0f} – {high:,.0f})",
            f"{ratio:.2f} ({least:.2f} – {most:.2f})",
            f"{sum(each.values()):.2f}: {parts}",
            memory,
            f"{common.median(results, 'others'):.0%}",
        )
        yield f"| {' | '.join(cells)} |"


# -- the plot -----------------------------------------------------------------------------------------------------


def _plot(sections: Sequence[Section]) -> Iterator[str]:
    """Bars of the medians, with their quartiles; each section has its own scale."""
    height = sum(44 + _BAR * len(section.rounds) for section in sections) + 10
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        'font-family="system-ui,sans-serif" font-size="13" role="img">'
    )
    yield f'<title>images per second of each side</title><rect width="{_WIDTH}" height="{height}" fill="#fff"/>'
    top = 0
    for section in sections:
        top += 30
        yield f'<text x="12" y="{top}" font-weight="bold" fill="#1b2330">{html.escape(section.title)}, images/s</text>'
        top += 10
        found = {
            side: common.quartiles([one["images_per_s"] for one in results]) for side, results in section.rounds.items()
        }
        most = max(high for _, _, high in found.values())
        for side, (low, middle, high) in found.items():
            ends = [_LEFT + value / most * (_WIDTH - _LEFT - _RIGHT) for value in (low, middle, high)]
            yield from _bar(top, side, *ends)
            yield (
                f'<text x="{_WIDTH - _RIGHT + 12}" y="{top + 16}" fill="#1b2330">{middle:,.0f}'
                f'<tspan fill="#5d6878"> ({low:,.0f} – {high:,.0f})</tspan></text>'
            )
            top += _BAR
        top += 4
    yield "</svg>"


def _bar(top: int, side: str, low: float, middle: float, high: float) -> Iterator[str]:
    colour = _OURS if side.startswith("headrace") else _THEIRS
    yield f'<text x="{_LEFT - 8}" y="{top + 16}" text-anchor="end" fill="#1b2330">{html.escape(side)}</text>'
    yield f'<rect x="{_LEFT}" y="{top + 3}" width="{middle - _LEFT:.1f}" height="{_BAR - 7}" fill="{colour}"/>'
    y = top + 3 + (_BAR - 7) / 2
    yield f'<path d="M{low:.1f} {y}H{high:.1f}" stroke="#1b2330" stroke-width="2"/>'
