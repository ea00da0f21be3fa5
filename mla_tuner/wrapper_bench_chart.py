"""Latencies as an SVG: a panel a table, a mark a plan at its median, whiskers to min and max."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from math import ceil, floor, log10
from typing import Any
from xml.sax.saxutils import escape

from .answers import tokens
from .plan import PATHS

Row = Mapping[str, Any]
Panels = Mapping[str, Sequence[Row]]

# Of the Okabe-Ito palette, which colour-blind people can tell apart; the shapes differ as well.
_COLOURS = {
    "mlx": "#000000",
    "mlx_rows": "#e69f00",
    "mlx_fused": "#cc79a7",
    "single": "#0072b2",
    "split": "#d55e00",
}
_WIDE, _HIGH = 430, 250  # of a panel, in pixels
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 10, 28, 44  # of its frame
_ACROSS = 3  # panels
_HEAD = 68


def svg(panels: Panels, title: str) -> str:
    """Times in milliseconds on a logarithmic scale; each panel has its own.

    title: up to 60 letters, which is what fits above a single panel.
    """
    shown = {name: [row for row in rows if row["median_us"]] for name, rows in panels.items()}
    shown = {name: rows for name, rows in shown.items() if rows}
    across = max(1, min(_ACROSS, len(shown)))
    width, height = across * _WIDE, _HEAD + ceil(len(shown) / across) * _HIGH
    paths = [path for path in PATHS if any(row["path"] == path for row in chain(*shown.values()))]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        _text(10, 18, "One step of an attention module in ms: median, min, max", size=13),
        _text(10, 36, title),
        *_legend(paths),
    ]
    for number, (name, rows) in enumerate(shown.items()):
        down, right = divmod(number, across)
        parts += [f'<g transform="translate({right * _WIDE},{_HEAD + down * _HIGH})">']
        parts += [*_panel(name, rows), "</g>"]
    return "\n".join([*parts, "</svg>", ""])


def _legend(paths: Sequence[str]) -> Iterator[str]:
    for at, path in enumerate(paths):
        x = 16 + at * 80
        yield _mark(path, x, 54)
        yield _text(x + 10, 58, path)


def _panel(name: str, rows: Sequence[Row]) -> Iterator[str]:
    right, bottom = _WIDE - _RIGHT, _HIGH - _BOTTOM
    ticks = _ticks(min(row["min_us"] for row in rows), max(row["max_us"] for row in rows))

    def y(us: float) -> float:
        return bottom - log10(us / ticks[0]) / log10(ticks[-1] / ticks[0]) * (bottom - _TOP)

    yield _text(_LEFT, _TOP - 8, name, size=12)
    yield f'<rect x="{_LEFT}" y="{_TOP}" width="{right - _LEFT}" height="{bottom - _TOP}" '
    yield 'fill="none" stroke="#999"/>'
    for tick in ticks:
        yield _line(_LEFT, y(tick), right, y(tick), "#ddd")
        yield _text(_LEFT - 5, y(tick) + 4, f"{tick / 1e3:g}", anchor="end")
    yield from _columns(rows, y)


def _ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 of each decade that the values lie in, as far as they reach; microseconds."""
    decades = range(floor(log10(low)) - 1, ceil(log10(high)) + 1)  # log10 may round up
    ticks = [digit * 10.0**decade for decade in decades for digit in (1, 2, 5)]
    first = max(at for at, tick in enumerate(ticks) if tick <= low)
    last = min(at for at, tick in enumerate(ticks) if tick >= high and at > first)
    return ticks[first : last + 1]


def _columns(rows: Sequence[Row], y: Callable[[float], float]) -> Iterator[str]:
    """A column a shape: its plans side by side, by path and partitions."""
    bottom = _HIGH - _BOTTOM
    shapes = list(dict.fromkeys((row["batch"], row["context"]) for row in rows))
    step = (_WIDE - _RIGHT - _LEFT) / len(shapes)
    for at, (batch, context) in enumerate(shapes):
        middle = _LEFT + (at + 0.5) * step
        yield _text(middle, bottom + 14, tokens(context), anchor="middle")
        yield _text(middle, bottom + 28, f"b{batch}", anchor="middle")
        some = [row for row in rows if (row["batch"], row["context"]) == (batch, context)]
        some.sort(key=lambda row: (PATHS.index(row["path"]), row["partitions"]))
        for number, row in enumerate(some):
            place = number - (len(some) - 1) / 2
            yield from _whiskers(row, middle + place * min(12.0, step / (len(some) + 1)), y)


def _whiskers(row: Row, x: float, y: Callable[[float], float]) -> Iterator[str]:
    colour, low, high = _COLOURS[row["path"]], y(row["min_us"]), y(row["max_us"])
    yield _line(x, low, x, high, colour)
    for end in (low, high):
        yield _line(x - 3, end, x + 3, end, colour)
    yield _mark(row["path"], x, y(row["median_us"]))


def _mark(path: str, x: float, y: float) -> str:
    """A mark of the path's own shape and colour."""
    colour = f'fill="{_COLOURS[path]}"'
    if path == "single":
        return f'<rect x="{x - 3:.1f}" y="{y - 3:.1f}" width="6" height="6" {colour}/>'
    if path == "split":
        points = f"{x:.1f},{y - 4.5:.1f} {x - 4:.1f},{y + 3:.1f} {x + 4:.1f},{y + 3:.1f}"
        return f'<polygon points="{points}" {colour}/>'
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" {colour}/>'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{colour}"/>'


def _text(x: float, y: float, text: str, *, size: int = 11, anchor: str = "start") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"'
    return f"<text {place}>{escape(text)}</text>"
