"""The same findings as Markdown, for a pull request or a terminal."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby

from ..answers import tokens
from ..plan import PATHS
from ..report import microseconds, speedup
from ..words import counted
from . import compared, tables
from .findings import Finding, Findings
from .tables import Table

# What could begin markup in a cell; `_` within a word and `#` within a line do not.
_SIGNS = re.compile(r"[\\`*\[\]|~<>&$]")


def render(found: Findings) -> str:
    """A title, the numbers to see first, and a table for each section of the page."""
    return "\n".join(_parts(found)) + "\n"


def _parts(found: Findings) -> Iterator[str]:
    yield f"# {_text(found.device.name)}: MLA decode plans\n"
    yield f"{_text(tables.lead(found))}\n"
    yield from (f"- {name}: {value} ({more})" for value, name, more in tables.summary(found))
    yield "\n## Speed-up by shape\n"
    yield "Of the stored plan over its baseline, MLX's own path; contexts across, batches down."
    for title, some in _kinds(found):
        yield from _table(_heat(title, some))
    yield "\n## Latency of every path\n"
    yield "Median of one call with the path's best measured plan, and its 10th to 90th percentile."
    for title, some in _kinds(found):
        yield from _table(_latency(title, some))
    sections = {
        "Regret": tables.regret(found),
        "Refused": [tables.refusals(found)],
        "Thresholds": [tables.thresholds(found)],
        "Provenance": [tables.device(found), tables.runs(found)],
    }
    for name, some_tables in sections.items():
        yield f"\n## {name}"
        for table in some_tables:
            yield from _table(table)


def _kinds(found: Findings) -> list[tuple[str, list[Finding]]]:
    """Buckets that differ in context and batch alone."""

    def title(each: Finding) -> str:
        return f"{counted(each.bucket.heads, 'head')}, {tables.kind_text(each.bucket._asdict())}"

    ordered = sorted(found.findings, key=lambda each: each.bucket[2:])
    return [(name, list(some)) for name, some in groupby(ordered, key=title)]


def _heat(title: str, findings: Sequence[Finding]) -> Table:
    contexts = sorted({each.bucket.context for each in findings})
    cells = {each.bucket[:2]: _cell(each) for each in findings}
    rows = [
        (str(batch), *(cells.get((context, batch), "") for context in contexts))
        for batch in sorted({each.bucket.batch for each in findings})
    ]
    return Table(title, ("batch", *map(tokens, contexts)), rows)


def _cell(each: Finding) -> str:
    if each.row is None:
        return "undecided"
    return f"{speedup(each.row.speedup)} {each.row.plan}"


def _latency(title: str, findings: Sequence[Finding]) -> Table:
    points = [{point.path: point for point in compared.points(each)} for each in findings]
    paths = [path for path in PATHS if any(path in some for some in points)]
    rows = [
        (
            str(each.bucket.batch),
            tokens(each.bucket.context),
            *(_time(some[path]) if path in some else "" for path in paths),
        )
        for each, some in zip(findings, points, strict=True)
    ]
    return Table(title, ("batch", "context", *paths), rows, 0)


def _time(point: compared.Point) -> str:
    text = f"{microseconds(point.median_us)} {point.plan.removeprefix(point.path).strip()}".strip()
    if point.p10_us is None or point.p90_us is None:
        return text
    return f"{text} ({microseconds(point.p10_us)} to {microseconds(point.p90_us)})"


# --- markup --------------------------------------------------------------------------------------


def _table(table: Table) -> Iterator[str]:
    if not table.rows:
        yield f"\n{_text(table.empty)}"
        return
    yield f"\n**{_text(table.title)}**\n"
    yield _row(table.columns)
    yield _row(["---" if at < table.words else "---:" for at in range(len(table.columns))])
    yield from (_row([_text(cell) for cell in row]) for row in table.rows)
    if table.note:
        yield f"\n{_text(table.note)}"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _text(text: str) -> str:
    """On one line, with nothing that Markdown or HTML would take for markup."""
    return _SIGNS.sub(_harmless, " ".join(text.split()))


def _harmless(sign: re.Match[str]) -> str:
    return f"&#{ord(sign[0])};" if sign[0] in "<>&" else f"\\{sign[0]}"
