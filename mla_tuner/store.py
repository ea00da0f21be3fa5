"""Evidence and winners in one SQLite file per user. The only importer of sqlite_utils.

`measurement` is only ever added to; `plan` and `threshold` follow from it (`rebuild`).
Every write is one transaction that starts with BEGIN IMMEDIATE: processes queue instead of failing.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import Any

from sqlite_utils import Database, Migrations

from .device import Device
from .errors import StoreError
from .evidence import Measurement, verdict
from .fits import Threshold, threshold
from .plan import Plan
from .policy import BUCKET_COLUMNS, ROW_COLUMNS, SCHEMA_VERSION, Row
from .shapes import Bucket

LOCK_WAIT_S = 30.0

migrations = Migrations("mla_tuner")

_BUCKET = """
    context INTEGER NOT NULL, batch INTEGER NOT NULL, heads INTEGER NOT NULL, dtype TEXT NOT NULL,
    kv_lora_rank INTEGER NOT NULL, rope_dim INTEGER NOT NULL, q_len INTEGER NOT NULL,
    layout TEXT NOT NULL"""
_PLAN = "path TEXT NOT NULL, partitions INTEGER NOT NULL, tile TEXT NOT NULL"
# Engines pin different MLX releases and share this file: each release keeps its own winners.
_KEY = ("device", *BUCKET_COLUMNS, "kernel", "mlx")
_TABLES = (
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
    for statement in _TABLES:
        db.execute(statement)


class Store:
    """The tuning database at `path`, created and migrated on opening.

    Raises:
        StoreError: here and in every method, one line: the file is corrupt, newer, locked for
            longer than `LOCK_WAIT_S`, or cannot be written.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        with self._clear_errors():
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            connection = sqlite3.connect(self.path, timeout=LOCK_WAIT_S)
            self._db = Database(connection, execute_plugins=False)
        try:
            with self._clear_errors():
                self._migrate()
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
            for (run, bucket), duel in groupby(rows, lambda row: (row["run"], _bucket(row))):
                evidence = list(duel)
                measurements = [_measurement(row) for row in evidence]
                if self._derive_plan(run, bucket, measurements, evidence[0]["at"]):
                    self._derive_threshold(run, bucket)
            return int(db.execute("SELECT count(*) FROM plan").fetchone()[0])

    # --- reading -----------------------------------------------------------------------------

    def plans(self, device: str | None = None) -> list[Row]:
        """Stored winners, of one device key or of all, in the order of their buckets."""
        where, values = ("device = ?", [device]) if device else (None, [])
        with self._clear_errors():
            rows = self._db.table("plan").rows_where(
                where, values, select=", ".join(ROW_COLUMNS), order_by=", ".join(BUCKET_COLUMNS)
            )
            return [_plan_row(row) for row in rows]

    def tuned(self, device: Device, kernel: str, mlx: str) -> set[Bucket]:
        """Buckets of a device whose winner was found with this kernel and this MLX."""
        return {r.bucket for r in self.plans(device.key) if (r.kernel, r.mlx) == (kernel, mlx)}

    def thresholds(self, device: str) -> dict[Bucket, Threshold]:
        """Thresholds of one device key by bucket with context 0; the newest run's where several."""
        with self._clear_errors():
            rows = self._db.table("threshold").rows_where("device = ?", [device], order_by="rowid")
            return {
                _bucket(r): Threshold(r["native_from"], r["split_from"], r["kappa"]) for r in rows
            }

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
        """Integrity, schema version and rows a table. `ok` is False where SQLite finds damage."""
        with self._clear_errors():
            found = [row[0] for row in self._db.execute("PRAGMA integrity_check").fetchall()]
            found += [
                f"{row[0]} row {row[1]} refers to a missing {row[2]}"
                for row in self._db.execute("PRAGMA foreign_key_check").fetchall()
            ]
            problems = [problem for problem in found if problem != "ok"]
            tables = ("device", "run", "measurement", "plan", "threshold")
            return {
                "path": str(self.path),
                "ok": not problems,
                "problems": problems,
                "schema": SCHEMA_VERSION,
                "rows": {name: self._db.table(name).count for name in tables},
            }

    # --- inside ------------------------------------------------------------------------------

    def _migrate(self) -> None:
        """Bring the schema up to date; a file that is may be read-only."""
        if self._is_current():
            return
        self._enable_wal()  # not possible within a transaction
        with self._write() as db:
            if not self._is_current():  # another process may have migrated while we waited
                migrations.apply(db)

    def _enable_wal(self) -> None:
        """Switching needs the file alone and does not wait; whoever comes second finds it done."""
        with suppress(sqlite3.OperationalError):
            self._db.execute("PRAGMA journal_mode = WAL").fetchone()

    def _is_current(self) -> bool:
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if version > SCHEMA_VERSION:
            raise StoreError(
                f"{self.path} has schema {version}, this mla-tuner writes {SCHEMA_VERSION}: "
                "update mla-tuner, or name another file with --db"
            )
        return bool(version == SCHEMA_VERSION)

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

    def _derive_plan(
        self, run: int, bucket: Bucket, duel: Sequence[Measurement], at: str
    ) -> Row | None:
        found = verdict(duel)
        if found is None:
            return None
        best, reason = found
        device, kernel, mlx = self._identity(run)
        interval = (best.ratio_low, best.ratio_high)
        row = Row(
            bucket,
            best.plan,
            best.median_us or 0.0,
            best.ratio or 1.0,
            *interval,
            at[:10],
            kernel,
            mlx,
        )
        derived = {name: getattr(row, name) for name in ROW_COLUMNS[-7:]}
        values = {"device": device, **_named(bucket, best.plan), **derived}
        self._db.table("plan").upsert({**values, "reason": reason, "run": run}, pk=_KEY)
        return row

    def _derive_threshold(self, run: int, bucket: Bucket) -> None:
        device, kernel, mlx = self._identity(run)
        family = bucket._replace(context=0)
        winners = {
            row.bucket: row.plan
            for row in self.plans(device)
            if (row.bucket._replace(context=0), row.kernel, row.mlx) == (family, kernel, mlx)
        }
        cores = self._db.table("device").get(device)["cores"]
        found = threshold(winners, cores)
        named = {"device": device, **family._asdict(), "kernel": kernel, "mlx": mlx}
        self._db.table("threshold").upsert({**named, **vars(found)}, pk=_KEY)

    def _identity(self, run: int) -> tuple[str, str, str]:
        row = self._db.table("run").get(run)
        return row["device"], row["kernel"], row["mlx"]


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), sort_keys=True, default=str)


def _named(bucket: Bucket, plan: Plan) -> dict[str, Any]:
    return {**bucket._asdict(), **vars(plan)}


_MEASURED = (
    *("status", "message", "max_error", "rounds", "median_us", "p10_us", "p90_us"),
    *("ratio", "ratio_low", "ratio_high"),
)


def _evidence(bucket: Bucket, measurement: Measurement) -> dict[str, Any]:
    return {
        **_named(bucket, measurement.plan),
        **{name: getattr(measurement, name) for name in _MEASURED},
        "samples_us": _json([float(f"{sample:.5g}") for sample in measurement.samples_us]),
        "executed": str(measurement.executed) if measurement.executed else None,
    }


def _measurement(row: Mapping[str, Any]) -> Measurement:
    return Measurement(
        shape=_bucket(row).shape,
        plan=_plan(row),
        samples_us=tuple(json.loads(row["samples_us"])),
        **{name: row[name] for name in _MEASURED},
    )


def _bucket(row: Mapping[str, Any]) -> Bucket:
    return Bucket(*(row[name] for name in BUCKET_COLUMNS))


def _plan(row: Mapping[str, Any]) -> Plan:
    return Plan(row["path"], row["partitions"], row["tile"])


def _plan_row(row: Mapping[str, Any]) -> Row:
    return Row(_bucket(row), _plan(row), *(row[name] for name in ROW_COLUMNS[-7:]))
