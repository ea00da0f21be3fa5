"""Evidence and winners in one SQLite file per user. The only importer of sqlite_utils.

`measurement` is only ever added to; `plan` and `threshold` follow from it (`rebuild`).
Every write is one transaction that starts with BEGIN IMMEDIATE: processes queue instead of failing.
"""

from __future__ import annotations

import json
import os
import reprlib
import sqlite3
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from itertools import groupby
from pathlib import Path
from types import NoneType, TracebackType
from typing import Any

from sqlite_utils import Database, Migrations

from .device import Device
from .errors import StoreError
from .evidence import STATUSES, Measurement, verdict
from .fits import threshold
from .plan import Plan
from .shapes import Bucket
from .table import (
    BUCKET_COLUMNS,
    FILE_KINDS,
    ROW_COLUMNS,
    SCHEMA_VERSION,
    Row,
    checked_row,
    open_read_only,
)

LOCK_WAIT_S = 30.0

migrations = Migrations("mla_tuner")

TABLES = ("device", "run", "measurement", "plan", "threshold")
_BUCKET = """
    context INTEGER NOT NULL, batch INTEGER NOT NULL, heads INTEGER NOT NULL, dtype TEXT NOT NULL,
    kv_lora_rank INTEGER NOT NULL, rope_dim INTEGER NOT NULL, q_len INTEGER NOT NULL,
    layout TEXT NOT NULL"""
_PLAN = "path TEXT NOT NULL, partitions INTEGER NOT NULL, tile TEXT NOT NULL"
# Engines pin different MLX releases and share this file: each release keeps its own winners.
_KEY = ("device", *BUCKET_COLUMNS, "kernel", "mlx")
_STATEMENTS = (
    """CREATE TABLE device (
    key TEXT PRIMARY KEY, backend TEXT NOT NULL, architecture TEXT NOT NULL, family TEXT NOT NULL,
    cores INTEGER, memory_gb INTEGER NOT NULL, name TEXT NOT NULL, cache_bytes INTEGER NOT NULL)""",
    """CREATE TABLE run (
    id INTEGER PRIMARY KEY, device TEXT NOT NULL REFERENCES device, started TEXT NOT NULL,
    kernel TEXT NOT NULL, mlx TEXT NOT NULL,
    software TEXT NOT NULL, options TEXT NOT NULL, conditions TEXT NOT NULL)""",
    f"""CREATE TABLE measurement (
    id INTEGER PRIMARY KEY, run INTEGER NOT NULL REFERENCES run, at TEXT NOT NULL,
    stage TEXT NOT NULL CHECK (stage IN ('search', 'duel', 'cut')), {_BUCKET}, {_PLAN},
    status TEXT NOT NULL CHECK (status IN ('ok', 'wrong', 'error', 'timeout')),
    message TEXT NOT NULL, max_error REAL, rounds INTEGER NOT NULL,
    median_us REAL, p10_us REAL, p90_us REAL, ratio REAL, ratio_low REAL, ratio_high REAL,
    samples_us TEXT NOT NULL, executed TEXT)""",
    f"CREATE INDEX measurement_bucket ON measurement ({', '.join(BUCKET_COLUMNS)}, run)",
    f"""CREATE TABLE plan (
    device TEXT NOT NULL REFERENCES device, {_BUCKET}, {_PLAN}, median_us REAL NOT NULL,
    speedup REAL NOT NULL, speedup_low REAL, speedup_high REAL, day TEXT NOT NULL,
    kernel TEXT NOT NULL, mlx TEXT NOT NULL, reason TEXT NOT NULL,
    run INTEGER NOT NULL REFERENCES run, PRIMARY KEY ({", ".join(_KEY)}))""",
    # One row for all contexts of a bucket; its own context column is 0.
    f"""CREATE TABLE threshold (
    device TEXT NOT NULL REFERENCES device, {_BUCKET}, kernel TEXT NOT NULL, mlx TEXT NOT NULL,
    native_from INTEGER, split_from INTEGER, kappa REAL, PRIMARY KEY ({", ".join(_KEY)}))""",
    # Last, in the same transaction: a reader sees the whole schema or none.
    f"PRAGMA user_version = {SCHEMA_VERSION}",
)


@migrations()
def create_tables(db: Database) -> None:
    """Schema 1: who measured, what was measured, and what follows from it."""
    for statement in _STATEMENTS:
        db.execute(statement)


_SELECT_PLANS = f"SELECT {', '.join(ROW_COLUMNS)} FROM plan"
_REBUILD = "`mla-tune db rebuild` makes all plans anew"
_MEND = "correct or delete it and what refers to it, then run `mla-tune db rebuild`"


def exists(path: Path) -> bool:
    """Whether there is a file at `path`.

    Raises:
        StoreError: it can't be looked at, or is something else than a file.
    """
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise StoreError(f"cannot use the database {path}: {error.strerror}") from error
    kind = FILE_KINDS.get(stat.S_IFMT(mode))
    if kind:
        raise StoreError(f"cannot use the database {path}: it is {kind}")
    return True


class Store:
    """The tuning database at `path`, created and migrated on opening.

    create: False opens only what is there already, and writes nothing by opening it.

    Raises:
        StoreError: here and in every method, one line: the file is corrupt, newer, another
            program's, locked for longer than `LOCK_WAIT_S`, holds malformed rows, or cannot be
            written; or, without `create`, there is none.
    """

    def __init__(self, path: str | Path, *, create: bool = True) -> None:
        self.path = Path(path)
        there = exists(self.path)
        if not there and not create:
            raise StoreError(f"no database at {self.path}: run mla-tune")
        with self._clear_errors():
            connection = self._connect(there)
            connection.text_factory = lambda raw: str(raw, errors="replace")
            self._db = Database(connection, execute_plugins=False)
        try:
            with self._clear_errors():
                if not self._is_current():
                    self._migrate(create)
        except StoreError:
            connection.close()
            raise

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; nothing is pending, every write was its own transaction."""
        self._db.close()

    # --- writing -----------------------------------------------------------------------------

    def start_run(
        self,
        device: Device,
        *,
        kernel: str,
        software: Mapping[str, str],
        options: Mapping[str, object] | None = None,
        conditions: Mapping[str, object] | None = None,
    ) -> int:
        """Note who measures, where and in what state; the id that evidence is recorded under.

        `software["mlx"]` and `kernel` (the kernels' digest) decide later which winners still count.
        """
        row = {name: getattr(device, name) for name in Device.__dataclass_fields__}
        with self._write() as db:
            db.table("device").upsert({"key": device.key, **row}, pk="key")
            run = {
                "device": device.key,
                "started": _now(),
                "kernel": kernel,
                "mlx": software["mlx"],
                "software": _json(software),
                "options": _json(options or {}),
                "conditions": _json(conditions or {}),
            }
            return int(db.table("run").insert(run).last_pk or 0)

    def record(
        self,
        run: int,
        bucket: Bucket,
        search: Sequence[Measurement],
        duel: Sequence[Measurement] = (),
    ) -> Row | None:
        """Add a bucket's evidence; with a duel also its winner and thresholds, all or nothing.

        search: all candidates; duel: the finalist and `mlx` with fresh samples. Without a verdict
        (the budget ended, or `mlx` failed) both are stored as "cut" and change no winner.

        Returns the winner, or None.
        """
        decided = verdict(duel) is not None
        stages = [("search", search), ("duel", duel)] if decided else [("cut", [*search, *duel])]
        evidence = [
            {"run": run, "at": _now(), "stage": stage, **_evidence(bucket, measurement)}
            for stage, measurements in stages
            for measurement in measurements
        ]
        with self._write() as db:
            db.table("measurement").insert_all(evidence)
            winner = self._derive_plan(run, bucket, duel, _now())
            if winner:
                self._derive_threshold(run, bucket)
            return winner

    def rebuild(self) -> int:
        """Make every winner and threshold anew from the evidence; how many winners there are."""
        with self._write() as db:
            db.execute("DELETE FROM plan")
            db.execute("DELETE FROM threshold")
            duels = (
                "SELECT * FROM measurement WHERE stage = 'duel' ORDER BY run, "
                + ", ".join(BUCKET_COLUMNS)
                + ", id"
            )
            rows = list(db.query(duels))  # sqlite_utils' first upsert fails beside an open cursor
            for (run, *_), duel in groupby(rows, lambda row: (row["run"], _bucket_values(row))):
                evidence = list(duel)
                with self._sound(_MEND):
                    measurements = [_measurement(row) for row in evidence]
                    bucket, at = _bucket(evidence[0]), evidence[0]["at"]
                    if self._derive_plan(run, bucket, measurements, at):
                        self._derive_threshold(run, bucket)
            return int(db.execute("SELECT count(*) FROM plan").fetchone()[0])

    # --- reading -----------------------------------------------------------------------------

    def plans(self, device: str | None = None) -> list[Row]:
        """Stored winners, of one device key or of all, in the order of their buckets."""
        where, values = ("WHERE device = ?", [device]) if device else ("", [])
        order = ", ".join(BUCKET_COLUMNS)
        with self._clear_errors(), self._sound(_REBUILD):
            found = self._db.execute(f"{_SELECT_PLANS} {where} ORDER BY {order}", values)
            return [checked_row(row) for row in found]

    def tuned(self, device: Device, kernel: str, mlx: str) -> list[Row]:
        """Winners of a device that were found with this kernel and this MLX."""
        return [r for r in self.plans(device.key) if (r.kernel, r.mlx) == (kernel, mlx)]

    def evidence(self, bucket: Bucket | None = None) -> list[dict[str, Any]]:
        """Raw rows of `measurement` with their run's `device`, `kernel` and `mlx`, oldest first."""
        where = " AND ".join(f"{name} = ?" for name in BUCKET_COLUMNS) if bucket else "1"
        with self._clear_errors():
            found = self._db.query(
                "SELECT measurement.*, run.device, run.kernel, run.mlx FROM measurement "
                f"JOIN run ON run.id = measurement.run WHERE {where} ORDER BY measurement.id",
                list(bucket or ()),
            )
            return list(found)

    def check(self) -> dict[str, object]:
        """Integrity, schema version and rows a table.

        `ok` is False where SQLite finds damage, or a row holds what can't be there.
        """
        with self._clear_errors():
            found = [row[0] for row in self._db.execute("PRAGMA integrity_check").fetchall()]
            found += [
                f"{row[0]} row {row[1]} refers to a missing {row[2]}"
                for row in self._db.execute("PRAGMA foreign_key_check").fetchall()
            ]
            problems = [problem for problem in found if problem != "ok"]
            problems = problems or list(self._malformed())
            return {
                "path": str(self.path),
                "ok": not problems,
                "problems": problems,
                "schema": SCHEMA_VERSION,
                "rows": {name: self._db.table(name).count for name in TABLES},
            }

    def _malformed(self) -> Iterator[str]:
        """What is wrong with single rows, and the cure."""
        for (run,) in self._db.execute("SELECT id FROM run").fetchall():
            try:
                self._identity(run)
            except ValueError as error:
                yield f"{error}: {_MEND}"
        for row in self._db.query("SELECT * FROM measurement"):
            try:
                _measurement(row)
            except ValueError as error:
                yield f"{error}: {_MEND}"
        for row in self._db.execute(_SELECT_PLANS):
            try:
                checked_row(row)
            except ValueError as error:
                yield f"plan: {error}: {_REBUILD}"

    # --- inside ------------------------------------------------------------------------------

    def _connect(self, there: bool) -> sqlite3.Connection:
        """Ready for writing where that is possible, else for reading."""
        folder = Path(os.path.realpath(self.path)).parent  # SQLite's side files lie there
        if there and not all(os.access(each, os.W_OK) for each in (self.path, folder)):
            return self._read_only()
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return sqlite3.connect(self.path, timeout=LOCK_WAIT_S)

    def _read_only(self) -> sqlite3.Connection:
        try:
            return open_read_only(self.path)
        except ValueError as error:
            raise StoreError(f"cannot use the database {self.path}: {error}") from error

    def _migrate(self, create: bool) -> None:
        """Make the tables of an empty file."""
        if not create:
            raise StoreError(f"{self.path} holds no tuning data: run mla-tune")
        self._enable_wal()  # not possible within a transaction
        with self._write() as db:
            if not self._is_current():  # another process may have migrated while we waited
                migrations.apply(db)

    def _enable_wal(self) -> None:
        """Switching needs the file alone and does not wait; whoever comes second finds it done."""
        with suppress(sqlite3.OperationalError):
            self._db.execute("PRAGMA journal_mode = WAL").fetchone()

    def _is_current(self) -> bool:
        """Whether the file has this version's tables; False for an empty one."""
        # Names before the version: another process may create both, at once, in between.
        names = {row[0] for row in self._db.execute("SELECT name FROM sqlite_master")}
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if version > SCHEMA_VERSION:
            raise StoreError(
                f"{self.path} has schema {version}, this mla-tuner writes {SCHEMA_VERSION}: "
                "update mla-tuner, or name another file with --db"
            )
        if version == SCHEMA_VERSION and names.issuperset(TABLES):
            return True
        if names:
            raise StoreError(
                f"{self.path} is the database of another program: name another file with --db"
            )
        return False

    @contextmanager
    def _write(self) -> Iterator[Database]:
        """One transaction. IMMEDIATE: a deferred one would fail at its first write, not wait."""
        with self._clear_errors():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.commit()
            except BaseException:
                with suppress(sqlite3.Error):
                    self._db.rollback()
                raise

    @contextmanager
    def _clear_errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise StoreError(f"cannot use the database {self.path}: {error}") from error

    @contextmanager
    def _sound(self, cure: str) -> Iterator[None]:
        """For reading rows, which anybody may have changed."""
        try:
            yield
        except ValueError as error:
            raise StoreError(f"malformed data in {self.path} ({error}): {cure}") from error

    def _derive_plan(
        self, run: int, bucket: Bucket, duel: Sequence[Measurement], at: str
    ) -> Row | None:
        found = verdict(duel)
        if found is None:
            return None
        best, reason = found
        device, kernel, mlx, _ = self._identity(run)
        times = (best.median_us or 0.0, best.ratio or 1.0, best.ratio_low, best.ratio_high)
        values = (*bucket, *vars(best.plan).values(), *times, at[:10], kernel, mlx)
        row = checked_row(values)
        named = {"device": device, **dict(zip(ROW_COLUMNS, values, strict=True))}
        self._db.table("plan").upsert({**named, "reason": reason, "run": run}, pk=_KEY)
        return row

    def _derive_threshold(self, run: int, bucket: Bucket) -> None:
        device, kernel, mlx, cores = self._identity(run)
        family = bucket._replace(context=0)
        winners = {
            row.bucket: row.plan
            for row in self.plans(device)
            if (row.bucket._replace(context=0), row.kernel, row.mlx) == (family, kernel, mlx)
        }
        found = threshold(winners, cores)
        named = {"device": device, **family._asdict(), "kernel": kernel, "mlx": mlx}
        self._db.table("threshold").upsert({**named, **vars(found)}, pk=_KEY)

    def _identity(self, run: int) -> tuple[str, str, str, int | None]:
        """Device key, kernel, MLX and core count of a run.

        Raises:
            ValueError: the run or its device is missing or malformed.
        """
        found = self._db.query(
            "SELECT device, kernel, mlx, cores FROM run JOIN device ON key = device WHERE id = ?",
            [run],
        )
        row = next(found, None)
        if row is None:
            raise ValueError(f"run {run} or its device is missing")
        try:
            _expect(row, ("device", "kernel", "mlx"), str)
            _expect(row, ("cores",), int, NoneType)
        except ValueError as error:
            raise ValueError(f"run {run}: {error}") from error
        return row["device"], row["kernel"], row["mlx"], row["cores"]


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), sort_keys=True, default=str)


# What the columns of `measurement` must hold: SQLite takes any value in any column.
_TEXTS = ("at", "dtype", "layout", "path", "tile", "status", "message", "samples_us")
_INTEGERS = (*(name for name in BUCKET_COLUMNS if name not in _TEXTS), "partitions", "rounds")
_NUMBERS = ("max_error", "median_us", "p10_us", "p90_us", "ratio", "ratio_low", "ratio_high")
_MEASURED = ("status", "message", "rounds", *_NUMBERS)
_KIND_NAMES = {str: "text", int: "an integer", float: "a number", NoneType: "NULL"}


def _expect(row: Mapping[str, Any], columns: Sequence[str], *kinds: type) -> None:
    for column in columns:
        if type(row[column]) not in kinds:
            names = " or ".join(_KIND_NAMES[kind] for kind in kinds)
            got = reprlib.repr(row[column])
            raise ValueError(f"expected column {column} as {names}; got {got}")


def _evidence(bucket: Bucket, measurement: Measurement) -> dict[str, Any]:
    return {
        **bucket._asdict(),
        **vars(measurement.plan),
        **{name: getattr(measurement, name) for name in _MEASURED},
        "samples_us": _json([float(f"{sample:.5g}") for sample in measurement.samples_us]),
        "executed": str(measurement.executed) if measurement.executed else None,
    }


def _measurement(row: Mapping[str, Any]) -> Measurement:
    """One row of evidence.

    Raises:
        ValueError: one line that names the row and what is wrong with it.
    """
    try:
        _expect(row, _TEXTS, str)
        _expect(row, _INTEGERS, int)
        _expect(row, _NUMBERS, int, float, NoneType)
        if row["status"] not in STATUSES:
            raise ValueError(f"expected column status in {STATUSES}; got {row['status']!r}")
        samples = json.loads(row["samples_us"])
        if not (isinstance(samples, list) and all(type(x) in (int, float) for x in samples)):
            raise ValueError("expected column samples_us as a list of numbers")
        return Measurement(
            shape=_bucket(row).shape,
            plan=Plan(row["path"], row["partitions"], row["tile"]),
            samples_us=tuple(samples),
            **{name: row[name] for name in _MEASURED},
        )
    except (ValueError, RecursionError) as error:
        raise ValueError(f"measurement {row['id']}: {error}") from error


def _bucket(row: Mapping[str, Any]) -> Bucket:
    return Bucket(*_bucket_values(row))


def _bucket_values(row: Mapping[str, Any]) -> list[Any]:
    return [row[name] for name in BUCKET_COLUMNS]
