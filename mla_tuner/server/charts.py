"""Charts as inline SVG: no script; colours come from the page, so that they fit light and dark."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import ceil, floor, log2
from typing import NamedTuple
from xml.sax.saxutils import escape

from ..answers import tokens

_WIDE, _HIGH = 720, 320  # of a chart of curves, pixels
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 16, 12, 32
_LABEL, _ROW = 250, 24  # of a forest: the width of a name, the height of a row
_TICKS = 12  # at most
COLOURS = 6  # classes c0 to c5 of the page's style: so many lines are told apart


class Point(NamedTuple):
    """A speed-up with its 95 % interval, where it has one; x is the context it was measured at."""

    x: float
    speedup: float
    low: float | None
    high: float | None


class _Axis(NamedTuple):
    """Powers of two from one pixel to another."""

    ticks: list[float]
    start: float
    end: float

    def __call__(self, value: float) -> float:
        first, last = log2(self.ticks[0]), log2(self.ticks[-1])
        return self.start + (log2(value) - first) / (last - first) * (self.end - self.start)

    @property
    def shown(self) -> list[float]:
        """Ticks with a line and a number: 1 is among them."""
        step = ceil(len(self.ticks) / _TICKS)
        return [tick for tick in self.ticks if log2(tick) % step == 0]


def curves(series: Mapping[str, Sequence[Point]], title: str) -> str:
    """Speed-ups over contexts, a line each name; "" where there are none."""
    points = [point for each in series.values() for point in each]
    if not points:
        return ""
    x = _Axis(_octaves(point.x for point in points), _LEFT, _WIDE - _RIGHT)
    y = _Axis(_speedups(points), _HIGH - _BOTTOM, _TOP)
    parts: list[str] = []
    for tick in x.shown:
        parts += [_line(x(tick), _TOP, x(tick), y.start, "grid")]
        parts += [_text(x(tick), y.start + 18, tokens(int(tick)), "middle")]
    for tick in y.shown:
        parts += [_line(x.start, y(tick), x.end, y(tick), "one" if tick == 1 else "grid")]
        parts += [_text(x.start - 6, y(tick) + 4, f"{tick:g}x", "end")]
    for at, (name, each) in enumerate(series.items()):
        parts += [f'<g class="c{at % COLOURS}"><title>{escape(name)}</title>']
        parts += [_line(x(a.x), y(a.speedup), x(b.x), y(b.speedup)) for a, b in pairwise(each)]
        for point in each:
            if point.low and point.high:
                parts += [_line(x(point.x), y(point.low), x(point.x), y(point.high))]
            parts += [_mark(at, x(point.x), y(point.speedup))]
        parts += ["</g>"]
    parts += _legend(series)
    return _svg(_WIDE, _HIGH + 20 * ceil(len(series) / 4), title, parts)


def forest(rows: Sequence[tuple[str, Point]], title: str) -> str:
    """Speed-ups one below the other, each with its interval; "" where there are none."""
    if not rows:
        return ""
    bottom = _ROW * len(rows) + 8
    x = _Axis(_speedups([point for _, point in rows]), _LABEL, _WIDE - _RIGHT)
    parts: list[str] = []
    for tick in x.shown:
        parts += [_line(x(tick), 4, x(tick), bottom, "one" if tick == 1 else "grid")]
        parts += [_text(x(tick), bottom + 16, f"{tick:g}x", "middle")]
    for at, (name, point) in enumerate(rows):
        y = _ROW * (at + 0.5) + 4
        parts += [_text(_LABEL - 12, y + 4, name, "end"), '<g class="c0">']
        if point.low and point.high:
            parts += [_line(x(point.low), y, x(point.high), y)]
        parts += [_mark(0, x(point.speedup), y), "</g>"]
    return _svg(_WIDE, bottom + 24, title, parts)


# --- inside ------------------------------------------------------------------------------------


def _octaves(values: Iterable[float]) -> list[float]:
    """Powers of two that enclose the values, two at least."""
    known = list(values)
    first, last = floor(log2(min(known))), ceil(log2(max(known)))
    return [2.0**each for each in range(first, max(last, first + 1) + 1)]


def _speedups(points: Iterable[Point]) -> list[float]:
    """The scale holds 1 and every interval."""
    return _octaves([1.0, *(each for point in points for each in point[1:] if each)])


def _legend(names: Iterable[str]) -> Iterator[str]:
    for at, name in enumerate(names):
        place = f"translate({_LEFT + at % 4 * 165},{_HIGH + at // 4 * 20 + 8})"
        yield f'<g class="c{at % COLOURS}" transform="{place}">{_mark(at, 0, 0)}</g>'
        yield f'<g transform="{place}">{_text(10, 4, name)}</g>'


def _svg(width: float, height: float, title: str, parts: Iterable[str]) -> str:
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" role="img" class="chart" {size}>'
    return f"{head}<title>{escape(title)}</title>{''.join(parts)}</svg>"


def _mark(at: int, x: float, y: float) -> str:
    """Colours repeat and not everybody tells them apart: the shapes change, too."""
    if at % 3 == 1:
        return f'<rect x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8"/>'
    if at % 3 == 2:
        points = f"{x:.1f},{y - 5:.1f} {x - 5:.1f},{y + 4:.1f} {x + 5:.1f},{y + 4:.1f}"
        return f'<polygon points="{points}"/>'
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4"/>'


def _line(x1: float, y1: float, x2: float, y2: float, style: str = "") -> str:
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} class="{style}"/>' if style else f"<line {ends}/>"


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
