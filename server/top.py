"""`headrace top`: a live view of a daemon, by what it answers to a `Ping`."""

from __future__ import annotations

import io
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from headrace.errors import HeadraceError
from headrace.ping import ping
from headrace.pipeline.index import shown
from headrace.protocol import Pong, StreamStatus
from headrace.server import rates

#: Seconds over which rates are taken, where the daemon has been watched for so long: clients report once a second.
_WINDOW = 5.0
#: Seconds that an answer may take.
_TIMEOUT = 5.0
#: Cells of a bar, and columns where nobody folds.
_BAR = 10
_WIDE = 200
#: Stages that are the daemon's own: their time is its, and not the workers'.
DAEMON_STAGES = ("send",)
#: The stage of a client in which it does nothing.
IDLE = "wait"


def top(
    address: str,
    out: Callable[[str], None],
    *,
    interval: float,
    once: bool,
    curve: Mapping[str, Any] | None = None,
) -> None:
    """Show a frame every `interval` seconds; on a terminal one in the place of the other, elsewhere one below it.

    Args:
        out: takes lines where standard output is no terminal.
        once: a single one, over `interval` seconds.
        curve: as `ping`'s.

    Raises:
        HeadraceError: as `ping`'s; on a terminal only for the first frame.
    """
    ask = partial(ping, address, timeout=_TIMEOUT, curve=curve)
    history = History(ask())
    console = Console(highlight=False, emoji=False, markup=False)
    if console.is_terminal and not once:
        _live(address, ask, console, history, interval)
    while True:
        time.sleep(interval)
        history.push(ask())
        shown_now = frame(address, history.before, history.after)
        if console.is_terminal:
            console.print(shown_now)
        else:
            out(plain(shown_now))
        if once:
            return


def _live(address: str, ask: Callable[[], Pong], console: Console, history: History, interval: float) -> NoReturn:
    trouble = ""
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(frame(address, history.before, history.after, trouble), refresh=True)
            time.sleep(interval)
            try:
                history.push(ask())
                trouble = ""
            except HeadraceError as error:  # it may come back
                trouble = str(error)


def plain(what: RenderableType) -> str:
    """Its lines, unfolded and without colours."""
    text = io.StringIO()
    Console(file=text, width=_WIDE, highlight=False, emoji=False, markup=False, color_system=None).print(what)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


class History:
    """The answers of the last seconds: rates are taken between `before` and `after`, at first one and the same."""

    def __init__(self, first: Pong) -> None:
        self._pongs = deque([first])

    @property
    def before(self) -> Pong:
        return self._pongs[0]

    @property
    def after(self) -> Pong:
        return self._pongs[-1]

    def push(self, pong: Pong) -> None:
        """One more; what lies further back than the window goes, and everything of another daemon."""
        if not rates.same_run(self.after, pong):
            self._pongs.clear()
        self._pongs.append(pong)
        while len(self._pongs) > 2 and pong.uptime - self._pongs[1].uptime >= _WINDOW:
            self._pongs.popleft()


def frame(address: str, before: Pong, after: Pong, trouble: str = "") -> RenderableType:
    """What is shown of the time between two answers of one daemon; both may be the same, before there is a second.

    Args:
        trouble: why there is no newer answer.
    """
    parts: list[RenderableType] = [_head(address, after)]
    if trouble:
        parts.append(Text(f"no answer any more: {_safe(trouble)}", style="red"))
    parts += [Text(_safe(notice), style="yellow") for notice in after.notices]
    parts += [Text(), _streams(before, after), Text(), _stages(before, after)]
    if after.clients:
        parts += [Text(), _clients(before, after)]
    return Group(*parts)


def _head(address: str, pong: Pong) -> Text:
    what = f"headrace {_safe(pong.version)} at {address}, process {pong.pid}, up {_duration(pong.uptime)}"
    many = f"{_several(len(pong.workers), 'worker')}, {_several(pong.deaths, 'death')} of workers"
    return Text(f"{what}; {many}; {_several(pong.sessions, 'session')}", style="bold")


# -- tables ---------------------------------------------------------------------------------------------------


def _streams(before: Pong, after: Pong) -> Table:
    table = _table("stream", "images/s", "chunks/s", "shared", "again/s", "waiting", "bad", "ring")
    for name, at in after.streams.items():
        if at is None:
            table.add_row(_safe(name), *[""] * 6, "not open yet")
            continue
        rate = rates.stream(before.streams.get(name), at, after.uptime - before.uptime)
        table.add_row(
            _safe(name),
            _number(rate.images_per_s),
            _number(rate.delivered_per_s),
            _share(rate.shared),
            _number(rate.recomputed_per_s),
            _number(at.waiting),
            _number(at.rejected),
            _ring(at),
        )
    return table


def _ring(at: StreamStatus) -> Text:
    """A bar of leased, ready, filling and free slots; then ready with leased ones, those being filled, and all."""
    counts, signs = (at.leased, at.ready - at.leased, at.filling), ("█", "▓", "▒")
    ends = [round(_BAR * sum(counts[: i + 1]) / at.slots) if at.slots else 0 for i in range(len(counts))]
    bar = Text()
    for sign, style, begin, end in zip(signs, ("green", "cyan", "yellow"), [0, *ends], ends, strict=False):
        bar.append(sign * (end - begin), style=style)
    bar.append("░" * (_BAR - ends[-1]), style="dim")
    return bar.append(f" {at.ready:,}+{at.filling:,} of {at.slots:,}")


def _stages(before: Pong, after: Pong) -> Table:
    table = _table("stage", "busy", "", "per s", "mean", "median ≤", "99 % ≤", "MB/s")
    for name, rate in rates.stages(before, after, DAEMON_STAGES).items():
        who = f"{name} (daemon)" if name in DAEMON_STAGES else name
        table.add_row(
            _safe(who),
            _share(rate.busy),
            _bar(rate.busy),
            _number(rate.per_s),
            *(_time(seconds) for seconds in (rate.mean, rate.p50, rate.p99)),
            f"{rate.bytes_per_s / 1e6:,.1f}" if rate.bytes_per_s else "",
        )
    return table


def _clients(before: Pong, after: Pong) -> Table:
    table = _table("client", "stream", "via", "images/s", "waits", "busy", "shared", "again/s", "behind", "for")
    for then, now in rates.pairs(before, after):
        rate = rates.client(then, now, after.uptime - before.uptime)
        busy = [at.busy for name, at in rates.client_stages(then, now).items() if name != IDLE]
        table.add_row(
            _safe(f"{now.client}, GPU {now.device}" if now.device else now.client),
            _safe(now.stream),
            _safe(now.transport),
            "" if rate.images_per_s is None else _number(rate.images_per_s),
            _share(rate.waited),
            _share(sum(busy)) if busy else "",
            _share(rate.shared),
            _number(rate.recomputed_per_s),
            _number(now.lag),
            _duration(now.age),
        )
    return table


def _table(*columns: str) -> Table:
    """Where it is too narrow, names of clients are folded, and no number is cut."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for column in columns:
        left = column in ("stream", "stage", "client", "via", "ring", "")
        table.add_column(column, justify="left" if left else "right", no_wrap=column != "client", overflow="fold")
    return table


# -- texts ----------------------------------------------------------------------------------------------------


def _safe(text: str) -> str:
    """What somebody else has said, without what a terminal would obey."""
    return shown(text.encode("utf-8", "backslashreplace"))


def _number(value: float) -> str:
    if not math.isfinite(value):  # of a client that says nonsense of itself
        return ""
    return f"{value:,.0f}" if value >= 10 or value == round(value) else f"{value:.1f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _bar(share: float) -> Text:
    cells = max(0, min(_BAR, round(_BAR * share)))
    return Text("█" * cells, style="cyan").append("░" * (_BAR - cells), style="dim")


def _time(seconds: float) -> str:
    if not seconds:
        return ""
    if math.isinf(seconds):
        return "long"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.0f} µs"


def _duration(seconds: float) -> str:
    """`12 s`, `3 min 0 s`, `5 h 3 min`, `2 d 7 h`"""
    whole = int(seconds)
    for (unit, size), (smaller, less) in itertools.pairwise((("d", 86400), ("h", 3600), ("min", 60), ("s", 1))):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // less} {smaller}"
    return f"{whole} s"


def _several(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"
