"""Evidence and winners in one SQLite file per user. The only importer of sqlite_utils.

`measurement` is only ever added to; `plan` and `threshold` follow from it (`rebuild`).
Every write is one transaction that starts with BEGIN IMMEDIATE: processes queue instead of failing.
"""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from types import NoneType, TracebackType
from typing import Any

from sqlite_utils import Database, Migrations

from . import schema, share_rows
from .device import Device
from .errors import StoreError, plain
from .evidence import Measurement, best_speedup, refuted, verdict
from .fits import threshold
from .plan import Plan
from .records import evidence_row, expect, measurement_of, to_json
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


@migrations()
def create_tables(db: Database) -> None:
    """Schema 1: who measured, what was measured, and what follows from it."""
    for statement in schema.VERSION_1:
        db.execute(statement)


@migrations()
def keep_systems_apart(db: Database) -> None:
    """Schema 2: winners of one system, refuted plans, and what measuring was spared."""
    for statement in schema.VERSION_2:
        db.execute(statement)


@migrations()
def name_baselines(db: Database) -> None:
    """Schema 3: what a winner was compared with."""
    for statement in schema.VERSION_3:
        db.execute(statement)


_OF_BUCKET = " AND ".join(f"{name} = ?" for name in BUCKET_COLUMNS)
_SELECT_PLANS = f"SELECT {', '.join(ROW_COLUMNS)} FROM plan"
_REBUILD = "`mla-tune db rebuild` makes all plans anew"
_UPGRADE = "`mla-tune db rebuild` brings it there"
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
    upgrade: without `create`, tables of an older version are migrated all the same.

    Raises:
        StoreError: here and in every method, one line: the file is corrupt, newer, older and not
            to be migrated, another program's, locked for longer than `LOCK_WAIT_S`, holds malformed
            rows, or cannot be written; or, without `create`, there is none.
    """

    def __init__(self, path: str | Path, *, create: bool = True, upgrade: bool = False) -> None:
        self.path = Path(path)
        there = exists(self.path)
        if not there and not create:
            raise StoreError(f"no database at {self.path}: run mla-tune")
        folder = Path(os.path.realpath(self.path)).parent  # SQLite's side files lie there
        self.writable = not there or all(os.access(each, os.W_OK) for each in (self.path, folder))
        with self._clear_errors():
            connection = self._connect()
            connection.text_factory = lambda raw: str(raw, errors="replace")
            self._db = Database(connection, execute_plugins=False)
        try:
            with self._clear_errors():
                self._migrate(create, upgrade)
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
        started: str = "",
    ) -> int:
        """Note who measures, where and in what state; the id that evidence is recorded under.

        started: ISO time of a run that another machine made; now by default.

        `kernel` (the kernels' digest), `software["mlx"]` and, where known, `software["system"]`
        decide later which winners still count.
        """
        row = {name: getattr(device, name) for name in Device.__dataclass_fields__}
        with self._write() as db:
            db.table("device").upsert({"key": device.key, **row}, pk="key")
            run = {
                "device": device.key,
                "started": started or _now(),
                "kernel": kernel,
                "mlx": software["mlx"],
                "software": to_json(software),
                "options": to_json(options or {}),
                "conditions": to_json(conditions or {}),
                "system": software.get("system", ""),
            }
            return int(db.table("run").insert(run).last_pk or 0)

    def record(
        self,
        run: int,
        bucket: Bucket,
        search: Sequence[Measurement],
        duel: Sequence[Measurement] = (),
        *,
        refutes: bool = False,
        at: str = "",
    ) -> Row | None:
        """Add a bucket's evidence; with a duel also its winner and thresholds, all or nothing.

        search: all candidates; duel: the baseline, then the finalist, with fresh samples. Without a
        verdict (the budget ended, or the baseline failed) both are stored as "cut" and change no
        winner. refutes: the duel showed its last plan, which was stored, to be wrong or slower than
        the baseline, which wins then. at: ISO time when another machine measured; now by default.

        Returns the winner, or None.
        """
        decides = "refute" if refutes else "duel" if verdict(duel) else "cut"
        stages = [("cut" if decides == "cut" else "search", search), (decides, duel)]
        evidence = [
            {"run": run, "at": at or _now(), "stage": stage, **evidence_row(bucket, measurement)}
            for stage, measurements in stages
            for measurement in measurements
        ]
        with self._write() as db:
            db.table("measurement").insert_all(evidence)
            if decides == "cut":
                return None
            with self._sound(_MEND):
                winner = self._derive_plan(run, bucket)
                self._derive_threshold(run, bucket)
            return winner

    def rebuild(self) -> int:
        """Make every winner and threshold anew from the evidence; how many winners there are."""
        with self._write() as db:
            self._rebuild()
            return int(db.execute("SELECT count(*) FROM plan").fetchone()[0])

    def _rebuild(self) -> None:
        self._db.execute("DELETE FROM plan")
        self._db.execute("DELETE FROM threshold")
        columns = ", ".join(("run", *BUCKET_COLUMNS))
        decided = self._db.execute(
            f"SELECT DISTINCT {columns} FROM measurement WHERE stage IN ('duel', 'refute') "
            f"AND run >= 0 ORDER BY {columns}"  # later runs replace what earlier ones found
        ).fetchall()
        families = {}
        for run, *fields in decided:
            with self._sound(_MEND):
                self._derive_plan(run, bucket := Bucket(*fields))
                families[self._identity(run)[:4], bucket._replace(context=0)] = run, bucket
        for run, bucket in families.values():
            self._derive_threshold(run, bucket)
        with self._sound(_MEND):
            share_rows.derive(self._db.conn)

    # --- reading -----------------------------------------------------------------------------

    def plans(self, device: str | None = None) -> list[Row]:
        """Stored winners, of one device key or of all, in the order of their buckets.

        Those of one bucket, found with several versions, stand in the order they were found in.
        """
        with self._clear_errors():
            return self._rows("device = ?", [device]) if device else self._rows("1", [])

    def tuned(self, device: Device, kernel: str, mlx: str, system: str = "") -> list[Row]:
        """Winners of a device that count with this kernel, MLX and system ("": unknown).

        One a bucket. Buckets whose plan was refuted, and not tuned again, are left out.
        """
        rows, refuted = self.plans(device.key), self.refuted(device)
        counts = {row.bucket: row for row in rows if row.counts(kernel, mlx, system)}
        return [row for row in counts.values() if row not in refuted]

    def refuted(self, device: Device) -> list[Row]:
        """Those winners of a device, all of them baselines, that stand for a refuted plan."""
        with self._clear_errors():
            return self._rows("device = ? AND stage = 'refute'", [device.key])

    def rival(self, device: Device, row: Row) -> Plan | None:
        """The plan that did best beside the baseline in what a winner was found with."""
        where = f"{_OF_BUCKET} AND (device, kernel, mlx, system) = (?, ?, ?, ?)"
        with self._clear_errors(), self._sound(_MEND):
            found = self._db.execute(
                "SELECT path, partitions, tile FROM measurement "
                "JOIN run ON run.id = measurement.run "
                f"WHERE {where} AND status = 'ok' AND path NOT IN ('mlx', ?) AND ratio IS NOT NULL "
                "ORDER BY ratio DESC, measurement.id LIMIT 1",
                [*row.bucket, device.key, row.kernel, row.mlx, row.system, row.baseline],
            ).fetchone()
            return Plan(*found) if found else None

    def _rows(self, where: str, values: Sequence[object]) -> list[Row]:
        order = ", ".join((*BUCKET_COLUMNS, "run"))
        with self._sound(_REBUILD):
            found = self._db.execute(f"{_SELECT_PLANS} WHERE {where} ORDER BY {order}", values)
            return [checked_row(row) for row in found]

    def evidence(self, bucket: Bucket | None = None) -> list[dict[str, Any]]:
        """Raw rows of `measurement` with their run's device and versions, oldest first."""
        where = _OF_BUCKET if bucket else "1"
        with self._clear_errors():
            found = self._db.query(
                "SELECT measurement.*, run.device, run.kernel, run.mlx, run.system "
                "FROM measurement JOIN run ON run.id = measurement.run "
                f"WHERE {where} ORDER BY measurement.id",
                list(bucket or ()),
            )
            return list(found)

    def runs(self) -> dict[Device, list[dict[str, Any]]]:
        """Rows of `run` by device, oldest first; devices in the order of their keys."""
        names = tuple(Device.__dataclass_fields__)
        with self._clear_errors(), self._sound(_MEND):
            found: dict[Device, list[dict[str, Any]]] = {}
            devices = {
                row["key"]: Device(*(row[name] for name in names))
                for row in self._db.query("SELECT * FROM device ORDER BY key")
            }
            for row in self._db.query("SELECT * FROM run ORDER BY device, id"):
                if row["device"] not in devices:
                    raise ValueError(f"run {row['id']}: its device is missing")
                found.setdefault(devices[row["device"]], []).append(row)
            return found

    def thresholds(self, device: str, **versions: str) -> list[dict[str, Any]]:
        """Rows of `threshold` of a device key, with these `kernel`, `mlx` and `system`."""
        where = " AND ".join(f"{name} = :{name}" for name in ("device", *versions))
        with self._clear_errors():
            values = {"device": device, **versions}
            return list(self._db.query(f"SELECT * FROM threshold WHERE {where}", values))

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
            problems = problems or [plain(problem) for problem in self._malformed()]
            return {
                "path": str(self.path),
                "ok": not problems,
                "problems": problems,
                "schema": SCHEMA_VERSION,
                "rows": {name: self._db.table(name).count for name in schema.TABLES},
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
                measurement_of(row)
            except ValueError as error:
                yield f"{error}: {_MEND}"
        for row in self._db.execute(_SELECT_PLANS):
            try:
                checked_row(row)
            except ValueError as error:
                yield f"plan: {error}: {_REBUILD}"

    # --- inside ------------------------------------------------------------------------------

    def _connect(self) -> sqlite3.Connection:
        """Ready for writing where that is possible, else for reading."""
        if not self.writable:
            return self._read_only()
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return sqlite3.connect(self.path, timeout=LOCK_WAIT_S)

    def _read_only(self) -> sqlite3.Connection:
        try:
            return open_read_only(self.path)
        except ValueError as error:
            raise StoreError(f"cannot use the database {self.path}: {error}") from error

    def _migrate(self, create: bool, upgrade: bool) -> None:
        """Make the tables of an empty file; carry older ones on."""
        version = self._version()
        if version == SCHEMA_VERSION:
            return
        if version == 0 and not create:
            raise StoreError(f"{self.path} holds no tuning data: run mla-tune")
        if version and not (self.writable and (create or upgrade)):
            raise StoreError(
                f"{self.path} has schema {version}, this mla-tuner uses {SCHEMA_VERSION}: "
                f"{_UPGRADE}, where it can be written"
            )
        self._enable_wal()  # not possible within a transaction
        with self._write() as db:
            if self._version() != SCHEMA_VERSION:  # another process may have been faster
                migrations.apply(db)
                with suppress(StoreError), db.atomic():  # else the copied winners stay
                    self._rebuild()

    def _enable_wal(self) -> None:
        """Switching needs the file alone and does not wait; whoever comes second finds it done."""
        with suppress(sqlite3.OperationalError):
            self._db.execute("PRAGMA journal_mode = WAL").fetchone()

    def _version(self) -> int:
        """Schema of the file's tables; 0 for an empty file."""
        # Names before the version: another process may create both, at once, in between.
        names = {row[0] for row in self._db.execute("SELECT name FROM sqlite_master")}
        version = int(self._db.execute("PRAGMA user_version").fetchone()[0])
        if version > SCHEMA_VERSION:
            raise StoreError(
                f"{self.path} has schema {version}, this mla-tuner writes {SCHEMA_VERSION}: "
                "update mla-tuner, or name another file with --db"
            )
        if version > 0 and names.issuperset(schema.TABLES):
            return version
        if names:
            raise StoreError(
                f"{self.path} is the database of another program: name another file with --db"
            )
        return 0

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

    def _derive_plan(self, run: int, bucket: Bucket) -> Row | None:
        """Store the winner that a run's evidence on a bucket makes; its last verdict holds."""
        found = self._db.query(
            f"SELECT * FROM measurement WHERE {_OF_BUCKET} AND run = ? AND stage != 'cut' "
            "ORDER BY id",
            [*bucket, run],
        )
        rows = list(found)  # sqlite_utils' first upsert fails beside an open cursor
        measured = [measurement_of(row) for row in rows]
        stage = next(row["stage"] for row in reversed(rows) if row["stage"] != "search")
        duel = [m for row, m in zip(rows, measured, strict=True) if row["stage"] == stage]
        decided = verdict(duel, measured) if stage == "duel" else refuted(duel)
        if decided is None:
            return None
        best, default, reason = decided
        device, kernel, mlx, system, _ = self._identity(run)
        times = (best.median_us or 0.0, best.ratio or 1.0, best.ratio_low, best.ratio_high)
        versions = (rows[-1]["at"][:10], kernel, mlx, system)
        speedups = (best_speedup(measured, path) for path in ("single", "split"))
        values = (*bucket, *vars(best.plan).values(), *times, *versions, *speedups)
        values += (stage, default.plan.path)
        row = checked_row(values)
        named = {"device": device, **dict(zip(ROW_COLUMNS, values, strict=True))}
        named |= {"reason": reason, "run": run}
        self._db.table("plan").upsert(named, pk=schema.KEY)
        return row

    def _derive_threshold(self, run: int, bucket: Bucket) -> None:
        """Store the threshold that a run's versions leave to all contexts of a bucket."""
        device, kernel, mlx, system, cores = self._identity(run)
        key = {"device": device, **bucket._replace(context=0)._asdict()}
        key |= {"kernel": kernel, "mlx": mlx, "system": system}
        same = {name: value for name, value in key.items() if name != "context"}
        rows = self._rows(" AND ".join(f"{name} = ?" for name in same), list(same.values()))
        speedups = {row.bucket: (row.single_speedup, row.split_speedup) for row in rows}
        found = threshold({row.bucket: row.plan for row in rows}, cores, speedups)
        self._db.table("threshold").upsert({**key, **vars(found)}, pk=schema.KEY)

    def _identity(self, run: int) -> tuple[str, str, str, str, int | None]:
        """Device key, kernel, MLX, system and core count of a run.

        Raises:
            ValueError: the run or its device is missing or malformed.
        """
        found = self._db.query(
            "SELECT device, kernel, mlx, system, cores FROM run JOIN device ON key = device "
            "WHERE id = ?",
            [run],
        )
        row = next(found, None)
        if row is None:
            raise ValueError(f"run {run} or its device is missing")
        try:
            expect(row, ("device", "kernel", "mlx", "system"), str)
            expect(row, ("cores",), int, NoneType)
        except ValueError as error:
            raise ValueError(f"run {run}: {error}") from error
        return row["device"], row["kernel"], row["mlx"], row["system"], row["cores"]


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
