"""One HTML page that needs nothing else: no network, no server.

Facts and tables are written here; what filters change is drawn by `charts.js` and `page.js` from
the data in the page. The page's own policy runs these alone (by a hash), and all that comes from a
database is escaped: no text there can become markup or code.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from .. import __version__
from ..answers import finite, short, tokens
from ..evidence import Measurement
from ..plan import PATHS, Plan
from . import compared, tables
from .findings import Finding, Findings
from .tables import Table

_FOLDER = Path(__file__).parent
_SCRIPTS = ("charts.js", "page.js")
_DIGITS = 6  # of a number: three are shown, and rounded once more
_LONG = 40  # characters of a cell that may wrap; `charts.js` has the same
_MEASURED = ("median_us", "p10_us", "p90_us", "ratio", "ratio_low", "ratio_high", "max_error")


def render(found: Findings) -> str:
    """The whole page."""
    style, script = _read("page.css"), "\n".join(map(_read, _SCRIPTS))
    sections = {
        "device": [tables.device(found), tables.runs(found)],
        "regret": tables.regret(found),
        "refused": [tables.refusals(found)],
        "thresholds": [tables.thresholds(found)],
    }
    return Template(_read("page.html")).substitute(
        title=escape(found.device.name),
        policy=(
            "default-src 'none'; img-src data:; base-uri 'none'; form-action 'none'; "
            f"style-src '{_digest(style)}'; script-src '{_digest(script)}'"
        ),
        style=style,
        script=script,
        lead=escape(tables.lead(found)),
        summary="".join(_tile(*texts) for texts in tables.summary(found)),
        **{name: "\n".join(map(_table, some)) for name, some in sections.items()},
        data=_embedded(_data(found)),
        version=escape(__version__),
    )


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


# --- markup --------------------------------------------------------------------------------------


def _tile(value: str, name: str, more: str) -> str:
    texts = (escape(text) for text in (name, value, more))
    return "<div><dt>{}</dt><dd>{}</dd><dd>{}</dd></div>".format(*texts)


def _table(table: Table) -> str:
    """Within a box that scrolls by itself, which the keyboard can reach."""
    if not table.rows:
        return f"<p>{escape(table.empty)}</p>"
    title, note = escape(table.title), f"<p>{escape(table.note)}</p>" if table.note else ""
    return (
        f'<div><div class="scroll" role="region" tabindex="0" aria-label="{title}"><table>'
        f"<caption>{title}</caption>{''.join(_rows(table))}</table></div>{note}</div>"
    )


def _rows(table: Table) -> Iterator[str]:
    if any(table.columns):
        yield f"<thead>{_row(table, table.columns, 'col')}</thead>"
    yield "<tbody>"
    for cells in table.rows:
        yield _row(table, cells, "row")
    yield "</tbody>"


def _row(table: Table, cells: Any, scope: str) -> str:
    """The cells of a head are all headers, of another row the first."""
    made = []
    for at, cell in enumerate(cells):
        long = ' class="long"' if len(cell) > _LONG else ""
        kind = long if at < table.words else ' class="number"'
        header = scope == "col" or at == 0
        tag = f'th scope="{scope}"' if header else "td"
        made.append(f"<{tag}{kind}>{escape(cell)}</{tag[:2]}>")
    return f"<tr>{''.join(made)}</tr>"


# --- data for the charts -------------------------------------------------------------------------


def _embedded(value: object) -> str:
    """JSON that can stand within a script element: nothing in it looks like markup."""
    text = json.dumps(finite(value), separators=(",", ":"), allow_nan=False)
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def _data(found: Findings) -> dict[str, object]:
    plans: dict[
        Plan, int
    ] = {}  # a plan by its place: there are a few hundred, named thousands of times
    buckets = [_bucket(each, plans) for each in found.findings]
    return {
        "paths": PATHS,
        "buckets": buckets,
        "plans": [[*asdict(plan).values(), str(plan)] for plan in plans],
    }


def _bucket(each: Finding, plans: dict[Plan, int]) -> dict[str, object]:
    bucket, best = each.bucket, compared.best(each)
    return {
        **bucket._asdict(),
        "geometry": str(bucket.geometry),
        "name": short(bucket),
        "tokens": tokens(bucket.context),
        "won": _won(each),
        "points": [_rounded(asdict(point)) for point in compared.points(each)],
        "measured": [
            _measured(stage, m, best if stage == "search" else None, plans)
            for stage, m in each.measured
        ],
    }


def _won(each: Finding) -> dict[str, object] | None:
    """The stored plan, for a cell of the heat map and the line over its measurements."""
    row = each.row
    if row is None:
        return None
    numbers = ("median_us", "speedup", "speedup_low", "speedup_high")
    values = {name: getattr(row, name) for name in numbers} | {"regret": compared.regret(each)}
    texts = {name: getattr(row, name) for name in ("baseline", "day", "stays", "stage")}
    plan = {"path": row.plan.path, "plan": str(row.plan), "partitions": row.plan.partitions}
    return {**plan, **_rounded(values), **texts, "reason": each.reason}


def _measured(
    stage: str, m: Measurement, best: compared.Point | None, plans: dict[Plan, int]
) -> list[object]:
    """In the order in which `page.js` takes them apart."""
    numbers = {name: getattr(m, name) for name in _MEASURED}
    numbers["behind"] = compared.behind(m.median_us, best)
    place = plans.setdefault(m.plan, len(plans))
    message = m.message[: tables.MOST_TEXT]
    return [place, stage, m.status, message, m.rounds, *_rounded(numbers).values()]


def _rounded(values: dict[str, Any]) -> dict[str, Any]:
    return {
        name: float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value
        for name, value in values.items()
    }
