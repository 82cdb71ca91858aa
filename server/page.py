"""A profile as a page of its own: one HTML file with its plots in it, which loads nothing from anywhere."""

from __future__ import annotations

import html
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path

from headrace import __version__
from headrace.errors import ConfigError
from headrace.server import report
from headrace.server.profile import Profile
from headrace.server.verdict import Chain, called, plural, shown

_STYLE = """
:root{--ink:#1b2330;--soft:#5d6878;--line:#d7dce3;--page:#fff;--quiet:#f3f5f8}
@media(prefers-color-scheme:dark){:root{--ink:#e8ebf0;--soft:#9aa5b5;--line:#3a4454;--page:#161b23;--quiet:#1f2630}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--page);max-width:52rem;margin:2rem auto;
padding:0 1rem}
h1{font-size:1.5rem;margin:0}h2{font-size:1.1rem;margin:2rem 0 .5rem}p{margin:.4rem 0}.soft{color:var(--soft)}
.verdict{background:var(--quiet);border-left:4px solid #c8553d;padding:.8rem 1rem;margin:1.2rem 0}
svg{width:100%;height:auto;display:block}text{font:13px system-ui,sans-serif;fill:var(--ink)}
text.soft{fill:var(--soft)}line{stroke:var(--line)}
code,pre{font:13px/1.5 ui-monospace,monospace;background:var(--quiet)}pre{padding:.8rem;overflow:auto}
li{margin:.5rem 0}.key span{display:inline-block;margin-right:1rem}.key i{display:inline-block;width:.8rem;
height:.8rem;margin-right:.3rem;vertical-align:-1px}
"""
#: One colour for a stage, wherever it is drawn.
_COLOURS = {
    "read": "#4878a8",
    "plan": "#8c6bb1",
    "probe": "#8c6bb1",
    "decode": "#c8553d",
    "resize": "#e0a030",
    "colour": "#5a9e6f",
    "render": "#c8553d",
    "write": "#7d8a99",
    "copy": "#7d8a99",
    "finish": "#3fa0a0",
    "chunk": "#39424e",
    "idle": "#c9d0d9",
}
_WIDTH, _LEFT, _RIGHT = 760, 90, 180


def write(profile: Profile, file: Path, data: Sequence[Path] = ()) -> None:
    """
    Args:
        data: folders that are never written to, without links.

    Raises:
        ConfigError: the file cannot be written.
    """
    real = Path(os.path.realpath(file))
    for place in data:
        if real.is_relative_to(place):
            raise ConfigError(f"{file}: it belongs to the data set {place}, which is never written to")
    partial = real.with_name(f".headrace-{secrets.token_hex(8)}.partial")
    try:
        try:
            partial.write_text(page(profile), encoding="utf-8")
            partial.rename(real)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise ConfigError(f"{file}: cannot be written: {error.strerror}") from error


def page(profile: Profile) -> str:
    """The HTML."""
    return "\n".join(_page(profile)) + "\n"


def _page(profile: Profile) -> Iterator[str]:
    title = f"Headrace profile{f' of {profile.stream}' if profile.stream else ''}"
    yield f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{_text(title)}</title>'
    yield f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>'
    yield f"<h1>{_text(title)}</h1><p class=soft>{_text(profile.what)}</p>"
    said = _text(_sentence(profile.verdict.text))
    yield f"<div class=verdict><p><b>{shown(profile.best.rate)} images/s.</b> {said}</p>"
    if profile.headroom is not None:
        yield f"<p>{_text(_sentence(profile.headroom.text))}</p>"
    yield "</div>"
    if profile.alone:
        yield "<h2>Each stage alone, milliseconds of one core for an image</h2>"
        yield from _bars([(one.stage, one.seconds * 1e3, f"{shown(one.rate)} images/s") for one in profile.alone])
    yield "<h2>Where the workers' time goes</h2>"
    yield from _shares(profile.chains)
    if len(profile.chains) > 1 or profile.forecasts:
        yield "<h2>More workers</h2>"
        yield from _scaling(profile)
        if profile.distrust:
            yield "<p>Not to be trusted:</p><ul>"
            yield from (f"<li>{_text(reason)}</li>" for reason in profile.distrust)
            yield "</ul>"
    yield "<h2>What to do</h2><ul>"
    for one in (*profile.advice, *(profile.target or ())):
        keys = "".join(f"<br><code>{_text(line)}</code>" for line in one.lines)
        yield f"<li>{_text(_sentence(one.text))}{keys}</li>"
    yield "</ul><h2>All figures</h2>"
    yield f"<pre>{_text(chr(10).join(report.lines(profile)))}</pre>"
    yield f"<p class=soft>headrace {__version__}</p></body></html>"


def _bars(bars: Sequence[tuple[str, float, str]]) -> Iterator[str]:
    most = max(value for _, value, _ in bars) or 1.0
    yield f'<svg viewBox="0 0 {_WIDTH} {28 * len(bars)}" role="img">'
    for i, (name, value, note) in enumerate(bars):
        width = (_WIDTH - _LEFT - _RIGHT) * value / most
        y = 28 * i
        yield f'<text x="{_LEFT - 8}" y="{y + 18}" text-anchor="end">{_text(name)}</text>'
        yield f'<rect x="{_LEFT}" y="{y + 5}" width="{max(1.0, width):.1f}" height="18" fill="{_colour(name)}"/>'
        yield f'<text class=soft x="{_LEFT + width + 8:.1f}" y="{y + 18}">{value:.2f} · {_text(note)}</text>'
    yield "</svg>"


def _shares(chains: Sequence[Chain]) -> Iterator[str]:
    names = list(dict.fromkeys(name for chain in chains for name in chain.stages))
    yield f'<svg viewBox="0 0 {_WIDTH} {34 * len(chains)}" role="img">'
    for i, chain in enumerate(chains):
        total = (chain.busy + chain.wait) or 1.0
        y, x = 34 * i, float(_LEFT)
        workers = f"{chain.workers} {plural(chain.workers, 'worker')}"
        yield f'<text x="{_LEFT - 8}" y="{y + 20}" text-anchor="end">{workers}</text>'
        for name in (*names, "idle"):
            share = (chain.wait if name == "idle" else chain.stages.get(name, 0.0)) / total
            width = (_WIDTH - _LEFT - _RIGHT) * share
            yield (
                f'<rect x="{x:.1f}" y="{y + 4}" width="{width:.1f}" height="24" fill="{_colour(name)}">'
                f"<title>{_text(name)} {share:.0%}</title></rect>"
            )
            if share > 0.07:
                yield f'<text x="{x + 5:.1f}" y="{y + 20}" style="fill:#fff">{share:.0%}</text>'
            x += width
        yield f'<text class=soft x="{x + 8:.1f}" y="{y + 20}">{shown(chain.rate)} images/s</text>'
    yield "</svg><p class=key>"
    yield from (
        f'<span><i style="background:{_colour(name)}"></i>{_text(called(name))}</span>' for name in (*names, "idle")
    )
    yield "</p>"


def _scaling(profile: Profile) -> Iterator[str]:
    """Images/s over workers: what was measured as dots, what is predicted as rings."""
    dots = [(chain.workers, chain.rate) for chain in profile.chains]
    rings = [(one.workers, one.rate) for one in profile.forecasts]
    across = max(x for x, _ in dots + rings)
    up = max(y for _, y in dots + rings) * 1.1 or 1.0
    height, floor = 260, 220

    def at(x: float, y: float) -> tuple[float, float]:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * x / across, floor - (floor - 10) * y / up

    yield f'<svg viewBox="0 0 {_WIDTH} {height}" role="img">'
    for y in _ticks(up):
        _, py = at(0, y)
        yield f'<line x1="{_LEFT}" y1="{py:.1f}" x2="{_WIDTH - _RIGHT}" y2="{py:.1f}"/>'
        yield f'<text class=soft x="{_LEFT - 8}" y="{py + 4:.1f}" text-anchor="end">{y:,.0f}</text>'
    for x in sorted({x for x, _ in dots + rings}):
        px, _ = at(x, 0)
        yield f'<text class=soft x="{px:.1f}" y="{floor + 18}" text-anchor="middle">{x}</text>'
    yield f'<text class=soft x="{_LEFT}" y="{height - 2}">workers; a dot was measured, a ring is predicted</text>'
    for (x, y), fill in [(point, "none") for point in rings] + [(point, "#c8553d") for point in dots]:
        px, py = at(x, y)
        yield (
            f'<circle cx="{px:.1f}" cy="{py:.1f}" r="6" fill="{fill}" stroke="#c8553d" stroke-width="2">'
            f"<title>{x} workers: {y:,.0f} images/s</title></circle>"
        )
    yield "</svg>"


def _ticks(most: float) -> list[float]:
    """Round numbers up to this one, three to six of them."""
    step = 1.0
    while most / step > 6:
        step *= 2 if str(step)[0] in "15" else 2.5
    return [step * i for i in range(int(most / step) + 1)]


def _colour(name: str) -> str:
    return _COLOURS.get(name, "#7d8a99")


def _text(text: str) -> str:
    return html.escape(text, quote=True)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + "."
