"""The tables of the tuning database as SQL: how each version is made from the one before.

`store` runs these statements and writes the rows, `table` reads the winners.
"""

from __future__ import annotations

from .table import BUCKET_COLUMNS

TABLES = ("device", "run", "measurement", "plan", "threshold")

_BUCKET = """
    context INTEGER NOT NULL, batch INTEGER NOT NULL, heads INTEGER NOT NULL, dtype TEXT NOT NULL,
    kv_lora_rank INTEGER NOT NULL, rope_dim INTEGER NOT NULL, q_len INTEGER NOT NULL,
    layout TEXT NOT NULL"""
_PLAN = "path TEXT NOT NULL, partitions INTEGER NOT NULL, tile TEXT NOT NULL"
_MEASURED = """
    status TEXT NOT NULL CHECK (status IN ('ok', 'wrong', 'error', 'timeout')),
    message TEXT NOT NULL, max_error REAL, rounds INTEGER NOT NULL,
    median_us REAL, p10_us REAL, p90_us REAL, ratio REAL, ratio_low REAL, ratio_high REAL,
    samples_us TEXT NOT NULL, executed TEXT"""
_WON = """
    median_us REAL NOT NULL, speedup REAL NOT NULL, speedup_low REAL, speedup_high REAL,
    day TEXT NOT NULL, kernel TEXT NOT NULL, mlx TEXT NOT NULL"""
_FITTED = "native_from INTEGER, split_from INTEGER, kappa REAL"
_INDEX = f"CREATE INDEX measurement_bucket ON measurement ({', '.join(BUCKET_COLUMNS)}, run)"

# Engines pin different MLX releases and share this file: each release keeps its own winners.
_KEY_1 = ", ".join(("device", *BUCKET_COLUMNS, "kernel", "mlx"))
VERSION_1 = (
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
    {_MEASURED})""",
    _INDEX,
    f"""CREATE TABLE plan (
    device TEXT NOT NULL REFERENCES device, {_BUCKET}, {_PLAN}, {_WON}, reason TEXT NOT NULL,
    run INTEGER NOT NULL REFERENCES run, PRIMARY KEY ({_KEY_1}))""",
    # One row for all contexts of a bucket; its own context column is 0.
    f"""CREATE TABLE threshold (
    device TEXT NOT NULL REFERENCES device, {_BUCKET}, kernel TEXT NOT NULL, mlx TEXT NOT NULL,
    {_FITTED}, PRIMARY KEY ({_KEY_1}))""",
    # Last, in the same transaction: a reader sees the whole schema or none.
    "PRAGMA user_version = 1",
)

# The system (OS and driver) joins what a winner is kept for, "" where nobody noted it; a stored
# plan can be refuted; a measurement says what it was spared and what it waited for. SQLite can't
# change a CHECK or a primary key in place: those tables are made anew around the same rows.
KEY = ("device", *BUCKET_COLUMNS, "kernel", "mlx", "system")
_KEY_2 = ", ".join(KEY)
_OLD_MEASUREMENT = f"""
    id, run, at, stage, {", ".join(BUCKET_COLUMNS)}, path, partitions, tile, status, message,
    max_error, rounds, median_us, p10_us, p90_us, ratio, ratio_low, ratio_high, samples_us,
    executed"""
_OLD_PLAN = f"""
    device, {", ".join(BUCKET_COLUMNS)}, path, partitions, tile, median_us, speedup, speedup_low,
    speedup_high, day, kernel, mlx, reason, run"""


def _made_anew(table: str, body: str, kept: str) -> tuple[str, ...]:
    return (
        f"CREATE TABLE new_{table} ({body})",
        f"INSERT INTO new_{table} ({kept}) SELECT {kept} FROM {table}",
        f"DROP TABLE {table}",
        f"ALTER TABLE new_{table} RENAME TO {table}",
    )


VERSION_2 = (
    "ALTER TABLE run ADD COLUMN system TEXT NOT NULL DEFAULT ''",
    *_made_anew(
        "measurement",
        f"""id INTEGER PRIMARY KEY, run INTEGER NOT NULL REFERENCES run, at TEXT NOT NULL,
    stage TEXT NOT NULL CHECK (stage IN ('search', 'duel', 'cut', 'refute')), {_BUCKET}, {_PLAN},
    {_MEASURED}, dropped INTEGER NOT NULL DEFAULT 0, paused_s REAL NOT NULL DEFAULT 0,
    "inner" INTEGER NOT NULL DEFAULT 1""",
        _OLD_MEASUREMENT,
    ),
    _INDEX,
    *_made_anew(
        "plan",
        f"""device TEXT NOT NULL REFERENCES device, {_BUCKET}, {_PLAN}, {_WON},
    system TEXT NOT NULL DEFAULT '', single_speedup REAL, split_speedup REAL,
    stage TEXT NOT NULL DEFAULT 'duel', reason TEXT NOT NULL,
    run INTEGER NOT NULL REFERENCES run, PRIMARY KEY ({_KEY_2})""",
        _OLD_PLAN,
    ),
    "DROP TABLE threshold",
    f"""CREATE TABLE threshold (
    device TEXT NOT NULL REFERENCES device, {_BUCKET}, kernel TEXT NOT NULL, mlx TEXT NOT NULL,
    system TEXT NOT NULL, {_FITTED}, PRIMARY KEY ({_KEY_2}))""",
    "PRAGMA user_version = 2",
)

# What a winner's speed-up is over: `mlx`, or where that can't run another of MLX's paths.
VERSION_3 = (
    "ALTER TABLE plan ADD COLUMN baseline TEXT NOT NULL DEFAULT 'mlx'",
    "PRAGMA user_version = 3",
)
