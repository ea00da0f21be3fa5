"""Tables of winners that don't change: one JSON file, known by its digest. Standard library only.

Another partition count is another rounding: who needs the same results from every process and after
every tuning run names a table by MLA_TUNER_FROZEN, and serving uses that one or none.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from . import backends
from .device import MLX_VERSION, Device, system_version
from .errors import StoreError
from .table import ROW_COLUMNS, Row, checked_row, content, read_imported

FORMAT = "mla-tuner frozen table 1"
SHORT = 12  # digits of a digest that name a file, and that a required digest needs at least
MAX_BYTES = 64 << 20  # a row takes 300 bytes; no table has a hundred thousand buckets


@dataclass(frozen=True)
class Frozen:
    """What serving gets for a required digest: the table's rows, or the reason why there are none.

    `digest` is the whole one where the table was found, else what was asked for.
    """

    digest: str
    rows: tuple[Row, ...] = ()
    problem: str = ""


def freeze(rows: Iterable[Row], device: Device) -> tuple[bytes, list[Row]]:
    """The winners of a device that count here, as canonical JSON: the same rows, the same bytes.

    rows: all of the device, in the order they were found in. Also gives those taken. Raises
    StoreError where none counts.
    """
    kernel, system = backends.get(device.backend).digest(), system_version()
    found = {row.bucket: row for row in rows if row.counts(kernel, MLX_VERSION, system)}
    if not found:
        raise StoreError(f"no plan counts here for {device.key}: run mla-tune, then freeze")
    taken = [found[bucket] for bucket in sorted(found)]
    table = {
        "format": FORMAT,
        "device": device.key,
        "columns": ROW_COLUMNS,
        "rows": [_values(row) for row in taken],
    }
    text = json.dumps(table, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode() + b"\n", taken


def origins(rows: Iterable[Row], path: Path, device: Device) -> Counter[str]:
    """How many of these winners of a device came with imported runs, by the name of the device that
    they were measured on. `path` is the database's.
    """
    found = read_imported(path, device.family, backends.get(device.backend).digest())
    names = {checked_row(values): facts[1] for facts, values in found if facts[0] == device.key}
    return Counter(names[row] for row in rows if row in names)


def digest_of(data: bytes) -> str:
    """What a table is known by: the SHA-256 of its file, 64 digits."""
    return sha256(data).hexdigest()


def place(folder: Path, digest: str) -> Path:
    """Where serving looks for a table: beside the database."""
    return folder / f"frozen-{digest[:SHORT]}.json"


def write(path: Path, data: bytes) -> None:
    """Put a table in its place, whole or not at all.

    Raises:
        StoreError: it can't be written there.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}")
    if os.path.exists(path) and not os.path.isfile(path):  # root would replace /dev/null
        raise StoreError(f"cannot write {path}: it is there, and no file")
    try:
        try:
            part.write_bytes(data)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror}") from error


def read(folder: Path, digest: str, device: Device) -> Frozen:
    """The table that begins with a digest of 12 to 64 digits. Never raises for what it finds.

    It has to be made for this device, and with the kernel, MLX and system that run here.
    """
    digest = digest.strip().lower()
    try:
        if not re.fullmatch(f"[0-9a-f]{{{SHORT},64}}", digest):
            raise ValueError(f"expected {SHORT} to 64 digits of its digest; got {digest!r}")
        data = content(place(folder, digest), MAX_BYTES)
        whole = digest_of(data)
        if not whole.startswith(digest):
            raise ValueError(f"it has changed, its digest is now {whole[:SHORT]}")
        return Frozen(whole, _rows(data, device))
    except OSError as error:
        problem = f"{place(folder, digest)}: {error.strerror}"
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        problem = str(error)
    return Frozen(digest, problem=problem)


def _rows(data: bytes, device: Device) -> tuple[Row, ...]:
    table = json.loads(data)
    if not isinstance(table, dict) or table.get("format") != FORMAT:
        raise ValueError(f"it is no {FORMAT}")
    if table["columns"] != list(ROW_COLUMNS):
        raise ValueError("its columns are those of another version")
    if table["device"] != device.key:
        raise ValueError(f"it is for {table['device']!r}, this is {device.key}")
    rows = tuple(checked_row(values) for values in table["rows"])
    backend, system = backends.get(device.backend), system_version()
    built, reason = backend.available()
    for row in rows:
        if row.kernel != backend.digest():
            raise ValueError("it was made with another kernel" if built else reason)
        if row.mlx != MLX_VERSION:
            raise ValueError(f"it was made with MLX {row.mlx}, this is {MLX_VERSION}")
        if not row.counts(row.kernel, MLX_VERSION, system):
            raise ValueError(f"it was made on {row.system}, this is {system}")
    return rows


def _values(row: Row) -> list[Any]:
    bucket, plan, *rest = row
    return [*bucket, *vars(plan).values(), *rest]
