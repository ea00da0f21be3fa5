"""Evidence in the database as entries of shared tables, and the winners of imported runs.

A run with a number below 0 was measured elsewhere. What such runs say about a bucket is pooled, and
counts where no run of this database has decided.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

from .evidence import FAILED, Measurement, baseline
from .fits import threshold
from .plan import MLX, NATIVE_PATHS, Plan
from .records import measurement_of
from .schema import KEY
from .shapes import Bucket
from .share_pool import Entry, pool
from .table import BUCKET_COLUMNS, ROW_COLUMNS, checked_row
from .words import counted

OF_BUCKET = " AND ".join(f"{name} = ?" for name in BUCKET_COLUMNS)
_DECIDED = ("duel", "refute")


class Found(NamedTuple):
    """What a run of the database says about a bucket."""

    run: int
    bucket: Bucket
    entry: Entry


def nonce(connection: sqlite3.Connection, run: Mapping[str, Any]) -> str:
    """16 hex digits that no other run has: an imported one's own, else the digest of the row and of
    its first bucket, which copies of the database agree in.

    Raises:
        ValueError: the row is malformed.
    """
    known = imported_nonce(run)
    if known:
        return known
    found = connection.execute("SELECT min(id) FROM measurement WHERE run = ?", [run["id"]])
    return own_nonce(connection, run, found.fetchone()[0])


def imported_nonce(run: Mapping[str, Any]) -> str:
    """That of a run that came with one; "" where it has none."""
    conditions = json.loads(run["conditions"])
    known = conditions.get("nonce", "") if isinstance(conditions, dict) else ""
    return known if isinstance(known, str) else ""


def own_nonce(connection: sqlite3.Connection, run: Mapping[str, Any], first: int | None) -> str:
    """That of a run whose first measurement is known."""
    names = ("id", "device", "started", "kernel", "mlx", "system", "software", "options")
    told = [str(run[name]) for name in (*names, "conditions")]
    bucket = " AND ".join(f"a.{name} = b.{name}" for name in BUCKET_COLUMNS)
    found = connection.execute(  # all of its first bucket, which came in one transaction
        "SELECT a.samples_us FROM measurement AS a JOIN measurement AS b ON b.id = :first "
        f"AND a.id BETWEEN b.id AND b.id + 99 AND a.run = b.run AND {bucket} ORDER BY a.id",
        {"first": first},
    )
    told += [row[0] for row in found.fetchall()]
    return sha256("\0".join(told).encode()).hexdigest()[:16]


# Columns of `measurement` that tell the best plans of a run, then what its duel has besides.
_PLAIN = ("stage", "status", "path", "partitions", "tile", "ratio")
_REST = (
    *("id", "at", "message", "max_error", "rounds", "median_us", "p10_us", "p90_us"),
    *("ratio_low", "ratio_high", "samples_us", "dropped", "paused_s", "inner"),
)
_OF_RUN = (*BUCKET_COLUMNS, "run")
_SELECT = ", ".join(f'"{name}"' for name in (*_OF_RUN, *_PLAIN, *_REST))
_RUN_OF = itemgetter(slice(len(_OF_RUN)))


def entries(
    connection: sqlite3.Connection, where: str, values: Sequence[object]
) -> Iterator[Found]:
    """What runs decided, bucket by bucket, of the measurements that an SQL condition names; a run's
    last verdict on a bucket holds.

    Raises:
        ValueError: one line that names the row and what is wrong with it.
    """
    rows = connection.execute(
        f"SELECT {_SELECT} FROM measurement WHERE stage != 'cut' AND {where} "
        f"ORDER BY {', '.join(_OF_RUN)}, id",  # that of the index: nothing is sorted
        values,
    )
    for (*fields, run), group in groupby(rows, _RUN_OF):
        bucket = Bucket(*fields)
        entry = _entry(run, bucket, [row[len(_OF_RUN) :] for row in group])
        if entry:
            yield Found(run, bucket, entry)


def _entry(run: int, bucket: Bucket, rows: list[tuple[Any, ...]]) -> Entry | None:
    """None where a run decided nothing. A row has `_PLAIN`, then `_REST`."""
    stage = next((row[0] for row in reversed(rows) if row[0] in _DECIDED), None)
    if stage is None:
        return None
    duel = [
        measurement_of(bucket._asdict() | dict(zip((*_PLAIN, *_REST), row, strict=True)))
        for row in rows
        if row[0] == stage
    ]
    default = baseline(duel)
    if default is None:  # refuted before anything could be compared
        default = Measurement(duel[0].shape, MLX)
    place = next((i for i in reversed(range(len(duel))) if duel[i].plan != default.plan), None)
    rival = default if place is None else duel[place]
    # The one that was timed in the same rounds, where a bucket was measured again.
    default = next((m for m in reversed(duel[:place]) if m.plan == default.plan), default)
    timed = rival.samples_us if rival.plan != default.plan and rival.status == "ok" else ()
    return Entry(
        run=str(run),
        plan=rival.plan,
        failed=rival.status if rival.status in FAILED else "",
        max_error=rival.max_error,
        samples_us=timed,
        baseline=default.plan.path,
        baseline_samples_us=default.samples_us,
        best=tuple(_best(rows)),
        day=rows[-1][_DAY][:10],
    )


_DAY = (*_PLAIN, *_REST).index("at")


def _best(rows: Iterable[tuple[Any, ...]]) -> Iterator[tuple[Plan, float]]:
    """The best plan of each native path; of one measured more than once, the last time counts."""
    last = {
        (path, partitions, tile): ratio
        for _, status, path, partitions, tile, ratio, *_ in rows
        if ratio and status == "ok" and path in NATIVE_PATHS
    }
    for path in NATIVE_PATHS:
        found = [(ratio, plan) for plan, ratio in last.items() if plan[0] == path]
        if found:
            ratio, plan = max(found)
            yield Plan(*plan), ratio


# --- winners of imported runs --------------------------------------------------------------------


def derive(connection: sqlite3.Connection, buckets: Iterable[Bucket] | None = None) -> None:
    """Make the winners of imported runs anew, and the thresholds of their kinds: of these buckets,
    or of all.

    It is to be called within a transaction. Raises ValueError as `entries`.
    """
    if buckets is None:
        columns = ", ".join(BUCKET_COLUMNS)
        found = connection.execute(f"SELECT DISTINCT {columns} FROM measurement WHERE run < 0")
        buckets = [Bucket(*fields) for fields in found.fetchall()]
    versions = {
        run: tuple(rest)
        for run, *rest in connection.execute(
            "SELECT id, device, kernel, mlx, system FROM run WHERE id < 0"
        )
    }
    buckets = tuple(buckets)
    for bucket in buckets:
        connection.execute(f"DELETE FROM plan WHERE {OF_BUCKET} AND run < 0", bucket)
        told: dict[tuple[str, ...], list[Found]] = {}
        for each in entries(connection, f"{OF_BUCKET} AND run < 0", bucket):
            told.setdefault(versions[each.run], []).append(each)
        for same, found_there in told.items():
            _store(connection, same, bucket, found_there)
    for kind in {bucket._replace(context=0) for bucket in buckets}:
        _derive_thresholds(connection, kind)


def _store(
    connection: sqlite3.Connection, versions: tuple[str, ...], bucket: Bucket, told: list[Found]
) -> None:
    """Store what runs of the same versions say together, unless one of this database decided."""
    try:
        best = pool([each.entry for each in told])
    except ValueError:  # nothing was timed
        return
    device, kernel, mlx, system = versions
    values = (
        *(*bucket, *vars(best.plan).values(), best.median_us),
        *(best.speedup, best.speedup_low, best.speedup_high, best.day, kernel, mlx, system),
        *(best.single_speedup, best.split_speedup, "duel", best.baseline),
    )
    checked_row(values)
    columns = ("device", *ROW_COLUMNS, "reason", "run")
    reason = counted(len(told), "imported run")
    row = (device, *values, reason, max(each.run for each in told))
    connection.execute(
        f"INSERT OR IGNORE INTO plan ({', '.join(columns)}) "
        f"VALUES ({', '.join('?' * len(columns))})",
        row,
    )


def _derive_thresholds(connection: sqlite3.Connection, kind: Bucket) -> None:
    """Those of a kind, for all versions that have winners of it; of others they go."""
    of_kind = " AND ".join(f"plan.{name} = ?" for name in _KIND)
    connection.execute(
        f"DELETE FROM threshold WHERE {of_kind.replace('plan.', '')} AND NOT EXISTS "
        f"(SELECT 1 FROM plan WHERE {_same('plan', 'threshold')})",
        kind[1:],
    )
    found = connection.execute(
        f"SELECT DISTINCT device, plan.kernel, plan.mlx, plan.system, cores FROM plan "
        f"JOIN device ON device.key = plan.device WHERE {of_kind}",
        kind[1:],
    ).fetchall()
    for *versions, cores in found:
        rows = [
            checked_row(row)
            for row in connection.execute(
                f"SELECT {', '.join(ROW_COLUMNS)} FROM plan WHERE {of_kind} "
                "AND (device, kernel, mlx, system) = (?, ?, ?, ?)",
                [*kind[1:], *versions],
            )
        ]
        known = {row.bucket: (row.single_speedup, row.split_speedup) for row in rows}
        fitted = threshold({row.bucket: row.plan for row in rows}, cores, known)
        values = [versions[0], *kind, *versions[1:], *vars(fitted).values()]
        columns = (*KEY, *vars(fitted))
        connection.execute(
            f"INSERT OR REPLACE INTO threshold ({', '.join(columns)}) "
            f"VALUES ({', '.join('?' * len(columns))})",
            values,
        )


_KIND = BUCKET_COLUMNS[1:]


def _same(a: str, b: str) -> str:
    names = (name for name in KEY if name != "context")
    return " AND ".join(f"{a}.{name} = {b}.{name}" for name in names)
