"""Tables that devices of a chip family share: exported, checked, merged, contributed.

What they hold is in `share_format`, how runs are pooled in `share_pool`, how databases take part in
`share_store`; this module is what the commands and the server call.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from functools import reduce
from pathlib import Path

from .backends import cuda_tiles, metal_tiles
from .candidates import MIN_GAIN
from .device import Device
from .errors import ShareError, plain
from .family import data_of
from .plan import Plan
from .shapes import Bucket, pieces
from .share_format import (
    SharedBucket,
    SharedDevice,
    SharedEntry,
    SharedTable,
    parse,
    pooled_fields,
    render,
    run_id,
    schema,
    thresholds,
)
from .share_merge import described, differences, merged
from .share_pool import pool
from .share_store import cure, into_store, tables, undo
from .store import Store

__all__ = [
    "SharedTable",
    "check",
    "described",
    "differences",
    "export",
    "faults",
    "into_store",
    "load",
    "merge",
    "merged",
    "offers",
    "read",
    "render",
    "schema",
    "sound",
    "sound_tables",
    "tables",
    "undo",
    "write",
    "write_schema",
]

SCHEMA_NAME = "schema.json"
# What could tell whose machine it was. A CPU "@ 2.60GHz" doesn't, nor one that ends with "0000%@".
_PRIVATE = re.compile(
    r"(^|[\s\"'=])(~|/|[A-Za-z]:\\)|/(home|root|Users|tmp|mnt|work)\b|\\"
    r"|@(?!\s?\d+(\.\d+)?\+?\s?[GM]Hz(\s|\Z)|\s*\Z)"
)


# --- files ---------------------------------------------------------------------------------------


def export(store: Store, folder: Path) -> list[Path]:
    """Write a file for each family in the database, and the schema beside them; the paths.

    Raises:
        ShareError: there is nothing to write, or it can't be written, or it would not pass `check`,
            or a file is there with evidence that the database lacks.
    """
    found = {folder / f"{table.family}.json": table for table in sound_tables(store)}
    for path, table in found.items():
        if path.exists() and merged(read(path), table) != merged(table, table):
            raise ShareError(
                f"{path} holds evidence that {store.path} lacks: "
                "`mla-tune share contribute` adds to it, --folder names another place"
            )
    texts = {path: sound(table) for path, table in found.items()}  # all, before one is written
    written = [_write(path, text) for path, text in texts.items()]
    write_schema(folder)
    return written


def write_schema(folder: Path) -> None:
    """Put the JSON Schema beside the tables. Raises ShareError: it can't be written."""
    _write(folder / SCHEMA_NAME, schema())


def write(table: SharedTable, path: Path) -> Path:
    """Put a table in a file of any name, whole or not at all.

    Raises:
        ShareError: it can't be written, or it would not pass `check`.
    """
    return _write(path, sound(table))


def sound(table: SharedTable) -> str:
    """The text of a table for others. Raises ShareError: it would not pass `check`."""
    problems = faults(text := render(table), Path(f"{table.family}.json"))
    if problems:
        raise ShareError(problems[0])
    return text


def offers(store: Store) -> tuple[list[SharedTable], dict[str, str]]:
    """What of a database others may have: a sound table for each family, without the devices that
    can't be shared; and those by their keys, with the reason and what helps.

    Raises:
        ShareError: there is nothing to share.
        StoreError: the database can't be read.
    """
    left_out: dict[str, str] = {}
    found: list[SharedTable] = []
    imported = {device.key for device, runs in store.runs().items() if runs[-1]["id"] < 0}
    for table in tables(store, left_out):
        fit: list[SharedDevice] = []
        for key in dict.fromkeys(device.key for device in table.devices):
            whole = tuple(device for device in table.devices if device.key == key)
            try:
                sound(table.model_copy(update={"devices": whole}))
                fit += whole
            except ShareError as error:
                fault = str(error).removeprefix(f"{table.family}.json: ")  # nobody has written it
                ids = ", ".join(run.id for device in whole for run in device.runs)
                undo = f"take it out, mla-tune share import --undo RUN, of {ids}"
                left_out[key] = f"{fault}: {undo if key in imported else cure(fault)}"
        if fit:
            found.append(table.model_copy(update={"devices": tuple(fit)}))
    return found, left_out


def sound_tables(store: Store) -> list[SharedTable]:
    """The same of a database that has nothing else.

    Raises:
        ShareError: there is nothing to share, or a device that can't be.
        StoreError: the database can't be read.
    """
    found, left_out = offers(store)
    for key, reason in left_out.items():
        raise ShareError(f"{key} can't be shared: {reason}")
    return found


def _write(path: Path, text: str) -> Path:
    part = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            part.write_text(text, encoding="utf-8")
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise ShareError(f"cannot write {path}: {error.strerror}") from error
    return path


def read(path: Path) -> SharedTable:
    """The table in a file. Raises ShareError, one line with the file and the field."""
    try:
        text = data_of(path).decode()
    except OSError as error:
        raise ShareError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ShareError(f"{path.name}: {_unreadable(error)}") from error
    return load(text, path.name)


def _unreadable(error: ValueError) -> str:
    return "not UTF-8 text" if isinstance(error, UnicodeError) else str(error)


def merge(out: Path, sources: Sequence[Path]) -> dict[str, int]:
    """Write the union of tables; the numbers of its `runs` and `buckets`.

    Raises:
        ShareError: one is not as it must be, they are of different families, or `out` is there and
            none of them.
    """
    if out.exists() and out.resolve() not in [source.resolve() for source in sources]:
        raise ShareError(f"{out} is there already: merge it, too, or name a new file")
    table = reduce(merged, [read(source) for source in sources])
    table = merged(table, table)  # of a single one, too
    write(table, out)
    return {
        "runs": sum(len(device.runs) for device in table.devices),
        "buckets": sum(len(device.buckets) for device in table.devices),
    }


def load(text: str, name: str) -> SharedTable:
    """The table in a text, which may come from anybody; `name` is the file's, for the message.

    Raises:
        ShareError: one line with the file and the field that is not as it must be.
    """
    try:
        table = parse(text)
        problem = next(iter(_table_faults(table)), None)
    except ShareError as error:
        problem = str(error)
    if problem:
        raise ShareError(f"{name}: {problem}")
    return table


# --- check ---------------------------------------------------------------------------------------


def check(path: Path) -> list[str]:
    """What is wrong with a file, a line each that names it; empty: it can be relied on."""
    try:
        text = data_of(path).decode()
    except OSError as error:
        return [f"{path.name}: {error.strerror}"]
    except ValueError as error:
        return [f"{path.name}: {_unreadable(error)}"]
    return faults(text, path)


def faults(text: str, path: Path) -> list[str]:
    """The same of a text that is to lie at `path`."""
    try:
        table = parse(text)
    except ShareError as error:
        return [f"{path.name}: {error}"]
    found = list(_table_faults(table))
    if path.stem != table.family:
        found.append(f"expected the family's name, {table.family}.json")
    if not found and text != render(table):
        found = [
            f"order or layout is not that of `mla-tune share export`: {_first_change(text, table)}"
        ]
    return [f"{path.name}: {plain(fault)}" for fault in found]


def _first_change(text: str, table: SharedTable) -> str:
    have, want = text.splitlines(), render(table).splitlines()
    pairs = zip([*have, ""], [*want, ""], strict=False)
    line = next((at for at, (a, b) in enumerate(pairs, 1) if a != b), len(have))
    return f"line {line}"


def _table_faults(table: SharedTable) -> Iterable[str]:
    for place, text in _texts(table.model_dump(), ""):
        if _PRIVATE.search(text) or not text.isprintable():
            yield f"{place}: a path, an address or what can't be printed: {text!a:.200}"
    seen: set[tuple[str, ...]] = set()
    for index, device in enumerate(table.devices):
        where = f"devices.{index}"
        if device.versions in seen:
            yield f"{where}.key: {device.key} is there twice with the same versions"
        seen.add(device.versions)
        yield from (f"{where}.{fault}" for fault in _device_faults(device, table.family))


def _device_faults(shared: SharedDevice, family: str) -> Iterable[str]:
    """Each begins with the field."""
    device = Device(
        *(shared.backend, shared.architecture, family, shared.cores),
        *(shared.memory_gb, shared.name, shared.cache_bytes),
    )
    if device.key != shared.key:
        yield f"key: expected the key {device.key}"
    runs = {run.id: run for run in shared.runs}
    for index, run in enumerate(shared.runs):
        missing = [name for name in ("mla_tuner", "mlx", "os") if not run.software.get(name)]
        if missing or not run.options:
            yield f"runs.{index}: it lacks {', '.join(missing) or 'its options'}"
        if run.id != run_id(shared.versions, run.model_dump()):
            yield f"runs.{index}.id: {run.id} is not the digest of what it says"
        if not _is_day(run.day):
            yield f"runs.{index}.day: {run.day} is no day"
    used = {entry.run for bucket in shared.buckets for entry in bucket.evidence}
    if len(runs) != len(shared.runs) or set(runs) - used:
        yield "runs: one is there twice, or measured nothing"
    ordered = sorted({each.bucket for each in shared.buckets})
    if [each.bucket for each in shared.buckets] != ordered:
        yield "buckets: they are not in order, or one is there twice"
    first = {run.id: run.day for run in shared.runs}
    sound = True
    for index, each in enumerate(shared.buckets):
        fault = _bucket_fault(each, device) or _evidence_fault(each, first, device)
        if fault:
            sound = False
            where = f"(context {each.context} batch {each.batch} heads {each.heads})"
            yield f"buckets.{index}.{fault} {where}"
    if sound and shared.thresholds != thresholds(shared.buckets, shared.cores):
        yield "thresholds: they are not what the winners make"


def _bucket_fault(each: SharedBucket, device: Device) -> str | None:
    """Why a winner can't be one, field first; None if it may."""
    try:
        shape = each.bucket.shape
    except ValueError as error:
        return f"{_named(error, ('dtype', 'layout', 'heads', 'q_len', 'batch'))}: {error}"
    try:
        plan = each.plan
    except ValueError as error:
        return f"{_named(error, ('partitions', 'tile', 'path'))}: {error}"
    if shape.bucket != each.bucket:
        return f"context: no bucket: it is rounded to {shape.bucket}"
    cut = pieces(each.context, plan.partitions)
    if cut != plan.partitions:
        return f"partitions: {plan} makes only {cut} pieces"
    low = each.speedup_low
    if plan.path != each.baseline and (low is None or low < MIN_GAIN):  # it was rounded
        return f"speedup_low: the interval begins at {low}: it must clear {MIN_GAIN:g}"
    fault = _tile_fault(plan, each.bucket, device) if plan.native else None
    return fault and f"tile: {fault}"


def _named(error: ValueError, fields: Iterable[str]) -> str:
    """Which field a message of `Shape` or `Plan` is about: they say `expected FIELD in`."""
    return next((name for name in fields if f"expected {name} " in str(error)), "context")


def _evidence_fault(each: SharedBucket, first: Mapping[str, str], device: Device) -> str | None:
    """Why a winner is not what its evidence makes, field first; None if it is."""
    for index, shared in enumerate(each.evidence):
        fault = _entry_fault(shared, first.get(shared.run), each.bucket, device)
        if fault:
            return f"evidence.{index}.{fault}"
    if len({entry.run for entry in each.evidence}) != len(each.evidence):
        return "evidence: a run is there twice"
    if list(each.evidence) != sorted(each.evidence, key=lambda e: (e.day, e.run)):
        return "evidence: it is not in order"
    try:
        found = pooled_fields(pool([shared.entry for shared in each.evidence]))
    except ValueError as error:
        return f"evidence: {error}"
    for name, value in found.items():
        if getattr(each, name) != value:
            return f"{name}: it is {getattr(each, name)}, the evidence makes it {value}"
    return None


def _entry_fault(
    shared: SharedEntry, first: str | None, bucket: Bucket, device: Device
) -> str | None:
    try:
        plans = [shared.entry.plan, *(plan for plan, _ in shared.entry.best)]
    except ValueError as error:
        return f"partitions: {error}"
    for plan in plans:  # any of them may win once tables are merged
        if pieces(bucket.context, plan.partitions) != plan.partitions:
            return f"partitions: context {bucket.context} is not cut in so many pieces"
        fault = _tile_fault(plan, bucket, device) if plan.native else None
        if fault:
            return f"tile: {fault}"
    if first is None:
        return f"run: {shared.run} is none of the device's runs"
    if not _is_day(shared.day):
        return f"day: {shared.day} is no day"
    return None if shared.day >= first else f"day: {shared.day} is before its run, {first}"


def _is_day(day: str) -> bool:
    try:
        return date.fromisoformat(day) <= date.max
    except ValueError:
        return False


def _tile_fault(plan: Plan, bucket: Bucket, device: Device) -> str | None:
    if device.backend == "cuda":
        capability = cuda_tiles.capability(device.architecture)
        return cuda_tiles.refusal(plan.tile, bucket.shape, capability)
    if device.backend == "metal":
        return metal_tiles.refusal(plan.tile, bucket.shape)
    return None if re.fullmatch(r"r[1-9]\d{0,2}", plan.tile) else f"{plan.tile!r} is no tile"


def _texts(value: object, place: str) -> Iterable[tuple[str, str]]:
    """Every text in a value of JSON with its place, names included."""
    if isinstance(value, str):
        yield place, value
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield place, str(name)
            yield from _texts(each, f"{place}.{name}".lstrip("."))
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            yield from _texts(each, f"{place}.{index}")
