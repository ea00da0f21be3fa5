"""The file that a team's server keeps: runs and their evidence, which are only ever added.

A row's key is a digest of what it says, so what comes twice is there once, whoever else is pushing;
and what all rows say together depends on the set of them alone. The winners are not in the file:
`reading` makes them of the evidence. Columns repeat what is in a row's text, to search by.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from datetime import datetime, timezone
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from ..device import Device
from ..errors import ShareError
from ..evidence import median_interval
from ..family import NAME
from ..shapes import Bucket
from ..share_format import (
    SharedBucket,
    SharedDevice,
    SharedEntry,
    SharedFacts,
    SharedRun,
    SharedTable,
    run_id,
)
from ..table import BUCKET_COLUMNS

VERSION = 1
_PROGRAM = 0x4D4C4154  # SQLite's application_id: "MLAT"

Row = tuple[object, ...]


class Piece(NamedTuple):
    """A row of evidence with its run. facts: of the device, as `SharedDevice.facts`."""

    family: str
    facts: dict[str, Any]
    bucket: Bucket
    run: SharedRun
    entry: SharedEntry


_RUN = (
    *("id", "received", "contributor", "family", "device", "name", "kernel", "mlx", "system"),
    *("day", "clock", "facts", "body"),
)
_EVIDENCE = (
    *("hash", "received", "contributor", "run", *BUCKET_COLUMNS, "path", "partitions", "tile"),
    *("baseline", "failed", "speedup", "speedup_low", "speedup_high", "rounds", "day", "body"),
)
_SCHEMA = (
    """CREATE TABLE run (
    id TEXT PRIMARY KEY, received TEXT NOT NULL, contributor TEXT NOT NULL,
    family TEXT NOT NULL, device TEXT NOT NULL, name TEXT NOT NULL, kernel TEXT NOT NULL,
    mlx TEXT NOT NULL, system TEXT NOT NULL, day TEXT NOT NULL, clock TEXT NOT NULL,
    facts TEXT NOT NULL, body TEXT NOT NULL) WITHOUT ROWID""",
    """CREATE TABLE evidence (
    id INTEGER PRIMARY KEY, hash TEXT NOT NULL UNIQUE, received TEXT NOT NULL,
    contributor TEXT NOT NULL, run TEXT NOT NULL REFERENCES run,
    context INTEGER NOT NULL, batch INTEGER NOT NULL, heads INTEGER NOT NULL, dtype TEXT NOT NULL,
    kv_lora_rank INTEGER NOT NULL, rope_dim INTEGER NOT NULL, q_len INTEGER NOT NULL,
    layout TEXT NOT NULL, path TEXT NOT NULL, partitions INTEGER NOT NULL, tile TEXT NOT NULL,
    baseline TEXT NOT NULL, failed TEXT NOT NULL, speedup REAL, speedup_low REAL,
    speedup_high REAL, rounds INTEGER NOT NULL, day TEXT NOT NULL, body TEXT NOT NULL)""",
    "CREATE INDEX evidence_run ON evidence (run)",
    "CREATE INDEX run_family ON run (family)",
    """CREATE VIEW devices AS
    SELECT run.family, run.device, run.name, run.kernel, run.mlx, run.system,
        count(DISTINCT run.id) AS runs, count(evidence.id) AS evidence,
        count(DISTINCT run.contributor) AS contributors, max(evidence.day) AS last_day
    FROM run LEFT JOIN evidence ON evidence.run = run.id
    GROUP BY run.family, run.device, run.kernel, run.mlx, run.system""",
    # An insertion that would replace a row is skipped: REPLACE asks no trigger on deletion.
    """CREATE TRIGGER run_known BEFORE INSERT ON run
    WHEN EXISTS (SELECT 1 FROM run WHERE id = NEW.id) BEGIN SELECT RAISE(IGNORE); END""",
    """CREATE TRIGGER evidence_known BEFORE INSERT ON evidence
    WHEN EXISTS (SELECT 1 FROM evidence WHERE hash = NEW.hash OR id = NEW.id)
    BEGIN SELECT RAISE(IGNORE); END""",
    *(
        f"""CREATE TRIGGER {table}_no_{event} BEFORE {event} ON {table}
    BEGIN SELECT RAISE(ABORT, 'evidence is only ever added'); END"""
        for table in ("run", "evidence")
        for event in ("update", "delete")
    ),
    f"PRAGMA application_id = {_PROGRAM}",
    f"PRAGMA user_version = {VERSION}",
)


def prepare(path: Path, *, create: bool) -> None:
    """See that the file at `path` is one, or with `create` make it.

    Raises:
        ShareError: it is not there, another program's, of a newer version, or can't be used.
    """
    if not create and not path.exists():
        raise ShareError(f"there is no shared file at {path}: --writable makes one")
    try:
        if create:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = "rwc" if create else "ro"
        uri = f"{path.absolute().as_uri()}?mode={mode}"
        with closing(sqlite3.connect(uri, uri=True, isolation_level=None)) as db:
            if create and not _version(db, path):
                db.execute("PRAGMA journal_mode = WAL").fetchone()
                _make(db, path)
            if _version(db, path) != VERSION:
                raise ShareError(f"{path} is empty: --writable makes the tables in it")
    except (sqlite3.Error, OSError) as error:
        raise ShareError(f"cannot use the shared file {path}: {error}") from error


def add(db: sqlite3.Connection, table: SharedTable, contributor: str) -> dict[str, int]:
    """Add a table's evidence, in the caller's transaction: how much was `new`, how much `known`."""
    by = datetime.now(timezone.utc).isoformat(timespec="seconds"), contributor
    new = total = 0
    for device in table.devices:
        for run in device.runs:
            _insert(db, "run", _RUN, _run_row(table.family, device, run, by))
        for bucket in device.buckets:
            for entry in bucket.evidence:
                new += _insert(db, "evidence", _EVIDENCE, _evidence_row(bucket, entry, by))
                total += 1
    return {"new": new, "known": total - new}


def since(db: sqlite3.Connection, after: int) -> Iterator[tuple[int, Piece | str]]:
    """What was added after the row `after`, oldest first, with the rows' numbers. Of a row that is
    not what `add` wrote, one line that says why: somebody else wrote into the file.
    """
    asked = (
        "SELECT evidence.id, hash, family, facts, run.body, evidence.body, "
        f"{', '.join(BUCKET_COLUMNS)} FROM evidence LEFT JOIN run ON run.id = evidence.run "
        "WHERE evidence.id > ? ORDER BY evidence.id"
    )
    for at, *row in db.execute(asked, [after]):
        found: Piece | str
        try:
            found = _piece(*row)
        except (ValueError, TypeError) as error:
            found = f"row {at}, {' '.join(str(error).split()):.200}"
        yield at, found


# --- inside ------------------------------------------------------------------------------------


def _insert(db: sqlite3.Connection, table: str, columns: tuple[str, ...], row: Row) -> int:
    """1 where the row is new, else 0."""
    places = ", ".join("?" * len(columns))
    before = db.total_changes
    db.execute(f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({places})", row)
    return db.total_changes - before


def _run_row(family: str, device: SharedDevice, run: SharedRun, by: tuple[str, str]) -> Row:
    told = (family, device.key, device.name, device.kernel, device.mlx, device.system)
    facts = json.dumps(device.facts, sort_keys=True)
    return (run.id, *by, *told, run.day, run.clock, facts, run.model_dump_json())


def _evidence_row(bucket: SharedBucket, entry: SharedEntry, by: tuple[str, str]) -> Row:
    body = entry.model_dump_json()
    digest = _digest(bucket.bucket, body)
    ratios = entry.entry.ratios
    low, high = median_interval(ratios) or (None, None)
    return (
        *(digest, *by, entry.run, *bucket.bucket, entry.path, entry.partitions, entry.tile),
        *(entry.baseline, entry.failed, median(ratios) if ratios else None, low, high),
        *(len(ratios), entry.day, body),
    )


def _digest(bucket: Bucket, body: str) -> str:
    return sha256(json.dumps([*bucket, body]).encode()).hexdigest()


def _piece(digest: str, family: str, facts: str, run: str, body: str, *fields: Any) -> Piece:
    """Raises ValueError or TypeError: the row or its run is not what it was when it was added."""
    bucket = Bucket(*fields)
    if digest != _digest(bucket, body) or bucket.shape.bucket != bucket:
        raise ValueError("its hash is not that of a bucket and its body")
    entry = SharedEntry.model_validate_json(body)
    measured, told = _run(family, facts, run)
    if entry.entry.run != told.id:
        raise ValueError("its run is another one")
    return Piece(family, measured.model_dump(), bucket, told, entry)


@lru_cache(256)  # of evidence that lies together
def _run(family: str, facts: str, body: str) -> tuple[SharedFacts, SharedRun]:
    """Raises ValueError or TypeError as `_piece`."""
    device, run = SharedFacts.model_validate_json(facts), SharedRun.model_validate_json(body)
    if run.id != run_id(device.versions, run.model_dump()):
        raise ValueError("its run's id is not the digest of what the run says")
    of = (device.backend, device.architecture, family, device.cores, device.memory_gb, device.name)
    if Device(*of, device.cache_bytes).key != device.key or not NAME.fullmatch(family):
        raise ValueError("its run is of no such device or family")
    return device, run


def _make(db: sqlite3.Connection, path: Path) -> None:
    db.execute("BEGIN IMMEDIATE")
    if not _version(db, path):  # another process may have been faster
        for statement in _SCHEMA:
            db.execute(statement)
    db.execute("COMMIT")


def _version(db: sqlite3.Connection, path: Path) -> int:
    """Of the tables; 0 for an empty file. Raises ShareError: they are not ours, or newer."""
    program, version = (
        int(db.execute(f"PRAGMA {name}").fetchone()[0])
        for name in ("application_id", "user_version")
    )
    empty = db.execute("SELECT 1 FROM sqlite_master").fetchone() is None
    if program != _PROGRAM and not empty:
        raise ShareError(f"{path} is the database of another program: name another --file")
    if version > VERSION:
        raise ShareError(f"{path} has schema {version}, this mla-tuner uses {VERSION}: update it")
    return version
