"""Several tuning databases as one, by SQL alone: rows stream from file to file."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from .errors import ShareError, StoreError
from .share_rows import derive, imported_nonce, own_nonce
from .store import Store
from .table import BUCKET_COLUMNS, open_read_only

_MAGIC = b"SQLite format 3\0"  # what such a file begins with
_RUN = ("device", "started", "kernel", "mlx", "system", "software", "options", "conditions")
_IDENTITY = ("device", "kernel", "mlx", "system", "nonce")


class _Run(NamedTuple):
    """A run of a source; `number` there, `rows` of evidence."""

    key: tuple[str, ...]
    source: int
    number: int
    rows: int
    started: str

    @property
    def order(self) -> tuple[bool, int, int]:
        """Of the same run in several files the first is copied whole: measured there, then the
        longest; of the others only buckets that it lacks.
        """
        return self.number < 0, -self.rows, self.source


def is_one(path: Path) -> bool:
    """Whether a file is a database. Raises ShareError: it can't be read."""
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError as error:
        raise ShareError(f"cannot read {path}: {error.strerror}") from error


def merge(out: Path, sources: Sequence[Path]) -> dict[str, Any]:
    """Make a database of the evidence of others; a run that is in several of them counts once.

    All runs get numbers below 0: what they say about a bucket is pooled. Returns `runs` and
    `measurements` of the new file, which appears only when it is complete.

    Raises:
        ShareError: there is a file of that name.
        StoreError: a database can't be read, or the new one can't be written.
    """
    if out.exists():
        raise ShareError(f"{out} is there already: name a new file")
    part = out.with_name(f".{out.name}.part")
    _remove(part)
    try:
        _create(part, sources)
        with _errors(out):
            address = _address(part, "rw")
            with closing(sqlite3.connect(address, uri=True, isolation_level=None)) as connection:
                # A file that is thrown away after a failure needs no journal.
                connection.execute("PRAGMA journal_mode = OFF")
                connection.execute("PRAGMA synchronous = OFF")
                counts = _fill(connection, sources)
            part.replace(out)
    finally:
        _remove(part)
    return counts


def _create(part: Path, sources: Iterable[Path]) -> None:
    """The empty tables; refuses sources that are no database of this version."""
    for source in sources:
        Store(source, create=False).close()
    Store(part).close()


def _remove(part: Path) -> None:
    for suffix in ("", "-wal", "-shm", "-journal"):
        with suppress(OSError):
            part.with_name(part.name + suffix).unlink()


def _fill(connection: sqlite3.Connection, sources: Sequence[Path]) -> dict[str, Any]:
    same: dict[tuple[str, ...], list[_Run]] = {}
    for index, source in enumerate(sources):
        for run in _runs(index, source):
            same.setdefault(run.key, []).append(run)
    ordered = sorted(same, key=lambda key: (min(run.started for run in same[key]), key))
    numbers = {key: place - len(ordered) for place, key in enumerate(ordered)}
    copies = [sorted(runs, key=lambda run: run.order) for runs in same.values()]
    index = connection.execute(
        "SELECT sql FROM sqlite_master WHERE name = 'measurement_bucket'"
    ).fetchone()[0]
    connection.execute("DROP INDEX measurement_bucket")  # many rows are faster without
    _copy(connection, sources, [runs[0] for runs in copies], numbers, whole=True)
    connection.execute(index)
    _copy(connection, sources, [run for runs in copies for run in runs[1:]], numbers, whole=False)
    connection.execute("BEGIN")  # one for its many small statements
    derive(connection)
    connection.execute("COMMIT")
    rows = connection.execute("SELECT count(*) FROM measurement").fetchone()[0]
    return {"runs": len(numbers), "measurements": rows}


def _runs(index: int, source: Path) -> Iterator[_Run]:
    with _errors(source), closing(open_read_only(source)) as connection:
        connection.row_factory = sqlite3.Row
        told = {
            run: (count, first)
            for run, count, first in connection.execute(
                "SELECT run, count(*), min(id) FROM measurement GROUP BY run"
            )
        }
        for row in connection.execute("SELECT * FROM run ORDER BY id").fetchall():
            count, first = told.get(row["id"], (0, None))
            known = imported_nonce(row) or own_nonce(connection, row, first)
            values = dict(row) | {"nonce": known}
            key = tuple(str(values[name]) for name in _IDENTITY)
            yield _Run(key, index, row["id"], count, row["started"])


def _copy(
    connection: sqlite3.Connection,
    sources: Sequence[Path],
    runs: Sequence[_Run],
    numbers: dict[tuple[str, ...], int],
    *,
    whole: bool,
) -> None:
    """Rows of these runs, one source after the other. Not `whole`: only of buckets that the run
    lacks.
    """
    for index, source in enumerate(sources):
        chosen = [run for run in runs if run.source == index]
        if not chosen:
            continue
        connection.execute("CREATE TEMP TABLE renumbered (old INTEGER PRIMARY KEY, new, nonce)")
        connection.executemany(
            "INSERT INTO renumbered VALUES (?, ?, ?)",
            [(run.number, numbers[run.key], run.key[-1]) for run in chosen],
        )
        with _attached(connection, source):
            if whole:
                _copy_runs(connection)
            _copy_evidence(connection, "" if whole else f"WHERE NOT EXISTS ({_THERE})")
        connection.execute("DROP TABLE renumbered")


_THERE = "SELECT 1 FROM main.measurement AS known WHERE known.run = new AND " + " AND ".join(
    f"known.{name} = source.measurement.{name}" for name in BUCKET_COLUMNS
)


def _copy_runs(connection: sqlite3.Connection) -> None:
    facts = "key, backend, architecture, family, cores, memory_gb, name, cache_bytes"
    connection.execute(
        f"INSERT INTO device ({facts}) SELECT {facts} FROM source.device "
        "WHERE key IN (SELECT device FROM source.run JOIN renumbered ON old = id) "
        "ON CONFLICT (key) DO UPDATE SET name = min(name, excluded.name), "
        "cache_bytes = min(cache_bytes, excluded.cache_bytes)"
    )
    names = ", ".join(_RUN)
    kept = names.replace("conditions", "json_set(conditions, '$.nonce', nonce)")
    connection.execute(
        f"INSERT INTO run (id, {names}) "
        f"SELECT new, {kept} FROM source.run JOIN renumbered ON old = id"
    )


def _copy_evidence(connection: sqlite3.Connection, where: str) -> None:
    found = connection.execute("PRAGMA main.table_info(measurement)").fetchall()
    columns = [f'"{row[1]}"' for row in found if row[1] not in ("id", "run")]
    connection.execute(
        f"INSERT INTO measurement (run, {', '.join(columns)}) "
        f"SELECT new, {', '.join(f'source.measurement.{name}' for name in columns)} "
        f"FROM source.measurement JOIN renumbered ON old = run {where} ORDER BY id"
    )


@contextmanager
def _attached(connection: sqlite3.Connection, source: Path) -> Iterator[None]:
    connection.execute("ATTACH ? AS source", [_address(source, "ro")])
    try:
        yield
    finally:
        connection.execute("DETACH source")


def _address(path: Path, mode: str) -> str:
    return f"file:{quote(str(path.absolute()))}?mode={mode}"


@contextmanager
def _errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, OSError, ValueError) as error:
        raise StoreError(f"cannot use the database {path}: {error}") from error
