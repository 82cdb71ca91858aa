"""The command line, `headrace COMMAND`.

Data goes to standard output, unfolded, uncoloured and in UTF-8; progress and logs to standard error. Exit status:
0 fine, 1 found something (not usable), 2 wrong usage or configuration, 130 Ctrl-C.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from headrace import __version__
from headrace.errors import ConfigError, DatasetError, HeadraceError

if TYPE_CHECKING:
    from headrace.pipeline.spec import Config
    from headrace.server.doctor import Finding
    from headrace.workers.crew import Crew

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
stderr = Console(stderr=True)
#: Seconds between two lines about something that takes long.
_PACE = 30.0
log = logging.getLogger("headrace")

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="the YAML file", show_default=False)]
Address = Annotated[
    str, typer.Argument(metavar="ADDRESS", help="of a daemon: ipc://PATH or tcp://HOST:PORT", show_default=False)
]
SecretKey = Annotated[
    Path | None,
    typer.Option(
        "--curve-secret-key",
        metavar="FILE",
        help="of this client, for a tcp address that wants keys",
        show_default=False,
    ),
]
ServerKey = Annotated[
    Path | None,
    typer.Option("--curve-server", metavar="FILE", help="the daemon's public key, likewise", show_default=False),
]
StreamName = Annotated[str, typer.Argument(metavar="STREAM", help="a stream of the configuration", show_default=False)]


def main() -> NoReturn:
    """The console script: every error that we raise on purpose is one message and an exit status."""
    if sys.stdout is None:  # closed by who has started us
        sys.stdout = open(os.devnull, "w")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")  # a listing is the same in every locale
    try:
        status = app(standalone_mode=False)
    except ConfigError as error:
        sys.exit(_complain(error, 2))
    except HeadraceError as error:
        sys.exit(_complain(error, 1))
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except typer.Exit as stop:
        sys.exit(stop.exit_code)
    except Exception as error:
        if not hasattr(error, "show"):
            raise
        error.show()  # click's own: wrong usage
        sys.exit(2)
    sys.exit(status if isinstance(status, int) else 0)


def _complain(error: HeadraceError, status: int) -> int:
    stderr.print(f"headrace: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
    return status


def _version(asked: bool) -> None:
    if asked:
        _out(__version__)
        raise typer.Exit


@app.callback()
def options(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="log more")] = False,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="and exit")] = False,
) -> None:
    """Image batches for training: decoded and augmented here, streamed to the trainers that ask."""
    level = logging.DEBUG if verbose else logging.INFO
    if sys.stderr.isatty():
        handler: logging.Handler = RichHandler(console=stderr, show_path=False)
        logging.basicConfig(level=level, format="%(message)s", handlers=[handler])
    else:
        logging.basicConfig(level=level, format="%(asctime)s %(name)s[%(process)d] %(levelname)s %(message)s")


@app.command()
def serve(
    config: ConfigFile,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="listen also where other hosts reach it, without keys and encryption")
    ] = False,
) -> None:
    """Run the daemon. Prints `listening on ADDRESS` when clients can come; SIGTERM or Ctrl-C stops it, twice forces."""
    from headrace.pipeline.spec import Config
    from headrace.server.exporter import Exporter
    from headrace.server.listener import Listener, private_folder, tcp_endpoint
    from headrace.server.quiet import quiet
    from headrace.server.service import Service

    loaded = Config.load(config)
    keys = loaded.curve.secret_key is not None
    endpoints = [
        tcp_endpoint(address, insecure=insecure, keys=keys) for address in loaded.listen if address.startswith("tcp:")
    ]
    paths = [address.removeprefix("ipc://") for address in loaded.listen if address.startswith("ipc:")]
    with contextlib.ExitStack() as opened:
        listeners = []
        for path in paths or [f"{private_folder()}/serve-{loaded.key()[:16]}.sock"]:
            listener = Listener(Path(path), group=loaded.socket.group)
            opened.callback(listener.close)
            listeners.append(listener)
        exporter = Exporter.at(loaded.metrics, insecure=insecure)
        if exporter is not None:
            opened.callback(exporter.close)
        log.info("the log is this, standard error; process %d", os.getpid())
        quiet()
        if insecure and keys:
            log.warning("--insecure: over tcp keys are asked for all the same; only at the port for metrics none are")
        elif insecure:
            log.warning(
                "--insecure: anybody who reaches a port of this daemon can read its pictures and labels, and can keep "
                "it busy; nothing is encrypted, and nobody is asked for a key"
            )
        stopped_by = Service(loaded, listeners, endpoints, exporter=exporter).run(
            lambda found: _out(*(f"listening on {address}" for address in _in_order(loaded.listen, found)))
        )
    if stopped_by == signal.SIGINT:
        raise typer.Exit(130)


def _in_order(listen: list[str], found: list[str]) -> list[str]:
    """The addresses in the order of the configuration, and last the one that it leaves to the daemon."""
    ipc, tcp = (iter([address for address in found if address.startswith(kind)]) for kind in ("ipc:", "tcp:"))
    return [*(next(tcp if address.startswith("tcp:") else ipc) for address in listen), *ipc]


@app.command()
def check(
    config: ConfigFile,
    reindex: Annotated[bool, typer.Option("--reindex", help="list the data sets anew")] = False,
) -> int:
    """Validate the configuration, list its data sets, and say what would run and why."""
    from headrace.pipeline import machine
    from headrace.pipeline.spec import Config
    from headrace.workers.cpus import usable_cpus
    from headrace.workers.crew import crew

    loaded = Config.load(config)
    chosen = machine.prove(loaded.workers)
    team = crew(loaded.workers, private=False, chosen=chosen)
    _out(
        f"backend: {loaded.workers.backend} runs as {chosen.render_id}",
        *(f"  {why}" for why in chosen.why),
        *_devices(team),
        f"workers: {team.processes} ({usable_cpus()} CPUs may be used)"
        f"{', which take over where no GPU works any more' if team.devices else ''}",
        f"cache: {loaded.cache_folder}",
        *_keys_shown(loaded),
    )
    status = 0
    for name in loaded.streams:
        try:
            _out(*_checked(loaded, name, team.chunks, reindex=reindex))
        except DatasetError as error:  # the others may be no good either, and each may take long to list
            status = _complain(error, 1)
    return status


def _devices(team: Crew) -> list[str]:
    """What there is to say about GPUs that render."""
    if not team.devices:
        return []
    from headrace.workers.device import least_memory

    most, least = team.gpu_memory >> 20, least_memory(team.threads) >> 20
    bounds = (
        f"a worker with {team.threads} threads, {team.in_flight} chunks at once, and at most {most} MiB of its memory, "
        f"of which it takes about {least} before the first picture"
    )
    return [f"GPU {device}: {bounds}" for device in team.devices]


def _keys_shown(config: Config) -> list[str]:
    """What there is to say about the keys of a configuration.

    Raises:
        ConfigError: the daemon would not take them.
    """
    from headrace.server.keys import ServerKeys

    keys = ServerKeys.load(config.curve)
    if keys is None:
        return []
    names = ", ".join(sorted(keys.clients.values()))
    used = any(address.startswith("tcp:") for address in config.listen)
    return [f"keys: over tcp may come {names}", *([] if used else ["  but `listen` has no tcp:// address"])]


def _checked(config: Config, name: str, in_flight: int, *, reindex: bool) -> list[str]:
    """What there is to say about a stream."""
    from headrace.pipeline.dataset import open_index
    from headrace.pipeline.index import shown
    from headrace.pipeline.ledger import Ledger
    from headrace.server import ring_size

    stream = config.streams[name]
    with _progress(f"listing {name}") as progress:
        index = open_index(stream.dataset, config.cache_folder, reindex=reindex, progress=progress)
    with contextlib.closing(index):
        layout = stream.layout(index)
        chunks = layout.chunks(len(index))
        need = ring_size.Need(layout, in_flight, chunks, len(config.streams))
        left = ring_size.available_bytes()
        slots = ring_size.slots(name, config.memory, need, left, left)
        prints = stream.fingerprints(index.data_fingerprint)
        columns = ", ".join(shown(column.encode()) for column in index.columns)
        return [
            f"stream {name}: {len(index)} samples, {index.labels_shown()}, {chunks} chunks of {stream.chunk}; "
            f"pictures {layout.height}x{layout.width}",
            *([f"  further columns: {columns}"] if columns else []),
            f"  memory: {slots} chunks, {slots * layout.stride >> 20} MiB",
            f"  fingerprints: data {prints.data[:12]}, order {prints.order[:12]}, pixels {prints.pixels[:12]}",
            *(f"  {notice}" for notice in index.notices),
            *(f"  not rendered: {index.shown(i)}: {why}" for i, why in Ledger(index).convicted.items()),
        ]


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False) -> int:
    """Look at this machine: what is here and what is missing, and what to do. Exit status 1 if it is not usable."""
    from headrace.server.doctor import examine

    found = []
    for name, finding in examine():
        found.append({"check": name, **asdict(finding)})
        if not as_json:
            _out(*_shown(name, finding))
    usable = all(finding["level"] != "bad" for finding in found)
    if as_json:
        _out(json.dumps({"usable": usable, "findings": found}))
    return int(not usable)


def _shown(name: str, finding: Finding) -> list[str]:
    level = f"{finding.level:4}"
    if sys.stdout.isatty():
        level = typer.style(level, fg={"ok": "green", "warn": "yellow", "bad": "red"}[finding.level])
    return [f"{level}  {name}: {finding.found}", *([f"      {finding.advice}"] if finding.advice else [])]


@app.command()
def ls(config: ConfigFile, stream: StreamName) -> None:
    """List a stream's samples: index, label, path, with tabs between."""
    from headrace.pipeline.dataset import open_index
    from headrace.pipeline.spec import Config

    loaded = Config.load(config)
    name, spec = loaded.stream(stream)
    with _progress(f"listing {name}") as progress:
        index = open_index(spec.dataset, loaded.cache_folder, progress=progress)
    for notice in index.notices:
        log.warning("%s", notice)
    for first in range(0, len(index), 1000):
        some = range(first, min(first + 1000, len(index)))
        _out(*(f"{i}\t{index.label_shown(i)}\t{index.shown(i)}" for i in some))
    index.close()


@app.command()
def show(
    config: ConfigFile,
    stream: StreamName,
    at: Annotated[str, typer.Argument(metavar="EPOCH:POSITION", show_default=False)],
    number: Annotated[int, typer.Option("-n", min=1, max=4096, help="how many pictures")] = 32,
    output: Annotated[Path, typer.Option("-o", help="the PNG file to write")] = Path("show.png"),
) -> None:
    """Draw the pictures that trainers get from a position of an epoch on."""
    from headrace.pipeline.dataset import open_index
    from headrace.pipeline.spec import Config
    from headrace.server.grid import draw

    loaded = Config.load(config)
    name, spec = loaded.stream(stream)
    epoch, position = _position(at)
    with _progress(f"listing {name}") as progress:
        index = open_index(spec.dataset, loaded.cache_folder, progress=progress)
    if position >= len(index):
        raise ConfigError(f"{at}: an epoch of stream {name!r} has the positions 0 to {len(index) - 1}")
    lines = draw(spec, index, loaded.workers, epoch, position, number, output)
    _out(*lines)
    log.info("wrote %s", output)
    index.close()


def _position(at: str) -> tuple[int, int]:
    epoch, _, position = at.partition(":")
    if not (epoch.isascii() and epoch.isdigit() and position.isascii() and position.isdigit()):
        raise ConfigError(f"{at!r}: must be EPOCH:POSITION, two whole numbers such as 3:1024")
    if max(len(epoch), len(position)) > 18:  # digits; every such number fits into 63 bits
        raise ConfigError(f"{at!r}: there is no such epoch or position, the largest is {10**18 - 1}")
    return int(epoch), int(position)


@app.command()
def verify(
    config: ConfigFile,
    stream: Annotated[str | None, typer.Option(help="only this one")] = None,
    output: Annotated[Path | None, typer.Option("-o", help="the CSV file to write, instead of standard output")] = None,
    restart: Annotated[bool, typer.Option("--restart", help="do not go on where an interrupted run was")] = False,
) -> int:
    """Read and decode everything; list what would be rejected, as CSV. Exit status 1 if there is any."""
    from headrace.pipeline.spec import Config
    from headrace.server.findings import Target, table
    from headrace.server.verify import Interrupted, Verification

    loaded = Config.load(config)
    names = list(loaded.streams) if stream is None else [loaded.stream(stream)[0]]
    with Verification(loaded, names, _progress, restart=restart) as run:
        target = None if output is None else Target(output, run.data)
        try:
            run.run()
        except Interrupted as interrupted:
            raise typer.Exit(128 + interrupted.number) from None
        if target is not None:
            target.write(table(run.findings()))
        else:
            with contextlib.suppress(typer.Exit):  # nobody reads it to its end
                rest = table(run.findings())
                while lines := list(itertools.islice(rest, 1000)):
                    _out(*lines)
        run.finish()
        return int(run.found > 0)


@app.command()
def keygen(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="is made if need be", show_default=False)],
    name: Annotated[str, typer.Option("--name", help="of the files, and of the key in the daemon's log")] = "headrace",
) -> None:
    """Make a pair of keys for tcp, NAME.key and NAME.key_secret: one for the daemon, one for each client."""
    from headrace.keys import generate

    _out(*map(str, generate(folder, name)))


@app.command()
def ping(
    address: Address,
    timeout: Annotated[float, typer.Option(min=0.001, help="seconds to wait")] = 5.0,
    secret_key: SecretKey = None,
    server_key: ServerKey = None,
) -> None:
    """Ask a daemon whether it is usable."""
    from headrace.ping import ping as ask

    pong = ask(address, timeout=timeout, curve=_curve(secret_key, server_key))
    streams = ", ".join(
        f"{name} ({'not open yet' if at is None else f'{at.samples} samples'})" for name, at in pong.streams.items()
    )
    _out(
        f"headrace {pong.version}, process {pong.pid}, {pong.sessions} sessions; streams: {streams}",
        *(f"  {notice}" for notice in pong.notices),
    )


@app.command()
def top(
    address: Address,
    once: Annotated[bool, typer.Option("--once", help="print one frame and end")] = False,
    interval: Annotated[float, typer.Option(min=0.1, max=3600, help="seconds between two frames")] = 2.0,
    secret_key: SecretKey = None,
    server_key: ServerKey = None,
) -> None:
    """Watch a daemon: what its streams, workers and clients do now. Ctrl-C ends it."""
    from headrace.server.top import top as watch

    watch(address, _out, interval=interval, once=once, curve=_curve(secret_key, server_key))


@app.command()
def bench(
    address: Address,
    stream: Annotated[str | None, typer.Option(help="which; may be left out where there is one")] = None,
    batch_size: Annotated[int, typer.Option(min=1)] = 256,
    steps: Annotated[int, typer.Option(min=1, help="batches to take, over as many epochs as it needs")] = 200,
    transport: Annotated[str, typer.Option(help="auto, shm or tcp")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
    secret_key: SecretKey = None,
    server_key: ServerKey = None,
) -> None:
    """Take batches from a daemon as fast as they come, and say how fast that is."""
    from headrace.server.bench import bench as run

    curve = _curve(secret_key, server_key)
    result = run(address, stream=stream, batch_size=batch_size, steps=steps, transport=transport, curve=curve)
    if as_json:
        _out(json.dumps(result.as_dict()))
    else:
        _out(*result.sentences())


@app.command()
def profile(
    config: Annotated[
        Path | None, typer.Argument(metavar="CONFIG", help="the YAML file; not needed with --against")
    ] = None,
    stream: Annotated[
        str | None, typer.Argument(metavar="STREAM", help="which; may be left out where there is one")
    ] = None,
    workers: Annotated[
        str | None, typer.Option(metavar="N,N...", help="how many to try; by default one up to all", show_default=False)
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.5, max=3600, help="for each measurement of the whole chain")] = 5.0,
    target: Annotated[
        float | None, typer.Option(min=0.1, metavar="N", help="say what it takes to feed N images/s")
    ] = None,
    address: Annotated[
        str | None, typer.Option("--against", metavar="ADDRESS", help="watch a daemon under its real load instead")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
    page: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="write a page with plots, too")] = None,
    secret_key: SecretKey = None,
    server_key: ServerKey = None,
) -> None:
    """Measure each stage and the whole chain; say what limits, by how much, and what to change."""
    from headrace.pipeline.spec import Config
    from headrace.server import page as pages
    from headrace.server import profile as profiles
    from headrace.server import report

    logging.getLogger("headrace.loader").setLevel(logging.WARNING)  # its epochs are ours
    loaded = None if config is None else Config.load(config)
    data = []
    if address is not None:
        name = None if loaded is None and stream is None else stream or _only(loaded)
        curve = _curve(secret_key, server_key)
        result = profiles.against(address, _progress, stream=name, seconds=seconds, target=target, curve=curve)
    elif loaded is not None:
        name, spec = loaded.stream(stream)
        data = [Path(os.path.realpath(spec.dataset.folder))] if spec.dataset.folder is not None else []
        result = profiles.profile(loaded, name, _progress, workers=_numbers(workers), seconds=seconds, target=target)
    else:
        raise ConfigError("profile: name a CONFIG, or a daemon that serves with --against ADDRESS")
    if page is not None:
        pages.write(result, page, data)
        log.info("wrote %s", page)
    _out(*([json.dumps(result.as_dict())] if as_json else report.lines(result)))


def _curve(secret_key: Path | None, server_key: Path | None) -> dict[str, Path] | None:
    """The two options as the Loader takes them."""
    if secret_key is None or server_key is None:
        if secret_key is server_key:
            return None
        raise ConfigError("--curve-secret-key and --curve-server belong together: a client needs both")
    return {"secret_key": secret_key, "server": server_key}


def _only(config: Config | None) -> str | None:
    """The stream of a configuration, if it has just one."""
    return next(iter(config.streams)) if config is not None and len(config.streams) == 1 else None


def _numbers(text: str | None) -> list[int]:
    """Of `1,2,4`."""
    if text is None:
        return []
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and 1 <= int(part[:9]) <= 4096 and len(part) < 5 for part in parts):
        raise ConfigError(
            f"--workers: {text!r} must be whole numbers from 1 to 4096, with commas between, such as 1,2,4"
        )
    return [int(part) for part in parts]


@app.command()
def demo(
    data: Annotated[Path | None, typer.Option("--data", help="a folder of class folders with pictures")] = None,
    address: Annotated[
        str | None, typer.Option("--from", metavar="ADDRESS", help="a daemon that serves already")
    ] = None,
    transport: Annotated[str, typer.Option(help="auto, shm or tcp; with --from")] = "auto",
    secret_key: SecretKey = None,
    server_key: ServerKey = None,
) -> None:
    """Serve real photos through a daemon, train a small network on them, print speed, waiting and loss."""
    from headrace.server.demo import run, train

    logging.getLogger("headrace.loader").setLevel(logging.WARNING)  # the demo says itself what each epoch waited
    if address is None:
        run(data, _out)
    else:
        train(address, _out, epochs=1, transport=transport, curve=_curve(secret_key, server_key))


def _out(*lines: str) -> None:
    try:
        sys.stdout.write("".join(f"{line}\n" for line in lines))
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python would try once more at its end, and complain
        if isinstance(error, BrokenPipeError):  # `headrace ls … | head` has read enough
            raise typer.Exit from None
        raise HeadraceError(f"standard output: {error.strerror}") from None


class _Reporter:
    def __init__(self, bar: Progress, what: str) -> None:
        self._bar = bar
        self._what = what
        self._task = bar.add_task(what, total=None)
        self._said = time.monotonic()

    def __call__(self, done: int, total: int, note: str = "") -> None:
        self._bar.update(self._task, completed=done, total=total or None, description=self._what + note)
        if self._bar.disable and time.monotonic() - self._said >= _PACE:
            self._said = time.monotonic()
            log.info("%s: %d of %s%s", self._what, done, total or "?", note)


@contextlib.contextmanager
def _progress(what: str) -> Iterator[_Reporter]:
    """A progress bar on standard error, gone when done; where that is no terminal, a line in the log now and then."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=stderr, transient=True, disable=not sys.stderr.isatty()) as bar:
        yield _Reporter(bar, what)


if __name__ == "__main__":
    main()
