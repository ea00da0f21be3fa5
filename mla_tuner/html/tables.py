"""What holds for a whole device, as tables of plain text; `page` and `markdown` write them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, geometric_mean
from typing import Any

from ..answers import short, tokens
from ..plan import NATIVE_PATHS
from ..report import speedup
from ..words import counted
from . import compared
from .findings import Findings

MOST_REGRETS = 10
MOST_GROUPS = 200  # of refusals, a row each
MOST_NAMED = 3  # plans, or shapes, in a cell
MOST_TEXT = 300  # characters of a message, which may hold a compiler's whole output


@dataclass(frozen=True)
class Table:
    """Rows of text; the first `words` columns hold words, the others numbers. `empty`: what to say
    where there are no rows.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int = 1
    note: str = ""
    empty: str = ""


def lead(found: Findings) -> str:
    """The sentence under the title."""
    days = sorted({str(run["day"]) for run in found.runs})
    when = " to ".join(dict.fromkeys((days[0], days[-1])))
    text = f"{found.device.key}, MLX {found.versions['mlx']}, {when}."
    if found.source == "table":
        text += " From a shared table: it has the final duels, not what was searched before them."
    return text


def summary(found: Findings) -> list[tuple[str, str, str]]:
    """The few numbers to see first: value, what it is, and of what."""
    rows = [each.row for each in found.findings if each.row and each.row.speedup > 0]
    if not rows:
        return [("0", "shapes with a plan", "the evidence decides nothing yet")]
    gains, many = [row.speedup for row in rows], counted(len(rows), "shape")
    noun = "measurement" if found.measurements == 1 else "measurements"
    own, split = (sum(row.plan.path in some for row in rows) for some in (NATIVE_PATHS, ("split",)))
    tiles = [
        (speedup(geometric_mean(gains)), "mean speed-up", f"geometric, of {many}"),
        (f"{speedup(min(gains))} to {speedup(max(gains))}", "speed-up", "least and most"),
        (f"{own} of {len(rows)}", "won by our kernel", f"{split} of them split"),
        (f"{found.measurements:,}", noun, f"of {counted(len(found.findings), 'shape')}"),
    ]
    kept = [value for each in found.findings if (value := compared.regret(each)) is not None]
    if kept:
        of = f"mean of {counted(len(kept), 'stored plan')}"
        tiles.insert(3, (percent(fmean(kept)), "behind the best", of))
    return tiles


def percent(value: float | None) -> str:
    """`0.7 %`, `12 %`, `14,216 %`; `-` for None."""
    if value is None:
        return "-"
    return f"{value * 100:.1f} %" if abs(value) < 0.0995 else f"{value * 100:,.0f} %"


# --- provenance ----------------------------------------------------------------------------------


def device(found: Findings) -> Table:
    """What was measured, and with what."""
    it = found.device
    rows = [
        ("name", it.name),
        ("key", it.key),
        ("family", it.family),
        ("cores", "unknown" if it.cores is None else str(it.cores)),
        ("memory", f"{it.memory_gb} GiB"),
        ("last-level cache", f"{it.cache_bytes / 2**20:.0f} MiB"),
        ("MLX", found.versions["mlx"]),
        ("system", found.versions["system"] or "unknown"),
        ("kernels' digest", found.versions["kernel"]),
    ]
    note = ""
    if found.left_out:
        note = f"Left out: {counted(found.left_out, 'winner')} of other versions."
    return Table("Device", ("", ""), rows, 2, note)


def runs(found: Findings) -> Table:
    """Each run of the tuner that timed something with these versions."""
    rows = [
        (
            str(run["day"]),
            {"gpu": "GPU", "wall": "host"}.get(run.get("clock", "wall"), str(run.get("clock"))),
            *(_pairs(run.get(name, {})) for name in ("software", "options", "conditions")),
        )
        for run in found.runs
    ]
    columns = ("day", "clock", "software", "options", "conditions")
    return Table("Runs of the tuner", columns, rows, len(columns))


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in sorted(values.items())) or "-"


# --- regret --------------------------------------------------------------------------------------


def regret(found: Findings) -> list[Table]:
    """Of the stored plans and of always taking one path; then the stored plans furthest behind."""
    numbers = ("mean", "median", "p95", "worst")
    rows = [
        (each.name, str(each.buckets), *(percent(getattr(each, name)) for name in numbers))
        for each in compared.regrets(found.findings)
    ]
    columns = ("choice", "shapes", "mean", "median", "95 % below", "worst")
    unknown = "Not known: only a database has what was searched before the final duels."
    table = Table("Slower than the best measured plan, by", columns, rows, empty=unknown)
    return [table, _worst(found)] if rows else [table]


def _worst(found: Findings) -> Table:
    scored = [
        (value, each.bucket, each.row.plan, best.plan)
        for each in found.findings
        if each.row and (best := compared.best(each)) and (value := compared.regret(each))
    ]
    scored.sort(key=lambda each: -each[0])
    rows = [
        (short(bucket), str(plan), best, percent(value))
        for value, bucket, plan, best in scored[:MOST_REGRETS]
    ]
    title = f"Stored plans furthest behind, {len(rows)} of {len(scored)}"
    columns = ("shape", "stored plan", "best measured", "behind")
    return Table(title, columns, rows, 3, empty="Every stored plan is the best measured one.")


# --- refused -------------------------------------------------------------------------------------


def refusals(found: Findings) -> Table:
    """Candidates that can't be taken, grouped by the reason."""
    groups = compared.refused(found.findings)
    rows = [
        (
            each.status,
            each.message[:MOST_TEXT] or "-",
            _named(each.plans),
            _named(map(short, each.buckets)),
        )
        for each in groups[:MOST_GROUPS]
    ]
    more = len(groups) - len(rows)
    note = f"And {counted(more, 'other reason')}." if more else ""
    columns = ("result", "why", "plans", "shapes")
    return Table("Candidates", columns, rows, 4, note, empty="No candidate was refused.")


def _named(texts: Iterable[str]) -> str:
    """The first few different ones, and how many more."""
    different = list(dict.fromkeys(texts))
    named, more = ", ".join(different[:MOST_NAMED]), len(different) - MOST_NAMED
    return f"{named} and {more} more" if more > 0 else named


# --- thresholds ----------------------------------------------------------------------------------


def thresholds(found: Findings) -> Table:
    """Contexts from which our kernel wins, and from which splitting does."""
    order = ("heads", "dtype", "kv_lora_rank", "rope_dim", "q_len", "layout", "batch")
    rows = [
        (
            str(row["heads"]),
            kind_text(row),
            str(row["batch"]),
            *(_from(row[name]) for name in ("native_from", "split_from")),
            "-" if row["kappa"] is None else f"{row['kappa']:.3g}",
        )
        for row in sorted(found.thresholds, key=lambda row: [row[name] for name in order])
    ]
    columns = ("heads", "cache", "batch", "our kernel from", "split from", "kappa")
    return Table("By heads and batch", columns, rows, 2, empty="None: no winner is stored.")


def kind_text(row: Mapping[str, Any]) -> str:
    """`bfloat16 512+64 paged`, and q_len above 1."""
    q_len = f", {row['q_len']} query tokens" if row["q_len"] != 1 else ""
    return f"{row['dtype']} {row['kv_lora_rank']}+{row['rope_dim']} {row['layout']}{q_len}"


def _from(context: int | None) -> str:
    return "nowhere" if context is None else tokens(context)
