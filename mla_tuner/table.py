"""The winners of one device, read from the tuning database. Standard library only.

`store` writes what this module reads.
"""

from __future__ import annotations

import logging
import os
import reprlib
import sqlite3
import stat
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from .device import Device
from .errors import StoreError
from .plan import MLX, MLX_PLANS, Plan
from .shapes import Bucket

SCHEMA_VERSION = 3  # of the tables that `store` writes; a newer file is not read
LOCK_WAIT_S = 1.0  # a reader meets a lock only while another process repairs a crashed file

log = logging.getLogger("mla_tuner")

BASELINES = tuple(plan.path for plan in MLX_PLANS)  # what a speed-up can be over


class Row(NamedTuple):
    """A stored winner. Times in microseconds; `day` is ISO, UTC.

    Speed-ups are over `baseline`: `mlx` or, where that can't run, another of MLX's paths.

    `kernel`, `mlx` and `system` (OS and driver, "" unknown) are what it was measured with.
    `single_speedup` and `split_speedup` are those of the best plan of that path, None where none
    was measured. `stage` is "refute" where the baseline stands for a plan that failed later.
    """

    bucket: Bucket
    plan: Plan
    median_us: float
    speedup: float
    speedup_low: float | None
    speedup_high: float | None
    day: str
    kernel: str
    mlx: str
    system: str = ""
    single_speedup: float | None = None
    split_speedup: float | None = None
    stage: str = "duel"
    baseline: str = MLX.path

    @property
    def stays(self) -> bool:
        """Whether nothing beat the baseline."""
        return self.plan.path == self.baseline

    def counts(self, kernel: str, mlx: str, system: str) -> bool:
        """Whether it was measured with these versions. An unknown system differs from none."""
        same_system = not system or not self.system or system == self.system
        return same_system and (self.kernel, self.mlx) == (kernel, mlx)


# Columns of the table `plan` that make a Row; `store` writes the same list.
BUCKET_COLUMNS = Bucket._fields
ROW_COLUMNS = (
    *BUCKET_COLUMNS,
    *("path", "partitions", "tile"),
    *("median_us", "speedup", "speedup_low", "speedup_high", "day", "kernel", "mlx", "system"),
    *("single_speedup", "split_speedup", "stage", "baseline"),
)


def default_path() -> Path:
    """The user's database: MLA_TUNER_DB, else mla-tuner/tuning.db in the user's data folder.

    Raises:
        StoreError: MLA_TUNER_DB begins with the home folder of a user who does not exist.
    """
    named = os.environ.get("MLA_TUNER_DB")
    if named:
        try:
            return Path(named).expanduser()
        except RuntimeError as error:
            raise StoreError(f"cannot use MLA_TUNER_DB={named}: {error}") from error
    from platformdirs import user_data_dir

    return Path(user_data_dir("mla-tuner", appauthor=False)) / "tuning.db"


def read_rows(path: Path, device: Device) -> list[Row]:
    """Every winner that was found here for a device, of all versions, in the order they were found
    in.

    Empty, with one log line, where the file can't be used.
    """
    try:
        return rows_of(path, device)
    except (FileNotFoundError, NotADirectoryError):
        log.warning("no tuning table at %s: run `mla-tune`; the gates decide", path)
    except (sqlite3.Error, OSError, ValueError) as error:
        log.warning("tuning table %s is not used (%s): the gates decide", path, error)
    return []


def rows_of(path: Path, device: Device) -> list[Row]:
    """The same. Raises OSError, sqlite3.Error or ValueError where the file can't be used."""
    with closing(_opened(path)) as connection:
        return _select(connection, device.key)


def read_imported(
    path: Path, family: str, kernel: str
) -> list[tuple[tuple[Any, ...], tuple[Any, ...]]]:
    """Winners of imported runs of a chip family with one kernel: the device's key, name, cores,
    memory, and the versions; then the values of `ROW_COLUMNS`, which nobody checked.

    Empty where the file can't be used: `read_rows` says why.
    """
    columns = ", ".join(f"plan.{name}" for name in ROW_COLUMNS)
    try:
        with closing(_opened(path)) as connection:
            found = connection.execute(
                f"SELECT key, name, cores, memory_gb, plan.kernel, plan.mlx, system, {columns} "
                "FROM plan JOIN device ON key = device "
                "WHERE run < 0 AND family = ? AND plan.kernel = ?",
                [family, kernel],
            )
            return [(row[:7], row[7:]) for row in found]
    except (sqlite3.Error, OSError, ValueError):
        return []


def _opened(path: Path) -> sqlite3.Connection:
    """Raises ValueError, OSError or sqlite3.Error: it is no table of this version."""
    kind = FILE_KINDS.get(stat.S_IFMT(path.stat().st_mode))
    if kind:
        raise ValueError(f"it is {kind}")
    connection = open_read_only(path)
    try:
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version != SCHEMA_VERSION:
            raise ValueError(_other_schema(version))
    except BaseException:
        connection.close()
        raise
    return connection


FILE_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def content(path: Path, most: int) -> bytes:
    """Of a file of up to so many bytes. Raises OSError, or ValueError: it is none, or larger."""
    facts = path.stat()
    kind = FILE_KINDS.get(stat.S_IFMT(facts.st_mode))
    if kind:
        raise ValueError(f"it is {kind}")
    if facts.st_size > most:
        raise ValueError(f"it has more than {most >> 20} MB")
    return path.read_bytes()


def open_read_only(path: Path) -> sqlite3.Connection:
    """Read-only; as an unchanging file where the folder lets nobody make SQLite's side files."""
    address = f"file:{quote(str(path.absolute()))}?mode=ro"
    connection = sqlite3.connect(address, uri=True, timeout=LOCK_WAIT_S)
    try:
        connection.execute("SELECT 1 FROM sqlite_master").fetchone()
        return connection
    except sqlite3.OperationalError as error:
        connection.close()
        if os.access(path.parent, os.W_OK) or "locked" in str(error):
            raise
    wal = path.with_name(f"{path.name}-wal")
    if wal.exists() and wal.stat().st_size:  # without it the file may be half written
        raise ValueError(f"{wal.name} holds changes that can't be read in a read-only folder")
    return sqlite3.connect(address + "&immutable=1", uri=True)


def _select(connection: sqlite3.Connection, device_key: str) -> list[Row]:
    columns = ", ".join(ROW_COLUMNS)
    found = connection.execute(
        f"SELECT {columns} FROM plan WHERE device = ? AND run >= 0 ORDER BY run", [device_key]
    )
    return [checked_row(values) for values in found]


def _other_schema(version: int) -> str:
    if version == 0:
        return "it holds no tuning data"
    cure = "`mla-tune db rebuild`" if version < SCHEMA_VERSION else "a newer mla-tuner"
    return f"its schema is {version}, this version reads {SCHEMA_VERSION}: that takes {cure}"


def checked_row(values: Sequence[Any]) -> Row:
    """One stored winner from its raw values, in the order of `ROW_COLUMNS`.

    Raises:
        ValueError: one line that names the column and what is wrong with it.
    """
    for column, value in zip(ROW_COLUMNS, values, strict=True):
        kind, holds = _KINDS[column]
        if not holds(value):
            raise ValueError(f"expected column {column} as {kind}; got {reprlib.repr(value)}")
    width = len(BUCKET_COLUMNS)
    path, partitions, tile, *rest = values[width:]
    row = Row(Bucket(*values[:width]), Plan(path, partitions, tile), *rest)
    if row.bucket.context < 1 or row.bucket.shape.bucket != row.bucket:
        raise ValueError(f"expected columns context, batch, q_len of a bucket; got {row.bucket}")
    if (row.speedup_low is None) != (row.speedup_high is None):
        raise ValueError("expected columns speedup_low and speedup_high both or neither; got one")
    return row


def _is_count(value: object) -> bool:
    return type(value) is int


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value.isprintable()


def _is_baseline(value: object) -> bool:
    return value in BASELINES


def _is_amount(value: object) -> bool:
    return isinstance(value, int | float) and 0 <= value <= sys.float_info.max


def _is_amount_or_null(value: object) -> bool:
    return value is None or _is_amount(value)


# What each column must hold: SQLite takes any value in any column.
_TEXTS = ("dtype", "layout", "path", "tile", "day", "kernel", "mlx", "system", "stage")
_OR_NULL = ("speedup_low", "speedup_high", "single_speedup", "split_speedup")
_KINDS: dict[str, tuple[str, Callable[[object], bool]]] = {
    **dict.fromkeys((*BUCKET_COLUMNS, "partitions"), ("an integer", _is_count)),
    **dict.fromkeys(_TEXTS, ("printable text", _is_text)),
    "baseline": ("one of MLX's paths", _is_baseline),
    **dict.fromkeys(("median_us", "speedup"), ("a number of 0 or more", _is_amount)),
    **dict.fromkeys(_OR_NULL, ("a number of 0 or more, or NULL", _is_amount_or_null)),
}
