"""The frozen look-up table of a serving process: a shape goes in, a decision comes out.

The first step that answers wins: `off` (MLA_TUNER=off), `tuned` (this device measured this bucket),
`fitted` (between two tuned contexts), `gates`. Standard library only, and no file access after
`Policy.load`.
"""

from __future__ import annotations

import logging
import math
import os
import reprlib
import sqlite3
import stat
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from . import backends, fits, gates
from . import device as devices
from .backends import Backend
from .device import MLX_VERSION, Device
from .errors import StoreError
from .plan import MLX, Decision, Plan
from .shapes import DEEPSEEK, Bucket, Geometry, bucket_fields

SCHEMA_VERSION = 1  # of the tables that `store` writes; a newer file is not read
LOCK_WAIT_S = 1.0  # a reader meets a lock only while another process repairs a crashed file
MAX_CACHED = 65536  # decisions; more distinct buckets than any server sees

log = logging.getLogger("mla_tuner")


class Row(NamedTuple):
    """A stored winner. Times in microseconds; `speedup` is against `mlx`; `day` is ISO, UTC."""

    bucket: Bucket
    plan: Plan
    median_us: float
    speedup: float
    speedup_low: float | None
    speedup_high: float | None
    day: str
    kernel: str
    mlx: str


# Columns of the table `plan` that make a Row; `store` writes the same list.
BUCKET_COLUMNS = Bucket._fields
ROW_COLUMNS = (
    *BUCKET_COLUMNS,
    *("path", "partitions", "tile"),
    *("median_us", "speedup", "speedup_low", "speedup_high", "day", "kernel", "mlx"),
)


class Policy:
    """Decisions for one device, from `rows`, cached by bucket. Threads may share it."""

    def __init__(
        self,
        device: Device,
        rows: Iterable[Row] = (),
        *,
        backend: Backend | None = None,
        off: bool = False,
        mlx: str = MLX_VERSION,
    ) -> None:
        self.device = device
        self.off = off
        self._backend = backend or backends.get(device.backend)
        self._rows: dict[Bucket, Row] = {}
        self._stale: dict[Bucket, str] = {}
        self._ranges: dict[Bucket, list[int]] = {}  # tuned contexts, by the bucket without context
        self._cache: dict[tuple[int | str, ...], Decision] = {}  # a Bucket equals its tuple
        built, reason = self._backend.available()
        self._missing = "" if built else reason
        kernel = self._backend.digest()
        for row in rows:
            if row.kernel != kernel:
                if self._missing:
                    continue  # the kernel is what is stale, and every decision says so
                self._stale[row.bucket] = "tuned with another kernel: run `mla-tune`"
            elif row.mlx != mlx:
                self._stale[row.bucket] = (
                    f"tuned with MLX {row.mlx}, this is {mlx}: run `mla-tune verify`"
                )
            else:
                self._rows[row.bucket] = row
        for bucket in sorted(self._rows):
            self._ranges.setdefault(bucket._replace(context=0), []).append(bucket.context)

    @classmethod
    def load(cls, path: str | Path | None = None, device: Device | None = None) -> Policy:
        """Read the winners of `device` (this one by default) from the database, once.

        Never raises for the database's state: missing, corrupt, locked or newer, it is left out
        with one log line, and the gates decide.
        """
        off = os.environ.get("MLA_TUNER", "").lower() == "off"
        device = device or devices.probe()
        return cls(device, () if off else _winners(path, device), off=off)

    def __len__(self) -> int:
        """Tuned buckets that count here."""
        return len(self._rows)

    def decide(
        self,
        context: int,
        batch: int,
        heads: int,
        dtype: str,
        q_len: int = 1,
        geometry: Geometry = DEEPSEEK,
        layout: str = "paged",
    ) -> Decision:
        """The plan for a shape; `batch` is the effective one. Never raises for ints and strings."""
        key = bucket_fields(context, batch, heads, dtype, geometry, q_len, layout)
        try:
            return self._cache[key]
        except KeyError:
            return self._look_up(Bucket(*key))

    def _look_up(self, bucket: Bucket) -> Decision:
        if len(self._cache) >= MAX_CACHED:
            self._cache.clear()
        decision = self._tuned(bucket) or self._fitted(bucket) or self._gated(bucket)
        if self._missing not in decision.reason and not self.off:
            decision = replace(decision, reason=f"{self._missing}; {decision.reason}")
        self._cache[bucket] = decision
        return decision

    def _tuned(self, bucket: Bucket) -> Decision | None:
        if self.off:
            return Decision(MLX, "off", "MLA_TUNER=off")
        row = self._rows.get(bucket)
        if row is None or self._refusal(row.plan, bucket):
            return None
        when = f"tuned on this device {row.day}"
        if row.plan == MLX:
            reason = f"{when}: nothing beats mlx at context {bucket.context}"
        else:
            low, high = row.speedup_low, row.speedup_high
            span = "" if low is None or high is None else f" [{low:.3g}, {high:.3g}]"
            reason = (
                f"{when}: {row.plan} is {row.speedup:.3g}x mlx{span} at context {bucket.context}"
            )
        interval = row.speedup_low, row.speedup_high
        return Decision(row.plan, "tuned", reason, row.median_us, row.speedup, *interval)

    def _fitted(self, bucket: Bucket) -> Decision | None:
        contexts = self._ranges.get(bucket._replace(context=0), [])
        low = max((c for c in contexts if c < bucket.context), default=0)
        high = min((c for c in contexts if c > bucket.context), default=0)
        if not (low and high):
            return None  # nothing is extrapolated
        below, above = (self._rows[bucket._replace(context=c)].plan for c in (low, high))
        plan = fits.between(bucket.context, (low, below), (high, above))
        if plan is None or self._refusal(plan, bucket):
            return None
        return Decision(
            plan, "fitted", f"between tuned contexts {low} ({below}) and {high} ({above})"
        )

    def _gated(self, bucket: Bucket) -> Decision:
        plan, reason = gates.gate(bucket, self.device, self._backend)
        row = self._rows.get(bucket)
        refused = self._refusal(row.plan, bucket) if row else self._stale.get(bucket)
        return Decision(plan, "gates", f"{refused}; {reason}" if refused else reason)

    def _refusal(self, plan: Plan, bucket: Bucket) -> str | None:
        """A table is foreign data: it never selects what the back end refuses."""
        return self._backend.refusal(plan, bucket.shape) if plan.native else None


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


def _winners(path: str | Path | None, device: Device) -> list[Row]:
    try:
        return read_rows(Path(path or default_path()), device)
    except StoreError as error:
        log.warning("%s: the gates decide", error)
        return []


def read_rows(path: Path, device: Device) -> list[Row]:
    """Every stored winner of a device; empty, with one log line, where the file can't be used."""
    try:
        kind = FILE_KINDS.get(stat.S_IFMT(path.stat().st_mode))
        if kind:
            raise ValueError(f"it is {kind}")
        with closing(open_read_only(path)) as connection:
            return _select(connection, device.key)
    except (FileNotFoundError, NotADirectoryError):
        log.warning("no tuning table at %s: run `mla-tune`; the gates decide", path)
    except (sqlite3.Error, OSError, ValueError) as error:
        log.warning("tuning table %s is not used (%s): the gates decide", path, error)
    return []


FILE_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


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
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version != SCHEMA_VERSION:
        raise ValueError(f"its schema is {version}, this version reads {SCHEMA_VERSION}")
    columns = ", ".join(ROW_COLUMNS)
    found = connection.execute(f"SELECT {columns} FROM plan WHERE device = ?", [device_key])
    return [checked_row(values) for values in found]


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


def _is_amount(value: object) -> bool:
    return isinstance(value, int | float) and 0 <= value < math.inf


def _is_amount_or_null(value: object) -> bool:
    return value is None or _is_amount(value)


# What each column must hold: SQLite takes any value in any column.
_TEXTS = ("dtype", "layout", "path", "tile", "day", "kernel", "mlx")
_KINDS: dict[str, tuple[str, Callable[[object], bool]]] = {
    **dict.fromkeys((*BUCKET_COLUMNS, "partitions"), ("an integer", _is_count)),
    **dict.fromkeys(_TEXTS, ("printable text", _is_text)),
    **dict.fromkeys(("median_us", "speedup"), ("a number of 0 or more", _is_amount)),
    **dict.fromkeys(
        ("speedup_low", "speedup_high"), ("a number of 0 or more, or NULL", _is_amount_or_null)
    ),
}


_current: Policy | None = None
_current_lock = threading.Lock()


def current() -> Policy:
    """The policy of this process: loaded at the first call, then shared by all threads."""
    global _current
    if _current is None:
        with _current_lock:
            if _current is None:
                _current = Policy.load()
    return _current
