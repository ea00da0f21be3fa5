"""Shared tables out of a database and into one. Pooling is `share_rows`' and `share_format`'s."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from statistics import median
from typing import Any

from pydantic import ValidationError

from . import backends
from .device import Device
from .errors import ShareError, StoreError
from .evidence import Measurement, median_interval, percentile
from .plan import Plan
from .records import evidence_row
from .shapes import Bucket, Shape
from .share_format import (
    VERSION,
    SharedDevice,
    SharedEntry,
    SharedRun,
    SharedTable,
    problems,
    rounded,
    run_id,
    settled,
)
from .share_pool import Entry
from .share_rows import derive, entries, nonce
from .store import LOCK_WAIT_S, Store
from .table import BUCKET_COLUMNS, open_read_only

_SOFTWARE = ("mla_tuner", "mlx", "driver", "os", "python", "optuna")
_OPTIONS = ("budget_s", "buckets", "command", "force", "seed")
_VERSIONS = ("device", "kernel", "mlx", "system")
_TUNE_ANEW = "tune it into another database, mla-tune --db FILE"
_REPORT = "it is what the machine says of itself: report it to mla-tuner"
_OF_MACHINE = re.compile(r"(?:^|\.)(?:name|family|architecture|key): ")

# --- out of a database ---------------------------------------------------------------------------


def tables(store: Store, left_out: dict[str, str] | None = None) -> list[SharedTable]:
    """A table for each family in the database: all runs of a device with the kernel that it was
    tuned with last, imported ones too.

    left_out: is given the devices that can't be shared, by key, with the reason and what helps;
    without it the first of them is an error.

    Raises:
        ShareError: there is nothing to share, or something that can't be.
        StoreError: the database can't be read.
    """
    families: dict[str, list[SharedDevice]] = {}
    with _reading(store) as connection:
        for device, runs in store.runs().items():
            same = [run for run in runs if run["kernel"] == runs[-1]["kernel"]]
            try:
                made = tuple(_devices(connection, device, same))
                if made:
                    SharedTable(version=VERSION, family=device.family, devices=made)
            except (ShareError, ValidationError) as error:
                if left_out is None:
                    raise
                left_out[device.key] = _reason(error)
            else:
                families.setdefault(device.family, []).extend(made)
    found = {family: devices for family, devices in sorted(families.items()) if devices}
    if not found and not left_out:
        raise ShareError(f"{store.path} holds no winners: run mla-tune")
    return [
        SharedTable(version=VERSION, family=family, devices=tuple(devices))
        for family, devices in found.items()
    ]


def _reason(error: ShareError | ValidationError) -> str:
    if isinstance(error, ShareError):
        return str(error)
    problem = problems(error)[0]
    return f"{problem}: {cure(problem)}"


def cure(fault: str) -> str:
    """What helps against a fault of a device that was tuned here."""
    return _REPORT if _OF_MACHINE.search(fault) else _TUNE_ANEW


def _devices(
    connection: sqlite3.Connection, device: Device, runs: Iterable[dict[str, Any]]
) -> Iterator[SharedDevice]:
    """A device once for each MLX and system that it was tuned with."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for run in runs:
        groups.setdefault(tuple(run[name] for name in _VERSIONS), []).append(run)
    for versions, same in sorted(groups.items()):
        by_number = {run["id"]: run for run in same}
        shared: dict[int, SharedRun] = {}
        evidence: dict[Bucket, list[SharedEntry]] = {}
        numbers = ", ".join(map(str, by_number))
        for found in entries(connection, f"run IN ({numbers})", []):
            if found.run not in shared:
                shared[found.run] = shared_run(connection, by_number[found.run])
            entry = _shared_entry(shared[found.run].id, found.entry)
            evidence.setdefault(found.bucket, []).append(entry)
        facts = {name: getattr(device, name) for name in _FACTS}
        facts |= dict(zip(_VERSIONS[1:], versions[1:], strict=True))
        made = settled(facts, shared.values(), evidence)
        if made:
            yield made


_FACTS = ("key", "backend", "architecture", "name", "cores", "memory_gb", "cache_bytes")


def shared_run(connection: sqlite3.Connection, run: Mapping[str, Any]) -> SharedRun:
    """A row of `run` as tables have it.

    Raises:
        ShareError: nobody knows by which clock it timed, or on which system.
    """
    parsed = [json.loads(run[name]) for name in ("software", "options", "conditions")]
    day = run["started"][:10]
    if not all(isinstance(each, dict) for each in parsed):
        raise ShareError(f"the run of {day} on {run['device']} is malformed: {_TUNE_ANEW}")
    software, options, known = parsed
    backend = run["device"].partition("/")[0]
    missing = "by which clock it timed" if backend == "cuda" and "clock" not in known else ""
    missing = missing or ("" if run["system"] else "on which system it ran")
    if missing:
        raise ShareError(
            f"the run of {day} on {run['device']} does not say {missing}: {_TUNE_ANEW}"
        )
    told = {
        "nonce": nonce(connection, run),
        "day": day,
        "clock": known.get("clock", "wall"),  # elsewhere there is no other
        "software": {name: str(software[name]) for name in _SOFTWARE if name in software},
        "options": {name: options[name] for name in _OPTIONS if name in options},
    }
    return SharedRun(id=run_id([run[name] for name in _VERSIONS], told), **told)


def _shared_entry(run: str, entry: Entry) -> SharedEntry:
    return SharedEntry(
        run=run,
        **vars(entry.plan),
        **{name: getattr(entry, name) for name in _ENTRY_FIELDS},
        max_error=None if entry.max_error is None else rounded(entry.max_error),
        best=tuple(
            {**vars(plan), "speedup": rounded(speedup)}  # type: ignore[misc]
            for plan, speedup in entry.best
        ),
    )


_ENTRY_FIELDS = ("failed", "samples_us", "baseline", "baseline_samples_us", "day")


# --- into one ------------------------------------------------------------------------------------


def refuse_other_kernels(table: SharedTable, name: str) -> None:
    """Plans of another kernel mean nothing here. Raises ShareError with file and field."""
    for index, device in enumerate(table.devices):
        here = backends.get(device.backend).digest()
        if device.kernel != here:
            raise ShareError(
                f"{name}: devices.{index}.kernel: {device.key} was measured with kernel "
                f"{device.kernel}, this is {here or 'without one'}: only the same can be imported"
            )


def into_store(table: SharedTable, store: Store, name: str = "") -> dict[str, Any]:
    """Add a table's runs, all or nothing; what is known already is left as it is.

    They get numbers below 0, and their winners count where no run of this database has decided.
    Returns the numbers of `runs` that something was added of, with their `ids`, of `buckets` that
    it was added to, and of those `known` already with all that the table has. A bucket that several
    runs measured counts once a device, as its winner does.

    Raises:
        ShareError: a device's kernel is not the one here. `name` is the file's, for the message.
        StoreError: the database can't be written.
    """
    refuse_other_kernels(table, name or f"{table.family}.json")
    ids: list[str] = []
    added: set[tuple[tuple[str, ...], Bucket]] = set()
    found: set[tuple[tuple[str, ...], Bucket]] = set()
    with _writing(store) as connection:
        for device in table.devices:
            _insert(connection, "device", {**_identity(device), "family": table.family})
            there = _runs_there(connection, device.key)
            for run in device.runs:
                told = [b for b in device.buckets for e in b.evidence if e.run == run.id]
                buckets = {each.bucket: each for each in told}
                found |= {(device.versions, bucket) for bucket in buckets}
                number = there.get(run.id)
                if number is None:
                    number = _add_run(connection, device, run)
                else:
                    have = _buckets_of(connection, number) if number < 0 else set(buckets)
                    buckets = {b: each for b, each in buckets.items() if b not in have}
                for bucket, each in buckets.items():
                    entry = next(entry for entry in each.evidence if entry.run == run.id)
                    _add_entry(connection, number, bucket, entry)
                added |= {(device.versions, bucket) for bucket in buckets}
                ids += [run.id] if buckets else []
        derive(connection, {bucket for _, bucket in added})
    known = len(found - added)
    return {"runs": len(ids), "buckets": len(added), "known": known, "ids": ids}


def undo(store: Store, run: str) -> int:
    """Take an imported run out again, by its id in the table; how many buckets it had.

    Raises:
        ShareError: no such run was imported.
        StoreError: the database can't be written.
    """
    with _writing(store) as connection:
        devices = [row[0] for row in connection.execute("SELECT key FROM device").fetchall()]
        numbers = [_runs_there(connection, key).get(run, 0) for key in devices]
        number = min(numbers, default=0)
        if number >= 0:
            raise ShareError(f"no run {run} was imported into {store.path}")
        buckets = _buckets_of(connection, number)
        for statement in (
            "DELETE FROM plan WHERE run = ?",
            "DELETE FROM measurement WHERE run = ?",
            "DELETE FROM run WHERE id = ?",
        ):
            connection.execute(statement, [number])
        derive(connection, buckets)
        connection.execute("DELETE FROM device WHERE key NOT IN (SELECT device FROM run)")
    return len(buckets)


def _identity(device: SharedDevice) -> dict[str, Any]:
    return {name: getattr(device, name) for name in _FACTS}


def _runs_there(connection: sqlite3.Connection, device: str) -> dict[str, int]:
    """Numbers of a device's runs by their id; those that can't be shared are left out."""
    cursor = connection.cursor()
    cursor.row_factory = sqlite3.Row
    found = {}
    for row in cursor.execute("SELECT * FROM run WHERE device = ?", [device]).fetchall():
        try:
            found[shared_run(connection, row).id] = int(row["id"])
        except (ShareError, ValueError):
            continue
    return found


def _buckets_of(connection: sqlite3.Connection, run: int) -> set[Bucket]:
    columns = ", ".join(BUCKET_COLUMNS)
    found = connection.execute(f"SELECT DISTINCT {columns} FROM measurement WHERE run = ?", [run])
    return {Bucket(*fields) for fields in found}


def _add_run(connection: sqlite3.Connection, device: SharedDevice, run: SharedRun) -> int:
    number = int(connection.execute("SELECT min(0, min(id)) FROM run").fetchone()[0] or 0) - 1
    values = {
        "id": number,
        "device": device.key,
        "started": f"{run.day}T00:00:00+00:00",
        "kernel": device.kernel,
        "mlx": device.mlx,
        "system": device.system,
        "software": json.dumps(run.software, sort_keys=True),
        "options": json.dumps(run.options, sort_keys=True),
        "conditions": json.dumps({"clock": run.clock, "nonce": run.nonce}),
    }
    _insert(connection, "run", values)
    return number


def _add_entry(
    connection: sqlite3.Connection, run: int, bucket: Bucket, shared: SharedEntry
) -> None:
    """The rows of `measurement` that give the same entry again."""
    at = {"run": run, "at": f"{shared.day}T00:00:00+00:00"}
    for stage, measurement in _measurements(bucket, shared.entry):
        row = {**at, "stage": stage, **evidence_row(bucket, measurement)}
        _insert(connection, "measurement", row)


def _measurements(bucket: Bucket, entry: Entry) -> Iterator[tuple[str, Measurement]]:
    """With their stages."""
    shape, default, known = bucket.shape, Plan(entry.baseline), dict(entry.best)
    stays = entry.plan == default
    for plan, speedup in entry.best:
        if plan != entry.plan:
            yield "search", Measurement(shape, plan, ratio=speedup)
    if entry.baseline_samples_us:
        timed = _timed(shape, default, entry.baseline_samples_us)
        error = entry.max_error if stays else None
        yield "duel", replace(timed, max_error=error, ratio=1.0, ratio_low=1.0, ratio_high=1.0)
    if stays:
        return
    if entry.samples_us:
        low, high = median_interval(entry.ratios) or (None, None)
        ratio = known.get(entry.plan, median(entry.ratios))
        timed = _timed(shape, entry.plan, entry.samples_us)
        timed = replace(timed, ratio=ratio, ratio_low=low, ratio_high=high)
    else:
        timed = Measurement(shape, entry.plan, entry.failed or "timeout")
    yield "duel", replace(timed, max_error=entry.max_error)


def _timed(shape: Shape, plan: Plan, times: tuple[float, ...]) -> Measurement:
    low, high = percentile(times, 0.1), percentile(times, 0.9)
    return Measurement(
        shape,
        plan,
        rounds=len(times),
        median_us=median(times),
        p10_us=low,
        p90_us=high,
        samples_us=times,
        executed=plan,
    )


def _insert(connection: sqlite3.Connection, into: str, values: Mapping[str, Any]) -> None:
    names = ", ".join(f'"{name}"' for name in values)
    marks = ", ".join("?" * len(values))
    verb = "INSERT OR IGNORE" if into == "device" else "INSERT"
    connection.execute(f"{verb} INTO {into} ({names}) VALUES ({marks})", list(values.values()))


# --- connections ---------------------------------------------------------------------------------


@contextmanager
def _reading(store: Store) -> Iterator[sqlite3.Connection]:
    try:
        with closing(open_read_only(store.path)) as connection:
            yield connection
    except ValidationError as error:
        raise ShareError(f"{store.path} can't be shared: {_reason(error)}") from error
    except (sqlite3.Error, OSError, ValueError) as error:
        raise StoreError(f"cannot use the database {store.path}: {error}") from error


@contextmanager
def _writing(store: Store) -> Iterator[sqlite3.Connection]:
    """One transaction, all or nothing."""
    try:
        with closing(sqlite3.connect(store.path, LOCK_WAIT_S, isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            yield connection
            connection.execute("COMMIT")  # closing without it takes everything back
    except (sqlite3.Error, OSError, ValueError) as error:
        raise StoreError(f"cannot use the database {store.path}: {error}") from error
